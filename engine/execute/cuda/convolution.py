"""Launches short convolutions: where rows find the inputs before them, once for a step, and the layers."""

import triton
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.cuda.slots import StepInput
from engine.kernels.triton.convolution import convolve_kernel, seen_kernel
from engine.kernels.triton.launch import split_alike
from models.network import ConvolutionWeights
from models.spec import ModelSpec, ShortConvolution

BLOCK = 256
"""Channels that a program computes."""


def most_seen(spec: ModelSpec) -> int:
    """Return how many rows any convolution sees, rounded up to a power of two; 0 if there is none."""
    widths = [layer.mixer.width for layer in spec.layers if isinstance(layer.mixer, ShortConvolution)]
    return int(triton.next_power_of_2(max(widths))) if widths else 0


def convolution_groups(spec: ModelSpec, cache: KVCache) -> list[int]:
    """Return the groups of layers in which there are convolutions."""
    layers = zip(spec.layers, cache.groups, strict=True)
    return sorted({group for layer, group in layers if isinstance(layer.mixer, ShortConvolution)})


def seen_in_step(given: StepInput, group: int, seen: Tensor, block_size: int) -> None:
    """Enqueue `seen_rows` for the rows of a decode step in a group into seen int32 [rows, `most_seen`]."""
    rows, most = seen.shape
    tables = given.tables[group]
    kernel = seen_kernel[(rows,)](
        given.active,
        given.counters,
        tables,
        seen,
        tables.shape[1],
        BLOCK=block_size,
        MOST=most,
        num_warps=1,
    )
    split_alike(kernel)


def convolve(
    weights: ConvolutionWeights,
    projected: Tensor,
    kept: Tensor,
    seen: Tensor,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Enqueue a layer between its products: projected [T, 3 size] -> out [T, size].

    `kept` [slots, 1, size] is its part of the cache, `seen` int32 [T or more, `most_seen`] is `seen_rows`.
    """
    size, width = weights.filters.shape
    kernel = convolve_kernel[(len(projected), triton.cdiv(size, BLOCK))](
        projected,
        weights.filters,
        weights.bias,
        kept,
        seen,
        out,
        SIZE=size,
        WIDTH=width,
        MOST=seen.shape[1],
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    if pdl:
        split_alike(kernel)
