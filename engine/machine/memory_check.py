"""Checks whether there is memory for one more model."""

from dataclasses import dataclass, replace

import torch

from engine.cache.sizing import beside_weights
from engine.device import available_memory, pick_device, pick_dtype
from engine.execute.compatibility import not_on_host
from engine.execute.loading import plan_here
from engine.params import LoadOptions
from models.files import ModelFiles
from models.loading.plan import LoadPlan
from models.weights.memory import available_bytes
from models.weights.share import Share


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory a model needs on its device, in bytes."""

    weights: int
    least: int
    """The part of the weights that must be on the device; experts may lie in host memory."""
    beside: int
    """Bytes for a conversation of a useful length and for computing."""
    free: int
    """Bytes of the device's memory that are free."""

    @property
    def is_met(self) -> bool:
        return self.weights + self.beside <= self.free


def memory_need(files: ModelFiles, options: LoadOptions, mapped: int = 0) -> MemoryNeed:
    """Read the headers of a model and return what it needs; see `need_of_plan`. Raises ModelError and EngineError."""
    return need_of_plan(_plan(files, options), options, mapped)


def need_of_plan(plan: LoadPlan, options: LoadOptions, mapped: int = 0) -> MemoryNeed:
    """Return what a model needs that is planned to be loaded whole on one device.

    `mapped` is the bytes of other models' weights that are mapped from files. On a CPU they are subtracted from the
    free memory: the system counts them as free, because it could read them again. For a model that the options divide
    among GPUs, return the need of one of them.
    """
    place, numbers, spec = plan.target.device, plan.target.dtype, plan.spec
    free = available_bytes(place)
    free = available_memory(place) if free is None else free
    free -= mapped if place.type == "cpu" else 0
    # The ranks on a CPU share its memory.
    ranks = 1 if place.type == "cpu" else max(options.tensor_parallel, 1)
    outside = 0
    if place.type == "cuda" and ranks == 1 and not_on_host(spec) is None:
        outside = sum(layer.on_device for layer in plan.experts({}))
    part = Share(0, ranks, spec).spec if ranks > 1 else spec  # several have the same head where there are few
    beside = beside_weights(part, numbers, place, options.context, options.kv_dtype, free)
    return MemoryNeed(plan.nbytes // ranks, plan.nbytes // ranks - outside, beside, max(free, 0))


def fewest_ranks(files: ModelFiles, options: LoadOptions) -> int:
    """Return how many GPUs a model needs to fit: a power of two, or all of them; 1 on a CPU or a GPU that is named.

    Raises ModelError and EngineError.
    """
    if str(pick_device(options.device).device) != "cuda":
        return 1
    there = torch.cuda.device_count()
    free = min(available_memory(torch.device("cuda", number)) for number in range(there))
    counts = [*(1 << power for power in range(there.bit_length()) if 1 << power < there), there]
    plan = _plan(files, options)
    for ranks in counts:
        need = need_of_plan(plan, replace(options, tensor_parallel=ranks))
        if need.weights + need.beside <= free:
            return ranks
    return counts[-1]


def _plan(files: ModelFiles, options: LoadOptions) -> LoadPlan:
    place = pick_device(options.device).device
    return plan_here(files, pick_dtype(options.dtype, place), place, options)


def mapped_bytes(files: ModelFiles, device: torch.device, weights: int, is_quantized: bool) -> int:
    """Return the bytes of loaded weights that are mapped from their file, and so count as free memory."""
    return weights if device.type == "cpu" and files.gguf is not None and is_quantized else 0
