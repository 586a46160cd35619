"""The tensors of a checkpoint in the layout of the network: under its names, and cut where one holds several."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from torch import Tensor

from models.recurrences import DeltaNet
from models.spec import Attention, LatentAttention, ModelSpec
from models.weights.checkpoint import Blocks, StoredTensor
from models.weights.slots import Names, Packed, Slot, slots

Changes = Mapping[str, Callable[[Tensor], Tensor]]
"""For parts that are stored otherwise than the network has them: stored numbers, fp32 -> those of the network, in the
same shape."""


def map_tensors(
    spec: ModelSpec,
    tensors: Iterable[StoredTensor],
    names: Names,
    *,
    packed: Packed,
    rename: Callable[[str], str | None] = str,
    turned: tuple[str, ...] = (),
    alternating: tuple[str, ...] = (),
    changes: Changes,
) -> Iterator[StoredTensor]:
    """Yield the stored tensors, one for each slot of `spec` where possible; nothing is read.

    `rename` returns the name to use, or None for a tensor that does not belong to this network. Names may lack the
    prefix of the embedding's ("model"), as those of a checkpoint saved without its head do. The weights of the
    parts `turned` are stored [columns, rows], unless they are in blocks. The tensors `alternating`, named as in
    `packed`, hold some rows of each of their parts, then some more of each, and so on: those of a head, or one row of
    an expert. `changes` is made to what is stored.
    """
    inside: dict[str, list[Slot]] = {}
    mixed: set[str] = set()
    for slot in slots(spec):
        # A set, because a packed tensor may have the name of one of its parts (ffn_up of Phi-3).
        for name in {slot.name(names), *_packed_names(slot, names, packed)}:
            inside.setdefault(name, []).append(slot)
        mixed.update(_packed_names(slot, names, {name: packed[name] for name in alternating}))
    base = names["embedding"].rpartition(".")[0]
    for stored in tensors:
        renamed = rename(stored.name)
        if renamed is None:
            continue
        if f"{base}.{renamed}" in inside:
            renamed = f"{base}.{renamed}"
        tensor, found = replace(stored, name=renamed), inside.get(renamed, [])
        is_matrix = bool(found) and len(found[0].shape) == len(tensor.shape) == 2
        if is_matrix and found[0].part in turned:
            tensor = _turned(tensor)
        if found and (change := changes.get(found[0].part)) is not None:
            tensor = _picked(tensor, tensor.shape, change)
        one_of_many = bool(found) and found[-1].expert is not None
        if one_of_many and (len(found) > 1 or len(tensor.shape) > len(found[-1].shape)):
            yield from _experts(tensor, found, names, turned, renamed in mixed)
        elif [slot.part for slot in found] == ["k_b", "v_b"]:
            yield from _by_head(tensor, found, names, spec)
        elif renamed in mixed:
            yield from _cut(tensor, found, names, _groups(spec, found[0]))
        else:
            yield from _cut(tensor, found, names)


def _packed_names(slot: Slot, names: Names, packed: Packed) -> Iterator[str]:
    at = "" if slot.layer is None else names["layers"].format(slot.layer)
    for name, parts in packed.items():
        if slot.part in parts and ("{field}" in name or slot.field == "weight"):
            yield at + name.format(field=slot.field)


def _groups(spec: ModelSpec, slot: Slot) -> int:
    """Return into how many groups of rows a tensor is divided that holds some rows of `slot` and others in each."""
    mixer = spec.layers[slot.layer or 0].mixer
    assert isinstance(mixer, Attention | DeltaNet)
    return mixer.heads if isinstance(mixer, Attention) else mixer.key_heads


def _cut(tensor: StoredTensor, found: list[Slot], names: Names, groups: int = 1) -> Iterator[StoredTensor]:
    """Yield the slots of a tensor, or the tensor itself if it is a single slot or does not have the expected shape.

    Each of the `groups` has an equal share of the rows of every slot.
    """
    shape = tensor.shape
    fits = prod(shape) == sum(prod(slot.shape) for slot in found)
    if fits and len(found) == 1 and len(found[0].shape) != len(shape):
        if tensor.cut and len(shape) > 2 and shape[-1:] == found[0].shape[-1:]:
            yield replace(tensor.cut(0, found[0].rows), name=tensor.name)
        else:
            yield _shaped(tensor, found[0].shape)
    elif fits and len(found) > 1 and tensor.cut and (len(shape) == 1 or shape[-1:] == found[0].shape[-1:]):
        start = 0
        for slot in found:
            rows = slot.rows // groups
            part = tensor.cut(start, rows) if groups == 1 else _from_groups(tensor, groups, start, rows)
            yield replace(part, name=slot.name(names))
            start += rows
    else:
        yield tensor


def _by_head(
    tensor: StoredTensor, found: list[Slot], names: Names, spec: ModelSpec
) -> Iterator[StoredTensor]:
    """Yield the slots of a tensor that has, head by head, rows that make keys of a latent, and rows that make values;
    the former are transposed. Yield the tensor itself if it does not have the expected shape."""
    keys, values = found
    mixer = spec.layers[keys.layer or 0].mixer
    assert isinstance(mixer, LatentAttention)
    if tensor.shape != (mixer.heads * mixer.expanded_dim, mixer.kv_rank):
        yield tensor
        return

    def pick(stored: Tensor) -> Tensor:
        return stored.view(mixer.heads, -1, mixer.kv_rank)[:, : mixer.nope_dim].mT.flatten(0, 1)

    yield replace(_picked(tensor, keys.shape, pick), name=keys.name(names))
    of_values = _from_groups(tensor, mixer.heads, mixer.nope_dim, mixer.v_dim)
    yield replace(of_values, name=values.name(names))


def _experts(
    tensor: StoredTensor, found: list[Slot], names: Names, turned: tuple[str, ...], alternating: bool
) -> Iterator[StoredTensor]:
    """Yield the slots of a tensor [experts, ...], or the tensor itself if it does not have the expected shape."""
    last, shape = found[-1], list(tensor.shape[1:])
    assert last.expert is not None
    experts = last.expert + 1
    count = len(found) // experts
    is_turned = last.part in turned and len(shape) == 2 and tensor.blocks is None
    wanted = [sum(slot.rows for slot in found[:count]), *last.shape[1:]]
    if (
        tensor.cut is None
        or tensor.shape[:1] != (experts,)
        or shape != (wanted[::-1] if is_turned else wanted)
    ):
        yield tensor
        return
    rows = prod(shape[:-1])
    for expert in range(experts):
        own = tensor.cut(expert * rows, rows)
        if len(shape) == 1:
            own = _shaped(own, own.shape[1:])
        elif is_turned:
            own = _turned(own)
        slots, start = found[expert * count : (expert + 1) * count], 0
        for index, slot in enumerate(slots):
            if count == 1:
                part = own
            elif alternating:
                part = _from_groups(own, slot.rows, index, 1)
            else:
                assert own.cut is not None
                part = own.cut(start, slot.rows)
            yield replace(part, name=slot.name(names))
            start += slot.rows


def _shaped(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """View the same numbers in another shape: a matrix of one row as a vector, or a vector as such a matrix."""
    return replace(
        tensor, shape=shape, copy_into=lambda out: tensor.copy_into(out.view(tensor.shape)), cut=None
    )


def _turned(tensor: StoredTensor) -> StoredTensor:
    """Transpose a matrix."""
    columns, rows = tensor.shape

    def cut(start: int, count: int) -> StoredTensor:
        part = _picked(tensor, (count, columns), lambda stored: stored.T[start : start + count])
        return replace(part, cut=lambda first, some: cut(start + first, some))

    return cut(0, rows)


def _from_groups(tensor: StoredTensor, groups: int, start: int, count: int) -> StoredTensor:
    """Divide the rows of a matrix or the numbers of a vector into groups, and take `count` from `start` on of each."""

    def pick(stored: Tensor) -> Tensor:
        by_group = stored.reshape(groups, -1, *stored.shape[1:])
        return by_group[:, start : start + count].flatten(0, 1)

    part = _picked(tensor, (groups * count, *tensor.shape[1:]), pick)
    if (blocks := tensor.blocks) is None:
        return part
    return replace(part, blocks=Blocks(blocks.kind, lambda device: pick(blocks.rows(device)).contiguous()))


def _picked(tensor: StoredTensor, shape: tuple[int, ...], pick: Callable[[Tensor], Tensor]) -> StoredTensor:
    """Return a tensor of this shape with the numbers that `pick` makes of those of `tensor`."""

    def copy_into(out: Tensor) -> None:
        out.copy_(pick(tensor.numbers()))

    return tensor.part(shape, copy_into, lambda: iter([(0, pick(tensor.numbers()))]))
