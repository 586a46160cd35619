"""Cut the tensors of a checkpoint for one rank of several: some rows or columns of each, without reading them yet."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from models.spec import ModelSpec
from models.weights.block_formats import Kind
from models.weights.checkpoint import Blocks, DeviceBlocks, StoredTensor
from models.weights.matching import match
from models.weights.share import UNIT, Share, SharePart
from models.weights.slots import Names, Slot


def shard(
    spec: ModelSpec, tensors: Iterable[StoredTensor], names: Names, rank: int, ranks: int
) -> tuple[Share, list[StoredTensor]]:
    """Return the share of rank `rank` of `ranks` in the network `spec`, and its tensors.

    Raises ModelError unless the tensors are exactly the network's.
    """
    tensors = list(tensors)
    places = match(spec, tensors, names)
    share = Share(rank, ranks, spec, _block(tensors))
    return share, [_of_share(t, places[t.name], share) for t in tensors if t.name in places]


def _block(tensors: Iterable[StoredTensor]) -> int:
    """Return the multiple at which to cut a feed-forward, so that no block of a quantised matrix is split."""
    blocks = (held for tensor in tensors for held in (tensor.blocks, tensor.on_device) if held is not None)
    return max((held.kind.block for held in blocks), default=UNIT)


def _of_share(tensor: StoredTensor, slot: Slot, share: Share) -> StoredTensor:
    part = slot.part.rsplit(".", 1)[-1]
    if part in ("embedding", "head"):
        return _rows(tensor, share.vocab)
    if part in ("gate", "up"):
        return _rows(tensor, share.width(slot.rows))
    if part in ("out", "down") and slot.field == "bias":
        return tensor if share.is_first else _rows(tensor, SharePart(0, 0, slot.rows))
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


def _rows(tensor: StoredTensor, part: SharePart) -> StoredTensor:
    """Return some rows of a matrix, or some numbers of a vector."""
    if part.count == part.size == tensor.shape[0]:
        return tensor
    if tensor.cut is not None and part.count == part.size:
        return replace(tensor.cut(part.start, part.count), name=tensor.name)
    shape = (part.size, *tensor.shape[1:])

    def fill(out: Tensor) -> None:
        out[part.count :] = 0
        if tensor.cut is not None and part.count:
            tensor.cut(part.start, part.count).copy_into(out[: part.count])
        elif part.count:
            near = torch.empty(tensor.shape)
            tensor.copy_into(near)
            out[: part.count] = near[part.start : part.stop]

    def parts() -> Iterator[tuple[int, Tensor]]:
        for start, rows in _in_parts(tensor):
            found = rows[max(part.start - start, 0) : max(part.stop - start, 0)]
            if len(found):
                yield max(start - part.start, 0), found
        if part.count < part.size:
            yield part.count, torch.zeros(part.size - part.count, shape[-1])

    def blocks(kind: Kind, stored: Tensor) -> Tensor:
        wide = stored.new_zeros(part.size, stored.shape[1])
        wide[: part.count] = stored[part.start : part.stop]
        return wide

    return _made(tensor, shape, fill, parts, blocks, lambda kind, order: True)


def _columns(tensor: StoredTensor, part: SharePart) -> StoredTensor:
    """Return some columns of a matrix."""
    if part.count == part.size == tensor.shape[1]:
        return tensor
    shape = tensor.shape[0], part.size

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

    def blocks(kind: Kind, stored: Tensor) -> Tensor:
        first, last, width = (
            at // kind.block * kind.block_bytes for at in (part.start, part.stop, part.size)
        )
        wide = stored.new_zeros(len(stored), width)
        wide[:, : last - first] = stored[:, first:last]
        return wide

    def keeps(kind: Kind, order: Tensor | None) -> bool:
        """Return whether the cut splits no block and the columns are in their original order."""
        return order is None and not any(at % kind.block for at in (part.start, part.stop, part.size))

    return _made(tensor, shape, fill, parts, blocks, keeps)


def _in_parts(tensor: StoredTensor) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor's rows in order, with the first row's index: in parts if it can be read in parts, else at once."""
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
    cut: Callable[[Kind, Tensor], Tensor],
    keeps: Callable[[Kind, Tensor | None], bool],
) -> StoredTensor:
    """Return `tensor` cut to `shape`.

    `cut` takes the part's blocks, uint8 [rows, bytes a row], from those of the whole; `keeps` says whether it can.
    """
    blocks, on_device = tensor.blocks, tensor.on_device
    if blocks is not None:
        kept = Blocks(blocks.kind, partial(_cut_blocks, blocks, cut))
        blocks = kept if keeps(blocks.kind, None) else None
    if on_device is not None:
        made = DeviceBlocks(on_device.kind, partial(_cut_on, on_device, cut), on_device.order)
        on_device = made if keeps(on_device.kind, on_device.order) else None
    return replace(
        tensor,
        shape=shape,
        nbytes=tensor.nbytes * prod(shape) // prod(tensor.shape),
        copy_into=fill,
        extent=None,
        parts=parts if len(shape) == 2 else None,
        blocks=blocks,
        on_device=on_device,
        cut=None,
    )


def _cut_blocks(held: Blocks, cut: Callable[[Kind, Tensor], Tensor]) -> Tensor:
    return cut(held.kind, held.rows())


def _cut_on(held: DeviceBlocks, cut: Callable[[Kind, Tensor], Tensor], device: torch.device) -> Tensor:
    return cut(held.kind, held.rows(device))
