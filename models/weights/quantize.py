"""Quantise numbers to blocks of 32, and choose which weights of a checkpoint are held in which blocks."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from models.errors import ModelError
from models.units import bytes_text
from models.weights.block_formats import Kind
from models.weights.checkpoint import StoredTensor
from models.weights.formats.blocks import BLOCKS, half_bytes, pack_nibbles
from models.weights.quantized import KINDS
from models.weights.slots import OF_VOCABULARY, Slot

QUANTIZE = ("auto", "none", "int8", "int4")
"""auto: on a CPU, blocks of a GGUF file stay as they are, and those of types that no layer can hold (see KINDS) become
Q8_0; none: all weights become plain numbers; int8, int4: plain weights become blocks at load."""

_CPU = torch.device("cpu")
_BLOCK = 32
HALF_MAX = 65504.0
"""The largest number that blocks can hold, since their scales are fp16."""
_REFINEMENTS = 3
"""How often scale and minimum are refitted to the digits, and the digits to them. For normally distributed weights, the
error of Q4_1 is then 7.3%, compared with 7.8% without refinement and 7.25% with one more."""


def choose_kinds(
    tensors: Sequence[StoredTensor], places: Mapping[str, Slot], quantize: str, device: torch.device
) -> dict[str, Kind]:
    """Return the type in which each matrix of a checkpoint is held, by name; empty if all become plain numbers.

    `places` has the slot of each tensor; `quantize` is one of QUANTIZE. Raises ModelError for what cannot be done.
    """
    kinds = _of_matrices(tensors, places, quantize, device)
    by_head = [tensor for tensor in tensors if tensor.name in places and places[tensor.name].is_by_head]
    return kinds | {t.name: _held(t) for t in by_head if not t.shape[1] % _BLOCK} if kinds else {}


def _held(tensor: StoredTensor) -> Kind:
    return tensor.blocks.kind if tensor.blocks and tensor.blocks.kind in KINDS else Kind.Q8_0


def _of_matrices(
    tensors: Sequence[StoredTensor], places: Mapping[str, Slot], quantize: str, device: torch.device
) -> dict[str, Kind]:
    if quantize not in QUANTIZE:
        raise ModelError(f"Unknown quantisation {quantize!r}; it must be one of {', '.join(QUANTIZE)}.")
    matrices = [tensor for tensor in tensors if tensor.name in places and places[tensor.name].is_matrix]
    packed = any(tensor.blocks is not None for tensor in matrices)
    odd = [tensor for tensor in matrices if tensor.shape[1] % _BLOCK]
    if quantize == "auto":
        if device.type != "cpu" or not packed or odd or any(t.quantized and not t.blocks for t in matrices):
            return {}
        return {t.name: _held(t) for t in matrices}
    if quantize == "none":
        return {}
    if device.type != "cpu":
        raise ModelError(
            f"On a GPU there are no kernels for this model's weights in {quantize}; leave out --quantize "
            f"{quantize}, or add --device cpu."
        )
    if named := quantized_as(matrices):
        raise ModelError(
            f"The weights of this model are quantised already ({named}); leave out --quantize {quantize}."
        )
    if odd:
        raise ModelError(
            f"{odd[0].name} has rows of {odd[0].shape[1]} numbers, not a multiple of {_BLOCK}; leave out "
            f"--quantize {quantize}."
        )
    delicate = set(places) if quantize == "int8" else _delicate(places)
    return {t.name: Kind.Q8_0 if t.name in delicate else Kind.Q4_1 for t in matrices}


def quantized_as(tensors: Iterable[StoredTensor]) -> str | None:
    """Return the format of most of the quantised numbers, for display; None if none are quantised."""
    numbers: Counter[str] = Counter()
    for tensor in tensors:
        if named := tensor.quantized or (tensor.blocks.kind.name if tensor.blocks is not None else None):
            numbers[named] += prod(tensor.shape)
    return numbers.most_common(1)[0][0] if numbers else None


def conversion_note(tensors: Sequence[StoredTensor], kinds: Mapping[str, Kind]) -> str | None:
    """Return a line for the user if a quantised file's weights are held in types other than its own; otherwise None.

    `kinds` is the result of `choose_kinds`.
    """
    changed = [
        (t, t.blocks.kind.name if t.blocks else "unquantised")
        for t in tensors
        if t.name in kinds and (t.blocks is None or t.blocks.kind != kinds[t.name])
    ]
    if not changed or not any(tensor.blocks for tensor in tensors):
        return None
    *most, last = sorted({name for _, name in changed})
    names = f"{', '.join(most)} and {last}" if most else last
    held = sum(t.shape[0] * kinds[t.name].row_bytes(t.shape[1]) for t, _ in changed)
    stored = sum(t.nbytes for t, _ in changed)
    return (
        f"The {names} weights of this file take {bytes_text(held)} of memory as Q8_0, "
        f"{bytes_text(stored)} in the file."
    )


def plain_note(tensors: Sequence[StoredTensor], kinds: Mapping[str, Kind]) -> str | None:
    """Return a line for the user if matrices that are quantised, but not in blocks, become plain numbers; else None."""
    expanded = [t for t in tensors if t.quantized is not None and t.name not in kinds]
    if not expanded:
        return None
    held = 2 * sum(t.shape[0] * t.shape[1] for t in expanded)
    return (
        f"The quantised weights ({expanded[0].quantized}) are expanded and take {bytes_text(held)} in 16 bits, "
        f"{bytes_text(sum(t.nbytes for t in expanded))} in the file."
    )


def _delicate(places: Mapping[str, Slot]) -> set[str]:
    """Return the matrices that stay in 8 bits when the others take 4: together 4% more bytes.

    On SmolLM2-135M, keeping the head lowers the KL divergence from bf16 by a fifth, keeping the attention's values
    lowers it by another third, and keeping the MLP's down projections of the first and last layers by a quarter of
    the rest (benchmarks.quality).
    """
    count = 1 + max((slot.layer for slot in places.values() if slot.layer is not None), default=0)
    ends = {*range(count // 8), *range(count - count // 8, count)}
    return {
        name
        for name, slot in places.items()
        if slot.part in (*OF_VOCABULARY, "v") or (slot.part == "down" and slot.layer in ends)
    }


def packed_rows(tensor: StoredTensor, kind: Kind) -> tuple[Tensor, bool]:
    """Return the blocks of a matrix in `kind`, uint8 [rows, bytes per row]: those of the file if it has this type; and
    whether they are memory of the file, which must not be written. Raises ModelError if the file cannot be read.
    """
    blocks = tensor.blocks
    if blocks is not None and blocks.kind == kind:
        return blocks.rows(_CPU), blocks.is_mapped
    if blocks is not None and (blocks.kind, kind) == (Kind.Q5_0, Kind.Q8_0):
        return _widen_q5_0(blocks.rows(_CPU)), False
    assert tensor.parts is not None
    rows, columns = tensor.shape
    out = torch.empty(rows, kind.row_bytes(columns), dtype=torch.uint8)
    for start, values in tensor.parts():
        out[start : start + len(values)] = quantize(values.float(), kind)
    return out, False


def quantize(values: Tensor, kind: Kind) -> Tensor:
    """Quantise fp32 [rows, columns] to blocks of Q8_0 or Q4_1, uint8 [rows, bytes per row]."""
    blocks = values.reshape(len(values), -1, _BLOCK)
    return _WRITERS[kind](blocks).view(len(values), -1)


def _q8_0(x: Tensor) -> Tensor:
    scale = to_half(x.abs().amax(-1, keepdim=True) / 127)
    digits = _digits(divide(x, scale), -127, 127)
    return torch.cat((half_bytes(scale), digits.to(torch.int8).view(torch.uint8)), dim=-1)


def _q4_1(x: Tensor) -> Tensor:
    low = to_half(x.amin(-1, keepdim=True))
    scale = to_half((x.amax(-1, keepdim=True) - low) / 15)
    mean = x.mean(-1, keepdim=True)
    for _ in range(_REFINEMENTS):
        digits = _digits(divide(x - low, scale), 0, 15)
        # The line through (digit, number) with the smallest squared error.
        middle = digits.mean(-1, keepdim=True)
        spread = digits - middle
        slope = (x * spread).sum(-1, keepdim=True) / spread.square().sum(-1, keepdim=True).clamp_(min=1e-6)
        scale = to_half(slope)
        low = to_half(mean - scale * middle)
    digits = _digits(divide(x - low, scale), 0, 15)
    return join_q4_1(scale, low, digits)


def join_q4_1(scale: Tensor, low: Tensor, digits: Tensor) -> Tensor:
    """Join scale [..., 1], minimum [..., 1] and digits [..., 32] to blocks of Q4_1, uint8 [..., 20]."""
    return torch.cat((half_bytes(scale), half_bytes(low), pack_nibbles(digits)), dim=-1)


def to_half(x: Tensor) -> Tensor:
    """Round to fp16; return fp32."""
    return x.clamp(-HALF_MAX, HALF_MAX).half().float()


def divide(x: Tensor, scale: Tensor) -> Tensor:
    """Divide by scales; where one is 0, return x."""
    return x / torch.where(scale == 0, 1.0, scale)


def _digits(x: Tensor, low: int, high: int) -> Tensor:
    return x.round_().clamp_(low, high)


def _widen_q5_0(data: Tensor) -> Tensor:
    """Convert blocks of Q5_0 to blocks of Q8_0 with the same numbers."""
    blocks = data.view(len(data), -1, Kind.Q5_0.block_bytes)
    digits = BLOCKS[Kind.Q5_0].fields(blocks)[0] - 16
    return torch.cat((blocks[..., :2], digits), dim=-1).view(len(data), -1)


_WRITERS: dict[Kind, Callable[[Tensor], Tensor]] = {Kind.Q8_0: _q8_0, Kind.Q4_1: _q4_1}
