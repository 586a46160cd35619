"""Latent attention of a decode step, between the two products around it (see `models.spec.LatentAttention`).

    norm, q_b           linear_kernel   q -> heads
    k_b of each head    linear_kernel   heads -> absorbed
    row, cache, attend  latent_kernel   absorbed, heads, kv_a -> partial, lse
    combine the chunks  combine_kernel  partial, lse -> mixed
    v_b of each head    linear_kernel   mixed -> out

With a single short sequence, the product with v_b combines the chunks.

The plain twin is `models/reference/latent.py`. `step_attention.py` calls it.
"""

import math

import torch
import triton
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.cuda.decode_attention import Partials, padded_parts
from engine.execute.cuda.prefill import Projected
from engine.execute.cuda.slots import StepInput
from engine.execute.cuda.step_products import StepProducts
from engine.execute.cuda.tiles import FEW
from engine.kernels.triton.combine import combine_kernel
from engine.kernels.triton.latent_attention import LANES, latent_kernel
from engine.kernels.triton.launch import shared_bytes, split_alike
from engine.kernels.triton.linear import HeadInputs
from models.network import LatentWeights, Linear, Network
from models.spec import LatentAttention
from models.weights.formats.blocks import BLOCKS

CHUNK = 64
"""Rows of the smallest chunk of a sequence."""
MOST_CHUNKS, MOST_PARTS = 64, 512
"""The most chunks of each of up to FEW sequences, and of all sequences of a larger step."""
TILE, LARGE = 64, 170 << 10
"""Rows that a program holds at once, and the bytes of shared memory in which two such tiles fit, and the queries; with
less, half as many rows."""
IN_ORDER = 20
"""Up to this many chunks of a sequence, those of the two smallest contexts, are added up one after the other. The
product with v_b can do the same."""
WARPS = 4


def most_chunks(rows: int) -> int:
    """Return the most chunks that each of `rows` sequences is cut into."""
    return MOST_CHUNKS if rows <= FEW else max(MOST_PARTS // rows, 2)


class StepLatents:
    """Attends to latents in all layers that have them, which share its buffers."""

    def __init__(
        self, network: Network, cache: KVCache, rows: int, products: StepProducts, pdl: bool
    ) -> None:
        """Allocate for steps of up to `rows` rows."""
        specs = [layer.mixer for layer in network.spec.layers if isinstance(layer.mixer, LatentAttention)]

        def buffer(*shape: int, dtype: torch.dtype = network.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=network.device)

        self._network = network
        self._cache = cache
        self._products = products
        self._pdl = pdl
        self._is_large = shared_bytes(network.device) >= LARGE
        heads = max(spec.heads for spec in specs)
        ranks = max(spec.heads * spec.kv_rank for spec in specs)
        self._queries = buffer(rows * max(spec.heads * spec.head_dim for spec in specs))
        self._absorbed, self._mixed = buffer(rows * ranks), buffer(rows * ranks)
        parts = max(count * most_chunks(count) for count in {min(rows, FEW), rows})
        self._partial = buffer(parts * ranks, dtype=torch.float32)
        self._lse = buffer(parts * heads, dtype=torch.float32)

    def run(
        self,
        given: StepInput,
        index: int,
        projected: Projected,
        limit: int,
        out: Tensor,
        alone: StepInput | None = None,
    ) -> None:
        """Enqueue layer `index` between its products, for tokens in rows below `limit`, into out [rows, heads * v_dim].

        What is kept of the new tokens goes into the cache. For `alone`, see `StepAttention.run`.
        """
        spec, weights = self._network.spec.layers[index].mixer, self._network.layers[index].mixer
        assert isinstance(spec, LatentAttention)
        assert isinstance(weights, LatentWeights)
        assert projected.gates is not None
        rows, heads, rank = len(projected.first), spec.heads, spec.kv_rank
        q = projected.first
        if weights.q_b is not None:
            assert weights.q_norm is not None
            q = self._queries[: rows * weights.q_b.rows].view(rows, -1)
            for part in self._parts(rows):
                norm = spec.norm, weights.q_norm
                self._products.run(len(q[part]), projected.first[part], weights.q_b, q[part], norm=norm)
        absorbed = self._absorbed[: rows * heads * rank].view(rows, -1)
        self._by_head(q, weights.k_b, absorbed, spec.head_dim, rank)
        if alone is not None:
            self._attend(alone, index, (absorbed, q, projected.gates), self._cache.block_size, True)
        self._attend(given, index, (absorbed, q, projected.gates), limit, alone is None)
        mixed, parts = self._mixed[: rows * heads * rank].view(rows, -1), None
        used = min(triton.cdiv(limit, CHUNK), most_chunks(rows))
        if rows == 1 and used <= IN_ORDER and _combines(weights.v_b):
            sizes = rank, CHUNK, used, heads * rank
            parts = Partials(self._partial, self._lse, given.active, given.counters, sizes)
        else:
            self._combine(given, mixed, spec, limit)
        values = out[: rows * heads * spec.v_dim].view(rows, -1)
        self._by_head(mixed, weights.v_b, values, rank, spec.v_dim, parts)

    def _parts(self, rows: int) -> list[slice]:
        """Return the rows that products compute at once."""
        most = self._products.rows
        return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]

    def _by_head(
        self, x: Tensor, layer: Linear, out: Tensor, apart: int, outputs: int, parts: Partials | None = None
    ) -> None:
        """Multiply the inputs of each head, which are `apart` in x [rows, numbers], by its own `outputs` rows.

        With `parts`, the one row of x is combined from those.
        """
        heads = HeadInputs(outputs, apart, x.shape[1])
        for part in self._parts(len(x)):
            self._products.run(len(x[part]), x[part], layer, out[part], parts=parts, heads=heads)

    def _attend(
        self,
        given: StepInput,
        index: int,
        inputs: tuple[Tensor, Tensor, Tensor],
        limit: int,
        overlaps: bool,
    ) -> None:
        """Attend with (absorbed, q, kv_a), each [rows, numbers]. See `attend` for `overlaps`."""
        spec, weights = self._network.spec.layers[index].mixer, self._network.layers[index].mixer
        assert isinstance(spec, LatentAttention)
        assert isinstance(weights, LatentWeights)
        tables, rope = given.tables[self._cache.groups[index]], spec.rope
        rows, kept = len(inputs[0]), self._cache.k[index]
        chunks, groups = most_chunks(rows), triton.cdiv(spec.heads, LANES.value)
        tile = min(TILE if self._is_large else TILE // 2, CHUNK)
        kernel = latent_kernel[(groups, min(triton.cdiv(limit, CHUNK), chunks), rows)](
            *inputs,
            weights.kv_norm.weight,
            weights.kv_norm.weight if weights.rotary is None else weights.rotary,
            kept,
            given.active,
            tables,
            given.counters,
            self._partial,
            self._lse,
            spec.softmax_scale * math.log2(math.e),
            tables.shape[1],
            HEADS=spec.heads,
            GROUP=triton.cdiv(spec.heads, groups),
            DIM=spec.head_dim,
            WIDTH=spec.rope_dim,
            PIECES=spec.row_size // spec.rope_dim,
            EPS=spec.norm.eps,
            OFFSET=spec.norm.offset,
            ONCE=spec.norm.rounds_last,
            ROTATED=weights.rotary is not None,
            PAIRS=rope is not None and rope.interleaved,
            EXACT=rope is not None and rope.exact,
            BLOCK=self._cache.block_size,
            TILE=tile,
            STAGES=min((CHUNK << _doublings(limit, chunks)) // tile, 2),
            CHUNK=CHUNK,
            DOUBLINGS=_doublings(limit, chunks),
            CHUNKS=chunks,
            WARPS=WARPS,
            PDL=self._pdl,
            num_warps=WARPS,
            launch_pdl=self._pdl and overlaps,
        )
        split_alike(kernel)

    def _combine(self, given: StepInput, mixed: Tensor, spec: LatentAttention, limit: int) -> None:
        """Combine the chunks of all rows into mixed [rows, heads * kv_rank]."""
        rows, dim = len(mixed), int(triton.next_power_of_2(spec.kv_rank))
        chunks = most_chunks(rows)
        kernel = combine_kernel[(spec.heads, rows)](
            self._partial,
            self._lse,
            given.active,
            given.counters,
            mixed,
            HQ=spec.heads,
            D=dim,
            DIM=spec.kv_rank,
            CHUNK=CHUNK,
            DOUBLINGS=_doublings(limit, chunks),
            CHUNKS=chunks,
            PADDED=padded_parts(min(triton.cdiv(limit, CHUNK), chunks), dim),
            PDL=self._pdl,
            IN_ORDER=IN_ORDER,
            num_warps=max(dim // 32, 1),
            launch_pdl=self._pdl,
        )
        split_alike(kernel)


def _combines(layer: Linear) -> bool:
    """Return whether a product of one row of each head (`by_head`) can combine the parts of its input."""
    (weight,) = layer.parts
    if weight.planes is None:
        return True
    return BLOCKS[weight.format].shared == 1 and weight.planes.order is None


def _doublings(limit: int, chunks: int) -> int:
    """Return how often chunks double until so many hold `limit` rows."""
    return max(-(-limit // (CHUNK * chunks)) - 1, 0).bit_length()
