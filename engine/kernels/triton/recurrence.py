"""Launches the kernels of recurrences over the rows of prompts."""

import torch
import triton
from torch import Tensor

from engine.kernels.triton.delta_rows import COLUMNS, delta_kernel
from engine.kernels.triton.recurrence_inputs import delta_inputs_kernel
from engine.kernels.walks import Walks, delta_inputs, padded_key_dim
from models.network import DeltaNetWeights
from models.recurrences import DeltaNet

LINES = 16
"""Rows of a program before the recurrence."""
TILE, STAGES, WARPS = 8, 4, 4
"""Rows that are copied at once, how many times, and the warps of a program of a recurrence."""


def walk_delta(
    spec: DeltaNet, weights: DeltaNetWeights, walks: Walks, rows: Tensor, kept: Tensor, states: Tensor
) -> Tensor:
    """Enqueue what `models.reference.delta_net.walk` does for spans: log rows [T, log_size] -> y [T, output_size].

    `kept` [slots, log_size] has earlier log rows, `states` fp32 [slots, *state_shape] the states, which are read and
    saved as `walks` say. y has the dtype of `rows`.
    """
    count, width = walks.places.shape
    key_heads, heads, k, v = spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
    inputs = delta_inputs(spec, count, rows)
    delta_inputs_kernel[(triton.cdiv(count, LINES), key_heads + heads)](
        rows,
        kept,
        walks.places,
        weights.filters,
        weights.dt_bias,
        weights.decay,
        *inputs,
        count,
        KEY_HEADS=key_heads,
        HEADS=heads,
        K=k,
        V=v,
        SIZE=spec.log_size,
        STRIDE=rows.stride(0),
        WIDTH=width,
        LINES=LINES,
        KEYS=padded_key_dim(spec),
        VALUES=triton.next_power_of_2(v),
        num_warps=4,
    )
    out = torch.empty((len(rows), heads * v), dtype=rows.dtype, device=rows.device)
    delta_kernel[(len(walks.spans), heads, triton.cdiv(v, COLUMNS.value * WARPS))](
        *inputs,
        states,
        walks.spans,
        walks.saves,
        out,
        KEY_HEADS=key_heads,
        HEADS=heads,
        K=k,
        V=v,
        KEYS=padded_key_dim(spec),
        ALTERNATING=spec.alternating,
        TILE=TILE,
        STAGES=STAGES,
        WARPS=WARPS,
        num_warps=WARPS,
    )
    return out
