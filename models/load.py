"""Load a network from local files: check every tensor, take the memory, then fill it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from traceback import clear_frames

import torch
from torch import Tensor

from models.assemble import TensorStore, assemble
from models.errors import TooLargeError
from models.families.family import NAMES
from models.families.registry import spec_of_gguf, spec_of_hf
from models.families.rope import replaced_theta
from models.files import ModelFiles, read_json
from models.network import Network, Weight
from models.progress import OnProgress, Progress
from models.spec import ModelSpec, for_context, ropes
from models.units import bytes_text
from models.weights.block_formats import Kind
from models.weights.checkpoint import StoredTensor, read_safetensors
from models.weights.formats.registry import read_scheme
from models.weights.matching import match
from models.weights.memory import available_bytes
from models.weights.packed_groups import (
    PackedPart,
    choose_packed,
    expanded_note,
    expansion_note,
    packed_weights,
)
from models.weights.packing import packed_bytes
from models.weights.placement import Placement, expert_layers, fetch_bytes, place_experts
from models.weights.quantize import choose_kinds, conversion_note, is_file, packed_rows, plain_note
from models.weights.quantized import row_bytes
from models.weights.quantized_checkpoint import join_quantized, without_empty_biases
from models.weights.share import Share
from models.weights.slots import Names, Slot, group_shapes, slots
from models.weights.staging import Extent, Staging
from models.weights.tensor_mapping import map_tensors
from models.weights.tied import as_stored
from models.weights.too_large import Beside, too_large, too_large_for_host
from models.weights.tp_shard import shard

HOST_SHARE = 0.9
"""The share of free host memory that experts may take: it is pinned, and the system cannot take it back."""
_CPU = torch.device("cpu")
Room = Callable[[ModelSpec], int | None]
"""Returns how many bytes of a device a network's weights may take; None: all weights have to be on the device."""
Needs = Callable[[ModelSpec], Beside]
"""Returns the memory that a network needs on a device beside its weights."""
_PAGE = 1 << 16
"""At least the size of a memory page on any machine."""


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress | None = None,
    context_length: int | None = None,
    quantize: str = "auto",
    on_note: Callable[[str], None] | None = None,
    longest: int | None = None,
    room: Room | None = None,
    needs: Needs | None = None,
    packs: Callable[[ModelSpec], bool] | None = None,
    rank: tuple[int, int] = (0, 1),
) -> Network:
    """Load the network of local files in `dtype` on `device`.

    `context_length` is the number of positions to prepare for; None means the model's own. `quantize` is one of
    models.weights.quantize.QUANTIZE: on a CPU, "auto" leaves the blocks of a GGUF file as they are, mapped from the
    file; `dtype` is then that of the activations and norms. On a CPU, loading takes at most the memory of the model
    and of one tensor; to a GPU, the weights stream through buffers of 100 MB. `on_note` receives what the user should
    know about how the weights are held, one line each. `longest` is the maximum number of tokens of a text, if that is
    known to be less than the number of positions (see `for_context`). `room` returns how many bytes of the device the
    weights may take: if a network takes more, the experts of its last layers are held in host memory, in blocks if
    their file stores them in blocks. With None, all weights are on the device. `needs` returns what must be free beside
    the weights; if there is less, nothing is read. `packs` returns whether the executor of
    such a network on this device reads quantised weights in planes (models.weights.packing): quantised weights then
    stay quantised, and plain ones are quantised as `quantize` says. `rank` is (0, 1) for a whole network, or (index,
    number of parts): other processes load the other parts, and all of them compute together. Raises ModelError for
    faulty files and when memory is short.
    """
    spec, tensors, names, notes = read_tensors(files)
    spec = for_context(spec, longest or spec.max_positions)
    share = None
    if rank[1] > 1:
        share, tensors = shard(spec, tensors, names, *rank)
        spec = share.spec
    places = match(spec, tensors, names)
    tensors = [tensor for tensor in tensors if tensor.name in places]
    in_planes = quantize != "none" and packs is not None and packs(spec)
    packed = choose_packed(tensors, places, quantize) if in_planes else {}
    kinds = {} if in_planes else choose_kinds(tensors, places, quantize, device)
    positions = context_length or spec.max_positions
    host_layers: frozenset[int] = frozenset()
    limit = room(spec) if room is not None else None
    if limit is not None:
        experts = [t for t in tensors if places[t.name].expert is not None]
        of_host = choose_kinds(experts, places, quantize, _CPU)
        found = _placement(spec, places, dtype, device, positions, kinds, packed, of_host, limit)
        host_layers = found.host_layers
        kinds |= {name: kind for name, kind in of_host.items() if places[name].layer in host_layers}
        packed = {name: kind for name, kind in packed.items() if not _is_held(places[name], host_layers)}
    told = [*notes, conversion_note(tensors, kinds), plain_note(tensors, kinds | packed)]
    if in_planes:
        held = {name: slot for name, slot in places.items() if not _is_held(slot, host_layers)}
        told.append(expansion_note(tensors, held, packed, dtype))
    elif packs is None and quantize == "auto" and device.type == "cuda":
        told.append(expanded_note(tensors, places, dtype))
    if on_note is not None:
        for note in filter(None, told):
            on_note(note)
    return fill_network(
        spec,
        tensors,
        dtype,
        device,
        on_progress=on_progress,
        positions=positions,
        # A CPU reads a memory-mapped file as fast as a buffer: staging would gain nothing.
        staging=Staging() if device.type == "cuda" else None,
        kinds=kinds,
        names=names,
        host_layers=host_layers,
        packed=packed,
        share=share,
        beside=needs(spec) if needs is not None else Beside(),
    )


def _is_held(slot: Slot, host_layers: frozenset[int]) -> bool:
    """Return whether the slot belongs to an expert in host memory."""
    return slot.expert is not None and slot.layer in host_layers


def bytes_to_load(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str,
    longest: int | None,
    packs: Callable[[ModelSpec], bool] | None = None,
) -> tuple[ModelSpec, int]:
    """Return the description of a model and the bytes of device memory that all its weights take. The arguments are
    those of `load_model`. Raises ModelError."""
    spec, tensors, names, _ = read_tensors(files)
    spec = for_context(spec, longest or spec.max_positions)
    places = match(spec, tensors, names)
    in_planes = quantize != "none" and packs is not None and packs(spec)
    packed = choose_packed(tensors, places, quantize) if in_planes else {}
    kinds = {} if in_planes else choose_kinds(tensors, places, quantize, device)
    blocks, planes = ({places[name]: kind for name, kind in held.items()} for held in (kinds, packed))
    return spec, needed_bytes(spec, dtype, spec.max_positions, blocks, planes)


def _placement(
    spec: ModelSpec,
    places: Mapping[str, Slot],
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    kinds: Mapping[str, Kind],
    packed: Mapping[str, Kind],
    of_host: Mapping[str, Kind],
    room: int,
) -> Placement:
    """Return where the experts go. An empty placement (all on the device) leaves the check of memory to `fill_network`.

    Raises TooLargeError if the model fits neither way.
    """
    on_device, on_host, in_planes = (
        {slot: chosen[name] for name, slot in places.items() if name in chosen}
        for chosen in (kinds, of_host, packed)
    )
    experts = expert_layers(places.values(), dtype, in_planes, on_host)
    needed = needed_bytes(spec, dtype, positions, on_device, in_planes)
    placement = place_experts(needed, experts, room)
    if placement is not None:
        return placement
    available = available_bytes(device)
    if not experts or available is None or needed <= available:
        return Placement()
    least = needed - sum(layer.on_device for layer in experts) + fetch_bytes(experts)
    raise TooLargeError(
        f"The model needs {bytes_text(needed)} of memory on {device}, and with its experts in host memory still "
        f"{bytes_text(least)}, but {bytes_text(max(room, 0))} are free there beside a conversation; choose a smaller "
        "model, use --device cpu, or free some memory."
    )


def read_tensors(files: ModelFiles) -> tuple[ModelSpec, list[StoredTensor], Names, list[str]]:
    """Return the description, the tensors (not read yet), their names, and notes for the user.

    Raises ModelError for faulty files.
    """
    if files.gguf is None:
        folder = files.folder or Path()
        raw = read_json(folder / "config.json")
        (family, spec), scheme = spec_of_hf(raw), read_scheme(raw)
        tensors = map_tensors(
            spec,
            join_quantized(read_safetensors(folder), scheme),
            family.names,
            packed=family.packed,
            rename=family.rename,
            turned=family.turned,
            alternating=family.alternating,
        )
        stored = without_empty_biases(spec, tensors, family.names)
        spec, stored, note = as_stored(spec, stored, family.names)
        notes = [scheme.note if scheme is not None else None, replaced_theta(raw, spec), note]
        return spec, stored, family.names, [note for note in notes if note is not None]
    from models.weights.gguf import read_gguf
    from models.weights.gguf_tensors import stored_tensors

    file = read_gguf(files.gguf)
    family, spec = spec_of_gguf(file)
    parts, dim = family.gguf_interleaved, spec.attention.head_dim
    interleaved = {slot.name(family.gguf_names): dim for slot in slots(spec) if slot.part in parts}
    tensors = map_tensors(
        spec,
        stored_tensors(file, interleaved),
        family.gguf_names,
        packed=family.gguf_packed,
        norm_offset=family.gguf_norm_offset,
    )
    return spec, list(tensors), family.gguf_names, []


def fill_network(
    spec: ModelSpec,
    tensors: Iterable[StoredTensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    on_progress: OnProgress | None = None,
    positions: int | None = None,
    staging: Staging | None = None,
    kinds: Mapping[str, Kind] | None = None,
    names: Names = NAMES,
    host_layers: frozenset[int] = frozenset(),
    packed: Mapping[str, Kind] | None = None,
    share: Share | None = None,
    beside: Beside = Beside(),  # noqa: B008 - it is frozen
) -> Network:
    """Fill a network with these tensors, with rotary tables for `positions` (None: the model's own).

    Names, shapes and memory are checked before anything is allocated. With `staging` the weights are streamed; without
    it they are copied one tensor at a time. `kinds` has the type of each matrix that is held in blocks, by name: either
    all matrices or none, except for the experts of `host_layers`, which lie in host memory. `packed` has the types of
    the matrices that are held in planes for a GPU (see `choose_packed`). `share` says which part of a larger network
    this is, `beside` what else needs memory. Raises ModelError. An exception from `on_progress` ends the load, and
    nothing of it stays in memory.
    """
    tensors, kinds, positions = list(tensors), kinds or {}, positions or spec.max_positions
    if spec.learned_positions:  # positions beyond have no vectors
        positions = min(positions, spec.max_positions)
    places = match(spec, tensors, names)
    blocks = {slot: kinds[name] for name, slot in places.items() if name in kinds}
    planes = {places[name]: kind for name, kind in (packed or {}).items()}
    needed = needed_bytes(spec, dtype, positions, blocks, planes)
    on_host = [
        layer for layer in expert_layers(places.values(), dtype, planes, blocks) if layer.layer in host_layers
    ]
    held = sum(layer.on_host for layer in on_host)
    needed -= held
    available, free = available_bytes(device), available_bytes(_CPU)
    if available is not None and needed + beside.nbytes > available:
        sizes = Counter[str]()
        for slot, kind in (planes if on_host else blocks | planes).items():
            sizes[kind.name] += prod(slot.shape)
        held_as = max(sizes, key=sizes.__getitem__, default=None)
        raise TooLargeError(too_large(spec, needed, beside, available, dtype, device, held_as, free))
    if held and free is not None and held > free * HOST_SHARE:
        raise TooLargeError(
            too_large_for_host(held, int(free * HOST_SHARE), len(on_host), needed, available, device)
        )
    tensors = [tensor for tensor in tensors if tensor.name in places]
    filling = _Filling(dtype, device, tensors, on_progress, host_layers)
    try:
        orders = {places[t.name]: t.on_device.order for t in tensors if t.on_device is not None}
        filling.allocate(list(places.values()), {places[name].group for name in kinds}, planes, orders)
        filling.fill(places, kinds, staging)
        return assemble(spec, filling.store, positions, dtype, device, host_layers, share)
    except BaseException as error:
        # The frames of the error hold views of the tensors, which would keep their memory alive.
        clear_frames(error.__traceback__)
        filling.store.plain.clear()
        filling.store.blocks.clear()
        filling.stacks.clear()
        filling.packed.clear()
        if is_out_of_memory(error):
            raise TooLargeError(
                f"Memory ran out while loading: the model needs {bytes_text(needed)} on {device}; "
                "choose a smaller model or free some memory."
            ) from None
        raise
    finally:
        if device.type == "cuda":  # give back what only the load needed
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or torch means that memory ran out, on a CPU or a GPU."""
    # torch's CPU allocator, cuBLAS and the CUDA runtime have no exception type for it.
    text = str(error) if isinstance(error, RuntimeError) else ""
    known = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in known)


@dataclass(slots=True)
class _Filling:
    """The memory of a network, and how much of it is filled."""

    dtype: torch.dtype
    device: torch.device
    tensors: list[StoredTensor]
    on_progress: OnProgress | None
    host_layers: frozenset[int]
    """The layers whose experts lie in host memory."""
    store: TensorStore = field(default_factory=TensorStore)
    stacks: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """The blocks of experts in host memory, uint8 [experts, rows, bytes a row], by group and first row."""
    experts: dict[str, int] = field(default_factory=dict)
    """Number of experts by group."""
    packed: dict[Slot, PackedPart] = field(default_factory=dict)
    """The destinations of the matrices that are held in planes."""
    done: int = 0
    total: int = field(init=False)
    """Bytes of all tensors. Kept, because a mixture of experts has tens of thousands of tensors."""

    def __post_init__(self) -> None:
        self.total = sum(tensor.nbytes for tensor in self.tensors)

    def allocate(
        self,
        found: list[Slot],
        in_blocks: set[str],
        planes: Mapping[Slot, Kind],
        orders: Mapping[Slot, Tensor | None],
    ) -> None:
        """Allocate the memory of all plain tensors, and of the matrices that are held in planes."""
        groups: dict[str, list[tuple[Slot, Kind]]] = {}
        for slot, kind in planes.items():
            groups.setdefault(slot.group, []).append((slot, kind))
        self._advance(0)
        exact = {slot.group for slot in found if slot.exact}
        on_host = {slot.group for slot in found if self._on_host(slot)}
        for group, shape in group_shapes(found).items():
            self.experts[group] = shape[0]
            if group in groups:
                weights, of_slots = packed_weights(groups[group], self.device, orders)
                self.packed |= of_slots
                for (expert, start), each in weights.items():
                    weight = Weight.packed(each.planes, each.kind, each.rows, each.columns)
                    self.store.blocks.setdefault((group, expert), {})[start] = weight
            elif group not in in_blocks:
                dtype = torch.float32 if group in exact else self.dtype
                self.store.plain[group] = (
                    _own_pages(shape, dtype)
                    if group in on_host
                    else torch.empty(shape, dtype=dtype, device=self.device)
                )

    def fill(self, places: Mapping[str, Slot], kinds: Mapping[str, Kind], staging: Staging | None) -> None:
        """Write every tensor to its place."""
        streamed: list[tuple[StoredTensor, Slot]] = []
        for tensor in self.tensors:
            slot, kind = places[tensor.name], kinds.get(tensor.name)
            if kind is not None:
                data, mapped = packed_rows(tensor, kind), is_file(tensor, kind)
                if self._on_host(slot):
                    data, mapped = self._side_by_side(slot, data), False
                else:
                    _touch(data)
                weight = Weight(data, kind, slot.rows, slot.shape[1], split=slot.split, is_mapped=mapped)
                self.store.blocks.setdefault((slot.group, slot.expert), {})[slot.start] = weight
                self._advance(tensor.nbytes)
            elif staging is not None and tensor.extent is not None and not self._on_host(slot):
                streamed.append((tensor, slot))
            elif slot in self.packed:
                self.packed[slot].fill(tensor)
                self._advance(tensor.nbytes)
            else:
                tensor.copy_into(self._target(slot))
                self._advance(tensor.nbytes)
        if staging is not None:
            staging.stream(self._transfers(streamed), self.device, self._advance)

    def _transfers(self, streamed: Iterable[tuple[StoredTensor, Slot]]) -> Iterator[tuple[Extent, Tensor]]:
        """Yield each tensor's source and target; a matrix to be packed gets its buffer when its turn comes."""
        for tensor, slot in streamed:
            assert tensor.extent is not None
            part = self.packed.get(slot)
            yield part.streamed(tensor, tensor.extent) if part else (tensor.extent, self._target(slot))

    def _on_host(self, slot: Slot) -> bool:
        return _is_held(slot, self.host_layers)

    def _side_by_side(self, slot: Slot, data: Tensor) -> Tensor:
        """Copy the blocks of an expert to its place in a tensor that holds those of all experts of its layer."""
        assert slot.layer is not None
        assert slot.expert is not None
        experts = self.experts[slot.group]
        place = (slot.group, slot.start)
        if place not in self.stacks:
            self.stacks[place] = _own_pages((experts, *data.shape), torch.uint8)
        return self.stacks[place][slot.expert].copy_(data)

    def _target(self, slot: Slot) -> Tensor:
        group = self.store.plain[slot.group]
        return (group if slot.expert is None else group[slot.expert]).narrow(0, slot.start, slot.rows)

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.on_progress is not None:
            self.on_progress(Progress("load", "weights", self.done, self.total))


def _own_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate host memory that shares no page with anything else, so that it can be pinned."""
    nbytes = prod(shape) * dtype.itemsize
    memory = torch.empty(nbytes + 2 * _PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE
    return memory[start : start + nbytes].view(dtype).view(shape)


def _touch(data: Tensor) -> None:
    """Read a byte of every page, so that a mapped file is in memory when the first token is computed."""
    data.flatten()[::4096].sum()


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
    blocks = sum(slot.shape[0] * row_bytes(kind, slot.shape[1]) for slot, kind in kinds.items())
    blocks += sum(packed_bytes(kind, *slot.shape) for slot, kind in packed.items())
    return sum(count * (4 if in_fp32 else dtype.itemsize) for count, in_fp32 in numbers) + blocks
