"""MXFP4 in safetensors files: join a tensor of digits and a tensor of scales into blocks, as in GGUF files."""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from models.errors import ModelError
from models.weights.block_formats import Kind
from models.weights.checkpoint import Blocks, StoredTensor
from models.weights.formats.blocks import chunks

_BLOCK = Kind.MXFP4.block


def join_mxfp4(name: str, digits: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """Join digits [..., groups, 16] and scales [..., groups] into a tensor of blocks. Raises ModelError."""
    if digits.shape != (*scales.shape, _BLOCK // 2) or not scales.shape:
        raise ModelError(
            f"{scales.name} has the shape {list(scales.shape)}, but {digits.name} requires "
            f"{list(digits.shape[:-1])}; the checkpoint is inconsistent: download it again."
        )
    if scales.type != digits.type:
        raise ModelError(
            f"{scales.name} is of type {scales.type}, but must be of type {digits.type}; the checkpoint is damaged: "
            "download it again."
        )
    *rows, groups = scales.shape
    return _joined(name, (*rows, groups * _BLOCK), digits, scales)


def _joined(name: str, shape: tuple[int, ...], digits: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """Join digits and scales into a tensor of this shape."""
    groups = shape[-1] // _BLOCK
    count = prod(shape[:-1])

    def rows() -> Tensor:
        packed, exponents = (torch.empty(part.shape, dtype=torch.uint8) for part in (digits, scales))
        digits.copy_into(packed)
        scales.copy_into(exponents)
        blocks = torch.cat((exponents.view(-1, 1), _reordered(packed.view(-1, _BLOCK // 2))), dim=-1)
        return blocks.view(count, -1)

    def parts() -> Iterator[tuple[int, Tensor]]:
        return chunks(rows().numpy(), Kind.MXFP4)

    def copy_into(out: Tensor) -> None:
        near = torch.empty(count, shape[-1], dtype=out.dtype)
        for start, numbers in parts():
            near[start : start + len(numbers)] = numbers
        out.copy_(near.view(shape))

    def cut(start: int, some: int) -> StoredTensor:
        assert digits.cut is not None
        assert scales.cut is not None
        own = digits.cut(start * groups, some * groups), scales.cut(start, some)
        return _joined(name, (some, shape[-1]), *own)

    nbytes = digits.nbytes + scales.nbytes
    return StoredTensor(name, shape, nbytes, copy_into, None, parts, Blocks(Kind.MXFP4, rows), cut=cut)


def _reordered(packed: Tensor) -> Tensor:
    """Reorder uint8 [blocks, 16]: bytes with numbers 2 j and 2 j + 1 become bytes with j and j + 16, low half first."""
    digits = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    first, second = digits.chunk(2, dim=-1)
    return first | second << 4
