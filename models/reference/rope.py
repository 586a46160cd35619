"""Rotary position embedding: frequencies, the table of cos and sin, and the rotation."""

import math

import torch
from torch import Tensor

from models.spec import QueryScaling, Rope

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin of the step's positions, each [T, 1, rotated numbers]"""


class StepPositions:
    """The positions of a step, and what layers derive from them; layers that are alike share it."""

    def __init__(self, positions: Tensor) -> None:
        """`positions` is int64 [T]."""
        self._positions = positions
        self._rotations: dict[int, Rotation] = {}
        self._scales: dict[QueryScaling, Tensor] = {}

    def rotation(self, table: Tensor) -> Rotation:
        """Return cos and signed sin of a table [positions, rotated numbers]."""
        if id(table) not in self._rotations:
            self._rotations[id(table)] = select_rotation(table, self._positions)
        return self._rotations[id(table)]

    def query_scale(self, scaling: QueryScaling) -> Tensor:
        """Return the factors of queries, fp32 [T, 1, 1]."""
        if scaling not in self._scales:
            extensions = ((self._positions + scaling.offset) // scaling.positions).float()
            self._scales[scaling] = (1 + scaling.beta * torch.log(1 + extensions)).view(-1, 1, 1)
        return self._scales[scaling]


def inverse_frequencies(rope: Rope, dims: int, positions: int, made_for: int) -> Tensor:
    """Return the radians per position of each rotated pair, fp32 [dims / 2], for a table of `positions` rows.

    "dynamic" (NTK) scaling raises theta with the length of the sequence, and "longrope" has other divisors for long
    sequences. Keys are cached in rotated form, so the length used here is that of the table. "dynamic": up to
    `made_for`, the model's max_positions, theta is unchanged; a longer table is exact at its end. "longrope" (Ding et
    al. 2024): a table longer than the original positions uses the long divisors throughout (but see `for_context`).
    """
    theta = rope.theta
    if rope.kind == "dynamic" and positions > made_for:
        stretch = rope.factor * positions / made_for - (rope.factor - 1.0)
        theta *= stretch ** (dims / (dims - 2))
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    if rope.kind == "longrope":
        long = positions > rope.original_positions
        return 1.0 / (torch.tensor(rope.long_factors if long else rope.frequency_factors) * theta**exponents)
    frequencies = 1.0 / theta**exponents
    if rope.kind == "yarn":
        frequencies = _yarn(theta**exponents, rope, dims)
    if rope.kind == "linear":
        frequencies /= rope.factor
    if rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    if rope.frequency_factors is not None:
        frequencies /= torch.tensor(rope.frequency_factors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend linearly between."""
    original = rope.original_positions
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    slow = wavelengths > original / rope.low_freq_factor
    fast = wavelengths < original / rope.high_freq_factor
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, blended))


def _yarn(wavelengths: Tensor, rope: Rope, dims: int) -> Tensor:
    """Scale frequencies as in Peng et al. 2023, "NTK-by-parts", as transformers does (`_compute_yarn_parameters`).

    Frequencies with many turns within the original positions are kept, those with few are divided by the factor, and
    the dimensions between are blended linearly.
    """

    def dimension(turns: float) -> float:
        """Return the dimension, not a whole number, whose frequency makes `turns` turns."""
        return dims * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def rotary_table(
    rope: Rope, head_dim: int, positions: int, made_for: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return cos and sin of every position side by side, [positions, rotated numbers].

    They are computed in fp32, then cast to `dtype` unless the rotation is exact. Both are multiplied by the attention
    factor, so scores are multiplied by its square.
    """
    frequencies = inverse_frequencies(rope, rope.dims or head_dim, positions, made_for)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return table.to(device=device, dtype=torch.float32 if rope.exact else dtype)


def select_rotation(table: Tensor, positions: Tensor) -> Rotation:
    """Return cos and signed sin, each [T, 1, rotated numbers], of int64 positions [T]."""
    cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate(x: Tensor, rotation: Rotation, interleaved: bool = False) -> Tensor:
    """Return the heads x [T, heads, head_dim], rotated in the dtype of the rotation and rounded to that of x.

    If the rotation is narrower than a head, the rest of the head is unchanged. `interleaved` is as in `Rope`.
    """
    cos, signed_sin = rotation
    dims = cos.shape[-1]
    if dims < x.shape[-1]:
        return torch.cat((rotate(x[..., :dims], rotation, interleaved), x[..., dims:]), dim=-1)
    if interleaved:
        shape = x.shape
        halves = x.reshape(*shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return rotate(halves, rotation).view(*shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
    # The sign is in sin, so a roll replaces "negate one half and swap"; each product is rounded as elsewhere.
    wide = x.to(cos.dtype)
    return (wide * cos).add_(wide.roll(dims // 2, -1).mul_(signed_sin)).to(x.dtype)
