"""Measure how much GPU memory a step takes besides weights and KV, before the KV cache is allocated."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from engine.kernels.recording import wait_for
from engine.kernels.walks import walk_inputs
from engine.params import SamplingParams
from engine.sampling.sampler import SamplerState, sample
from models.loading.load import is_out_of_memory
from models.recurrences import Recurrence
from models.reference.attention import Walk
from models.reference.decoder import Decoder
from models.spec import Layer

FEWEST = 16
"""The fewest rows to measure with."""


def activation_bytes(model: Decoder, rows: int, samples: int, device: torch.device) -> int:
    """Return the bytes of GPU memory for a chunk of `rows` rows, including logits [samples, vocab] and sampling.

    Attention is left out: it holds less than the layers around it. Memory that stays allocated after a first run, such
    as library workspaces, is not counted, because it is no longer free. Raises any error of the chunk other than a lack
    of memory, and that one too if even FEWEST rows do not fit.
    """

    def run(count: int) -> None:
        ids = torch.zeros(count, dtype=torch.int64, device=device)
        hidden = model.forward(
            ids, torch.arange(count, device=device) % model.positions, _NoAttention(model.spec.layers)
        )
        logits = model.logits(hidden[-samples:])
        params = SamplingParams(top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, seed=0)
        sample(logits[-1], SamplerState.create(params, [0], logits.shape[-1], device))

    return _scaled(run, rows, device)


class _NoAttention:
    """Takes the memory of outputs, and sees no other rows."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.clone()

    def last_rows(self, layer_index: int, x: Tensor, width: int) -> list[Tensor]:
        return [x.clone() for _ in range(width)]

    def latent_rows(self, layer_index: int, rows: Tensor) -> Iterable[tuple[int, Tensor]]:
        return [(len(rows), rows)]

    def recur(self, layer_index: int, rows: Tensor, walk: Walk) -> Tensor:
        spec = self._layers[layer_index].mixer
        assert isinstance(spec, Recurrence)
        out = rows.new_zeros(len(rows), spec.output_size)
        walk_inputs(spec, len(rows), rows)  # kernels take that memory beside the output
        return out


@torch.inference_mode()
def _scaled(run: Callable[[int], None], rows: int, device: torch.device) -> int:
    """Return the bytes of `rows` rows. If that many do not fit, extrapolate from as many as do."""
    count = rows
    while True:
        try:
            run(count)  # compiles, and makes libraries allocate their workspaces
            wait_for(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run(count)
            wait_for(device)
            taken = torch.cuda.max_memory_allocated(device) - before
            torch.cuda.empty_cache()
            return taken * rows // count
        except Exception as error:
            if not is_out_of_memory(error) or count <= FEWEST:
                raise
        torch.cuda.empty_cache()
        count = max(count // 4, FEWEST)
