"""How the weights of a model are held here: as they are, packed for torch's operators, or expanded."""

from dataclasses import dataclass

import torch

from engine.execute.cpu.executor import supports
from models.hub.sources import ModelFiles
from models.load import load_model
from models.progress import OnProgress
from models.reference.decoder import DecoderModel
from models.weights import packed
from models.weights.quantized import quantized_weights, weight_bytes


@dataclass(frozen=True, slots=True)
class HeldModel:
    """A model that was read."""

    network: DecoderModel
    nbytes: int
    """Bytes of its weights, with what was packed beside them."""
    notes: tuple[str, ...]
    """What a person should know about how they are held."""


def read_model(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str,
    on_progress: OnProgress | None,
) -> HeldModel:
    """Read the weights; quantised ones that the native kernels cannot decode are packed or expanded.

    `quantize` as in `models.load`. Raises ModelError.
    """
    told: list[str] = []

    def load(quantize: str) -> DecoderModel:
        told.clear()
        return load_model(
            files,
            dtype=dtype,
            device=device,
            on_progress=on_progress,
            quantize=quantize,
            on_note=told.append,
        )

    network, slower, packed_bytes = load(quantize), "", 0
    if quantized_weights(network) and (reason := supports(network)) is not None:
        can_pack = packed.problem(dtype) is None
        if can_pack and (quantize != "auto" or packed.faster_than_expanded()):
            packed_bytes = packed.use_packed(network).nbytes
            slower = f"Decoding uses torch's packed operators, which are slower ({reason})."
        elif quantize == "auto":
            network = load("none")
            slower = f"Quantised weights were expanded, so decoding is slower ({reason})."
    notes = (slower, *told) if slower else tuple(told)
    return HeldModel(network, weight_bytes(network) + packed_bytes, notes)
