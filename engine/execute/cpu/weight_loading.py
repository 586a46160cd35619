"""How a model's weights are held here: as in their files or expanded; on a GPU, or partly in host memory beside it."""

from collections.abc import Callable

import torch

from engine.cache.sizing import weight_room
from engine.device import available_memory, is_amd
from engine.execute.compatibility import not_fused, not_on_host
from engine.execute.cpu import products
from engine.kernels import on_gpu
from engine.kernels.native import library as native
from models.errors import TooLargeError
from models.files import ModelFiles
from models.load import Needs, Room, load_model
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
    needs: Needs | None = None,
) -> tuple[Network, tuple[str, ...]]:
    """Read the weights, with `quantize` as in `models.load`; return the network and notes on how they are held.

    `context` is the most tokens of a text, if a person set it. Experts that do not fit in `room` bytes (without
    `room`: in the memory of the GPU) are held in host memory; on a CPU, all are. `rank` and `needs` are as in
    `models.load`; a part of a divided model has no experts in host memory.

    Quantised weights are expanded if no kernels multiply them, unless `quantize` asks for them. Raises ModelError.
    """
    told: list[str] = []
    if room is None and rank[1] == 1 and device.type == "cuda" and native.problem() is None and not is_amd():
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
            needs=needs,
            packs=packs(dtype, device),
            rank=rank,
        )

    try:
        network = load(quantize)
    except TooLargeError as error:
        if device.type != "cuda" or not any("expanded" in note for note in told):
            raise
        if (why := on_gpu.problem(device)) is None:
            raise
        raise TooLargeError(f"The quantised weights have to be expanded ({why}): {error}") from None
    if device.type == "cpu" and network.is_quantized and (reason := products.problem()) is not None:
        if quantize == "auto":
            network = load("none")
            told.insert(0, f"Quantised weights were expanded, so decoding is slower ({reason}).")
        else:
            told.insert(0, f"Weights are expanded in every step, which is slow ({reason}).")
    return network, tuple(told)


def packs(dtype: torch.dtype, device: torch.device) -> Callable[[ModelSpec], bool] | None:
    """Return a test of whether the GPU kernels for weights in planes run a network; None if they never do here."""
    if dtype != torch.bfloat16 or on_gpu.problem(device) is not None:
        return None
    return lambda spec: not_fused(spec) is None


def _gpu_room(dtype: torch.dtype, device: torch.device, context: int | None) -> Room:
    free = available_memory(device)

    def room(spec: ModelSpec) -> int | None:
        if not_on_host(spec) is not None:
            return None
        return weight_room(spec, free, dtype, context)

    return room
