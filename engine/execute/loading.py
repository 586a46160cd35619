"""How a model's weights are held here: as in their files or expanded; on a GPU, or partly in host memory beside it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from engine.cache.sizing import weight_room
from engine.device import available_memory, is_amd
from engine.execute.compatibility import not_fused, not_on_host
from engine.execute.cpu import products
from engine.kernels import on_gpu
from engine.kernels.native import library as native
from engine.params import LoadOptions
from models.errors import TooLargeError
from models.files import ModelFiles
from models.loading.load import fill_network
from models.loading.plan import LoadPlan, Room, Target, plan_load
from models.network import Network
from models.progress import OnProgress
from models.spec import ModelSpec


def plan_here(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, options: LoadOptions, **target: Any
) -> LoadPlan:
    """Plan how a model is loaded on `device`; `target` are further fields of `Target`.

    Quantised weights are expanded if no kernels multiply them, unless the options ask for them. Raises ModelError.
    """
    kernels = packs(dtype, device)
    asked = Target(dtype, device, options.quantize, longest=options.context, packs=kernels, **target)
    plan = plan_load(files, asked)
    if device.type != "cpu" or not plan.kinds or (reason := products.problem()) is None:
        return plan
    note = f"Weights are expanded in every step, which is slow ({reason})."
    if options.quantize == "auto":
        plan = plan_load(files, replace(asked, quantize="none"))
        note = f"Quantised weights were expanded, so decoding is slower ({reason})."
    return replace(plan, notes=(note, *plan.notes))


def load_here(plan: LoadPlan, on_progress: OnProgress | None = None) -> Network:
    """Read the weights as planned. Raises ModelError."""
    try:
        return fill_network(plan, on_progress)
    except TooLargeError as error:
        is_expanded = any("expanded" in note for note in plan.notes)
        if plan.target.device.type != "cuda" or not is_expanded:
            raise
        if (why := on_gpu.problem(plan.target.device)) is None:
            raise
        raise TooLargeError(f"The quantised weights have to be expanded ({why}): {error}") from None


def packs(dtype: torch.dtype, device: torch.device) -> Callable[[ModelSpec], bool] | None:
    """Return a test of whether the GPU kernels for weights in planes run a network; None if they never do here."""
    if dtype != torch.bfloat16 or on_gpu.problem(device) is not None:
        return None
    return lambda spec: not_fused(spec) is None


def gpu_room(dtype: torch.dtype, device: torch.device, context: int | None) -> Room | None:
    """Return how many bytes of a GPU weights may take before experts are held in host memory; None if none can be.

    `context` is the most tokens of a text, if a person set it.
    """
    if device.type != "cuda" or native.problem() is not None or is_amd():
        return None
    free = available_memory(device)

    def room(spec: ModelSpec) -> int | None:
        if not_on_host(spec) is not None:
            return None
        return weight_room(spec, free, dtype, context)

    return room
