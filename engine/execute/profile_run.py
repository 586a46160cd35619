"""How much memory a step takes on a GPU beside weights and KV: measured, before there is a KV cache."""

from collections.abc import Callable

import torch

from engine.params import SamplingParams
from engine.sampling.sampler import SamplerState, sample
from models.load import is_out_of_memory
from models.reference.decoder import Decoder

FEWEST = 16
"""Rows that are computed at least to find out."""


def activation_bytes(model: Decoder, rows: int, samples: int, device: torch.device) -> int:
    """Bytes that a chunk of `rows` rows takes on a GPU, logits [samples, vocab] and the drawing of a token included.

    Without attention, which holds less than what is around it. What is kept once it ran (the workspaces of libraries)
    is not counted: it is no longer free. Raises what a chunk raises that fails for another reason than memory.
    """

    def run(count: int) -> None:
        ids = torch.zeros(count, dtype=torch.int64, device=device)
        hidden = model.forward(
            ids, torch.arange(count, device=device) % model.positions, lambda _, q, k, v: q.clone()
        )
        logits = model.logits(hidden[-samples:])
        params = SamplingParams(top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, seed=0)
        sample(logits[-1], SamplerState.create(params, [0], logits.shape[-1], device))

    return _scaled(run, rows, device)


@torch.inference_mode()
def _scaled(run: Callable[[int], None], rows: int, device: torch.device) -> int:
    """The bytes of `rows` rows. Where so many do not fit, they are judged by as many as do."""
    count = rows
    while True:
        try:
            run(count)  # compiles, and has libraries take their workspaces
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run(count)
            torch.cuda.synchronize(device)
            taken = torch.cuda.max_memory_allocated(device) - before
            torch.cuda.empty_cache()
            return taken * rows // count
        except Exception as error:
            if not is_out_of_memory(error) or count <= FEWEST:
                raise
        torch.cuda.empty_cache()
        count = max(count // 4, FEWEST)
