"""`combine_kernel` in Triton's interpreter, against a softmax over all parts in fp64."""

import pytest
import torch

pytest.importorskip("triton")

from engine.execute.cuda.tiles import IN_ORDER
from engine.kernels.triton.combine import combine_kernel

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)
HEADS, CHUNK, CHUNKS, LENGTHS = 2, 4, 80, (1, 30, IN_ORDER * 4, IN_ORDER * 4 + 1, 203)
"""Two sequences have a part or a few, one as many as are added up in order, and one more than that."""


def combined(
    slots: list[int], padded: int, in_order: int, dim: int = 128, window: int = 0, sinks: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes of the sequences in these slots, and what it should: [rows, HEADS * dim]."""
    generator = torch.Generator().manual_seed(0)
    by_slot = torch.randn(len(LENGTHS), CHUNKS, HEADS, dim, generator=generator)
    scores = 3 * torch.randn(len(LENGTHS), CHUNKS, HEADS, generator=generator)
    sink = torch.randn(HEADS, generator=generator) if sinks else None
    partial, lse = by_slot[slots].contiguous(), scores[slots].contiguous()
    counters = torch.tensor([[length - 1, 0] for length in LENGTHS])
    out = torch.full((len(slots), HEADS * dim), float("nan"))
    combine_kernel[(HEADS, len(slots))](
        partial, lse, torch.tensor(slots, dtype=torch.int32), counters, out,
        HQ=HEADS, D=128, DIM=dim, CHUNK=CHUNK, DOUBLINGS=0, CHUNKS=CHUNKS, PADDED=padded, PDL=False,
        WINDOW=window, sinks=sink, IN_ORDER=in_order,
    )  # fmt: skip
    expected = []
    for row, slot in enumerate(slots):
        last = LENGTHS[slot] - 1
        count = last // CHUNK - (max(last - window + 1, 0) // CHUNK if window else 0) + 1
        logs = lse[row, :count].double() / 1.4426950408889634
        if sink is not None:
            logs = torch.cat([logs, sink[None].double()])
        shares = logs.softmax(0)[:count]
        expected.append((shares[:, :, None] * partial[row, :count].double()).sum(0).flatten())
    return out, torch.stack(expected)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("dim", "window"), [(128, 0), (96, 0), (128, 40)])
@pytest.mark.parametrize("in_order", [0, IN_ORDER])
def test_parts_are_weighed_as_one_softmax_would(in_order: int, dim: int, window: int, sinks: bool) -> None:
    found, expected = combined([4, 0, 2, 3, 1], 64, in_order, dim, window, sinks)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_sequence_has_the_same_bits_beside_longer_ones() -> None:
    together, _ = combined([0, 1, 2, 3, 4], 128, IN_ORDER)
    for slot, length in enumerate(LENGTHS):
        parts = -(-length // CHUNK)
        for padded in (8, 16, 32, 64):
            if parts <= padded:
                alone, _ = combined([slot], padded, IN_ORDER)
                assert torch.equal(alone[0], together[slot]), f"{length} rows, {padded} places"
