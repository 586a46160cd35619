"""Rotary position embedding: frequencies, the table of cos and sin, and the rotation."""

import math

import torch
from torch import Tensor

from models.families.config import ModelConfig


def inverse_frequencies(config: ModelConfig, positions: int) -> Tensor:
    """Radians per position of each rotated pair, fp32 [head_dim / 2], for a table of `positions` rows.

    "dynamic" (NTK) scaling raises theta with the length of the sequence. A table is computed once, so the
    length used here is that of the table: up to max_position_embeddings theta is the plain one, and a longer
    table has theta scaled for its full length (what transformers computes for a sequence of that length).
    """
    rope = config.rope_parameters
    dim = config.head_dim
    theta = rope.rope_theta
    if rope.rope_type == "dynamic" and positions > config.max_position_embeddings:
        stretch = rope.factor * positions / config.max_position_embeddings - (rope.factor - 1.0)
        theta *= stretch ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / theta**exponents
    if rope.rope_type == "linear":
        frequencies /= rope.factor
    if rope.rope_type == "llama3":
        frequencies = _llama3(frequencies, config)
    if rope.frequency_factors is not None:
        frequencies /= torch.tensor(rope.frequency_factors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a linear blend between."""
    rope = config.rope_parameters
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    slow = wavelengths > original / rope.low_freq_factor
    fast = wavelengths < original / rope.high_freq_factor
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, blended))


def rotary_table(config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """cos and sin of every position side by side, [positions, head_dim]; computed in fp32, then cast."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(config, positions))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=dtype)


def select_rotation(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin [T, 1, head_dim] of int64 positions [T]; once per step, used by every layer."""
    cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the heads x [T, heads, head_dim] in their own dtype; a new tensor of the same shape."""
    cos, signed_sin = rotation
    # The sign sits in sin, so a roll replaces "negate one half and swap"; each product rounds as elsewhere.
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed_sin))
