"""Weights packed for a GPU: bit-identical to the numbers of the GGUF blocks."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS, COLUMNS
from models.weights.packing import empty_planes, pack, packed_bytes, unpack
from tests.fresh import examples

CPU = torch.device("cpu")
_SCALES = {
    **dict.fromkeys((Kind.Q4_K, Kind.Q5_K, Kind.Q4_1, Kind.Q5_1), (0, 4)),
    **dict.fromkeys((Kind.INT4_64, Kind.INT4_128, Kind.INT8_32), (0, 4)),
    Kind.Q2_K: (80, 84),
    Kind.Q3_K: (108, 110),
    Kind.Q6_K: (208, 210),
}
"""Where a block has its halves, if not in its first two bytes."""


def random_blocks(kind: Kind, rows: int, blocks: int, seed: int) -> torch.Tensor:
    """Return blocks of random digits with finite scales, uint8 [rows, bytes per row]."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, blocks, kind.block_bytes), dtype=np.uint8)
    if kind == Kind.MXFP4:
        data[..., 0] = random.integers(119, 127, (rows, blocks))
        return torch.from_numpy(data.reshape(rows, -1))
    if kind == Kind.FP8_128:
        data[data & 127 == 127] = 0  # NaN
        data[..., :4] = random.normal(0, 0.1, (rows, blocks, 1)).astype(np.float32).view(np.uint8)
        return torch.from_numpy(data.reshape(rows, -1))
    start, stop = _SCALES.get(kind, (0, 2))
    scales = random.normal(0, 0.1, (rows, blocks, (stop - start) // 2)).astype(np.float16)
    data[..., start:stop] = scales.view(np.uint8).reshape(rows, blocks, stop - start)
    return torch.from_numpy(data.reshape(rows, -1))


def stands_for(data: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the numbers of blocks, fp32 [rows, columns], by the gguf package except for our own block types."""
    if not kind.is_own:
        return torch.from_numpy(gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType(kind)))
    blocks = data.reshape(len(data), -1, kind.block_bytes)
    head, codes = blocks[..., :4].contiguous(), blocks[..., 4:].contiguous()
    if kind == Kind.FP8_128:
        return (codes.view(torch.float8_e4m3fn).float() * head.view(torch.float32)).reshape(len(data), -1)
    if kind != Kind.INT8_32:
        codes = torch.cat((codes & 15, codes >> 4), -1).view(torch.int8)
    scale, low = head.view(torch.float16).float().chunk(2, -1)
    return (codes.view(torch.int8) * scale + low).reshape(len(data), -1)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@examples(8)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 13), seed=st.integers(0, 1 << 30))
def test_packed_weights_are_the_numbers_of_their_blocks(
    kind: Kind, rows: int, blocks: int, seed: int
) -> None:
    data = random_blocks(kind, rows, blocks, seed)
    columns = blocks * kind.block
    planes = empty_planes(kind, rows, columns, CPU)
    pack(data, planes)
    expected = stands_for(data, kind)
    assert torch.equal(unpack(planes, torch.arange(rows)), expected)
    some = torch.randint(rows, (5,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpack(planes, some), expected[some])
    assert planes.nbytes == packed_bytes(kind, rows, columns)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_packed_weights_take_little_more_than_their_blocks(kind: Kind) -> None:
    size = packed_bytes(kind, 64, 16 * COLUMNS)
    assert (
        size
        <= (1.06 if kind in (Kind.MXFP4, Kind.Q3_K) else 1.03)
        * 64
        * 16
        * COLUMNS
        * kind.block_bytes
        / kind.block
    )


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q8_0], ids=lambda kind: kind.name)
def test_some_rows_at_a_time_give_the_same_planes(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_blocks(kind, 37, 256 * 3 // kind.block, 1)
    whole, slabs = (empty_planes(kind, 37, 768, CPU) for _ in range(2))
    pack(data, whole)
    monkeypatch.setattr("models.weights.packing.SLAB", 1)
    pack(data, slabs)
    assert all(map(torch.equal, whole.tensors, slabs.tensors))
