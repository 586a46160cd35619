"""Norms in plain torch (see `models.spec.Norm`)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.network import NormWeights
from models.spec import Norm


def apply_norm(
    spec: Norm | None, weights: NormWeights | None, x: Tensor, squares: Tensor | None = None
) -> Tensor:
    """Norm [..., size] -> the same shape, with a weight [size], or [heads, size] for the heads of [T, heads, size].

    Computed in fp32, cast back, then multiplied by the weight, as networks were trained. `squares` fp32 [..., 1] is the
    mean square for an RMSNorm of which x is only a part.
    """
    if spec is None or weights is None:
        return x
    size, weight = x.shape[-1:], weights.weight
    if spec.offset or spec.rounds_last:  # checkpoints that store an offset multiply before they cast back
        out = (scaled(spec, x.float(), squares) * (weight.float() + spec.offset)).to(x.dtype)
    elif spec.kind == "layer" and weight.shape == size:
        return F.layer_norm(x, size, weight, weights.bias, spec.eps)
    else:
        out = scaled(spec, x, squares) * weight
    return out if weights.bias is None else out + weights.bias


def scaled(spec: Norm, x: Tensor, squares: Tensor | None) -> Tensor:
    """Apply a norm without its weight: [..., size] -> the same shape. For `squares` see `apply_norm`."""
    if squares is not None:
        return (x.float() * torch.rsqrt(squares + spec.eps)).to(x.dtype)
    norm = F.layer_norm if spec.kind == "layer" else F.rms_norm
    return norm(x, x.shape[-1:], eps=spec.eps)
