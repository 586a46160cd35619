"""Quantise a network to 4 bits, fitted to the inputs of its matrices on a short text; the costliest keep 8 bits."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from models.errors import ModelError
from models.network import Weight
from models.progress import OnProgress, Progress
from models.quantizing.activations import Activations
from models.quantizing.fit import BLOCK, fit
from models.weights.block_formats import Kind
from models.weights.checkpoint import StoredTensor
from models.weights.quantize import HALF_MAX, choose_kinds, join_q4_1, quantize
from models.weights.slots import OF_VOCABULARY, Slot

TEXT = Path(__file__).parent / "text.txt"
WINDOW = 256
"""The number of tokens of the text that attend to each other."""
_CPU = torch.device("cpu")
_STEP = 1 << 20
"""The number of weights that are fitted at once."""


def windows(ids: Sequence[int], size: int = WINDOW) -> tuple[list[list[int]], list[list[int]]]:
    """Cut the tokens of a text into windows for calibration and, a fifth of all but at least one, for evaluation."""
    parts = [list(ids[start : start + size]) for start in range(0, len(ids), size)]
    parts = [part for part in parts if len(part) > 1]
    last = max(1, len(parts) // 5)
    return (parts[:-last] or parts), parts[-last:]


def calibrate(
    tensors: Sequence[StoredTensor],
    found: Mapping[str, Slot],
    activations: Activations,
    whole: bool,
    on_progress: OnProgress | None = None,
) -> dict[str, Weight]:
    """Return every matrix of a network in blocks of 4 or 8 bits, by name. `whole`: one of the digits must mean zero.

    The total size is that of `--quantize int4`; embeddings and head stay in 8 bits. Raises ModelError for matrices that
    cannot be quantised.
    """
    preset = choose_kinds(tensors, found, "int4", _CPU)
    matrices = {tensor.name: tensor for tensor in tensors if tensor.name in preset}
    done, total = 0, sum(tensor.nbytes for tensor in matrices.values())
    held: dict[str, Weight] = {}
    gains: dict[str, float] = {}
    for name, tensor in matrices.items():
        slot = found[name]
        if slot.part in OF_VOCABULARY:
            held[name] = _in_8_bits(tensor)
        else:
            held[name], gains[name] = _in_4_bits(tensor, slot, activations, whole)
        done += tensor.nbytes
        if on_progress is not None:
            on_progress(Progress("quantize", "weights", done, total))
    budget = sum(
        _extra(matrices[name]) for name, kind in preset.items() if kind == Kind.Q8_0 and name in gains
    )
    for name in sorted(gains, key=lambda name: gains[name] / _extra(matrices[name]), reverse=True):
        if (cost := _extra(matrices[name])) <= budget:
            budget -= cost
            held[name] = _in_8_bits(matrices[name])
    return held


def _extra(tensor: StoredTensor) -> int:
    """Return how many more bytes 8 bits take than 4."""
    rows, columns = tensor.shape
    return rows * (Kind.Q8_0.row_bytes(columns) - Kind.Q4_1.row_bytes(columns))


def _in_8_bits(tensor: StoredTensor) -> Weight:
    blocks = [quantize(values, Kind.Q8_0) for values in _stretches(tensor)]
    return Weight(torch.cat(blocks), Kind.Q8_0, tensor.shape[0], tensor.shape[1])


def _in_4_bits(
    tensor: StoredTensor, slot: Slot, activations: Activations, whole: bool
) -> tuple[Weight, float]:
    """Return the blocks of a matrix, and the increase of a token's KL divergence by their error."""
    place = (slot.group, slot.expert)
    squares, matters = activations.inputs(place), activations.outputs(place)
    squares = torch.ones(tensor.shape[1]) if squares is None else squares
    matters = (
        torch.zeros(tensor.shape[0]) if matters is None else matters[slot.start : slot.start + slot.rows]
    )
    weights = squares.view(-1, BLOCK)
    blocks, cost, start = [], 0.0, 0
    for values in _stretches(tensor):
        cut = values.view(len(values), -1, BLOCK)
        fitted = fit(cut, weights, whole)
        error = ((cut - fitted.numbers).square() * weights).flatten(1).sum(1)
        cost += float((error * matters[start : start + len(values)]).sum())
        start += len(values)
        blocks.append(join_q4_1(fitted.scale, fitted.low, fitted.digits).view(len(values), -1))
    return Weight(torch.cat(blocks), Kind.Q4_1, tensor.shape[0], tensor.shape[1]), cost


def _stretches(tensor: StoredTensor) -> Iterator[Tensor]:
    """Yield fp32 [some rows, columns], in order. Raises ModelError for values that no block holds."""
    assert tensor.parts is not None
    waiting: list[Tensor] = []
    for _, values in tensor.parts():
        if not bool((values.abs() <= HALF_MAX).all()):
            raise ModelError(
                f"{tensor.name} has values that are no numbers or larger than {HALF_MAX:,.0f}, so it cannot be "
                "quantised."
            )
        waiting.append(values.float())
        if sum(part.numel() for part in waiting) >= _STEP:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)
