"""Cut the tensors of a checkpoint for one rank of several: some rows or columns of each, without reading them yet."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.errors import ModelError
from models.features import Feature, features
from models.recurrences import Recurrence
from models.spec import ModelSpec
from models.weights.checkpoint import Blocks, StoredTensor, copy_parts
from models.weights.matching import match
from models.weights.recurrent_share import recurrent_parts
from models.weights.share import UNIT, Share, SharePart
from models.weights.slots import OF_VOCABULARY, Names, Slot

_UNDIVIDED = frozenset(
    {
        Feature.CONVOLUTION,
        Feature.LATENT,
        Feature.SPARSE_GATE,
        Feature.STREAMS,
    }
)


def shard(
    spec: ModelSpec, tensors: Iterable[StoredTensor], names: Names, rank: int, ranks: int
) -> tuple[Share, list[StoredTensor]]:
    """Return the share of rank `rank` of `ranks` in the network `spec`, and its tensors.

    Raises ModelError unless the tensors are exactly the network's, and for what is not divided.
    """
    if undivided := sorted(feature.value for feature in features(spec) & _UNDIVIDED):
        raise ModelError(
            f"A model with {undivided[0]} cannot be divided among devices; leave out --tensor-parallel."
        )
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
    if part in OF_VOCABULARY:
        return _part(tensor, [share.vocab], 0)
    if part in ("gate", "up"):
        return _part(tensor, [share.width(slot.rows)], 0)
    if slot.split == "columns" or part == "latent_out":
        if slot.field == "bias":
            return tensor if share.is_first else _part(tensor, [SharePart(0, 0, slot.rows)], 0)
        if part == "down":
            return _part(tensor, [share.width(slot.shape[1])], 1)
    if slot.layer is None or slot.repeated:
        return tensor
    spec = share.whole.layers[slot.layer].mixer
    if isinstance(spec, Recurrence):
        parts = recurrent_parts(share, spec, part)
        return tensor if parts is None else _part(tensor, parts, int(slot.split == "columns"))
    if part not in ("q", "k", "v", "q_norm", "k_norm", "attention_gate", "out", "sinks"):
        return tensor
    attention = share.whole.layers[slot.layer].attention
    heads = share.kv_heads(attention) if part in ("k", "v", "k_norm") else share.q_heads(attention)
    if part != "sinks" and (part, attention.gate) != ("attention_gate", "heads"):
        heads = heads.times(attention.head_dim)
    return _part(tensor, [heads], int(slot.split == "columns"))


def _part(tensor: StoredTensor, part: Sequence[SharePart], axis: int) -> StoredTensor:
    """Return some rows (axis 0) or columns (axis 1) of a matrix, or some numbers of a vector (axis 0)."""
    first, size = part[0], sum(each.size for each in part)
    is_full = len(part) == 1 and first.count == size
    if is_full and size == tensor.shape[axis]:
        return tensor
    cut = tensor.cut if axis == 0 else None
    if cut is not None and is_full:
        return replace(cut(first.start, size), name=tensor.name)
    shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])

    def copy_into(out: Tensor) -> None:
        if cut is not None:  # reads no other rows
            for each, rows in zip(part, torch.split(out, [each.size for each in part]), strict=True):
                rows[each.count :] = 0
                if each.count:
                    cut(each.start, each.count).copy_into(rows[: each.count])
        elif len(shape) == 1:
            out.copy_(_taken(tensor.numbers(), part, 0))
        else:
            copy_parts(parts(), out)

    def parts() -> Iterator[tuple[int, Tensor]]:
        if axis == 1:
            yield from ((start, _taken(rows, part, 1)) for start, rows in _in_parts(tensor))
            return
        at = 0
        for each in part:
            for start, rows in _in_parts(tensor):
                if len(found := rows[max(each.start - start, 0) : max(each.stop - start, 0)]):
                    yield at + max(start - each.start, 0), found
            if each.count < each.size:
                yield at + each.count, torch.zeros(each.size - each.count, *shape[1:])
            at += each.size

    blocks, on_device = (_part_of_blocks(held, part, axis) for held in (tensor.blocks, tensor.on_device))
    return tensor.part(shape, copy_into, parts, blocks, on_device)


def _part_of_blocks(held: Blocks | None, part: Sequence[SharePart], axis: int) -> Blocks | None:
    """Return the part's blocks, or None if that would split a block, or take columns that are not in order."""
    if held is None:
        return None
    if axis == 0:
        return Blocks(held.kind, lambda device: _taken(held.rows(device), part, 0), order=held.order)
    size, nbytes = held.kind.block, held.kind.block_bytes
    places = [at for each in part for at in (each.start, each.stop, each.size)]
    if held.order is not None or any(at % size for at in places):
        return None
    own = [SharePart(*(at // size * nbytes for at in (each.start, each.stop, each.size))) for each in part]
    return Blocks(held.kind, lambda device: _taken(held.rows(device), own, 1))


def _taken(stored: Tensor, part: Sequence[SharePart], axis: int) -> Tensor:
    """Return some rows or columns, padded with zeros."""
    shape = list(stored.shape)
    shape[axis] = sum(each.size for each in part)
    wide = stored.new_zeros(shape)
    for each, run in zip(part, torch.split(wide, [each.size for each in part], axis), strict=True):
        run.narrow(axis, 0, each.count).copy_(stored.narrow(axis, each.start, each.count))
    return wide


def _in_parts(tensor: StoredTensor) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor's rows in order, with the first row's index: in parts if it can be read in parts, else at once."""
    if tensor.parts is not None and len(tensor.shape) == 2:
        yield from tensor.parts()
    else:
        yield 0, tensor.numbers()
