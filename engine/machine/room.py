"""Whether there is memory for one more model."""

from dataclasses import dataclass

import torch

from engine.cache.sizing import beside_weights
from engine.device import available_memory, pick_device, pick_dtype
from engine.execute.compatibility import not_on_host
from engine.execute.cpu import products
from engine.execute.cpu.held_weights import packs
from models.files import ModelFiles
from models.load import bytes_to_load
from models.weights.memory import available_bytes
from models.weights.placement import experts_of
from models.weights.slots import slots


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes of the device that it would run on, in bytes."""

    weights: int
    least: int
    """What of the weights has to be there; experts may lie in host memory."""
    beside: int
    """A conversation of a useful length, and what computing takes."""
    free: int
    """What nobody has there."""

    @property
    def is_met(self) -> bool:
        return self.weights + self.beside <= self.free


def need_of(
    files: ModelFiles,
    device: str,
    dtype: str,
    quantize: str,
    context: int | None,
    mapped: int = 0,
    kv_dtype: str = "auto",
) -> Need:
    """Read the headers of a model; arguments as in `Engine.load`. On a CPU `mapped` bytes of other models count as free
    memory, because the system could read them again. Raises ModelError and EngineError.
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
    outside = 0
    if place.type == "cuda" and not_on_host(spec) is None:
        outside = sum(layer.on_device for layer in experts_of(slots(spec), numbers, {}, {}))
    return Need(
        weights, weights - outside, beside_weights(spec, numbers, place, context, kv_dtype), max(free, 0)
    )


def mapped_bytes(files: ModelFiles, device: torch.device, weights: int, is_quantized: bool) -> int:
    """Bytes of loaded weights that count as free memory: those that are mapped from their file."""
    return weights if device.type == "cpu" and files.gguf is not None and is_quantized else 0
