"""The tensors of a checkpoint as one rank of several needs them: some rows or columns of each, nothing read yet."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from models.spec import ModelSpec
from models.weights.checkpoint import Blocks, StoredTensor
from models.weights.matching import match
from models.weights.share import UNIT, Part, Share
from models.weights.slots import Names, Slot


def shared_out(
    spec: ModelSpec, tensors: Iterable[StoredTensor], names: Names, rank: int, ranks: int
) -> tuple[Share, list[StoredTensor]]:
    """What rank `rank` of `ranks` has of the network `spec`, and its tensors. Raises ModelError."""
    tensors = list(tensors)
    places = match(spec, tensors, names)
    share = Share(rank, ranks, spec, _block(tensors))
    return share, [_of_share(t, places[t.name], share) for t in tensors if t.name in places]


def _block(tensors: Iterable[StoredTensor]) -> int:
    """The multiple at which a feed-forward is cut, so that no block of a quantised matrix is."""
    blocks = (tensor.blocks or tensor.on_device for tensor in tensors)
    return max((held.kind.block for held in blocks if held is not None), default=UNIT)


def _of_share(tensor: StoredTensor, slot: Slot, share: Share) -> StoredTensor:
    part = slot.part.rsplit(".", 1)[-1]
    if part in ("embedding", "head"):
        return _rows(tensor, share.vocab)
    if part in ("gate", "up"):
        return _rows(tensor, share.width(slot.rows))
    if part in ("out", "down") and slot.field == "bias":
        return tensor if share.is_first else _rows(tensor, Part(0, 0, slot.rows))
    if part == "down":
        return _columns(tensor, share.width(slot.shape[1]))
    if slot.layer is None or part not in ("q", "k", "v", "q_norm", "k_norm", "out", "sinks") or slot.repeated:
        return tensor
    spec = share.whole.layers[slot.layer].attention
    heads = share.kv_heads(spec) if part in ("k", "v", "k_norm") else share.q_heads(spec)
    if part == "sinks":
        return _rows(tensor, heads)
    part_of = heads.times(spec.head_dim)
    return _columns(tensor, part_of) if part == "out" else _rows(tensor, part_of)


def _rows(tensor: StoredTensor, part: Part) -> StoredTensor:
    """Some rows of a matrix, or numbers of a vector."""
    if part.count == part.size == tensor.shape[0]:
        return tensor
    if tensor.cut is not None and part.count == part.size:
        return replace(tensor.cut(part.start, part.count), name=tensor.name)
    shape = (part.size, *tensor.shape[1:])

    def fill(out: Tensor) -> None:
        near = torch.empty(tensor.shape)
        tensor.copy_into(near)
        out[part.count :] = 0
        out[: part.count] = near[part.start : part.stop]

    def parts() -> Iterator[tuple[int, Tensor]]:
        for start, rows in _in_parts(tensor):
            found = rows[max(part.start - start, 0) : max(part.stop - start, 0)]
            if len(found):
                yield max(start - part.start, 0), found
        if part.count < part.size:
            yield part.count, torch.zeros(part.size - part.count, shape[-1])

    def blocks() -> Tensor:
        assert tensor.blocks is not None
        stored = tensor.blocks.rows()
        wide = stored.new_zeros(part.size, stored.shape[1])
        wide[: part.count] = stored[part.start : part.stop]
        return wide

    return _made(tensor, shape, fill, parts, blocks if tensor.blocks is not None else None)


def _columns(tensor: StoredTensor, part: Part) -> StoredTensor:
    """Some columns of a matrix."""
    if part.count == part.size == tensor.shape[1]:
        return tensor
    shape, kind = (tensor.shape[0], part.size), tensor.blocks.kind if tensor.blocks is not None else None

    def parts() -> Iterator[tuple[int, Tensor]]:
        for start, rows in _in_parts(tensor):
            wide = rows.new_zeros(len(rows), part.size)
            wide[:, : part.count] = rows[:, part.start : part.stop]
            yield start, wide

    def fill(out: Tensor) -> None:
        near = out if out.device.type == "cpu" else torch.empty(shape, dtype=out.dtype)
        for start, rows in parts():
            near[start : start + len(rows)] = rows
        if near is not out:
            out.copy_(near)

    def blocks() -> Tensor:
        assert tensor.blocks is not None
        assert kind is not None
        stored = tensor.blocks.rows()
        first, last, width = (
            at // kind.block * kind.block_bytes for at in (part.start, part.stop, part.size)
        )
        wide = stored.new_zeros(len(stored), width)
        wide[:, : last - first] = stored[:, first:last]
        return wide

    keeps = kind is not None and not any(at % kind.block for at in (part.start, part.stop, part.size))
    return _made(tensor, shape, fill, parts, blocks if keeps else None)


def _in_parts(tensor: StoredTensor) -> Iterator[tuple[int, Tensor]]:
    """The numbers of a tensor, from first to last row: some at a time where it can be read so."""
    if tensor.parts is not None and len(tensor.shape) == 2:
        yield from tensor.parts()
    else:
        whole = torch.empty(tensor.shape)
        tensor.copy_into(whole)
        yield 0, whole


def _made(
    tensor: StoredTensor,
    shape: tuple[int, ...],
    fill: Callable[[Tensor], None],
    parts: Callable[[], Iterator[tuple[int, Tensor]]],
    blocks: Callable[[], Tensor] | None,
) -> StoredTensor:
    return replace(
        tensor,
        shape=shape,
        nbytes=tensor.nbytes * prod(shape) // prod(tensor.shape),
        copy_into=fill,
        extent=None,
        parts=parts if len(shape) == 2 else None,
        blocks=Blocks(tensor.blocks.kind, blocks)
        if tensor.blocks is not None and blocks is not None
        else None,
        on_device=None,
        cut=None,
    )
