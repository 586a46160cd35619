"""Load a network as planned: check the memory, take it, then fill it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor

from models.errors import TooLargeError
from models.files import ModelFiles
from models.loading.assemble import TensorStore, assemble
from models.loading.plan import LoadPlan, Target, plan_load
from models.network import Network, Weight
from models.progress import OnProgress, Progress
from models.units import bytes_text
from models.weights.block_formats import Kind
from models.weights.checkpoint import StoredTensor
from models.weights.memory import available_bytes
from models.weights.packed_groups import fill_planes, packed_weights, stream_planes
from models.weights.packing import Planes
from models.weights.quantize import packed_rows
from models.weights.slots import Slot, group_shapes
from models.weights.staging import Extent, Staging
from models.weights.too_large import too_large, too_large_for_host

HOST_SHARE = 0.9
"""The share of free host memory that experts may take: it is pinned, and the system cannot take it back."""
_CPU = torch.device("cpu")
_PAGE = 1 << 16
"""At least the size of a memory page on any machine."""


def load_model(
    files: ModelFiles,
    *,
    on_progress: OnProgress | None = None,
    on_note: Callable[[str], None] | None = None,
    **target: Any,
) -> Network:
    """Load the network of local files; `target` are the fields of `Target`.

    `on_note` receives what the user should know about how the weights are held, one line each. Raises ModelError.
    """
    plan = plan_load(files, Target(**target))
    if on_note is not None:
        for note in plan.notes:
            on_note(note)
    return fill_network(plan, on_progress)


def fill_network(
    plan: LoadPlan, on_progress: OnProgress | None = None, staging: Staging | None = None
) -> Network:
    """Fill a network as planned. Memory is checked before anything is allocated.

    To a GPU the weights are streamed through buffers of 100 MB, elsewhere only with `staging`; without it they are
    copied one tensor at a time. Raises ModelError. An exception from `on_progress` ends the load, and nothing of it
    stays in memory.
    """
    device = plan.target.device
    if staging is None and device.type == "cuda":
        staging = Staging()  # a CPU reads a memory-mapped file as fast as a buffer
    needed = _check_memory(plan)
    filling = _Filling(plan, on_progress)
    try:
        filling.allocate()
        filling.fill(staging)
        return assemble(plan, filling.store)
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


def _check_memory(plan: LoadPlan) -> int:
    """Return the bytes that the plan needs on its device. Raises TooLargeError if it or host memory has less."""
    target, on_host = plan.target, plan.on_host
    held = sum(layer.on_host for layer in on_host)
    needed, beside = plan.nbytes - held, plan.beside
    available, free = available_bytes(target.device), available_bytes(_CPU)
    if available is not None and needed + beside.nbytes > available:
        sizes = Counter[str]()
        for slot, kind in plan.by_place(plan.packed if on_host else {**plan.kinds, **plan.packed}).items():
            sizes[kind.name] += prod(slot.shape)
        held_as = max(sizes, key=sizes.__getitem__, default=None)
        raise TooLargeError(
            too_large(plan.spec, needed, beside, available, target.dtype, target.device, held_as, free)
        )
    if held and free is not None and held > free * HOST_SHARE:
        most = int(free * HOST_SHARE)
        raise TooLargeError(too_large_for_host(held, most, len(on_host), needed, available, target.device))
    return needed


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or torch means that memory ran out, on a CPU or a GPU."""
    # torch's CPU allocator, cuBLAS and the CUDA runtime have no exception type for it.
    text = str(error) if isinstance(error, RuntimeError) else ""
    known = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in known)


@dataclass(slots=True)
class _Filling:
    """The memory of a network, and how much of it is filled."""

    plan: LoadPlan
    on_progress: OnProgress | None
    store: TensorStore = field(default_factory=TensorStore)
    stacks: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """The blocks of experts in host memory, uint8 [experts, rows, bytes a row], by group and first row."""
    experts: dict[str, int] = field(default_factory=dict)
    """Number of experts by group."""
    packed: dict[Slot, Planes] = field(default_factory=dict)
    """The destinations of the matrices that are held in planes."""
    done: int = 0
    total: int = field(init=False)
    """Bytes of all tensors. Kept, because a mixture of experts has tens of thousands of tensors."""

    def __post_init__(self) -> None:
        self.total = sum(tensor.nbytes for tensor in self.plan.tensors)

    def allocate(self) -> None:
        """Allocate the memory of all plain tensors, and of the matrices that are held in planes."""
        plan, target, places = self.plan, self.plan.target, self.plan.places
        groups: dict[str, list[tuple[Slot, Kind]]] = {}
        for slot, kind in plan.by_place(plan.packed).items():
            groups.setdefault(slot.group, []).append((slot, kind))
        self._advance(0)
        found, in_blocks = list(places.values()), {places[name].group for name in plan.kinds}
        orders = {places[t.name]: t.on_device.order for t in plan.tensors if t.on_device is not None}
        exact = {slot.group for slot in found if slot.exact}
        on_host = {slot.group for slot in found if plan.is_on_host(slot)}
        for group, shape in group_shapes(found).items():
            self.experts[group] = shape[0]
            if group in groups:
                weights, of_slots = packed_weights(groups[group], target.device, orders)
                self.packed |= of_slots
                for (expert, start), planes in weights.items():
                    self.store.blocks.setdefault((group, expert), {})[start] = Weight.packed(planes)
            elif group not in in_blocks:
                dtype = torch.float32 if group in exact else target.dtype
                self.store.plain[group] = (
                    _own_pages(shape, dtype)
                    if group in on_host
                    else torch.empty(shape, dtype=dtype, device=target.device)
                )

    def fill(self, staging: Staging | None) -> None:
        """Write every tensor to its place."""
        plan = self.plan
        streamed: list[tuple[StoredTensor, Slot]] = []
        for tensor in plan.tensors:
            slot, kind = plan.places[tensor.name], plan.kinds.get(tensor.name)
            if kind is not None:
                data, mapped = packed_rows(tensor, kind)
                if plan.is_on_host(slot):
                    data, mapped = self._side_by_side(slot, data), False
                else:
                    _touch(data)
                weight = Weight(data, kind, slot.rows, slot.shape[1], split=slot.split, is_mapped=mapped)
                self.store.blocks.setdefault((slot.group, slot.expert), {})[slot.start] = weight
            elif staging is not None and tensor.extent is not None and not plan.is_on_host(slot):
                streamed.append((tensor, slot))
                continue
            elif slot in self.packed:
                fill_planes(self.packed[slot], tensor)
            else:
                tensor.copy_into(self._target(slot))
            self._advance(tensor.nbytes)
        if staging is not None:
            staging.stream(self._transfers(streamed), plan.target.device, self._advance)

    def _transfers(self, streamed: Iterable[tuple[StoredTensor, Slot]]) -> Iterator[tuple[Extent, Tensor]]:
        """Yield each tensor's source and target; a matrix to be packed gets its buffer when its turn comes."""
        for tensor, slot in streamed:
            assert tensor.extent is not None
            planes = self.packed.get(slot)
            if planes is not None:
                yield stream_planes(planes, tensor, tensor.extent)
            else:
                yield tensor.extent, self._target(slot)

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
