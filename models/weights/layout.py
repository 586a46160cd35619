"""The tensors of a checkpoint as the network wants them: under its names, and cut where one holds several of them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from models.spec import ModelSpec
from models.weights.checkpoint import StoredTensor
from models.weights.slots import Names, Packed, Slot, slots


def laid_out(
    spec: ModelSpec,
    tensors: Iterable[StoredTensor],
    names: Names,
    *,
    packed: Packed,
    rename: Callable[[str], str | None] = str,
    turned: tuple[str, ...] = (),
    norm_offset: float = 0.0,
) -> Iterator[StoredTensor]:
    """What is stored, a tensor for each slot of `spec` as far as it can be told; nothing is read.

    `rename` gives the name to go by, None for what is not of this network. The weights of the parts `turned` are
    stored [columns, rows]; `norm_offset` was added to the weights of all norms.
    """
    inside: dict[str, list[Slot]] = {}
    for slot in slots(spec):
        # A set: what is packed may go by the name of one of its parts (ffn_up of Phi-3).
        for name in {slot.name(names), *_packed_names(slot, names, packed)}:
            inside.setdefault(name, []).append(slot)
    for stored in tensors:
        renamed = rename(stored.name)
        if renamed is None:
            continue
        tensor, found = replace(stored, name=renamed), inside.get(renamed, [])
        is_matrix = bool(found) and len(found[0].shape) == len(tensor.shape) == 2
        if is_matrix and found[0].part in turned:
            tensor = _turned(tensor)
        if norm_offset and found and found[0].part.endswith("norm"):
            tensor = _without(norm_offset, tensor)
        yield from _cut(tensor, found, names)


def _packed_names(slot: Slot, names: Names, packed: Packed) -> Iterator[str]:
    at = "" if slot.layer is None else names["layers"].format(slot.layer)
    for name, parts in packed.items():
        if slot.part in parts and ("{field}" in name or slot.field == "weight"):
            yield at + name.format(field=slot.field)


def _cut(tensor: StoredTensor, found: list[Slot], names: Names) -> Iterator[StoredTensor]:
    """The slots in a tensor, or the tensor itself where it is one, or is not what it should be."""
    shape = tensor.shape
    fits = prod(shape) == sum(prod(slot.shape) for slot in found)
    if found and found[-1].expert is not None and len(found) > 1:
        fits = fits and shape[0] == found[-1].expert + 1
    if fits and len(found) == 1 and len(found[0].shape) < len(shape):
        yield replace(tensor, shape=found[0].shape, copy_into=lambda out: tensor.copy_into(out.view(shape)))
    elif fits and len(found) > 1 and tensor.cut and (len(shape) == 1 or shape[-1:] == found[0].shape[-1:]):
        start = 0
        for slot in found:
            yield replace(tensor.cut(start, slot.rows), name=slot.name(names))
            start += slot.rows
    else:
        yield tensor


def _turned(tensor: StoredTensor) -> StoredTensor:
    """The transpose of a matrix."""
    columns, rows = tensor.shape

    def cut(start: int, count: int) -> StoredTensor:
        def numbers() -> Tensor:
            stored = torch.empty(tensor.shape)
            tensor.copy_into(stored)
            return stored.T[start : start + count]

        return replace(
            tensor,
            shape=(count, columns),
            nbytes=tensor.nbytes * count // rows,
            copy_into=lambda out: _copy(numbers(), out),
            extent=None,
            parts=lambda: iter([(0, numbers())]),
            cut=cut,
        )

    return cut(0, rows)


def _without(offset: float, tensor: StoredTensor) -> StoredTensor:
    def copy_into(out: Tensor) -> None:
        stored = torch.empty(tensor.shape)
        tensor.copy_into(stored)
        _copy(stored - offset, out)

    return replace(tensor, copy_into=copy_into, extent=None)


def _copy(numbers: Tensor, out: Tensor) -> None:
    out.copy_(numbers)
