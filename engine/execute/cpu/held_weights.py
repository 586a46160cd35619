"""How the weights of a model are held here: as they are in their files, or expanded; on a GPU, or in part beside it."""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from engine.cache.sizing import weight_room
from engine.device import FULL_SPEED, available_memory
from engine.execute.compatibility import not_fused, not_on_host
from engine.execute.cpu import products
from engine.kernels.native import library as native
from models.files import ModelFiles
from models.load import Room, load_model
from models.network import Network
from models.progress import OnProgress
from models.spec import ModelSpec


def read_model(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str,
    on_progress: OnProgress | None,
    context: int | None = None,
    room: Room | None = None,
    rank: tuple[int, int] = (0, 1),
) -> tuple[Network, tuple[str, ...]]:
    """Read the weights, `quantize` as in `models.load`: the network, and what people should know of how it is held.
    `context` is how many tokens a text may have, where a person said so. Experts beyond `room` are held in host memory
    (None: beyond what a GPU has; all are on a CPU). `rank` is that of `models.load`; a part
    has no experts in host memory.

    Quantised ones are expanded where no kernels multiply them, unless `quantize` asks for them. Raises ModelError.
    """
    told: list[str] = []
    if room is None and rank[1] == 1 and device.type == "cuda" and native.problem() is None:
        room = _gpu_room(dtype, device, context)

    def load(quantize: str) -> Network:
        told.clear()
        return load_model(
            files,
            dtype=dtype,
            device=device,
            on_progress=on_progress,
            quantize=quantize,
            on_note=told.append,
            longest=context,
            room=room,
            packs=packs(dtype, device),
            rank=rank,
        )

    network = load(quantize)
    if device.type == "cpu" and network.is_quantized and (reason := products.problem()) is not None:
        if quantize == "auto":
            network = load("none")
            told.insert(0, f"Quantised weights were expanded, so decoding is slower ({reason}).")
        else:
            told.insert(0, f"Weights are expanded in every step, which is slow ({reason}).")
    return network, tuple(told)


def packs(dtype: torch.dtype, device: torch.device) -> Callable[[ModelSpec], bool] | None:
    """Whether the kernels of a GPU that read quantised weights in planes run here, for such a network."""
    if device.type != "cuda" or dtype != torch.bfloat16 or find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(device) < FULL_SPEED:
        return None
    return lambda spec: not_fused(spec) is None


def _gpu_room(dtype: torch.dtype, device: torch.device, context: int | None) -> Room:
    free = available_memory(device)

    def room(spec: ModelSpec) -> int | None:
        if not_on_host(spec) is not None:
            return None
        return weight_room(spec, free, dtype, context)

    return room
