"""Every attention backend on a GPU in bf16, against plain attention in float64 on the same inputs."""

import importlib.util
from typing import Any

import pytest
import torch

from engine.attention.choose import _problem, choose_attention, make_backend, usable_backends
from engine.batch import Span, StepBatch
from engine.cache.copies import RowCopy
from engine.cache.kv_cache import KVCache
from tests.engine.attention_cases import case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FLASH = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
SPLIT = 128
"""Rows that one program of the Triton kernel reads."""
BACKENDS = [
    ("sdpa", 16),
    ("sdpa", 32),
    ("triton", 16),
    ("triton", 32),
    ("triton", 256),
    pytest.param("flash", 256, marks=FLASH),
]
STEPS = {
    "prompt": [(0, 300)],
    "prompt of one": [(0, 1)],
    "chunk after a prefix": [(700, 130)],
    "one": [(1000, 1)],
    "long chunk": [(700, 600)],
    **{f"{count} across a page and a split": [(2 * SPLIT - 2, count)] for count in range(2, 9)},
    "two that decode and a prompt": [(20, 1), (300, 1), (0, 30)],
    "all kinds in between": [(20, 12), (3, 2), (5, 2), (255, 20), (40, 1), (0, 9)],
}


@pytest.mark.parametrize(("group", "dim"), [(1, 128), (2, 128), (3, 64), (4, 64), (4, 128), (8, 128)])
@pytest.mark.parametrize(("name", "block_size"), BACKENDS)
def test_a_backend_agrees_with_plain_attention(name: str, block_size: int, group: int, dim: int) -> None:
    for what, spans in STEPS.items():
        for scattered in (False, True):
            made = case(
                spans,
                group=group,
                dim=dim,
                block_size=block_size,
                dtype=torch.bfloat16,
                scattered=scattered,
                device="cuda",
            )
            backend = make_backend(name, made.cache)
            error = made.error(made.run(backend))
            assert error < 5e-3, f"{what}, scattered: {scattered}: {error}"
            for span in made.batch.spans:  # the rows that were written are those that the next step reads
                slots = [
                    s for first, end in made.cache.slots(span.blocks, 0, span.stop) for s in range(first, end)
                ]
                assert made.cache.kv[:, 1, slots].isfinite().all(), what


ASKED: dict[str, dict[str, Any]] = {
    "window": {"window": 300},
    "window of all layers": {"window": 200, "lets_go": True},
    "window of one token": {"window": 1, "lets_go": True},
    "cap and scale": {"cap": 3.0, "scale": 0.3},
    "window, cap and scale": {"window": 129, "cap": 50.0, "scale": 0.0625, "lets_go": True},
    "sinks": {"sinks": True, "window": 128, "lets_go": True},
}
"""The features of unusual layers."""


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize(("group", "dim"), [(2, 64), (2, 80), (1, 96), (4, 128), (2, 256)])
@pytest.mark.parametrize(
    ("name", "block_size"), [("triton", 32), ("triton", 256), pytest.param("flash", 256, marks=FLASH)]
)
def test_a_backend_knows_what_unusual_layers_ask_for(
    name: str, block_size: int, group: int, dim: int, asked: dict[str, Any]
) -> None:
    """Rows before the window of a layer are never read: they are NaN, and so is the Triton kernel's blank block."""
    for what, spans in STEPS.items():
        for scattered in (False, True):
            made = case(
                spans,
                group=group,
                dim=dim,
                block_size=block_size,
                dtype=torch.bfloat16,
                scattered=scattered,
                device="cuda",
                **asked,
            )
            if name == "triton" and asked.get("lets_go"):
                made.cache.kv[:, :, -block_size:] = float("nan")
            layer = made.unusual[1]
            problem = _problem(name, torch.device("cuda"), torch.bfloat16, dim, (layer.spec,))
            if problem is not None:
                assert name == "flash", problem.why
                pytest.skip(problem.why)
            error = made.error(made.run(make_backend(name, made.cache, made.unusual)))
            assert error < 5e-3, f"{what}, scattered: {scattered}: {error}"


@pytest.mark.parametrize("dim", [64, 256])
def test_the_kernel_of_unusual_layers_in_fp16(dim: int) -> None:
    spans = STEPS["all kinds in between"]
    made = case(
        spans, group=2, dim=dim, block_size=32, dtype=torch.float16, device="cuda", window=20, cap=3.0
    )
    assert made.error(made.run(make_backend("triton", made.cache, made.unusual))) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group", [1, 3])
def test_sdpa_in_other_dtypes(group: int, dtype: torch.dtype) -> None:
    for spans in STEPS.values():
        made = case(spans, group=group, dim=64, block_size=32, dtype=dtype, device="cuda")
        error = made.error(made.run(make_backend("sdpa", made.cache)))
        assert error < (1e-5 if dtype is torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_chunk_after_a_prefix_builds_no_mask(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def materialize(*_: object) -> None:
        raise AssertionError("no kernel of torch's took the chunk without a mask in memory")

    monkeypatch.setattr("torch.nn.attention.bias.CausalBias._materialize", materialize)
    made = case([(700, 130)], group=2, dim=128, block_size=32, dtype=dtype, device="cuda")
    assert made.error(made.run(make_backend("sdpa", made.cache))) < 5e-3


@pytest.mark.parametrize("start", [SPLIT - 4, 4 * SPLIT - 1, 5000])
@pytest.mark.parametrize(("group", "dim"), [(2, 128), (3, 64), (4, 128), (8, 128)])
def test_a_token_alone_gets_bitwise_what_it_gets_among_eight(group: int, dim: int, start: int) -> None:
    made = case([(start, 8)], group=group, dim=dim, block_size=32, dtype=torch.bfloat16, device="cuda")
    backend = make_backend("triton", made.cache)
    together = made.run(backend)
    (span,) = made.batch.spans
    for first, count in [(i, 1) for i in range(8)] + [(0, 3), (3, 5)]:
        rows = slice(first, first + count)
        step = backend.plan(StepBatch((Span(span.blocks, start + first, count),)))
        assert torch.equal(step(1, made.q[rows], made.k[rows], made.v[rows]), together[rows])


def test_auto_takes_the_best_that_works() -> None:
    names = [name for name, reason in usable_backends(torch.device("cuda")) if reason is None]
    choice = choose_attention("auto", torch.device("cuda"), torch.bfloat16, 128)
    assert choice.name == names[0]
    assert choice.note is None
    assert names[-2:] == ["triton", "sdpa"]


def test_copies_on_the_gpu_are_those_on_a_cpu() -> None:
    caches = [
        KVCache.uniform(3, 8, 16, 3, 8, torch.bfloat16, torch.device(device)) for device in ("cpu", "cuda")
    ]
    caches[0].kv.copy_(torch.randn(caches[0].kv.shape))
    caches[1].kv.copy_(caches[0].kv)
    for cache in caches:
        for copy in (RowCopy(0, 3, 16), RowCopy(3, 5, 7), RowCopy(1, 0, 2), RowCopy(1, 7, 9)):
            cache.carry_out(copy)
        cache.copy_rows([(70, 73), (20, 21)], [(100, 104)])
        with pytest.raises(ValueError, match="do not fit"):
            cache.copy_rows([(0, 2)], [(4, 5)])
    assert torch.equal(caches[0].kv, caches[1].kv.cpu())
