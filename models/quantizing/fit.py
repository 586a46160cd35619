"""Fit 4-bit digits and scales so that the error, weighted by the inputs of each column, is small."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.weights.quantize import divide, to_half

BLOCK = 32
_SHRINK = (1.0, 0.93, 0.86, 0.78)
"""Starting points, as fractions of a block's range. Numbers at its ends may be cut off."""
_ROUNDS = 2
_MOST = 15


@dataclass(frozen=True, slots=True)
class Fitted:
    """Blocks of numbers: scale * digit + low."""

    digits: Tensor
    """fp32 [..., 32] from 0 to 15"""
    scale: Tensor
    """fp32 [..., 1] that fp16 holds"""
    low: Tensor
    """fp32 [..., 1] that fp16 holds, or -scale * a whole number from 0 to 15"""

    @property
    def numbers(self) -> Tensor:
        """The numbers that the blocks stand for, fp32 [..., 32]."""
        return self.digits * self.scale + self.low


def fit(values: Tensor, squares: Tensor, whole: bool) -> Fitted:
    """Fit blocks fp32 [..., 32], with error weights that broadcast to them. `whole`: one digit must mean zero."""
    best, least = None, None
    lowest, highest = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    if whole:
        lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
    for shrink in _SHRINK:
        middle, reach = (lowest + highest) / 2, (highest - lowest) / 2 * shrink
        found = (_whole if whole else _free)(values, squares, middle - reach, 2 * reach / _MOST)
        error = ((values - found.numbers).square() * squares).sum(-1, keepdim=True)
        if best is None or least is None:
            best, least = found, error
        else:
            better = error < least
            best = Fitted(
                torch.where(better, found.digits, best.digits),
                torch.where(better, found.scale, best.scale),
                torch.where(better, found.low, best.low),
            )
            least = torch.minimum(error, least)
    assert best is not None
    return best


def _free(values: Tensor, squares: Tensor, low: Tensor, scale: Tensor) -> Fitted:
    """Fit the line through (digit, number) with the smallest error, and the digits that follow from it."""
    total = squares.sum(-1, keepdim=True)
    low, scale = to_half(low), to_half(scale)
    for _ in range(_ROUNDS):
        digits = _digits(divide(values - low, scale))
        middle = (digits * squares).sum(-1, keepdim=True) / total
        spread = (digits - middle) * squares
        slope = (values * spread).sum(-1, keepdim=True)
        slope = slope / (digits * spread).sum(-1, keepdim=True).clamp_(min=1e-30)
        scale = to_half(torch.where(slope > 0, slope, scale))
        low = to_half(((values - scale * digits) * squares).sum(-1, keepdim=True) / total)
    return Fitted(_digits(divide(values - low, scale)), scale, low)


def _whole(values: Tensor, squares: Tensor, low: Tensor, scale: Tensor) -> Fitted:
    scale = to_half(scale)
    zero = _digits(divide(-low, scale))
    for _ in range(_ROUNDS):
        steps = _digits(divide(values, scale) + zero) - zero
        power = (steps.square() * squares).sum(-1, keepdim=True)
        slope = (values * steps * squares).sum(-1, keepdim=True) / power.clamp_(min=1e-30)
        scale = to_half(torch.where(slope > 0, slope, scale))
    return Fitted(_digits(divide(values, scale) + zero), scale, -scale * zero)


def _digits(x: Tensor) -> Tensor:
    return x.round_().clamp_(0, _MOST)
