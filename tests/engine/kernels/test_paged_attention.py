"""The split-KV kernel against plain attention, on the GPU or else in Triton's interpreter."""

import pytest
import torch

from tests.engine.attention_cases import case

pytest.importorskip("triton")
from engine.attention.triton import TritonBackend
from engine.batch import Span, StepBatch
from engine.kernels.triton.paged_attention import COMBINE, SPLIT, paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter has no products in bf16.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products by a loop: a BLAS rounds a row by where it lies in the matrix, a GPU does not."""
    if DEVICE == "cuda":
        return
    import triton.runtime.interpreter as interpreter

    def create_dot(builder, a, b, d, *settings):  # type: ignore[no-untyped-def]
        products = a.data[:, :, None].astype("float32") * b.data[None]
        return interpreter.TensorHandle(products.sum(1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize(
    ("group", "dim", "block_size", "dtype"),
    [
        (1, 64, 16, DTYPES[1]),
        (2, 128, 256, DTYPES[1]),
        (2, 64, 32, DTYPES[0]),
        (3, 80, 16, DTYPES[1]),
        (4, 64, 256, DTYPES[1]),
        (8, 128, 32, DTYPES[0]),
    ],
)
def test_tokens_of_any_number_and_context(group: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
    spans = [(0, 1), (SPLIT - 3, 8), (40, 5), (2 * SPLIT - 1, 1)]
    made = case(spans, group=group, dim=dim, block_size=block_size, dtype=dtype, device=DEVICE, kv_heads=1)
    error = made.error(made.run(TritonBackend(made.cache)))
    assert error < (1e-5 if dtype is torch.float32 else 5e-3)


def test_every_kv_head_has_its_own_rows() -> None:
    made = case([(30, 2), (9, 3)], group=2, dim=64, block_size=16, dtype=DTYPES[1], device=DEVICE, kv_heads=3)
    assert made.error(made.run(TritonBackend(made.cache))) < 5e-3


def test_more_splits_than_are_combined_at_once() -> None:
    rows = SPLIT * COMBINE + 5
    made = case([(rows, 2)], group=1, dim=16, block_size=64, dtype=DTYPES[0], device=DEVICE, kv_heads=1)
    assert made.error(made.run(TritonBackend(made.cache))) < 1e-5


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize(("group", "dtype"), [(2, DTYPES[1]), (3, DTYPES[0]), (8, DTYPES[1])])
def test_a_token_alone_gets_bitwise_what_it_gets_among_eight(group: int, dtype: torch.dtype) -> None:
    start = SPLIT - 4  # the eight lie on both sides of a split's edge
    made = case([(start, 8)], group=group, dim=64, block_size=16, dtype=dtype, device=DEVICE, kv_heads=1)
    backend = TritonBackend(made.cache)
    together = made.run(backend)
    (span,) = made.batch.spans
    for i in range(8):
        step = backend.plan(StepBatch((Span(span.blocks, start + i, 1),)))
        alone = step(1, made.q[i : i + 1], made.k[i : i + 1], made.v[i : i + 1])
        assert torch.equal(alone[0], together[i])


@pytest.mark.usefixtures("rows_alike")
def test_bounds_that_leave_room_change_nothing() -> None:
    made = case(
        [(150, 2), (30, 1)], group=2, dim=64, block_size=32, dtype=DTYPES[1], device=DEVICE, kv_heads=1
    )
    exact = made.run(TritonBackend(made.cache))
    places = torch.tensor([[0, 150, 2], [2, 30, 1]], dtype=torch.int32, device=DEVICE)
    tables = torch.zeros((2, 64), dtype=torch.int32, device=DEVICE)
    for i, span in enumerate(made.batch.spans):
        tables[i, : len(span.blocks)] = torch.tensor(span.blocks, dtype=torch.int32)
    bounds: dict[str, int] = {"block_size": 32, "most_tokens": 8, "most_rows": 512}
    roomy = paged_attention(
        made.q, made.cache.k[1], made.cache.v[1], places, tables, kv_heads=made.cache.row.heads, **bounds
    )
    assert torch.equal(exact, roomy)
