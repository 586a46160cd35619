"""Launches recurrences in decode steps."""

import torch
import triton
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.cuda.add_norm import Normed
from engine.execute.cuda.prefill import Projected
from engine.execute.cuda.slots import StepInput
from engine.kernels.triton.delta_rule import warp_values
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.recurrence import gated_norm
from engine.kernels.triton.recurrence_step import Recurring, recur_kernel
from models.network import DeltaNetWeights, Mamba2Weights, MixerWeights
from models.recurrences import DeltaNet, Mamba2, Recurrence
from models.spec import Mixer, Norm

AT_ONCE = 128
"""Programs that run at once on most GPUs if one fits on a multiprocessor."""
LEAST_PART, MOST_NUMBERS = 32, 16_384
"""The values of a program where the size of a head is no power of two, and the most numbers of a state in a program."""


def norm_after(spec: Mixer | None, weights: MixerWeights | None) -> Normed | None:
    """Return the norm that the output projection of Mamba-2 applies to what it reads; None if there is none.

    It covers all heads. A norm of groups, or before the gate, is a launch of its own.
    """
    if not isinstance(spec, Mamba2) or not isinstance(weights, Mamba2Weights):
        return None
    if spec.norm_eps is None or weights.norm is None or _is_apart(spec):
        return None
    return Norm(spec.norm_eps), weights.norm


def recur(
    spec: Recurrence,
    weights: DeltaNetWeights | Mamba2Weights,
    given: StepInput,
    cache: KVCache,
    index: int,
    projected: Projected,
    out: Tensor,
    pdl: bool,
) -> None:
    """Enqueue layer `index` of a step between its products, into out [rows, output_size], but for `norm_after`.

    The rows go into the log in the cache, and the states to where `given.moves` says.
    """
    assert cache.states is not None
    tables, rows = given.tables[cache.groups[index]], len(projected.first)
    sizes = _sizes(spec)
    part = program_values(sizes)
    programs, warps = sizes.heads * triton.cdiv(sizes.values, part), part // warp_values(sizes.keys)
    limit = {"maxnreg": 128} if programs * rows > AT_ONCE else {}  # so that two fit on a multiprocessor
    y = torch.empty(rows, spec.output_size, device=out.device) if _is_apart(spec) else out
    delta = weights if isinstance(weights, DeltaNetWeights) else None
    mamba = weights if isinstance(weights, Mamba2Weights) else None
    kernel = recur_kernel[(programs, rows)](
        projected.first,
        projected.gates,
        weights.filters,
        None if mamba is None else mamba.conv_bias,
        weights.dt_bias,
        weights.decay,
        None if mamba is None else mamba.skip,
        None if delta is None else delta.norm.weight,
        cache.k[index],
        cache.states.layers[index],
        given.active,
        tables,
        given.counters,
        given.moves,
        y,
        tables.shape[1],
        SIZES=sizes,
        BLOCK=cache.block_size,
        PART=part,
        WARPS=warps,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
        **limit,
    )
    split_alike(kernel)
    if y is not out:
        gated_norm(spec, weights, y, projected.first, out, pdl)


def program_values(sizes: Recurring) -> int:
    """Return how many values of a head a program has: as many as its registers have room for, with few left over."""
    whole: int = triton.next_power_of_2(sizes.values)
    if sizes.is_delta:  # whose norm covers all values of a head
        return whole
    return min(whole, MOST_NUMBERS // sizes.keys if whole == sizes.values else LEAST_PART)


def _is_apart(spec: Recurrence) -> bool:
    """Return whether the norm and the gate are a launch of their own."""
    return isinstance(spec, Mamba2) and spec.norm_eps is not None and (spec.groups > 1 or spec.norms_first)


def _sizes(spec: Recurrence) -> Recurring:
    if isinstance(spec, DeltaNet):
        heads = spec.key_heads, spec.value_heads
        sizes = spec.key_dim, spec.value_dim, spec.conv_width
        return Recurring(*heads, *sizes, True, spec.alternating, eps=spec.norm_eps)
    sizes = spec.state_size, spec.head_dim, spec.conv_width
    least, most = spec.step_limits
    z, x, b, c, dt = spec.multipliers or (1.0,) * 5
    return Recurring(
        spec.groups,
        spec.heads,
        *sizes,
        False,
        least=least,
        most=most,
        gates=not _is_apart(spec),
        z_factor=z,
        q_factor=c,
        k_factor=b,
        v_factor=x,
        dt_factor=dt,
    )
