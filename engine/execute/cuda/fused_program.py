"""The decode step in fused GPU kernels: six launches a layer.

The plain twin is `engine/execute/cuda/plain_program.py`, that is `models/reference/decoder.py`.

    norm, q, k and v        linear_kernel     x -> heads
    position, cache, attend attention_kernel  heads -> partial, lse
    put the chunks together combine_kernel    partial, lse -> mixed
    o, residual             linear_kernel     mixed, x -> x
    norm, gate and up, SiLU linear_kernel     x -> inner
    down, residual          linear_kernel     inner, x -> x

It reads the weights of the plain modules and writes the same KV cache.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import BIASES, lacking
from engine.execute.cuda.plain_program import StepInput
from engine.kernels.triton.attention import attention_kernel, combine_kernel
from engine.kernels.triton.embedding import embedding_kernel
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.linear import linear_kernel
from models.features import Feature
from models.network import AttentionWeights, FeedForwardWeights, Linear, Network, NormWeights
from models.spec import FeedForward

MOST_CHUNKS = 80


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut (see `linear_kernel`)."""

    wk: int
    wn: int
    rows: int
    steps: int


def choose_tile(outputs: int, inputs: int, gated: bool) -> Tile:
    """What was fastest on an H100 for so many rows (pairs of rows where gated) of so many columns."""
    if inputs <= 1024:
        wk, wn, rows, most = (1, 8, 2, 4) if gated else (1, 4, 2, 2)
    elif outputs <= 1024 and inputs > 2048:
        wk, wn, rows, most = 4, 1, 4, 1
    elif gated and inputs <= 2048:
        wk, wn, rows, most = 2, 4, 2, 4
    elif inputs <= 4096:
        wk, wn, rows, most = 4, 1, 4 if gated or outputs <= 1024 else 8, 4
    else:
        wk, wn, rows, most = 8, 1, 2 if gated else 4, 2
    even = (steps for steps in (4, 2) if steps <= most and inputs % (256 * wk * steps) == 0)
    return Tile(wk, wn, rows, next(even, 1))


@dataclass(frozen=True, slots=True)
class Chunking:
    """How the rows of a sequence are cut among the programs of the attention."""

    warps: int
    tile: int
    """Rows that a program holds at once."""
    tiles: int
    """Tiles of a program."""
    chunks: int
    """Programs of a KV head."""

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return self.tile * self.tiles


def choose_chunking(limit: int) -> Chunking:
    """What was fastest on an H100 for up to `limit` rows: at most 80 chunks, so that combining them stays cheap."""
    if limit <= 1280:
        warps, tile, tiles = 8, 128, 1
    elif limit <= 10240:
        warps, tile, tiles = 4, 64, 2
    else:
        warps, tile, tiles = 4, 32, triton.cdiv(limit, MOST_CHUNKS * 32)
    return Chunking(warps, tile, tiles, triton.cdiv(limit, tile * tiles))


SUPPORTED = BIASES | {Feature.HEAD_NORM}


def unsupported(network: Network) -> str | None:
    """Why the fused kernels cannot run this network, as the middle of a sentence; None if they can."""
    lacks = lacking(network.spec, SUPPORTED)
    if lacks is not None:
        return f"the fused kernels do not know {lacks}"
    if network.spec.attention.head_dim not in (64, 128):
        return f"there are no fused kernels for a head_dim of {network.spec.attention.head_dim}"
    return "there are no fused kernels for quantised weights" if network.is_quantized else None


class FusedDecoder:
    """One token through the model, from its `StepInput` to logits on the device."""

    name = "fused kernels"

    def __init__(self, network: Network, cache: KVCache, given: StepInput, pdl: bool) -> None:
        """`pdl` turns programmatic dependent launch on (sm_90 and later)."""
        spec, heads = network.spec, network.spec.attention
        feed, weight = spec.layers[0].feed_forward, network.embedding.data
        assert isinstance(feed, FeedForward)
        self._network = network
        self._eps = spec.final_norm.eps
        self._cache = cache
        self._given = given
        self._pdl = pdl
        self._q_heads, self._kv_heads = heads.heads, heads.kv_heads
        self._dim = heads.head_dim

        def buffer(size: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=weight.device)

        self._x = buffer(spec.hidden_size)
        self._heads = buffer((self._q_heads + 2 * self._kv_heads) * self._dim)
        self._mixed = buffer(self._q_heads * self._dim)
        self._inner = buffer(feed.size)
        self._logits = buffer(spec.vocab_size)
        self._partial = buffer(MOST_CHUNKS * self._q_heads * self._dim, torch.float32)
        self._lse = buffer(MOST_CHUNKS * self._q_heads, torch.float32)

    def run(self, limit: int) -> Tensor:
        """Enqueue a step; logits [vocab_size] in the model's dtype. The row of the token must be below `limit`."""
        x = self._x
        size = x.shape[0]
        kernel = embedding_kernel[(-(-size // 1024),)](
            self._given.token, self._network.embedding.data, x, SIZE=size, BLOCK=1024
        )
        split_alike(kernel)
        cut = choose_chunking(limit)
        for index, layer in enumerate(self._network.layers):
            attention, feed = layer.attention, layer.feed_forward
            assert isinstance(feed, FeedForwardWeights)
            self._linear(x, attention.qkv, self._heads, norm=layer.attention_norm)
            self._attend(index, attention, cut)
            self._combine(cut)
            self._linear(self._mixed, attention.out, x, residual=x)
            self._linear(x, feed.gate_up, self._inner, norm=layer.feed_forward_norm, gated=True)
            self._linear(self._inner, feed.down, x, residual=x)
        self._linear(x, self._network.head, self._logits, norm=self._network.final_norm)
        return self._logits

    def _linear(
        self,
        x: Tensor,
        layer: Linear,
        out: Tensor,
        norm: NormWeights | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> None:
        weight = layer.weight
        outputs, inputs = out.shape[0], weight.shape[1]
        tile = choose_tile(outputs, inputs, gated)
        kernel = linear_kernel[(triton.cdiv(outputs, tile.wn * tile.rows),)](
            x,
            weight,
            layer.bias if layer.bias is not None else weight,
            norm.weight if norm is not None else weight,
            residual if residual is not None else x,
            out,
            N=outputs,
            K=inputs,
            EPS=self._eps,
            NORM=norm is not None,
            BIAS=layer.bias is not None,
            GATED=gated,
            RESIDUAL=residual is not None,
            WK=tile.wk,
            WN=tile.wn,
            ROWS=tile.rows,
            STEPS=tile.steps,
            PDL=self._pdl,
            num_warps=tile.wk * tile.wn,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)

    def _attend(self, index: int, layer: AttentionWeights, cut: Chunking) -> None:
        norm = layer.head_norm
        groups = cut.warps * 256 // self._dim
        kernel = attention_kernel[(self._kv_heads, cut.chunks)](
            self._heads,
            norm if norm is not None else self._heads,
            layer.rotary,
            self._cache.k[index],
            self._cache.v[index],
            self._given.table,
            self._given.counters,
            self._partial,
            self._lse,
            self._dim**-0.5 * math.log2(math.e),
            HQ=self._q_heads,
            HKV=self._kv_heads,
            G=triton.next_power_of_2(self._q_heads // self._kv_heads),
            D=self._dim,
            EPS=self._eps,
            NORM=norm is not None,
            BLOCK=self._cache.block_size,
            W=groups,
            R=cut.tile // groups,
            TILES=cut.tiles,
            PDL=self._pdl,
            num_warps=cut.warps,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)

    def _combine(self, cut: Chunking) -> None:
        kernel = combine_kernel[(self._q_heads,)](
            self._partial,
            self._lse,
            self._given.counters,
            self._mixed,
            HQ=self._q_heads,
            D=self._dim,
            CHUNK=cut.rows,
            CHUNKS=triton.next_power_of_2(cut.chunks),
            PDL=self._pdl,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)
