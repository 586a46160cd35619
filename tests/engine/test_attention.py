"""Every attention backend over block tables against plain attention in float64."""

import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import AttentionBackend
from engine.attention.choose import make_backend
from engine.attention.flash import FlashBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.sdpa_gpu import GpuSpan
from engine.attention.triton import TritonBackend
from engine.batch import Span, StepBatch
from engine.cache.copies import RowCopy
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention
from tests.engine import fake_flash
from tests.engine.attention_cases import case

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 2, 6, 2, 16, 4


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal at the right corner; q [t, H, D], k and v [rows, Hkv, D]."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / DIM**0.5
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def cache(dtype: torch.dtype) -> KVCache:
    made = KVCache.uniform(LAYERS, 16, BLOCK, KV_HEADS, DIM, dtype, torch.device("cpu"))
    made.kv.fill_(float("nan"))  # whatever is read before it is written shows
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [(0, 1, 2, 3, 4), (9, 2, 3, 15, 0)], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("cuts", [[18], [1] * 18, [5, 1, 7, 5], [17, 1]])
def test_any_split_of_a_prompt_gives_plain_attention(
    dtype: torch.dtype, blocks: tuple[int, ...], cuts: list[int]
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(18, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    backend = SdpaBackend(cache(dtype))
    parts, start = [], 0
    for count in cuts:
        step = backend.plan(StepBatch((Span(blocks, start, count),)))
        rows = slice(start, start + count)
        parts.append(step(1, q[rows], k[rows], v[rows]))
        start += count
    error = (torch.cat(parts).double() - reference(q, k, v)).norm() / reference(q, k, v).norm()
    assert error < (1e-5 if dtype is torch.float32 else 5e-3)


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    torch.manual_seed(1)
    kv = cache(torch.float32)
    backend = SdpaBackend(kv)
    rows = {(0, 1): 7, (5, 4): 6, (8,): 3}
    tensors = {b: [torch.randn(n, h, DIM) for h in (HEADS, KV_HEADS, KV_HEADS)] for b, n in rows.items()}
    first = [(blocks, 0, n - 1) for blocks, n in rows.items()]
    second = [(blocks, n - 1, 1) for blocks, n in rows.items()]
    outs: dict[tuple[int, ...], list[Tensor]] = {blocks: [] for blocks in rows}
    for spans in (first, second):
        step = backend.plan(StepBatch(tuple(Span(*span) for span in spans)))
        packed = [torch.cat([tensors[b][i][s : s + n] for b, s, n in spans]) for i in range(3)]
        out, at = step(0, *packed), 0
        for blocks, _, count in spans:
            outs[blocks].append(out[at : at + count])
            at += count
    for blocks, (q, k, v) in tensors.items():
        torch.testing.assert_close(torch.cat(outs[blocks]).double(), reference(q, k, v), rtol=1e-4, atol=1e-5)


class GpuPath:
    """What SDPA does on a GPU, span by span, on any device; `gqa` where torch's kernel repeats the KV heads."""

    name = "sdpa"

    def __init__(self, cache: KVCache, gqa: bool) -> None:
        self._cache, self._gqa = cache, gqa

    def plan(self, batch: StepBatch) -> Attention:
        (span,) = batch.spans
        return GpuSpan(self._cache, span, self._gqa)


SPANS = {
    "prompt": [(0, 300)],
    "prompt of one": [(0, 1)],
    "chunk after a prefix": [(270, 40)],
    "eight": [(250, 8)],
    "one": [(256, 1)],
    "long chunk": [(300, 520)],
}
BATCHES = {
    "two that decode and a prompt": [(20, 1), (300, 1), (0, 30)],
    "all kinds in between": [(20, 12), (3, 2), (5, 2), (255, 20), (40, 1), (0, 9)],
    "three that decode": [(20, 1), (256, 1), (0, 1)],
    "long ones, across blocks and at their ends": [(0, 256), (250, 700), (256, 1), (511, 2)],
}


@pytest.mark.parametrize("scattered", [False, True], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_the_gpu_path_of_sdpa(spans: list[tuple[int, int]], gqa: bool, scattered: bool) -> None:
    made = case(spans, group=3, dim=16, block_size=32, dtype=torch.float32, scattered=scattered)
    assert made.error(made.run(GpuPath(made.cache, gqa))) < 1e-5


@pytest.mark.parametrize("scattered", [False, True], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("spans", [*SPANS.values(), *BATCHES.values()], ids=[*SPANS, *BATCHES])
def test_flash_is_called_as_it_says(
    spans: list[tuple[int, int]], scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    made = case(spans, group=2, dim=16, block_size=256, dtype=torch.float32, scattered=scattered)
    assert made.error(made.run(FlashBackend(made.cache))) < 1e-5


ASKED: dict[str, dict[str, Any]] = {
    "window": {"window": 300},
    "short window": {"window": 5, "lets_go": True},
    "window of all layers": {"window": 290, "lets_go": True},
    "cap": {"cap": 2.0, "scale": 0.6},
    "all": {"cap": 3.0, "scale": 0.7, "window": 40, "lets_go": True},
}
"""What unusual layers ask for."""


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("spans", [*SPANS.values(), *BATCHES.values()], ids=[*SPANS, *BATCHES])
@pytest.mark.parametrize("name", ["flash", "sdpa"])
def test_windows_caps_and_scales_are_passed_on(
    name: str, spans: list[tuple[int, int]], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    made = case(spans, group=2, dim=16, block_size=256, dtype=torch.float32, **asked)
    assert made.unusual
    assert made.error(made.run(make_backend(name, made.cache, made.unusual))) < 1e-5


@pytest.mark.parametrize("spans", [*SPANS.values(), *BATCHES.values()], ids=[*SPANS, *BATCHES])
def test_rows_of_other_chunks_are_not_seen(spans: list[tuple[int, int]]) -> None:
    made = case(spans, group=2, dim=16, block_size=4, dtype=torch.float32, chunk=50)
    assert made.error(made.run(make_backend("sdpa", made.cache, made.unusual))) < 1e-5


@pytest.mark.parametrize("scattered", [False, True], ids=["contiguous", "scattered"])
def test_of_a_layer_with_a_window_no_block_before_it_is_copied(
    scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    made = case(
        [(3000, 520)], group=2, dim=16, block_size=256, dtype=torch.float32, scattered=scattered, window=300
    )
    read: list[int] = []
    attend = fake_flash.fwd_kvcache

    def noting(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, None]:
        read.append(k.shape[1])
        return attend(q, k, *rest)

    monkeypatch.setattr(fake_flash, "fwd_kvcache", noting)
    assert made.error(made.run(FlashBackend(made.cache, made.unusual))) < 1e-5
    assert read == [3520 - 2560]  # row 3000 sees row 2701


def test_flash_refuses_blocks_that_it_cannot_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    with pytest.raises(ValueError, match="multiple of 256 rows, not 4"):
        FlashBackend(cache(torch.float32))


@pytest.mark.parametrize("name", ["sdpa", "triton"])
@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
def test_batches_of_all_kinds(spans: list[tuple[int, int]], name: str) -> None:
    made = case(spans, group=2, dim=16, block_size=32, dtype=torch.float32)
    if name == "triton":
        pytest.importorskip("triton")
        backend: AttentionBackend = TritonBackend(made.cache)
    else:
        backend = SdpaBackend(made.cache)
    assert made.error(made.run(backend)) < 1e-5


def test_slots_are_joined_where_they_touch() -> None:
    kv = cache(torch.float32)
    assert kv.slots([3, 4, 9], 2, 11) == [(14, 20), (36, 39)]
    assert kv.slots([3], 1, 1) == []


@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=9, unique=True), st.integers(0, 36), st.integers(0, 36)
)
def test_slots_are_those_of_each_row_in_as_few_runs_as_can_be(blocks: list[int], a: int, b: int) -> None:
    start, stop = sorted((min(a, len(blocks) * BLOCK), min(b, len(blocks) * BLOCK)))
    runs = cache(torch.float32).slots(blocks, start, stop)
    rows = [blocks[row // BLOCK] * BLOCK + row % BLOCK for row in range(start, stop)]
    assert [slot for first, end in runs for slot in range(first, end)] == rows
    assert all(end != first for (_, end), (first, _) in pairwise(runs))


def test_copies_take_every_layer() -> None:
    kv = cache(torch.float32)
    kv.kv.copy_(torch.randn_like(kv.kv))
    k, v = kv.kv.clone()
    kv.carry_out(RowCopy(2, 7, 3))
    kv.copy_rows([(0, 2), (5, 6)], [(40, 43)])
    for now, before in ((kv.kv[0], k), (kv.kv[1], v)):
        assert torch.equal(now[:, 28:31], before[:, 8:11])
        assert torch.equal(now[:, 31], before[:, 31])
        assert torch.equal(now[:, 40:43], before[:, [0, 1, 5]])
    with pytest.raises(ValueError, match="do not fit"):
        kv.copy_rows([(0, 2)], [(4, 5)])
