"""The plan of loading a model: its tensors, how each is held and where, and how much memory that takes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from models.errors import TooLargeError
from models.families.family import NAMES
from models.families.fields import Fields
from models.families.registry import spec_of_gguf, spec_of_hf
from models.families.rope import replaced_theta
from models.files import ModelFiles, read_json
from models.loading.context import for_context
from models.spec import ModelSpec, ropes
from models.units import bytes_text
from models.weights.block_formats import Kind
from models.weights.checkpoint import StoredTensor, read_safetensors
from models.weights.formats.registry import read_scheme
from models.weights.matching import match
from models.weights.memory import available_bytes
from models.weights.packed_groups import choose_packed, expansion_note
from models.weights.packing import packed_bytes
from models.weights.placement import LayerExperts, expert_layers, fetch_bytes, place_experts
from models.weights.quantize import choose_kinds, conversion_note, plain_note
from models.weights.quantized_checkpoint import join_quantized, without_empty_biases
from models.weights.share import Share
from models.weights.slots import Names, Slot, group_shapes, slots
from models.weights.tensor_mapping import map_tensors
from models.weights.tied import as_stored
from models.weights.too_large import Beside
from models.weights.tp_shard import shard

_CPU = torch.device("cpu")
Room = Callable[[ModelSpec], int | None]
"""Returns how many bytes of a device a network's weights may take; None: all weights have to be on the device."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the weights of a model go, and how they are to be held there."""

    dtype: torch.dtype
    """That of activations and norms, and of weights that are not quantised."""
    device: torch.device
    quantize: str = "auto"
    """One of models.weights.quantize.QUANTIZE: on a CPU, "auto" leaves the blocks of a GGUF file as they are, mapped
    from the file."""
    context_length: int | None = None
    """The number of positions to prepare for; None: the model's own."""
    longest: int | None = None
    """The most tokens of a text, if that is known to be less than the number of positions (see `for_context`)."""
    packs: Callable[[ModelSpec], bool] | None = None
    """Returns whether the executor of such a network reads quantised weights in planes (models.weights.packing) on this
    device: quantised weights then stay quantised, and plain ones are quantised as `quantize` says."""
    room: Room | None = None
    """If a network takes more, the experts of its last layers are held in host memory, in blocks if their file stores
    them in blocks. With None, all weights are on the device."""
    needs: Callable[[ModelSpec], Beside] | None = None
    """Returns what must be free beside the weights; if there is less, nothing is read."""
    rank: tuple[int, int] = (0, 1)
    """(0, 1) for a whole network, or (index, number of parts): other processes load the other parts."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is loaded, how and where: the one place that decides it. Memory checks and loading read it."""

    target: Target
    spec: ModelSpec
    tensors: list[StoredTensor]
    """Those that have a place; none is read yet."""
    places: Mapping[str, Slot]
    """Where each tensor goes, by name."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """The type of each matrix that is held in blocks, by name: all matrices or none, except for the experts of
    `host_layers`."""
    packed: Mapping[str, Kind] = field(default_factory=dict)
    """The types of the matrices that are held in planes for a GPU (see `choose_packed`)."""
    host_layers: frozenset[int] = frozenset()
    """The layers whose experts lie in host memory."""
    share: Share | None = None
    """Which part of a larger network this is."""
    beside: Beside = Beside()  # noqa: RUF009 - it is frozen
    """What else needs memory."""
    notes: tuple[str, ...] = ()
    """Lines for the user on how the weights are held."""

    @property
    def positions(self) -> int:
        """The number of positions that are prepared for; learned ones have no vectors beyond the model's own."""
        asked, own = self.target.context_length or self.spec.max_positions, self.spec.max_positions
        return min(asked, own) if self.spec.learned_positions else asked

    def by_place(self, kinds: Mapping[str, Kind]) -> dict[Slot, Kind]:
        """Return the types of these matrices by place instead of by name."""
        return {self.places[name]: kind for name, kind in kinds.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, wherever they lie, and of the rotary tables."""
        blocks, planes = self.by_place(self.kinds), self.by_place(self.packed)
        return needed_bytes(self.spec, self.target.dtype, self.positions, blocks, planes)

    def experts(self, in_blocks: Mapping[str, Kind]) -> list[LayerExperts]:
        """Return the layers with experts; `in_blocks` has the types in which host memory would hold them, by name."""
        planes, blocks = self.by_place(self.packed), self.by_place(in_blocks)
        return expert_layers(self.places.values(), self.target.dtype, planes, blocks)

    @property
    def on_host(self) -> list[LayerExperts]:
        """The layers whose experts lie in host memory."""
        if not self.host_layers:
            return []
        return [layer for layer in self.experts(self.kinds) if layer.layer in self.host_layers]

    def is_on_host(self, slot: Slot) -> bool:
        """Return whether the slot belongs to an expert in host memory."""
        return slot.expert is not None and slot.layer in self.host_layers


def plan_load(files: ModelFiles, target: Target) -> LoadPlan:
    """Read the headers of local files and plan how the model is loaded. Raises ModelError for faulty files, for what
    cannot be done, and if the experts fit nowhere."""
    spec, tensors, names, notes = read_tensors(files)
    spec, share = for_context(spec, target.longest or spec.max_positions), None
    if target.rank[1] > 1:
        share, tensors = shard(spec, tensors, names, *target.rank)
        spec = share.spec
    plan = plan_tensors(spec, tensors, target, names, share=share)
    in_planes = target.quantize != "none" and target.packs is not None and target.packs(spec)
    choice = plan.tensors, plan.places, target.quantize
    plan = replace(
        plan,
        kinds={} if in_planes else choose_kinds(*choice, target.device),
        packed=choose_packed(*choice) if in_planes else {},
        beside=target.needs(spec) if target.needs is not None else Beside(),
    )
    if target.room is not None and (limit := target.room(spec)) is not None:
        plan = _with_host_experts(plan, limit)
    return replace(plan, notes=tuple(filter(None, (*notes, *_notes(plan, in_planes)))))


def plan_tensors(
    spec: ModelSpec, tensors: Iterable[StoredTensor], target: Target, names: Names = NAMES, **chosen: Any
) -> LoadPlan:
    """Plan a network of these tensors; `chosen` are further fields of the plan. Raises ModelError unless the tensors
    are the network's."""
    tensors = list(tensors)
    places = match(spec, tensors, names)
    return LoadPlan(target, spec, [tensor for tensor in tensors if tensor.name in places], places, **chosen)


def _with_host_experts(plan: LoadPlan, room: int) -> LoadPlan:
    """Move the experts of the last layers to host memory if all weights take more than `room` bytes of the device.

    If the device has memory for all of them, they stay there. Raises TooLargeError if the model fits neither way.
    """
    device = plan.target.device
    experts = [tensor for tensor in plan.tensors if plan.places[tensor.name].expert is not None]
    of_host = choose_kinds(experts, plan.places, plan.target.quantize, _CPU)
    layers, needed = plan.experts(of_host), plan.nbytes
    placement = place_experts(needed, layers, room)
    if placement is not None:
        plan = replace(plan, host_layers=placement.host_layers)
        moved = {name: kind for name, kind in of_host.items() if plan.places[name].layer in plan.host_layers}
        packed = {name: kind for name, kind in plan.packed.items() if not plan.is_on_host(plan.places[name])}
        return replace(plan, kinds={**plan.kinds, **moved}, packed=packed)
    available = available_bytes(device)
    if not layers or available is None or needed <= available:
        return plan
    least = needed - sum(layer.on_device for layer in layers) + fetch_bytes(layers)
    raise TooLargeError(
        f"The model needs {bytes_text(needed)} of memory on {device}, and with its experts in host memory still "
        f"{bytes_text(least)}, but {bytes_text(max(room, 0))} are free there beside a conversation; choose a smaller "
        "model, use --device cpu, or free some memory."
    )


def _notes(plan: LoadPlan, in_planes: bool) -> list[str | None]:
    """Return lines for the user on how the weights are held."""
    tensors, target = plan.tensors, plan.target
    matrices = [tensor for tensor in tensors if plan.places[tensor.name].is_matrix]
    notes = [conversion_note(matrices, plan.kinds), plain_note(matrices, {**plan.kinds, **plan.packed})]
    if in_planes:
        on_device = {name: slot for name, slot in plan.places.items() if not plan.is_on_host(slot)}
        notes.append(expansion_note(tensors, on_device, plan.packed, target.dtype))
    elif target.packs is None and target.quantize == "auto" and target.device.type == "cuda":
        notes.append(expansion_note(tensors, plan.places, None, target.dtype))
    return notes


def read_tensors(files: ModelFiles) -> tuple[ModelSpec, list[StoredTensor], Names, list[str]]:
    """Return the description, the tensors (not read yet), their names, and notes for the user.

    Raises ModelError for faulty files.
    """
    if files.gguf is None:
        folder = files.folder or Path()
        raw = read_json(folder / "config.json")
        (family, spec), scheme = spec_of_hf(raw), read_scheme(raw)
        extra = Fields(raw, "config.json").integer("num_nextn_predict_layers", 0, least=0, limit=1024)
        tensors = map_tensors(
            spec,
            join_quantized(_of_network(read_safetensors(folder), spec, family.names, extra), scheme),
            family.names,
            packed=family.packed,
            rename=family.rename,
            turned=family.turned,
            alternating=family.alternating,
            changes=family.changes,
        )
        stored = without_empty_biases(spec, tensors, family.names)
        spec, stored, note = as_stored(spec, stored, family.names)
        notes = [scheme.note if scheme is not None else None, replaced_theta(raw, spec), note]
        return spec, stored, family.names, [note for note in notes if note is not None]
    from models.weights.gguf import read_gguf
    from models.weights.gguf_tensors import stored_tensors

    file = read_gguf(files.gguf)
    family, spec = spec_of_gguf(file)
    parts, found = family.gguf_interleaved, slots(spec)
    interleaved = {
        slot.name(family.gguf_names): spec.attention.head_dim for slot in found if slot.part in parts
    }
    extra = Fields(file.metadata, "the GGUF file").integer(
        f"{family.gguf_architecture}.nextn_predict_layers", 0, least=0, limit=1024
    )
    tensors = map_tensors(
        spec,
        _of_network(stored_tensors(file, interleaved), spec, family.gguf_names, extra),
        family.gguf_names,
        packed=family.gguf_packed,
        alternating=family.gguf_alternating,
        changes=family.gguf_changes,
    )
    return spec, list(tensors), family.gguf_names, []


def _of_network(
    tensors: Iterable[StoredTensor], spec: ModelSpec, names: Names, extra: int
) -> list[StoredTensor]:
    """Return the tensors without those of the `extra` layers after the last, which predict further tokens."""
    last = len(spec.layers)
    beyond = tuple(names["layers"].format(last + number) for number in range(extra))
    return [tensor for tensor in tensors if not tensor.name.startswith(beyond)]


def needed_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    positions: int,
    kinds: Mapping[Slot, Kind] | None = None,
    packed: Mapping[Slot, Kind] | None = None,
) -> int:
    """Return the bytes of all weights, in blocks (mapped from a file or not) or in planes, and of the rotary tables."""
    found, kinds, packed = list(slots(spec)), kinds or {}, packed or {}
    exact = {slot.group for slot in found if slot.exact}
    plain = group_shapes([slot for slot in found if slot not in kinds and slot not in packed])
    numbers = [(prod(shape), group in exact) for group, shape in plain.items()]
    numbers += [(positions * width, rope.exact) for rope, width in ropes(spec)]
    blocks = sum(slot.shape[0] * kind.row_bytes(slot.shape[1]) for slot, kind in kinds.items())
    blocks += sum(packed_bytes(kind, *slot.shape) for slot, kind in packed.items())
    return sum(count * (4 if in_fp32 else dtype.itemsize) for count, in_fp32 in numbers) + blocks
