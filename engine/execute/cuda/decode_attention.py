"""Launches the attention of a decode step: the chunks of every sequence, and their combination."""

import math
from dataclasses import dataclass, field
from typing import Any

import triton
from torch import Tensor

from engine.execute.cuda.tiles import (
    FEW,
    IN_ORDER,
    IN_ORDER_DIM,
    MOST_CHUNKS,
    Chunking,
    most_chunks,
    query_splits,
)
from engine.kernels.triton.attention import attention_kernel
from engine.kernels.triton.combine import combine_kernel
from engine.kernels.triton.launch import split_alike
from models.spec import Attention

MOST_HELD = 2
"""The most rows that a group of threads reads at once if heads have more than 256 numbers: with more, three tiles of K
and V would not fit into the shared memory of every GPU."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The properties the kernels are compiled for."""

    spec: Attention
    block_size: int
    pdl: bool
    multiprocessors: int = 1
    shared_bytes: int = 0
    """Shared memory of a multiprocessor."""
    small: bool = False
    """Whether the layers' products are so small that kernels wait for each other rather than for memory."""

    @property
    def group(self) -> int:
        """Query heads per KV head, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.spec.groups))

    @property
    def dim(self) -> int:
        """Size of a head, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.spec.head_dim))

    @property
    def programs(self) -> int:
        """Programs of `attention_kernel` for a chunk: one or more for each KV head."""
        return self.spec.kv_heads * query_splits(self.spec.groups, self.dim)


@dataclass(frozen=True, slots=True)
class Partials:
    """The attention's uncombined output, for a product that combines the parts itself."""

    partial: Tensor
    lse: Tensor
    active: Tensor
    counters: Tensor
    sizes: tuple[int, int, int, int]
    """The size of a head, the rows of a part, the most parts of a row, and the numbers of a part."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the product."""
        return {
            "partial": self.partial,
            "lse": self.lse,
            "active": self.active,
            "counters": self.counters,
            "ATTENDED": self.sizes,
        }


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """The tensors of a step, as described in `attention_kernel`, with K and V of one layer."""

    heads: Tensor
    norm_weight: Tensor | None
    rotary: Tensor | None
    k: Tensor
    v: Tensor
    active: Tensor
    tables: Tensor
    counters: Tensor
    partial: Tensor
    lse: Tensor
    sinks: Tensor | None = None
    told: dict[str, Any] = field(default_factory=dict)
    """The arguments for quantised rows: see `KVCache.told`."""
    gates: Tensor | None = None
    """[rows, q_heads or q_heads * dim]: the output is multiplied by their sigmoid."""

    def arguments(self, spec: Attention, out: Tensor | None = None) -> tuple[Any, ...]:
        """Return the leading arguments of every attention kernel. It writes to `out` if given, not to `partial`."""
        return (
            self.heads,
            self.norm_weight if self.norm_weight is not None else self.heads,
            self.rotary if self.rotary is not None else self.heads,
            self.k,
            self.v,
            self.active,
            self.tables,
            self.counters,
            self.partial if out is None else out,
            self.lse,
            spec.softmax_scale * math.log2(math.e),
            self.tables.shape[1],
        )


def parts_left(given: AttentionInput, spec: Attention, cut: Chunking) -> Partials | None:
    """Return what the attention of one row leaves to the next product; None if it is too much to combine there."""
    plain = (given.sinks, given.gates, spec.window) == (None,) * 3 and spec.head_dim == IN_ORDER_DIM
    if not plain or cut.chunks > IN_ORDER:
        return None
    sizes = spec.head_dim, cut.rows, cut.chunks, spec.heads * spec.head_dim
    return Partials(given.partial, given.lse, given.active, given.counters, sizes)


def rotation(spec: Attention) -> dict[str, Any]:
    """Return the constants that tell kernels how to norm, rotate and scale the heads of q and k."""
    rope, norm, scaling = spec.rope, spec.head_norm, spec.query_scaling
    return {
        "ROTATED": spec.rotated,
        "PAIRS": rope is not None and rope.interleaved,
        "EXACT": rope is not None and rope.exact,
        "EPS": norm.eps if norm is not None else 0.0,
        "NORM": norm is not None,
        "TOGETHER": norm is not None and spec.norms_all_heads,
        "OFFSET": norm.offset if norm is not None else 0.0,
        "ONCE": norm is not None and norm.rounds_last,
        "LATER": norm is not None and spec.norms_rotated,
        "BETA": scaling.beta if scaling is not None else 0.0,
        "ORIGINAL": scaling.positions if scaling is not None else 1,
    }


def choose_start(shape: AttentionShape, rows: int) -> str:
    """Return when the kernel after the attention may start (see `attention_kernel`): the fastest choice on an H200.

    Microseconds per step for "at once", "looked up" and "waited": one token of Qwen3-0.6B 564, 552, 550, in Q4_0 538,
    532, 486; eight tokens 731, 727, 735; one token of 8B 4,273, 4,251, 4,236, in Q4_0 2,254, 2,250, 2,264. With heads
    of 64 (Llama-3.2-1B) the other choices are 1% slower than "at once".
    """
    if shape.dim < 128:
        return "at once"
    return "waited" if shape.small and rows == 1 else "looked up"


def padded_parts(count: int, dim: int) -> int:
    """Return the power of two, at least `count`, of parts that kernels combine for heads of `dim` numbers.

    It gives every thread two or more parts, however small `count` is. With a single part, a thread would round a
    product and the sum with another thread's in one operation, and the last bits would depend on how many parts other
    sequences have.
    """
    return max(int(triton.next_power_of_2(count)), 1024 // dim)


def attend(
    shape: AttentionShape,
    given: AttentionInput,
    out: Tensor | None,
    rows: int,
    cuts: tuple[Chunking, ...],
    overlaps: bool = True,
) -> None:
    """Enqueue the attention of the first `rows` rows of the batch into out [rows, q_heads * dim].

    `cuts` comes from `choose_chunkings`; it has one entry if there are more than FEW rows. Without `out`, the parts are
    not combined. Unless `overlaps` is False, the kernel may read cache rows that others wrote before it waits for their
    kernels.
    """
    spec, dim, programs = shape.spec, shape.dim, shape.programs
    chunks = MOST_CHUNKS if rows <= FEW else most_chunks(rows)
    tensors = given.arguments(spec)
    constants: dict[str, Any] = {
        "CHUNKS": chunks,
        "HQ": spec.heads,
        "HKV": spec.kv_heads,
        "D": dim,
        "DIM": spec.head_dim,
        **rotation(spec),
        "CAP_LOG2": (spec.score_cap or 0.0) * math.log2(math.e),
        "BLOCK": shape.block_size,
        "PDL": shape.pdl,
        "START": choose_start(shape, rows),
        "SPLITS": programs // spec.kv_heads,
        "V_EPS": None if spec.v_norm is None else spec.v_norm.eps,
        "V_IS_K": spec.v_is_k,
        "STORED": spec.kv_from is not None,
        "launch_pdl": shape.pdl and overlaps,
    }
    window = spec.window or 0
    wide = max(dim // 128, 1)  # the wider a head is, the fewer rows a thread can hold at once
    for cut in cuts:
        groups = cut.warps * max(256 // dim, 1)
        held = min(cut.tile // (groups * wide), MOST_HELD if dim > 256 else cut.tile)
        tiles = cut.rows // (groups * held)
        stages = min(tiles, 3)
        line = groups * dim * given.k.element_size()
        beside = -(-programs * cut.chunks * rows // shape.multiprocessors)
        spare = shape.shared_bytes // (beside + 1) - 2 * stages * held * line
        kernel = attention_kernel[(programs, cut.chunks, rows)](
            *tensors,
            cut.first,
            cut.end,
            **constants,
            SOME=cut.end > 0,
            WARPS=cut.warps,
            R=held,
            TILES=tiles,
            STAGES=stages,
            SPARE=max(-(-spare // line), 0),
            num_warps=cut.warps,
            WINDOW=window,
            **given.told,
        )
        split_alike(kernel)
    if out is None:
        return
    shortest, longest = cuts[0], cuts[-1]
    kernel = combine_kernel[(spec.heads, rows)](
        given.partial,
        given.lse,
        given.active,
        given.counters,
        out,
        HQ=spec.heads,
        D=dim,
        DIM=spec.head_dim,
        CHUNK=shortest.rows,
        DOUBLINGS=(longest.rows // shortest.rows).bit_length() - 1,
        CHUNKS=chunks,
        PADDED=padded_parts(max(cut.chunks for cut in cuts), dim),
        PDL=shape.pdl,
        WINDOW=window,
        sinks=given.sinks,
        gates=given.gates,
        BY_HEAD=spec.gate == "heads",
        IN_ORDER=IN_ORDER if spec.head_dim == IN_ORDER_DIM else 0,
        num_warps=4 * wide,
        launch_pdl=shape.pdl,
    )
    split_alike(kernel)
