"""The note for a model that the CPU computes because the GPU has no room for it."""

import torch

from engine.execute.loading import plan_here
from engine.machine.expected import speed_here
from engine.machine.report import look_here
from engine.params import LoadOptions
from models.errors import NoRoomError
from models.files import ModelFiles
from models.weights.slots import parameters


def instead_of_gpu(refusal: NoRoomError, files: ModelFiles, options: LoadOptions) -> str:
    """Return the note: why the GPU has no room, and the speed to expect from the CPU, if that is known.

    Raises ModelError.
    """
    more = ""
    if (count := torch.cuda.device_count()) > 1:
        more = f" With --tensor-parallel auto it is divided among as many of the {count} GPUs as it needs."
    rate = _rate(files, options)
    speed = "" if rate is None else f", at about {rate:.{0 if rate >= 1 else 1}f} tokens/s"
    return f"{refusal.sizes}, so it runs on the CPU{speed}.{more}"


def _rate(files: ModelFiles, options: LoadOptions) -> float | None:
    """Return the tokens/s to expect from the CPU; None if its bandwidth cannot be measured."""
    here = look_here("cpu", options.dtype)
    if here is None:
        return None
    plan = plan_here(files, here.dtype, here.device, options)
    spec, held = plan.spec, plan.nbytes
    is_quantized = held < parameters(spec) * here.dtype.itemsize
    return speed_here(files.name, spec, here, held if is_quantized else None).tokens_per_s
