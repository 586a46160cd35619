"""From local files to a network that runs: check every tensor, take the memory, then fill it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from traceback import clear_frames

import torch
from torch import Tensor

from models.assemble import Store, assemble
from models.errors import TooLargeError
from models.families.family import NAMES
from models.families.registry import spec_of_gguf, spec_of_hf
from models.files import ModelFiles, read_json
from models.network import Network, Weight
from models.progress import OnProgress, Progress
from models.spec import ModelSpec, for_context, ropes
from models.units import bytes_text
from models.weights.block_formats import Kind
from models.weights.checkpoint import StoredTensor, read_safetensors
from models.weights.layout import laid_out
from models.weights.matching import match
from models.weights.memory import available_bytes
from models.weights.packed_groups import PackedPart, choose_packed, expansion_note, packed_weights
from models.weights.packing import packed_bytes
from models.weights.placement import Placement, experts_of, fetch_bytes, place_experts
from models.weights.quantised_checkpoint import joined, without_empty_biases
from models.weights.quantize import choose_kinds, conversion_note, is_file, packed_rows, plain_note
from models.weights.quantized import row_bytes
from models.weights.schemes import scheme_of
from models.weights.sharding import shared_out
from models.weights.share import Share
from models.weights.slots import Names, Slot, group_shapes, slots
from models.weights.staging import Extent, Staging

INT4_BYTES = 0.75
"""Of a weight with `--quantize int4`, what stays in 8 bits included."""
HOST_SHARE = 0.9
"""Of the free host memory that experts may take: it is pinned, and the system cannot take it back."""
_CPU = torch.device("cpu")
Room = Callable[[ModelSpec], int | None]
"""How many bytes of a device the weights of a network may take; None: all of them have to be there."""
_PAGE = 1 << 16
"""At least what a page of memory has on any machine."""


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
    packs: Callable[[ModelSpec], bool] | None = None,
    rank: tuple[int, int] = (0, 1),
) -> Network:
    """The network of local files in `dtype` on `device`.

    `context_length` is the number of positions to prepare for; None takes the model's own. `quantize` is one of
    models.weights.quantize.QUANTIZE: "auto" leaves the blocks of a GGUF file as they are on a CPU, mapped from the
    file; `dtype` is then that of the activations and norms. On a CPU it needs the memory of the model and of one tensor
    at its peak; to a GPU the weights stream through buffers of 100 MB. `on_note` gets what a person should know of how
    the weights are held, a line each. `longest` is how many tokens a text may have where that is known to be fewer than
    the positions (see `for_context`). `room` says how many bytes of the device weights may take: of a network that
    takes more, the experts of the last layers are held in host memory, in blocks where their file has them in blocks.
    None: all weights are on the device. `packs` says whether what computes such a network on this device reads
    quantised weights in planes (models.weights.packing): then those of a file stay quantised, or plain ones become so
    as `quantize` says. `rank` is (0, 1), or which of how many parts it is to be: the other ones are loaded by other
    processes, and all compute together. Raises ModelError for what is wrong with the files and when memory is short.
    """
    spec, tensors, names, notes = read_tensors(files)
    spec = for_context(spec, longest or spec.max_positions)
    share = None
    if rank[1] > 1:
        share, tensors = shared_out(spec, tensors, names, *rank)
        spec = share.spec
    places = match(spec, tensors, names)
    in_planes = quantize != "none" and packs is not None and packs(spec)
    packed = choose_packed(tensors, places, quantize) if in_planes else {}
    kinds = {} if in_planes else choose_kinds(tensors, places, quantize, device)
    positions = context_length or spec.max_positions
    host_layers: frozenset[int] = frozenset()
    limit = room(spec) if room is not None else None
    if limit is not None:
        experts = [t for t in tensors if t.name in places and places[t.name].expert is not None]
        of_host = choose_kinds(experts, places, quantize, _CPU)
        found = _placement(spec, places, dtype, device, positions, kinds, packed, of_host, limit)
        host_layers = found.host_layers
        kinds |= {name: kind for name, kind in of_host.items() if places[name].layer in host_layers}
        packed = {name: kind for name, kind in packed.items() if not _is_held(places[name], host_layers)}
    told = [*notes, conversion_note(tensors, kinds), plain_note(tensors, kinds | packed)]
    if in_planes:
        held = {name: slot for name, slot in places.items() if not _is_held(slot, host_layers)}
        told.append(expansion_note(tensors, held, packed, dtype))
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
        # A memory-mapped file is as near to a CPU as a buffer: nothing is gained by staging there.
        staging=Staging() if device.type == "cuda" else None,
        kinds=kinds,
        names=names,
        host_layers=host_layers,
        packed=packed,
        share=share,
    )


def _is_held(slot: Slot, host_layers: frozenset[int]) -> bool:
    """Whether it is of an expert in host memory."""
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
    """The description of a model, and the bytes of a device that all its weights take; arguments as `load_model` has
    them. Raises ModelError."""
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
    """Where the experts go; on the device, too, where a network without them would not fit: that is said later."""
    on_device, on_host, in_planes = (
        {slot: chosen[name] for name, slot in places.items() if name in chosen}
        for chosen in (kinds, of_host, packed)
    )
    experts = experts_of(places.values(), dtype, in_planes, on_host)
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
    """The description, the tensors that are not read yet, what they are called, and lines for people.

    Raises ModelError for what is wrong with the files.
    """
    if files.gguf is None:
        folder = files.folder or Path()
        raw = read_json(folder / "config.json")
        (family, spec), scheme = spec_of_hf(raw), scheme_of(raw)
        tensors = laid_out(
            spec,
            joined(read_safetensors(folder), scheme),
            family.names,
            packed=family.packed,
            rename=family.rename,
            turned=family.turned,
            alternating=family.alternating,
        )
        notes = [scheme.note] if scheme is not None and scheme.note is not None else []
        return spec, without_empty_biases(spec, tensors, family.names), family.names, notes
    from models.weights.gguf import read_gguf
    from models.weights.gguf_tensors import stored_tensors

    file = read_gguf(files.gguf)
    family, spec = spec_of_gguf(file)
    parts, dim = family.gguf_interleaved, spec.attention.head_dim
    interleaved = {slot.name(family.gguf_names): dim for slot in slots(spec) if slot.part in parts}
    tensors = laid_out(
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
) -> Network:
    """A network of these tensors, with rotary tables for `positions` (None: the model's own).

    Names, shapes and memory are checked before anything is allocated. With `staging` the weights are streamed,
    without it they are copied one tensor at a time; `kinds` has the matrices that are held in blocks, by name: all or
    none, but for the experts of `host_layers`, which lie in host memory; `packed` those that are held in planes for a
    GPU (see `choose_packed`); `share` says which part of a larger network it is. Raises ModelError; what `on_progress`
    raises ends the load, and nothing of it stays in memory.
    """
    tensors, kinds, positions = list(tensors), kinds or {}, positions or spec.max_positions
    if spec.learned_positions:  # there are no vectors for more
        positions = min(positions, spec.max_positions)
    places = match(spec, tensors, names)
    blocks = {slot: kinds[name] for name, slot in places.items() if name in kinds}
    planes = {places[name]: kind for name, kind in (packed or {}).items()}
    needed = needed_bytes(spec, dtype, positions, blocks, planes)
    on_host = [
        layer for layer in experts_of(places.values(), dtype, planes, blocks) if layer.layer in host_layers
    ]
    held = sum(layer.on_host for layer in on_host)
    needed -= held
    available, free = available_bytes(device), available_bytes(_CPU)
    if available is not None and needed > available:
        raise TooLargeError(_too_large(needed, available, dtype, device, bool(kinds) and not on_host))
    if held and free is not None and held > free * HOST_SHARE:
        raise TooLargeError(
            _too_large_for_host(held, int(free * HOST_SHARE), len(on_host), needed, available, device)
        )
    tensors = [tensor for tensor in tensors if tensor.name in places]
    filling = _Filling(dtype, device, tensors, on_progress, host_layers)
    try:
        orders = {places[t.name]: t.on_device.order for t in tensors if t.on_device is not None}
        filling.allocate(list(places.values()), {places[name].group for name in kinds}, planes, orders)
        filling.fill(places, kinds, staging)
        return assemble(spec, filling.store, positions, dtype, device, host_layers, share)
    except BaseException as error:
        # The frames of the error hold views of the tensors, which would keep their memory.
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
        if device.type == "cuda":  # what was only needed on the way is free for others, too
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or of torch says that memory ran out, on a CPU or on a GPU."""
    # torch's CPU allocator has no error of its own, and neither have cuBLAS and the CUDA runtime.
    text = str(error) if isinstance(error, RuntimeError) else ""
    known = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in known)


@dataclass(slots=True)
class _Filling:
    """The memory of a network, and how far it is filled."""

    dtype: torch.dtype
    device: torch.device
    tensors: list[StoredTensor]
    on_progress: OnProgress | None
    host_layers: frozenset[int]
    """Those whose experts lie in host memory."""
    store: Store = field(default_factory=Store)
    stacks: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """The blocks of experts in host memory, uint8 [experts, rows, bytes a row], by group and first row."""
    experts: dict[str, int] = field(default_factory=dict)
    """How many there are in a group."""
    packed: dict[Slot, PackedPart] = field(default_factory=dict)
    """Where matrices go that are held in planes."""
    done: int = 0
    total: int = field(init=False)
    """Bytes of all tensors: a mixture of experts has tens of thousands."""

    def __post_init__(self) -> None:
        self.total = sum(tensor.nbytes for tensor in self.tensors)

    def allocate(
        self,
        found: list[Slot],
        in_blocks: set[str],
        planes: Mapping[Slot, Kind],
        orders: Mapping[Slot, Tensor | None],
    ) -> None:
        """Take the memory of every tensor of plain numbers, and of what is held in planes."""
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
        """Of each tensor where it lies and where it goes; what is to be packed gets memory when it is its turn."""
        for tensor, slot in streamed:
            assert tensor.extent is not None
            part = self.packed.get(slot)
            yield part.streamed(tensor, tensor.extent) if part else (tensor.extent, self._target(slot))

    def _on_host(self, slot: Slot) -> bool:
        return _is_held(slot, self.host_layers)

    def _side_by_side(self, slot: Slot, data: Tensor) -> Tensor:
        """A copy of the blocks of an expert, where those of all experts of its layer lie one behind the other."""
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
    """Host memory whose pages hold nothing else, so that it can be pinned."""
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
    """Bytes of all weights, those in blocks (mapped from a file or not) and in planes included, and of the rotary
    tables."""
    found, kinds, packed = list(slots(spec)), kinds or {}, packed or {}
    exact = {slot.group for slot in found if slot.exact}
    plain = group_shapes([slot for slot in found if slot not in kinds and slot not in packed])
    numbers = [(prod(shape), group in exact) for group, shape in plain.items()]
    numbers += [(positions * width, rope.exact) for rope, width in ropes(spec)]
    blocks = sum(slot.shape[0] * row_bytes(kind, slot.shape[1]) for slot, kind in kinds.items())
    blocks += sum(packed_bytes(kind, *slot.shape) for slot, kind in packed.items())
    return sum(count * (4 if in_fp32 else dtype.itemsize) for count, in_fp32 in numbers) + blocks


def _too_large_for_host(
    needed: int, free: int, layers: int, on_device: int, available: int | None, device: torch.device
) -> str:
    """The same for the experts that the device has no room for."""
    fits = free + (on_device if available is None else available)
    return (
        f"The model takes {bytes_text(on_device)} of memory on {device} and {bytes_text(needed)} "
        f"of host memory for the experts of {layers} layers, where {bytes_text(free)} can be used; choose a model of "
        f"at most {bytes_text(fits)}, or a quantised GGUF file of this one, or free some memory."
    )


def _too_large(needed: int, available: int, dtype: torch.dtype, device: torch.device, quantized: bool) -> str:
    """One line: what the model needs, what is free, and what would fit."""
    if quantized:
        ways = [f"choose a model of at most {bytes_text(available)}"]
    else:
        ways = [f"choose a smaller model (about {_count(available // dtype.itemsize)} parameters fit)"]
        if dtype.itemsize > 2:
            ways.append("use --dtype bfloat16, which needs half")
        if device.type == "cpu" and needed * INT4_BYTES / dtype.itemsize < available:
            ways.append("use --quantize int4")
    on_cpu = None if device.type == "cpu" else available_bytes(torch.device("cpu"))
    if on_cpu is not None and needed < on_cpu:
        ways.append(f"use --device cpu, where {bytes_text(on_cpu)} are free")
    return (
        f"The model needs {bytes_text(needed)} of memory on {device}, but {bytes_text(available)} are free; "
        f"{', '.join(ways)}, or free some memory."
    )


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"
