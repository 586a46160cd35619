"""Rows of several sequences in one call of the native kernels: the same bits as each row by itself.

Random networks and random schedules: every step computes the next rows of some sequences, one or many each, and each
is compared with the same sequence token by token.
"""

import tempfile
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import Span
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeLibrary, Pool
from models.network import Network
from tests.engine.native.spans import a_span
from tests.engine.native.test_native_decode import BLOCK, cache_for, plain_model, quantized_model
from tests.fresh import examples
from tests.models.checkpoints import tiny_llama, tiny_qwen3

LENGTHS = st.lists(st.sampled_from((1, 2, 7, 16, 30, 140)), min_size=2, max_size=9)
DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


@dataclass
class Sequence:
    """Tokens in blocks that lie in no order, with a gap in their positions."""

    ids: list[int]
    positions: list[int]
    blocks: list[int]

    @classmethod
    def random(cls, random: Random, length: int, free: list[int], vocab: int = 160) -> "Sequence":
        gap = random.randrange(length)
        positions = [row + 5 * (row > gap) for row in range(length)]
        blocks = [free.pop(random.randrange(len(free))) for _ in range(-(-length // BLOCK))]
        return cls([random.randrange(vocab) for _ in range(length)], positions, blocks)

    def span(self, start: int, end: int, *, wanted: bool = True) -> Span:
        return a_span(self.ids[start:end], start, self.positions[start:end], self.blocks, wanted)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """A layer or two; quantised where the heads together are as many numbers as a block of every format has."""
    dim, kv_heads, groups = draw(
        st.sampled_from(((8, 1, 3), (24, 2, 2), (32, 2, 4), (64, 1, 4), (128, 2, 1)))
    )
    quantized = dim * kv_heads * groups == 256 and draw(st.booleans())
    family = draw(st.sampled_from((tiny_qwen3, tiny_llama)))
    heads = kv_heads * groups
    config = family(
        hidden_size=256 if quantized else heads * draw(st.sampled_from((8, 10))),
        intermediate_size=256 if quantized else draw(st.sampled_from((52, 96))),
        num_hidden_layers=draw(st.integers(1, 2)),
        head_dim=dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    with tempfile.TemporaryDirectory() as folder:
        return (quantized_model if quantized else plain_model)(Path(folder), config)


@examples(3, *HealthCheck)
@given(
    model=networks(),
    lengths=LENGTHS,
    dtype=DTYPES,
    threads=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    library: NativeLibrary,
    model: Network,
    lengths: list[int],
    dtype: torch.dtype,
    threads: int,
    random: Random,
) -> None:
    texts, pool = random_texts(model, lengths, random), Pool(threads, library)
    for variant in library.variants.values():
        same_in_company(model, texts, pool, variant, dtype, random)


def random_texts(model: Network, lengths: Items[int], random: Random) -> list[Sequence]:
    """Random texts, which fill as many blocks as they have together."""
    free = list(range(sum(-(-length // BLOCK) for length in lengths)))
    return [Sequence.random(random, length, free, model.spec.vocab_size) for length in lengths]


def same_in_company(
    model: Network, texts: list[Sequence], pool: Pool, variant: int, dtype: torch.dtype, random: Random
) -> Tensor:
    """Compare the bits of every row in any company with those it has alone; return its logits, [rows, vocab]."""
    blocks = sum(len(text.blocks) for text in texts)
    caches = [cache_for(model, dtype, blocks) for _ in range(2)]
    expected = alone(NativeDecoder(model, caches[0], pool, variant), texts)
    for text, row, found in together(NativeDecoder(model, caches[1], pool, variant), texts, random):
        assert torch.equal(found, expected[text][row])
    for ours, theirs in zip(caches[1].parts, caches[0].parts, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    logits = torch.cat(expected)
    assert not logits.isnan().any()
    return logits


def alone(decoder: NativeDecoder, sequences: list[Sequence]) -> list[Tensor]:
    """The logits after every row of each sequence, token by token."""
    return [
        torch.cat([decoder.run([sequence.span(row, row + 1)]) for row in range(len(sequence.ids))])
        for sequence in sequences
    ]


def together(
    decoder: NativeDecoder, sequences: list[Sequence], random: Random
) -> list[tuple[int, int, Tensor]]:
    """The same rows in steps of some of the next rows of some sequences: which, the last row, its logits."""
    done, found = [0] * len(sequences), []
    for step in count():
        left = [i for i, sequence in enumerate(sequences) if done[i] < len(sequence.ids)]
        if not left:
            return found
        some = random.sample(left, random.randint(1, len(left)))
        # Every other step decodes: a row of each.
        most = {i: 1 if step % 2 else len(sequences[i].ids) - done[i] for i in some}
        ends = {i: done[i] + random.randint(1, most[i]) for i in some}
        wanted = [i for i in some if random.random() < 0.8]
        logits = decoder.run([sequences[i].span(done[i], ends[i], wanted=i in wanted) for i in some])
        assert len(logits) == len(wanted)
        found += [(i, ends[i] - 1, row) for i, row in zip(wanted, logits, strict=True)]
        for i, end in ends.items():
            done[i] = end
    return found


@pytest.mark.parametrize("streams", [2, 8, 9])
def test_a_batch_of_nothing_and_one_that_wants_nothing(pool: Pool, tmp_path: Path, streams: int) -> None:
    model = plain_model(tmp_path, tiny_qwen3())
    decoder = NativeDecoder(model, cache_for(model, torch.float32, streams), pool)
    assert decoder.run([]).shape == (0, model.spec.vocab_size)
    spans = [a_span([1], 0, [0], [block], wanted=False) for block in range(streams)]
    assert decoder.run(spans).shape == (0, model.spec.vocab_size)
