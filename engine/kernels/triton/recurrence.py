"""Launches the kernels of recurrences over the rows of prompts."""

import torch
import triton
from torch import Tensor

from engine.kernels.triton.gated_norm import gated_norm_kernel
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.recurrence_inputs import delta_inputs_kernel, mamba_inputs_kernel
from engine.kernels.triton.recurrence_rows import COLUMNS, walk_kernel
from engine.kernels.walks import Walks, walk_inputs, walk_shape
from models.network import DeltaNetWeights, Mamba2Weights
from models.recurrences import DeltaNet, Mamba2, Recurrence

LINES = 16
"""Rows of a program before and after the recurrence."""
NUMBERS = 4096
"""Numbers of a program after it, unless a head has more."""
TILE, STAGES, WARPS = 8, 4, 4
"""Rows that are copied at once, how many times, and the warps of a program of a recurrence."""
REGISTERS = 168
"""The most registers of a thread of a recurrence: with fewer, as compilers choose, sums of neighbouring rows wait for
each other."""


def walk_rows(
    spec: Recurrence,
    weights: DeltaNetWeights | Mamba2Weights,
    walks: Walks,
    rows: tuple[Tensor, Tensor],
    log: Tensor,
    states: Tensor,
    multiplies: bool = False,
) -> Tensor:
    """Enqueue what `walk` of `models.reference.delta_net` or `mamba2` does for the spans of a step -> y
    [T, output_size].

    `rows` are what the log rows of the step begin with, [T, conv_size or more], and their gates [T, all]; they are
    written into log [slots, log_size], which has the rows before them. `states` fp32 [slots, *state_shape] are read and
    saved as `walks` say. With `multiplies`, the multipliers of Mamba-2 are applied to the rows. y has the dtype of the
    rows, and that of Mamba-2 is fp32.
    """
    (own, gates), (count, width), shape = rows, walks.places.shape, walk_shape(spec)
    sizes = {"HEADS": shape.heads, "K": shape.keys, "V": shape.values, "KEYS": shape.padded_keys}
    cut = {"SIZE": spec.log_size, "WIDTH": width, "LINES": LINES}
    cut |= {"STRIDE": own.stride(0), "GATES": gates.stride(0)}
    cut["VALUES"] = triton.next_power_of_2(shape.values)
    inputs = walk_inputs(spec, count, own)
    grid = (triton.cdiv(count, LINES), shape.key_heads + shape.heads)
    given = own, gates, log, walks.places, walks.slots, weights.filters
    rest = weights.dt_bias, weights.decay, *inputs, count
    if isinstance(weights, DeltaNetWeights):
        delta_inputs_kernel[grid](*given, *rest, KEY_HEADS=shape.key_heads, **sizes, **cut, num_warps=4)
    else:
        assert not isinstance(spec, DeltaNet)
        least, most = spec.step_limits
        limits = {"LEAST": least, "MOST": most}
        factors = spec.multipliers if multiplies and spec.multipliers is not None else (1.0,) * 5
        limits |= dict(zip(("X", "B", "C", "DT"), factors[1:], strict=True))
        mamba_inputs_kernel[grid](
            *given, weights.conv_bias, *rest, GROUPS=shape.key_heads, **sizes, **cut, **limits, num_warps=4
        )
    is_delta = isinstance(spec, DeltaNet)
    dtype = own.dtype if is_delta else torch.float32
    make = torch.zeros if walks.is_padded else torch.empty
    out = make((len(own), spec.output_size), dtype=dtype, device=own.device)
    walk_kernel[(len(walks.spans), shape.heads, triton.cdiv(shape.values, COLUMNS.value * WARPS))](
        *inputs,
        None if isinstance(weights, DeltaNetWeights) else weights.skip,
        states,
        walks.spans,
        walks.saves,
        out,
        KEY_HEADS=shape.key_heads,
        **sizes,
        DELTA=is_delta,
        ALTERNATING=isinstance(spec, DeltaNet) and spec.alternating,
        TILE=TILE,
        STAGES=STAGES,
        WARPS=WARPS,
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
    return out


def gated_norm(
    spec: Recurrence,
    weights: DeltaNetWeights | Mamba2Weights,
    y: Tensor,
    z: Tensor,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Enqueue what `gated_norm` of `models.reference.delta_net` or `mamba2` does, for z before its multiplier.

    z may be columns of a larger tensor. With `out`, that is written, and a row has the bits that it has alone.
    """
    is_delta = isinstance(spec, DeltaNet)
    heads = spec.value_heads if isinstance(spec, DeltaNet) else spec.groups
    size = spec.output_size // heads
    lines = 1 if out is not None else 1 << (max(1, min(LINES, NUMBERS // size)).bit_length() - 1)
    if out is None:
        out = torch.empty(y.shape, dtype=z.dtype, device=y.device)
    kernel = gated_norm_kernel[(triton.cdiv(len(y), lines), heads)](
        y,
        z,
        None if weights.norm is None or spec.norm_eps is None else weights.norm.weight,
        out,
        len(y),
        HEADS=heads,
        V=size,
        VALUES=triton.next_power_of_2(size),
        STRIDE=z.stride(0),
        EPS=spec.norm_eps,
        LINES=lines,
        DELTA=is_delta,
        FIRST=isinstance(spec, DeltaNet) or spec.norms_first,
        PDL=pdl,
        FACTOR=spec.multipliers[0] if isinstance(spec, Mamba2) and spec.multipliers is not None else 1.0,
        num_warps=4,
        launch_pdl=pdl,
    )
    if pdl:
        split_alike(kernel)
    return out
