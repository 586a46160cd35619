"""Short chunks in steps of a fixed size against the plain modules, in fp32 and in Triton's interpreter."""

import sys
from collections.abc import Callable, Hashable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MistralConfig, PretrainedConfig

pytest.importorskip("triton")

from engine.attention.choose import BLOCK_SIZES, make_backend
from engine.attention.flash import FlashBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.unusual import unusual_layers
from engine.batch import Span, StepBatch
from engine.cache.block_table import BlockTable
from engine.cache.kv_cache import KVCache
from engine.cache.rows import Rows
from engine.execute.cuda import padded_prefill
from engine.execute.cuda.padded_prefill import ALONE, LONGEST, SPANS, TOGETHER, PaddedPrefill, pack_steps
from engine.execute.runner import Runner
from engine.kernels.triton import prompt_attention
from engine.kernels.triton.prompt_attention import Tile
from engine.params import SamplingParams
from engine.schedule.scheduler import PromptChunk
from engine.schedule.sequence import Priority, Sequence
from models.loading.load import load_model
from tests.covering import each_value_once
from tests.engine import fake_flash
from tests.models.checkpoints import files_of, tiny_llama, tiny_qwen3, write_checkpoint
from tests.models.families import tiny

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS = 5


CONFIGS = pytest.mark.parametrize(
    "config",
    [
        tiny_qwen3(num_hidden_layers=2, head_dim=64, hidden_size=96, max_position_embeddings=1024),
        tiny_llama(
            num_hidden_layers=2,
            hidden_size=192,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=1024,
        ),
    ],
    ids=["qwen3", "llama"],
)


@CONFIGS
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real kernel")
def test_chunks_give_the_logits_and_the_cache_of_the_plain_modules(
    tmp_path: Path, config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    model = load_model(files_of(write_checkpoint(tmp_path, config)), dtype=torch.float32, device=CPU)
    shape, layers = model.spec.attention, len(model.spec.layers)
    ids = torch.randint(160, (351,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Rows.of(ids).hide([(5, 9)])  # rows are not positions, as behind a masked think span
    table = BlockTable([3, 1, 2])
    found = []
    for short in (False, True):
        cache = KVCache.uniform(layers, BLOCKS, 256, shape.kv_heads, shape.head_dim, torch.float32, CPU)
        cache.kv.fill_(float("nan"))  # what was never written is never read
        plain = Runner(model, SdpaBackend(cache), CPU)
        padded = PaddedPrefill(model, cache, FlashBackend(cache), 1000, graphs=None)
        sequence = Sequence(rows.prefix(240), Priority.PERSON, SamplingParams())
        sequence.table = table
        plain.run(StepBatch((PromptChunk(sequence, 0, 240).span,)))
        logits, start = [], 240
        for count in (
            10,
            16,
            1,
            17,
            3,
            60,
        ):  # the last few rows of a block, the next block, and between two sizes
            sequence = Sequence(rows.prefix(start + count), Priority.PERSON, SamplingParams())
            sequence.table = table
            span = PromptChunk(sequence, start, count).span
            assert padded.takes((span,))
            (row,) = padded.run((span,)) if short else plain.run(StepBatch((span,)))
            logits.append(row.clone())
            start += count
        assert start == len(rows)
        found.append((torch.stack(logits), cache.kv))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4, equal_nan=True)


@CONFIGS
def test_deterministic_steps_give_the_same_bits_however_a_prompt_is_cut(
    tmp_path: Path, config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_prefill, "SLAB", 16)  # the interpreter is slow
    monkeypatch.setattr(prompt_attention, "choose_tile", lambda *_: Tile(16, 16, 4))
    monkeypatch.setattr(padded_prefill, "ALONE", (16,))
    network = load_model(files_of(write_checkpoint(tmp_path, config)), dtype=torch.float32, device=DEVICE)
    shape, layers = network.spec.attention, len(network.spec.layers)
    ids = torch.randint(160, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    blocks = (4, 1, 3)
    logits, rows = [], []
    for cuts in ((37,), (15, 16, 17, 36, 37), (5, 37)):
        cache = KVCache.uniform(layers, 5, 16, shape.kv_heads, shape.head_dim, torch.float32, DEVICE)
        cache.kv.fill_(float("nan"))  # what was never written is never read
        padded = PaddedPrefill(network, cache, None, 37, graphs=None)
        for start, stop in pairwise((0, *cuts)):
            part = ids[start:stop]
            span = Span(blocks, start, len(part), part, range(start, stop), True)
            (last,) = padded.run((span,))
        logits.append(last.clone())
        rows.append(cache.kv.nan_to_num())
    for other in (1, 2):
        assert torch.equal(logits[other], logits[0])
        assert torch.equal(rows[other], rows[0])
    cache = KVCache.uniform(layers, 5, 16, shape.kv_heads, shape.head_dim, torch.float32, DEVICE)
    plain = Runner(network, SdpaBackend(cache), DEVICE)
    (expected,) = plain.run(StepBatch((Span(blocks, 0, 37, ids, range(37), True),)))
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)


class Recorded:
    """Stands in for graphs: a step runs as it is, and its key is noted."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        self.keys.append(key)
        step()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real kernel")
@pytest.mark.parametrize("name", list(BLOCK_SIZES))
def test_prompts_are_recorded_unless_torch_attends(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    monkeypatch.setattr(padded_prefill, "ALONE", (16, 32))
    monkeypatch.setattr(padded_prefill, "TOGETHER", (32,))
    monkeypatch.setattr(padded_prefill, "SPANS", (2,))
    config = tiny(MistralConfig, num_hidden_layers=1, head_dim=64, sliding_window=12)
    network = load_model(files_of(write_checkpoint(tmp_path, config)), dtype=torch.float32, device=CPU)
    shape, unusual, found = network.spec.attention, unusual_layers(network), []
    ids = torch.randint(160, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    for fused in (False, True):
        cache = KVCache.uniform(1, 8, BLOCK_SIZES[name], shape.kv_heads, shape.head_dim, torch.float32, CPU)
        cache.kv.fill_(float("nan"))
        runner = Runner(network, make_backend(name, cache, unusual), CPU)
        graphs: Any = Recorded()
        if fused:
            assert runner.fuse(network, cache, 64, graphs, False) is None
            assert bool(graphs.keys) == (name != "sdpa")
        before = len(graphs.keys)
        for spans in (
            (Span((3, 1), 0, 40, ids[:40], range(40), True),),
            (Span((3, 1), 40, 10, ids[40:], range(40, 50), True),),
            (Span((2, 4), 0, 20, ids[:20], range(20), True), Span((5, 6), 0, 9, ids[:9], range(9), True)),
        ):
            found += [row.clone() for row in runner.run(StepBatch(spans))]
        # The first one has more tokens than a graph.
        assert len(graphs.keys) - before == (2 if fused and name != "sdpa" else 0)
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half], rtol=1e-4, atol=2e-4)


MIXED = [
    (0, 37, True),
    (250, 12, True),
    (256, 1, False),
    (0, 1, True),
    (70, 3, True),
    (300, 20, False),
    (9, 5, True),
]
"""Rows before, tokens, whether logits are wanted: across the end of a block, right after one, prompts from row 0."""


@each_value_once
@CONFIGS
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real kernel")
@pytest.mark.parametrize("cut", [False, True], ids=["in one step", "in several"])
def test_several_chunks_at_once_give_what_each_gives_alone(
    tmp_path: Path, config: PretrainedConfig, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    monkeypatch.setattr(padded_prefill, "ALONE", (4,))
    monkeypatch.setattr(padded_prefill, "TOGETHER", (8, 32) if cut else (16, 96))
    monkeypatch.setattr(padded_prefill, "SPANS", (3,) if cut else (4, 16))
    monkeypatch.setattr(padded_prefill, "LONGEST", (8, 96))
    network = load_model(files_of(write_checkpoint(tmp_path, config)), dtype=torch.float32, device=CPU)
    shape, layers = network.spec.attention, len(network.spec.layers)
    random = torch.Generator().manual_seed(2)
    blocks = iter(torch.randperm(len(MIXED) * 2, generator=random).tolist())
    spans, before = [], []
    for start, count, wanted in MIXED:
        ids = torch.randint(160, (start + count,), generator=random).tolist()
        table = (next(blocks), next(blocks))
        positions = range(7, 7 + start + count)  # not the rows
        before.append(Span(table, 0, start, ids[:start], positions[:start]))
        spans.append(Span(table, start, count, ids[start:], positions[start:], wanted))
    found = []
    for together in (False, True):
        cache = KVCache.uniform(
            layers, 2 * len(MIXED), 256, shape.kv_heads, shape.head_dim, torch.float32, CPU
        )
        cache.kv.fill_(float("nan"))  # what was never written is never read, and padding is written nowhere
        plain = Runner(network, SdpaBackend(cache), CPU)
        for span in before:
            if span.count:
                plain.run(StepBatch((span,)))
        if together:
            padded = PaddedPrefill(network, cache, FlashBackend(cache), 400, graphs=None)
            steps = list(pack_steps(spans, padded_prefill.TOGETHER[-1], padded_prefill.SPANS[-1]))
            assert len(steps) == (4 if cut else 1)
            assert padded.takes(tuple(spans))
            logits = padded.run(tuple(spans))
        else:
            logits = [row for span in spans for row in plain.run(StepBatch((span,)))]
        assert len(logits) == sum(wanted for _, _, wanted in MIXED)
        found.append((torch.stack(logits), cache.kv))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_every_step_has_a_size() -> None:
    for sizes in (ALONE, TOGETHER, SPANS, LONGEST):
        assert list(sizes) == sorted(set(sizes))
    assert LONGEST[-1] >= TOGETHER[-1] >= ALONE[-1]  # what is left of a step may be one span
    assert SPANS[0] > 1  # 1 is what lies at the end


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), min_size=1, max_size=9),
    st.integers(1, 30),
    st.integers(1, 5),
)
def test_steps_hold_every_token_once_in_order(
    chunks: list[tuple[int, int, bool]], tokens: int, most: int
) -> None:
    spans = [
        Span((number,), start, count, range(count), range(start, start + count), wanted)
        for number, (start, count, wanted) in enumerate(chunks)
    ]
    steps = list(pack_steps(spans, tokens, most))
    for step in steps:
        assert 0 < sum(span.count for span in step) <= tokens
        assert len(step) <= most
    rows = [(span.blocks, row) for step in steps for span in step for row in range(span.start, span.stop)]
    assert rows == [(span.blocks, row) for span in spans for row in range(span.start, span.stop)]
    ends = [(span.blocks, span.stop) for step in steps for span in step if span.wanted]
    assert ends == [(span.blocks, span.stop) for span in spans if span.wanted]
    full = [sum(span.count for span in step) == tokens or len(step) == most for step in steps]
    assert all(full[:-1])


def test_one_long_chunk_is_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaddedPrefill, "__init__", lambda self: setattr(self, "_backend", fake_flash))
    padded = PaddedPrefill()  # type: ignore[call-arg]
    short, long = (Span((0,), 100, ALONE[-1] + more) for more in (0, 1))
    assert padded.takes((short,))
    assert not padded.takes((long,))
    assert padded.takes((long, short))
