"""Launches gated delta nets in decode steps."""

from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.cuda.slots import StepInput
from engine.execute.cuda.tiles import FEW
from engine.kernels.triton.delta_net import delta_net_kernel
from engine.kernels.triton.delta_rule import WARP_VALUES
from engine.kernels.triton.launch import split_alike
from models.network import DeltaNetWeights
from models.recurrences import DeltaNet


def recur(
    spec: DeltaNet,
    weights: DeltaNetWeights,
    given: StepInput,
    cache: KVCache,
    index: int,
    projected: tuple[Tensor, Tensor],
    out: Tensor,
    pdl: bool,
) -> None:
    """Enqueue layer `index` of a step between its products.

    `projected` are q, k, v and z [rows, conv_size + output_size], and b and a [rows, 2 * value_heads]; out [rows,
    output_size]. The rows go into the log in the cache, and the states to where `given.moves` says.
    """
    assert cache.states is not None
    inputs, gates = projected
    tables = given.tables[cache.groups[index]]
    limit = {"maxnreg": 128} if len(inputs) > FEW else {}  # so that two programs fit on a multiprocessor
    kernel = delta_net_kernel[(spec.value_heads, len(inputs))](
        inputs,
        gates,
        weights.filters,
        weights.dt_bias,
        weights.decay,
        weights.norm.weight,
        cache.k[index],
        cache.states.layers[index],
        given.active,
        tables,
        given.counters,
        given.moves,
        out,
        tables.shape[1],
        KEY_HEADS=spec.key_heads,
        VALUE_HEADS=spec.value_heads,
        KEYS=spec.key_dim,
        VALUES=spec.value_dim,
        WIDTH=spec.conv_width,
        ALTERNATING=spec.alternating,
        SCALE=spec.key_dim**-0.5,
        EPS=spec.norm_eps,
        BLOCK=cache.block_size,
        WARPS=spec.value_dim // WARP_VALUES,
        PDL=pdl,
        num_warps=spec.value_dim // WARP_VALUES,
        launch_pdl=pdl,
        **limit,
    )
    split_alike(kernel)
