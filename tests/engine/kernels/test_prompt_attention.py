"""The kernel of unusual layers and of prompts against plain attention, on the GPU or else in Triton's interpreter."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fresh import examples

pytest.importorskip("triton")

from engine.attention.triton import TritonBackend
from engine.batch import Span, StepBatch
from engine.execute.compatibility import FUSED_HEADS
from engine.execute.cuda.padded_prefill import SLAB
from engine.kernels.triton import prompt_attention
from engine.kernels.triton.prompt_attention import FEW, TILES, WIDE_TILES, Tile, choose_tile
from tests.engine.attention_cases import Case, case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What the interpreter and a GPU both have products in.
EXACT = DEVICE == "cpu"
DTYPE = torch.float32 if EXACT else torch.bfloat16
BOUND = 1e-5 if EXACT else 5e-3
SMALL = (Tile(16, 16, 4), Tile(32, 16, 4), Tile(16, 32, 4), Tile(64, 32, 4))
ASKED = st.fixed_dictionaries(
    {},
    optional={
        "window": st.integers(1, 80),
        "cap": st.sampled_from([0.5, 3.0, 50.0]),
        "scale": st.sampled_from([0.05, 0.3, 1.5]),
        "sinks": st.just(True),
        "lets_go": st.just(True),
    },
).filter(lambda asked: len(asked.keys() - {"lets_go"}) > 0)


def made_case(spans: list[tuple[int, int]], **options: Any) -> Case:
    """A case whose blank block is full of what nobody may read."""
    made = case(spans, dtype=DTYPE, device=DEVICE, **options)
    held = {block for span in made.batch.spans for block in span.blocks}
    blank = made.cache.kv.shape[2] // made.cache.block_size - 1
    if options.get("lets_go") and options.get("window") and blank in held:
        made.cache.kv[:, :, blank * made.cache.block_size :] = float("nan")
    return made


def found(made: Case) -> float:
    return made.error(made.run(TritonBackend(made.cache, made.unusual)))


@examples(12)
@given(
    asked=ASKED,
    spans=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=4),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([16, 24, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 256]),
    tile=st.sampled_from(SMALL),
    scattered=st.booleans(),
)
def test_random_layers_over_random_batches(asked: dict[str, Any], tile: Tile, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_attention, "choose_tile", lambda *_: tile)
        assert found(made_case(**options, **asked)) < BOUND


@pytest.mark.parametrize("count", [1, 17], ids=["few", "many"])
@pytest.mark.parametrize("lets_go", [False, True], ids=["held", "let go"])
def test_a_window_is_left_at_every_row(count: int, lets_go: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tile, which is as long as two blocks, the first one may be gone."""
    monkeypatch.setattr(prompt_attention, "choose_tile", lambda *_: Tile(32, 32, 4))
    spans = [(start, count) for start in range(0, 100, 1 if count == 1 else 3)]
    made = made_case(spans, group=1, kv_heads=1, dim=16, block_size=16, window=21, lets_go=lets_go)
    assert found(made) < BOUND


@pytest.mark.parametrize(
    "asked",
    [{"window": 4096}, {"window": 512, "cap": 50.0, "scale": 0.0625}, {"sinks": True, "window": 128}],
    ids=["mistral", "gemma", "gpt-oss"],
)
def test_the_tiles_of_a_gpu(asked: dict[str, Any]) -> None:
    assert found(made_case([(130, 150), (700, 3)], group=2, dim=64, block_size=32, **asked)) < BOUND


def test_plain_layers_beside_unusual_ones_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_case([(40, 1), (3, 20)], group=2, dim=16, block_size=16, window=7)
    backend = TritonBackend(made.cache, made.unusual)
    monkeypatch.setattr(prompt_attention, "ragged_attention", None)
    plain = case([(40, 1), (3, 20)], group=2, dim=16, block_size=16, dtype=DTYPE, device=DEVICE)
    made.cache.kv[:, 0] = plain.cache.kv[:, 1]
    out = backend.plan(made.batch)(0, made.q, made.k, made.v)
    assert plain.error(out) < BOUND


def test_a_graph_attends_to_what_the_device_says() -> None:
    """Padding before, between and after, spans without tokens, plain layers too: nothing but the tensors says which."""
    spans = [(70, 20), (0, 9), (33, 1)]
    for asked in ({}, {"window": 30}):
        made = made_case(spans, group=2, dim=16, block_size=16, **asked)
        backend = TritonBackend(made.cache, made.unusual)
        expected = made.run(backend)
        ends = torch.tensor([[0, 20, 29, 30, 30, 30], [0, 90, 99, 133, 133, 133]], dtype=torch.int32)
        tables = torch.zeros(5, 9, dtype=torch.int32)
        for row, span in zip(tables, made.batch.spans, strict=False):
            row[: len(span.blocks)] = torch.tensor(span.blocks)
        q_ends, k_ends = ends.to(DEVICE)
        q = torch.cat((made.q, torch.full_like(made.q[:5], float("nan"))))
        step = backend.ragged(lambda *_: None, q_ends, k_ends, [tables.to(DEVICE)], 64, 1000)
        torch.testing.assert_close(step(1, q, q, q)[:30], expected, rtol=1e-5, atol=1e-5)
        at = torch.tensor([[7, 27], [0, 90]], dtype=torch.int32).to(DEVICE)
        q = torch.cat((torch.full_like(made.q[:7], float("nan")), made.q[:20]))
        step = backend.ragged(lambda *_: None, *at, [tables[:1].to(DEVICE)], 32, 1000)
        torch.testing.assert_close(step(1, q, q, q)[7:], expected[:20], rtol=1e-5, atol=1e-5)


def test_a_deterministic_slab_reads_nothing_before_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its padding is not in the way, whether it lies before the span's first row or after its last."""
    monkeypatch.setattr(prompt_attention, "choose_tile", lambda *_: Tile(16, 32, 4))
    asked: dict[str, Any] = {"window": 9, "sinks": True, "lets_go": True}
    made = made_case([(70, 20)], group=2, dim=24, block_size=16, **asked)
    expected = made.run(TritonBackend(made.cache, made.unusual))
    (span,) = made.batch.spans
    q = torch.cat((torch.zeros_like(made.q[:6]), made.q, torch.zeros_like(made.q[:6])))
    out = prompt_attention.prompt_attention(
        q,
        made.cache.k[1],
        made.cache.v[1],
        torch.tensor([64, 70, 90], dtype=torch.int32, device=DEVICE),
        torch.tensor(span.blocks, dtype=torch.int32, device=DEVICE),
        kv_heads=made.cache.row.heads,
        block_size=16,
        **made.unusual[1].asked,
    )
    assert out.isfinite().all()
    torch.testing.assert_close(out[6:26], expected, rtol=1e-5, atol=1e-5)


def test_a_step_that_is_cut_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_attention, "choose_tile", lambda *_: Tile(32, 16, 4))
    made = made_case([(45, 60)], group=2, dim=64, block_size=16, window=33, cap=3.0, sinks=True)
    backend = TritonBackend(made.cache, made.unusual)
    whole = made.run(backend)
    (span,) = made.batch.spans
    for first, end in pairwise((0, 1, 18, 60)):
        step = backend.plan(StepBatch((Span(span.blocks, 45 + first, end - first),)))
        part = step(1, made.q[first:end], made.k[first:end], made.v[first:end])
        torch.testing.assert_close(part, whole[first:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
def test_tiles_fit_where_there_are_fused_kernels(kilobytes: int) -> None:
    for dim in FUSED_HEADS:
        head_bytes = 2 * max(128, dim) if dim > 64 else 128
        tile = choose_tile(head_bytes, kilobytes * 1024)
        assert tile.shared(head_bytes) <= kilobytes * 1024
        assert SLAB % tile.queries == 0
        assert tile.queries > FEW
        best = TILES[0] if dim <= 256 else WIDE_TILES[0]
        assert tile == best or (dim >= 256 and kilobytes < 227)
