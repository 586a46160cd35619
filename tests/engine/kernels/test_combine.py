"""`combine_kernel` and `combine_parts_kernel` in Triton's interpreter, against a softmax over all parts in fp64."""

import pytest
import torch

pytest.importorskip("triton")

from engine.execute.cuda.tiles import IN_ORDER
from engine.kernels.triton.combine import combine_kernel, combine_parts_kernel

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


OWN, LEAST, USUAL, COMMON = 32, 128, 256, (0, 0, 0, 0, 0, 256)
LONG = (1, 500, 128 * IN_ORDER + 1, 256 * IN_ORDER + 1, 20_000, 700)
"""Up to 16 parts of 128 rows, 16 of 256, and 32 of more; the last sequence shares 256 rows, which are two parts."""


def own_size(rows: int, parts: int, least: int, usual: int) -> int:
    """The rows of a part of `rows` rows that a sequence has alone."""

    def size(parts: int) -> int:
        return max(-(-max(-(-rows // parts), 1) // 128) * 128, 128)

    return max(size(parts), min(size(max(parts // 2, 1)), usual), least)


def combined_parts(slots: list[int], padded: int, shares: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the parts of `parts_kernel`: own ones first, shared ones from OWN on."""
    generator = torch.Generator().manual_seed(0)
    by_slot = torch.randn(len(LONG), CHUNKS, HEADS, 128, generator=generator)
    partial = by_slot[slots].contiguous()
    lse = (3 * torch.randn(len(LONG), CHUNKS, HEADS, generator=generator))[slots].contiguous()
    common = torch.tensor(COMMON, dtype=torch.int32)[slots] * shares
    counters = torch.tensor([[row, 0] for row in LONG])
    out = torch.full((len(slots), HEADS * 128), float("nan"))
    combine_parts_kernel[(HEADS, len(slots))](
        partial, lse, torch.tensor(slots, dtype=torch.int32), counters, common.contiguous(),
        torch.tensor([[0] + [-1] * 15], dtype=torch.int32), out, 1, CHUNKS, 2, OWN, LEAST, USUAL,
        HQ=HEADS, D=128, DIM=128, MEMBERS=16, PADDED=padded, SHARES=shares, PDL=False, IN_ORDER=IN_ORDER,
    )  # fmt: skip
    expected = []
    for row, slot in enumerate(slots):
        alone = LONG[slot] - int(common[row])
        parts = [*range(max(-(-alone // own_size(alone, OWN, LEAST, USUAL)), 1))]
        parts += [OWN + part for part in range(int(common[row]) // 128)]
        shares_of = (lse[row, parts].double() / 1.4426950408889634).softmax(0)
        expected.append((shares_of[:, :, None] * partial[row, parts].double()).sum(0).flatten())
    return out, torch.stack(expected)


@pytest.mark.parametrize("shares", [False, True])
def test_parts_of_tensor_cores_are_weighed_as_one_softmax_would(shares: bool) -> None:
    found, expected = combined_parts([4, 0, 5, 2, 3, 1], 64, shares)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_parts_of_tensor_cores_have_the_same_bits_beside_longer_ones() -> None:
    together, _ = combined_parts([*range(len(LONG))], 64, False)
    for slot, row in enumerate(LONG):
        for padded in (8, 16, 32):
            if -(-row // own_size(row, OWN, LEAST, USUAL)) <= padded:
                alone, _ = combined_parts([slot], padded, False)
                assert torch.equal(alone[0], together[slot]), f"{row} rows, {padded} places"
