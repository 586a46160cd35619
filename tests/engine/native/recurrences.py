"""Texts with states, which native kernels go on from at any mark: recurrences are tested with them."""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from engine.batch import NONE, Span, StateMoves
from engine.cache.kv_cache import KVCache
from engine.cache.states import make_states
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeLibrary, Pool
from models.loading.load import load_model
from models.network import Network
from models.reference.decoder import Decoder
from tests.engine.native import comparing
from tests.engine.native.comparing import all_logits
from tests.engine.native.test_native_batches import Sequence, random_texts
from tests.engine.native.test_native_chunks import relative
from tests.engine.native.test_native_decode import CPU, cache_for
from tests.models.checkpoints import files_of, reference_model, run_reference, write_checkpoint

MARKS = 12
LENGTHS = (1, 7, 45, 150)


@dataclass
class Walked:
    """A text with states: the slot of its own and the row after which it is there, and other slots with theirs."""

    text: Sequence
    slot: int
    free: list[int]
    done: int = 0
    source: int = NONE
    row: int = 0
    marks: dict[int, int] = field(default_factory=dict)

    def go_back(self, random: Random) -> None:
        """Go on from a mark, or from before the first row, at some row that is known."""
        known = [NONE, *(slot for slot, row in self.marks.items() if row <= self.done)]
        self.source = random.choice(known)
        self.row = self.marks.get(self.source, 0)
        self.done = random.randint(self.row, self.done)

    def span(self, end: int, random: Random, guessed: int = 0) -> Span:
        """The rows to `end`, with marks on the way; the last `guessed` rows are not in the state that is left."""
        start, stop, saves = self.done, max(end - guessed, self.done), []
        for row in sorted(random.choices(range(start, stop + 1), k=random.choice((0, 0, 1, 2)))):
            if self.free:
                self.marks[slot := self.free.pop()] = row
                saves.append((row, slot))
        moves = StateMoves(self.source, self.row, (*saves, (stop, self.slot)))
        self.done, self.source, self.row = end, self.slot, stop
        return replace(self.text.span(start, end), states=moves)


def cache_of(model: Network, dtype: torch.dtype, blocks: int, slots: int) -> KVCache:
    """A cache of which nothing was written."""
    cache = cache_for(model, dtype, blocks)
    cache.states = make_states(model.spec, slots, CPU)
    assert cache.states is not None
    for states in cache.states.layers.values():
        states.fill_(float("nan"))
    return cache


def walked(texts: list[Sequence]) -> tuple[list[Walked], int]:
    """The texts with slots, and how many there are."""
    own = len(texts)
    return [
        Walked(text, at, list(range(own + at * MARKS, own + (at + 1) * MARKS)))
        for at, text in enumerate(texts)
    ], own * (1 + MARKS)


def alone(decoder: NativeDecoder, texts: list[Walked]) -> list[Tensor]:
    """The logits after every row of each text, token by token."""
    return [
        torch.cat([decoder.run([text.span(row + 1, _Never())]) for row in range(len(text.text.ids))])
        for text in texts
    ]


class _Never(Random):
    """Chooses the first."""

    def choice(self, seq: Any) -> Any:
        return seq[0]


def together(decoder: NativeDecoder, texts: list[Walked], random: Random) -> list[tuple[int, int, Tensor]]:
    """The same rows in steps of some of the next rows of some texts, now and then from a mark: which, the last row, its
    logits."""
    found: list[tuple[int, int, Tensor]] = []
    for step in count():
        left = [at for at, text in enumerate(texts) if text.done < len(text.text.ids)]
        if not left:
            break
        some, spans = random.sample(left, random.randint(1, len(left))), []
        for at in some:
            text = texts[at]
            if random.random() < 0.2:
                text.go_back(random)
            rows = 1 if step % 2 else random.randint(1, len(text.text.ids) - text.done)
            guessed = random.randint(1, min(rows - 1, 5)) if rows > 1 and random.random() < 0.3 else 0
            spans.append(text.span(text.done + rows, random, guessed))
        logits = decoder.run(spans)
        found += [(at, texts[at].done - 1, row) for at, row in zip(some, logits, strict=True)]
    return found


def same_from_marks(
    model: Network, texts: list[Sequence], pool: Pool, variant: int, dtype: torch.dtype, random: Random
) -> Tensor:
    """Compare the bits of every row and state in any company with those they have alone; return the logits,
    [rows, vocab].
    """
    blocks = sum(len(text.blocks) for text in texts)
    runs = [walked(texts) for _ in range(2)]
    caches = [cache_of(model, dtype, blocks, slots) for _, slots in runs]
    expected = alone(NativeDecoder(model, caches[0], pool, variant), runs[0][0])
    for text, row, found in together(NativeDecoder(model, caches[1], pool, variant), runs[1][0], random):
        assert torch.equal(found, expected[text][row])
    for ours, theirs in zip(caches[1].parts, caches[0].parts, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    first, second = (cache.states for cache in caches)
    assert first is not None
    assert second is not None
    for layer, states in first.layers.items():
        for ours, theirs in zip(*(texts for texts, _ in runs), strict=True):
            if theirs.row == ours.row:
                assert torch.equal(states[ours.slot], second.layers[layer][theirs.slot])
    return torch.cat(expected)


check = partial(comparing.check, same_in_company=same_from_marks, slack=2e-5)
"""Compares with the reference, and with marks on the way."""


def check_in_bf16(config: Any, library: NativeLibrary, pool: Pool, folder: Path) -> None:
    """Compare the logits of a random model of `config`, written to `folder`, with those of transformers in bf16: by
    every variant, their error against fp32 is smaller."""
    write_checkpoint(folder, config)
    models = {
        dtype: load_model(files_of(folder), dtype=dtype, device=CPU, quantize="none")
        for dtype in (torch.float32, torch.bfloat16)
    }
    model = models[torch.bfloat16]
    (text,) = random_texts(model, (100,), Random(0))
    text.positions = list(range(100))
    truth = all_logits(Decoder(models[torch.float32]), [text])
    theirs = relative(run_reference(reference_model(folder, torch.bfloat16), text.ids).float(), truth)
    for variant in library.variants.values():
        own, slots = walked([text])
        decoder = NativeDecoder(
            model, cache_of(model, torch.bfloat16, len(text.blocks), slots), pool, variant
        )
        assert relative(torch.cat(alone(decoder, own)), truth) < theirs
