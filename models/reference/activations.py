"""The activations of feed-forwards in plain torch."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from models.spec import XIELU_BETA, Activation, FeedForward

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Those without learned parameters."""

_XIELU_EPS = -1e-6


def activated(spec: FeedForward, inner: Tensor) -> Tensor:
    """Apply the activation to gate and up, or to up alone: [T, 2 size] or [T, size] -> [T, size]."""
    if not spec.gated:
        return _activate(spec, inner)
    gate, up = inner.chunk(2, dim=-1)
    if spec.cutoff is not None:
        deviation = gate.std(-1, keepdim=True, correction=0)
        gate = F.relu(gate - (gate.mean(-1, keepdim=True) + deviation * rounded(spec.cutoff, gate)))
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return _activate(spec, gate).mul_(up + spec.up_offset if spec.up_offset else up)


def _activate(spec: FeedForward, x: Tensor) -> Tensor:
    if spec.gain != 1.0:
        return x * torch.sigmoid(x * spec.gain)
    return ACTIVATIONS[spec.activation](x)


def xielu(alphas: Tensor, x: Tensor) -> Tensor:
    """Apply xIELU (Huang and Schlag 2024) in the dtype of x: a parabola above 0, and an exponential below."""
    alpha_p, alpha_n = F.softplus(alphas)
    alpha_n = XIELU_BETA + alpha_n
    below = (torch.expm1(x.clamp(max=_XIELU_EPS)) - x) * alpha_n
    return torch.where(x > 0, alpha_p * x * x, below) + XIELU_BETA * x


def rounded(factor: float, x: Tensor) -> float:
    """Round a constant to the dtype of x, as in training."""
    return float(torch.tensor(factor, dtype=x.dtype))
