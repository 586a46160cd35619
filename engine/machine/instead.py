"""The note for a model that the CPU computes because the GPU has no room for it."""

import torch

from engine.machine.expected import local_speed
from engine.machine.report import look_here
from engine.params import LoadOptions
from models.errors import NoRoomError
from models.files import ModelFiles


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
    return local_speed(files, here, options).tokens_per_s if here is not None else None
