"""The tensors of a GGUF file, dequantised while they are copied."""

import math
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.errors import ModelError
from models.weights.block_formats import Kind
from models.weights.checkpoint import Blocks, StoredTensor, copy_parts
from models.weights.formats.blocks import Bytes, chunks, decoder
from models.weights.gguf import GGUFFile, GGUFTensor
from models.weights.staging import Extent

Order = np.ndarray[Any, np.dtype[Any]]
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the description and not to the weights."""


def stored_tensors(
    file: GGUFFile, interleaved: Mapping[str, int] = MappingProxyType({})
) -> list[StoredTensor]:
    """Return all weights of a file, in file order. Raises ModelError for a type that cannot be dequantised.

    `interleaved` has the head size of each tensor whose rows interleave the two halves of every head.
    """
    for kind in {tensor.kind for tensor in file.tensors.values()}:
        _check_kind(kind)
    return [
        _stored(tensor, interleaved.get(name))
        for name, tensor in file.tensors.items()
        if name not in _IN_CONFIG
    ]


def _check_kind(kind: Kind) -> None:
    try:
        one_block = np.zeros((1, kind.block_bytes), dtype=np.uint8)
        for _ in chunks(one_block, kind):
            pass
    except NotImplementedError:
        raise ModelError(
            f"The GGUF file has tensors of type {kind.name}, which cannot be read; "
            "choose a file in F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or a K-quant."
        ) from None


def _stored(tensor: GGUFTensor, head_dim: int | None) -> StoredTensor:
    order = None if head_dim is None else row_order(tensor.shape[0], head_dim)

    def copy_into(out: Tensor) -> None:
        if len(tensor.shape) == 1:
            (_, values), *_ = chunks(tensor.data, tensor.kind)
            out.copy_(values[0] if order is None else values[0][order])
            return
        copy_parts(chunks(tensor.data, tensor.kind, order), out)

    def rows(device: torch.device) -> Tensor:
        return (_view(tensor.data) if order is None else torch.from_numpy(tensor.data[order])).to(device)

    packed, nbytes, decode = tensor.kind.block > 1, tensor.data.nbytes, decoder(tensor.kind)
    extent = None
    if decode is not None:
        places = None if order is None else torch.from_numpy(order)
        count, unit = math.prod(tensor.shape), tensor.kind.block_bytes
        extent = Extent(tensor.path, tensor.offset, nbytes, count, unit, decode, places)
    return StoredTensor(
        tensor.name,
        tensor.shape,
        nbytes,
        copy_into,
        extent,
        lambda: chunks(tensor.data, tensor.kind, order),
        Blocks(tensor.kind, rows, is_mapped=order is None) if packed and len(tensor.shape) == 2 else None,
        cut=None
        if packed and len(tensor.shape) == 1
        # Cuts fall between heads, so the rows of each head keep their order.
        else lambda start, count: _stored(_rows(tensor, start, count), head_dim),
    )


def _rows(tensor: GGUFTensor, start: int, count: int) -> GGUFTensor:
    """Return these rows of a tensor, with all dimensions but the last flattened; for a vector, these numbers."""
    kind, width = tensor.kind, tensor.shape[-1:]
    if len(tensor.shape) == 1:
        size = kind.block_bytes // kind.block
        data, size, width = tensor.data[:, start * size : (start + count) * size], size, ()
    else:
        data, size = tensor.data[start : start + count], tensor.data.shape[1]
    return GGUFTensor(tensor.name, (count, *width), kind, data, tensor.path, tensor.offset + start * size)


def _view(data: Bytes) -> Tensor:
    """Return the same memory as a tensor; torch would warn that it must not be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)


def row_order(rows: int, head_dim: int) -> Order | None:
    """Return the file row for each place, so that the two halves of every head follow each other; None if none fits."""
    if rows % head_dim:
        return None
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()
