"""Launches the kernels of recurrences over the rows of prompts."""

import torch
import triton
from torch import Tensor

from engine.kernels.triton.recurrence_inputs import delta_inputs_kernel, mamba_inputs_kernel
from engine.kernels.triton.recurrence_rows import COLUMNS, walk_kernel
from engine.kernels.walks import Walks, walk_inputs, walk_shape
from models.network import DeltaNetWeights, Mamba2Weights
from models.recurrences import DeltaNet, Recurrence

LINES = 16
"""Rows of a program before the recurrence."""
TILE, STAGES, WARPS = 8, 4, 4
"""Rows that are copied at once, how many times, and the warps of a program of a recurrence."""


def walk_rows(
    spec: Recurrence,
    weights: DeltaNetWeights | Mamba2Weights,
    walks: Walks,
    rows: Tensor,
    kept: Tensor,
    states: Tensor,
) -> Tensor:
    """Enqueue what `walk` of `models.reference.delta_net` or `mamba2` does for spans: log rows [T, log_size] -> y
    [T, output_size].

    `kept` [slots, log_size] has earlier log rows, `states` fp32 [slots, *state_shape] the states, which are read and
    saved as `walks` say. y has the dtype of `rows`, and that of Mamba-2 is fp32.
    """
    (count, width), shape = walks.places.shape, walk_shape(spec)
    sizes = {"HEADS": shape.heads, "K": shape.keys, "V": shape.values, "KEYS": shape.padded_keys}
    cut = {"SIZE": spec.log_size, "STRIDE": rows.stride(0), "WIDTH": width, "LINES": LINES}
    cut["VALUES"] = triton.next_power_of_2(shape.values)
    inputs = walk_inputs(spec, count, rows)
    grid = (triton.cdiv(count, LINES), shape.key_heads + shape.heads)
    given = rows, kept, walks.places, weights.filters
    own = weights.dt_bias, weights.decay, *inputs, count
    if isinstance(weights, DeltaNetWeights):
        delta_inputs_kernel[grid](*given, *own, KEY_HEADS=shape.key_heads, **sizes, **cut, num_warps=4)
    else:
        assert not isinstance(spec, DeltaNet)
        least, most = spec.step_limits
        limits = {"LEAST": least, "MOST": most}
        mamba_inputs_kernel[grid](
            *given, weights.conv_bias, *own, GROUPS=shape.key_heads, **sizes, **cut, **limits, num_warps=4
        )
    is_delta = isinstance(spec, DeltaNet)
    dtype = rows.dtype if is_delta else torch.float32
    out = torch.empty((len(rows), spec.output_size), dtype=dtype, device=rows.device)
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
    )
    return out
