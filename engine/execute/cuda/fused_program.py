"""The decode step in fused GPU kernels, for one token of each of several sequences.

Up to eight rows, six launches a layer, weights read once, and every row gets the bits that it gets alone:

    norm, q, k and v        linear_kernel     x -> heads
    position, cache, attend attention_kernel  heads -> partial, lse
    put the chunks together combine_kernel    partial, lse -> mixed
    o, residual             linear_kernel     mixed, x -> x
    norm, gate and up, SiLU linear_kernel     x -> inner
    down, residual          linear_kernel     inner, x -> x

In layers with experts other kernels take the place of the last two (`experts.py`). A row without a sequence has none.

More rows: rows that several sequences share are attended to once (`shared_prefix.py`), before those that each has
alone. From 17 rows on, products are those of a prompt's layers, with its kernels between them.

The plain twin is `engine/execute/cuda/plain_program.py`, that is `models/reference/decoder.py`. It writes
the same KV cache.
"""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import has_experts, not_fused
from engine.execute.cuda.attend import AttentionInput, AttentionShape, attend
from engine.execute.cuda.experts import ExpertStep, apart
from engine.execute.cuda.prefill import product, run_layers
from engine.execute.cuda.sharing import KVShape, choose_sharing
from engine.execute.cuda.slots import StepInput
from engine.execute.cuda.tiles import (
    FEW,
    FUSED,
    MOST_CHUNKS,
    Chunking,
    choose_chunkings,
    choose_tile,
    most_chunks,
)
from engine.kernels.triton.embedding import embedding_kernel
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.linear import linear_kernel
from models.network import ExpertWeights, Linear, Network, NormWeights
from models.spec import Experts, ModelSpec


def unsupported(network: Network) -> str | None:
    """Why the fused kernels cannot run this network, as the middle of a sentence; None if they can."""
    if network.is_quantized:
        return "there are no fused kernels for quantised weights"
    if network.dtype != torch.bfloat16 and network.device.type == "cuda":
        return f"there are no fused kernels for {str(network.dtype).removeprefix('torch.')} weights"
    reason = not_fused(network.spec)
    if reason is None and apart(network):
        return "the fused kernels do not know experts that do not lie in one tensor"
    return reason


class FusedDecoder:
    """One token of each sequence through the model, from a `StepInput` to logits on the device."""

    name = "fused kernels"

    def __init__(
        self, network: Network, cache: KVCache, given: StepInput, pdl: bool, deterministic: bool = False
    ) -> None:
        """`pdl` turns programmatic dependent launch on (sm_90 and later); `deterministic`: many rows are steps of
        FEW, so that each gets what it gets alone."""
        spec, heads = network.spec, network.spec.attention
        self._network = network
        self._eps = spec.final_norm.eps
        self._cache = cache
        self._given = given
        self._pdl = pdl
        self._deterministic = deterministic
        self._machine = (1, 0)
        if network.device.type == "cuda":
            device = torch.cuda.get_device_properties(network.device)
            self._machine = device.multi_processor_count, device.shared_memory_per_multiprocessor
        self._q_heads, self._kv_heads, self._dim = heads.heads, heads.kv_heads, heads.head_dim
        row_bytes = 2 * self._kv_heads * self._dim * cache.kv.element_size()
        kv = KVShape(self._q_heads // self._kv_heads, cache.block_size, row_bytes)
        self.kv = None if deterministic else kv
        vocab, size = spec.vocab_size, spec.hidden_size
        most = given.active.shape[0]
        few = min(most, FUSED)

        def buffer(*shape: int, dtype: torch.dtype = network.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=network.device)

        self._x = buffer(most, size)
        self._heads = buffer(few, (self._q_heads + 2 * self._kv_heads) * self._dim)
        self._mixed = buffer(most, self._q_heads * self._dim)
        self._inner = {size: buffer(few, size) for size in _sizes(spec)}
        self._experts = ExpertStep(network, few, pdl) if has_experts(spec) else None
        self._logits = buffer(most if deterministic else few, vocab)
        parts = max(
            rows * (most_chunks(rows) if rows > FEW else MOST_CHUNKS)
            for rows in {few, min(most, 31), min(most, 127), most}
        )
        self._partial = buffer(parts * self._q_heads * self._dim, dtype=torch.float32)
        self._lse = buffer(parts * self._q_heads, dtype=torch.float32)

    def run(self, rows: int, limit: int, own: int = 0) -> Tensor:
        """Enqueue a step of the first `rows` rows (a count of a graph, not of sequences); logits [rows, vocab].

        They are in the model's dtype; those of rows without a slot mean nothing. Every token lies in a row of its
        sequence below `limit`. With `own`, sequences read together what `StepInput` says they share, and have less than
        `own` rows before their newest token's beside that.
        """
        size = self._x.shape[1]
        kernel = embedding_kernel[(triton.cdiv(size, 1024), rows)](
            self._given.active,
            self._given.token,
            self._network.embedding.data,
            self._x,
            SIZE=size,
            BLOCK=1024,
        )
        split_alike(kernel)
        if rows > FUSED and not self._deterministic:
            return self._many(rows, choose_chunkings(rows, limit), own)
        given = self._given
        if rows <= FEW or not self._deterministic:
            self._few(given, self._x, self._logits, rows, choose_chunkings(rows, limit), own)
        else:  # every eight rows are a step of their own: what they get does not depend on who is beside them
            for first in range(0, rows, FEW):
                group = replace(given, active=given.active[first:])
                self._few(group, self._x[first:], self._logits[first:], FEW, choose_chunkings(FEW, limit))
        return self._logits[:rows]

    def _few(
        self,
        given: StepInput,
        x: Tensor,
        logits: Tensor,
        rows: int,
        cuts: tuple[Chunking, ...],
        own: int = 0,
    ) -> None:
        for index, layer in enumerate(self._network.layers):
            attention, feed = layer.attention, layer.feed_forward
            self._linear(rows, x, attention.qkv, self._heads, norm=layer.attention_norm)
            self._attend(given, rows, index, self._heads, cuts, own)
            self._linear(rows, self._mixed, attention.out, x, residual=x)
            if isinstance(feed, ExpertWeights):
                self._mix(given, x, rows, index, feed)
                continue
            inner = self._inner[feed.down.columns]
            self._linear(rows, x, feed.gate_up, inner, norm=layer.feed_forward_norm, gated=True)
            self._linear(rows, inner, feed.down, x, residual=x)
        self._linear(rows, x, self._network.head, logits, norm=self._network.final_norm)

    def _mix(self, given: StepInput, x: Tensor, rows: int, index: int, feed: ExpertWeights) -> None:
        """The feed-forward of a layer with experts: what the shared one gives is added last."""
        spec, norm = (
            self._network.spec.layers[index].feed_forward,
            self._network.layers[index].feed_forward_norm,
        )
        assert isinstance(spec, Experts)
        assert norm is not None
        assert self._experts is not None
        self._experts.route(spec, feed, norm, self._eps, given.active, x, rows)
        shared = feed.shared
        if shared is None:
            self._experts.multiply(spec, feed, norm, self._eps, x, rows)
            return
        inner = self._inner[shared.down.columns]
        self._linear(rows, x, shared.gate_up, inner, norm=norm, gated=True)
        self._experts.multiply(spec, feed, norm, self._eps, x, rows)
        self._linear(rows, inner, shared.down, x, residual=x)

    def _many(self, rows: int, cuts: tuple[Chunking, ...], own: int) -> Tensor:
        def attend(index: int, projected: Tensor) -> Tensor:
            self._attend(self._given, rows, index, projected, cuts, own)
            return self._mixed[:rows]

        return product(self._network.head, run_layers(self._network, self._x[:rows], attend))

    def _linear(
        self,
        rows: int,
        x: Tensor,
        layer: Linear,
        out: Tensor,
        norm: NormWeights | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> None:
        weight, bias = layer.weight, layer.bias
        outputs, inputs = out.shape[1], weight.shape[1]
        tile = choose_tile(outputs, inputs, gated)
        kernel = linear_kernel[(triton.cdiv(outputs, tile.outputs(gated)),)](
            x,
            weight,
            bias if bias is not None else weight,
            norm.weight if norm is not None else weight,
            residual if residual is not None else x,
            out,
            COUNT=rows,
            N=outputs,
            K=inputs,
            EPS=self._eps,
            NORM=norm is not None,
            BIAS=bias is not None,
            GATED=gated,
            RESIDUAL=residual is not None,
            FOLDS=tile.folds,
            WARPS=tile.warps,
            TILES=tile.tiles,
            AHEAD=tile.ahead,
            PDL=self._pdl,
            num_warps=tile.warps,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)

    def _attend(
        self,
        given: StepInput,
        rows: int,
        index: int,
        heads: Tensor,
        cuts: tuple[Chunking, ...],
        own: int = 0,
    ) -> None:
        """heads [rows, ...] -> `_mixed`; the K and V of the new tokens go into the cache."""
        layer = self._network.layers[index].attention
        norm = layer.head_norm
        assert layer.rotary is not None
        shape = AttentionShape(
            self._q_heads,
            self._kv_heads,
            self._dim,
            self._cache.block_size,
            self._eps if norm is not None else None,
            self._pdl,
            *self._machine,
        )
        step = AttentionInput(
            heads,
            norm,
            layer.rotary,
            self._cache.k[index],
            self._cache.v[index],
            given.active,
            given.tables,
            given.counters,
            self._partial,
            self._lse,
        )
        sharing = choose_sharing(rows, self.kv.group) if own and self.kv is not None else None
        attend(shape, step, self._mixed, rows, cuts, sharing, own, given.shared, given.members)


def _sizes(spec: ModelSpec) -> set[int]:
    """The sizes of all dense feed-forwards, shared experts among them."""
    feeds = (layer.feed_forward for layer in spec.layers)
    dense = (feed.shared if isinstance(feed, Experts) else feed for feed in feeds)
    return {feed.size for feed in dense if feed is not None}
