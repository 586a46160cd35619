"""How the weights of a model are held here: as they are in their files, or expanded."""

import torch

from engine.execute.cpu import products
from models.files import ModelFiles
from models.load import load_model
from models.network import Network
from models.progress import OnProgress


def read_model(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str,
    on_progress: OnProgress | None,
    context: int | None = None,
) -> tuple[Network, tuple[str, ...]]:
    """Read the weights, `quantize` as in `models.load`: the network, and what people should know of how it is held.
    `context` is how many tokens a text may have, where a person said so.

    Quantised ones are expanded where no native kernels multiply them, unless `quantize` asks for them. Raises
    ModelError.
    """
    told: list[str] = []

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
        )

    network = load(quantize)
    if network.is_quantized and (reason := products.problem()) is not None:
        if quantize == "auto":
            network = load("none")
            told.insert(0, f"Quantised weights were expanded, so decoding is slower ({reason}).")
        else:
            told.insert(0, f"Weights are expanded in every step, which is slow ({reason}).")
    return network, tuple(told)
