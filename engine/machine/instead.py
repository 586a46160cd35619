"""The note for a model that the CPU computes because the GPU has no room for it."""

import torch

from engine.execute.cpu import products
from engine.machine.expected import speed_here
from engine.machine.report import look_here
from models.errors import NoRoomError
from models.files import ModelFiles
from models.load import bytes_to_load
from models.weights.slots import parameters


def instead_of_gpu(refusal: NoRoomError, files: ModelFiles, dtype: str, quantize: str) -> str:
    """Return the note: why the GPU has no room, and the speed to expect from the CPU, if that is known.

    `dtype` and `quantize` are as in `Engine.load`. Raises ModelError.
    """
    more = ""
    if (count := torch.cuda.device_count()) > 1:
        more = f" With --tensor-parallel auto it is divided among as many of the {count} GPUs as it needs."
    rate = _rate(files, dtype, quantize)
    speed = "" if rate is None else f", at about {rate:.{0 if rate >= 1 else 1}f} tokens/s"
    return f"{refusal.sizes}, so it runs on the CPU{speed}.{more}"


def _rate(files: ModelFiles, dtype: str, quantize: str) -> float | None:
    """Return the tokens/s to expect from the CPU; None if its bandwidth cannot be measured."""
    here = look_here("cpu", dtype)
    if here is None:
        return None
    if quantize == "auto" and products.problem() is not None:
        quantize = "none"
    spec, held = bytes_to_load(files, dtype=here.dtype, device=here.device, quantize=quantize, longest=None)
    is_quantized = held < parameters(spec) * here.dtype.itemsize
    return speed_here(files.name, spec, here, held if is_quantized else None).tokens_per_s
