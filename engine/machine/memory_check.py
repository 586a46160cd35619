"""Checks whether there is memory for one more model."""

from dataclasses import dataclass

import torch

from engine.cache.sizing import beside_weights
from engine.device import available_memory, pick_device, pick_dtype
from engine.execute.compatibility import not_on_host
from engine.execute.cpu import products
from engine.execute.cpu.weight_loading import packs
from models.files import ModelFiles
from models.load import bytes_to_load
from models.weights.memory import available_bytes
from models.weights.placement import expert_layers
from models.weights.share import Share
from models.weights.slots import slots


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


def memory_need(
    files: ModelFiles,
    device: str,
    dtype: str,
    quantize: str,
    context: int | None,
    mapped: int = 0,
    kv_dtype: str = "auto",
    ranks: int = 1,
) -> MemoryNeed:
    """Read the headers of a model and return what it needs. Arguments are as in `Engine.load`.

    `mapped` is the bytes of other models' weights that are mapped from files. On a CPU they are subtracted from the
    free memory: the system counts them as free, because it could read them again. For a model divided among `ranks`
    GPUs, return the need of one of them. Raises ModelError and EngineError.
    """
    place = pick_device(device).device
    numbers = pick_dtype(dtype, place)
    if quantize == "auto" and products.problem() is not None:
        quantize = "none"
    spec, weights = bytes_to_load(
        files,
        dtype=numbers,
        device=place,
        quantize=quantize,
        longest=context,
        packs=packs(numbers, place),
    )
    free = available_bytes(place)
    free = available_memory(place) if free is None else free
    free -= mapped if place.type == "cpu" else 0
    if place.type == "cpu":  # the ranks share the CPU's memory
        ranks = 1
    outside = 0
    if place.type == "cuda" and ranks == 1 and not_on_host(spec) is None:
        outside = sum(layer.on_device for layer in expert_layers(slots(spec), numbers, {}, {}))
    part = Share(0, ranks, spec).spec if ranks > 1 else spec  # several have the same head where there are few
    beside = beside_weights(part, numbers, place, context, kv_dtype, free)
    return MemoryNeed(weights // ranks, weights // ranks - outside, beside, max(free, 0))


def fewest_ranks(
    files: ModelFiles, device: str, dtype: str, quantize: str, context: int | None, kv_dtype: str
) -> int:
    """Return how many GPUs a model needs to fit: a power of two, or all of them; 1 on a CPU or a GPU that is named.

    Arguments and errors are those of `memory_need`.
    """
    if str(pick_device(device).device) != "cuda":
        return 1
    there = torch.cuda.device_count()
    free = min(available_memory(torch.device("cuda", number)) for number in range(there))
    counts = [*(1 << power for power in range(there.bit_length()) if 1 << power < there), there]
    for ranks in counts:
        need = memory_need(files, device, dtype, quantize, context, kv_dtype=kv_dtype, ranks=ranks)
        if need.weights + need.beside <= free:
            return ranks
    return counts[-1]


def mapped_bytes(files: ModelFiles, device: torch.device, weights: int, is_quantized: bool) -> int:
    """Return the bytes of loaded weights that are mapped from their file, and so count as free memory."""
    return weights if device.type == "cpu" and files.gguf is not None and is_quantized else 0
