"""The launches of a decode step's attention in which sequences read a common prefix together."""

import math
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from engine.execute.cuda.attend import AttentionInput, AttentionShape, rotation
from engine.execute.cuda.sharing import Sharing
from engine.execute.cuda.tiles import most_chunks
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.shared_prefix import combine_parts_kernel, parts_kernel

OWN_ROWS = 512
"""Rows of the largest part of what a sequence has alone."""


@dataclass(frozen=True, slots=True)
class PartsCut:
    """How `parts_kernel` is cut."""

    parts: int
    """Programs of a KV head for shared rows."""
    own: int
    """Parts of the rows that a sequence has alone, at most."""
    tile: int
    """Rows that a program reads at once."""
    stages: int
    """Tiles on their way to a program."""
    warps: int
    halves: int
    """Groups of warps that share the query heads of a tile."""
    registers: int | None = None
    """The most that a thread may take; None: as many as it wants."""


def choose_cut(shape: AttentionShape, rows: int, sharing: Sharing, own: int) -> PartsCut:
    """For sequences that have up to `own` rows alone: programs that all run at once, and end together.

    Two or three of them fit on a multiprocessor; shared rows are cut into two for each, where there are enough.
    """
    lanes, wide = sharing.members * shape.group, max(shape.dim // 128, 1)
    tile = 64 if shape.dim <= 64 else 32
    stages = max((64 if lanes <= 32 else 96) * 1024 // (4 * tile * shape.dim), 2)
    warps = 4 if lanes <= 32 else 4 * wide
    parts = max(2 * shape.multiprocessors // shape.spec.kv_heads, sharing.tiles)
    own_parts = min(-(-own // OWN_ROWS), most_chunks(rows) // 2)
    return PartsCut(parts, own_parts, tile, stages, warps, min(lanes // 16, warps // 2))


def attend_shared(
    shape: AttentionShape,
    given: AttentionInput,
    out: Tensor,
    rows: int,
    sharing: Sharing,
    cut: PartsCut,
    shared: Tensor,
    members: Tensor,
) -> None:
    """Enqueue the attention of the first `rows` rows of the batch into out [rows, q_heads * dim].

    `shared` int32 [rows] and `members` int32 [tiles, members] on the device say who reads what together (`share`); they
    may change from step to step, and all 0 and -1 is nothing. The layer has neither a window nor sinks.
    """
    spec, dim, chunks = shape.spec, shape.dim, most_chunks(rows)
    assert spec.window is None
    assert given.sinks is None
    assert sharing.tiles <= cut.parts
    assert cut.own < chunks
    assert sharing.members * shape.group >= 16 * cut.halves
    counts = sharing.tiles, chunks, cut.parts, cut.own
    constants: dict[str, Any] = {
        "HQ": spec.heads,
        "D": dim,
        "DIM": spec.head_dim,
        "MEMBERS": sharing.members,
        "PDL": shape.pdl,
        "launch_pdl": shape.pdl,
    }
    kernel = parts_kernel[(spec.kv_heads, cut.parts + cut.own * rows)](
        given.heads,
        given.norm_weight if given.norm_weight is not None else given.heads,
        given.rotary if given.rotary is not None else given.heads,
        given.k,
        given.v,
        given.active,
        given.tables,
        given.counters,
        given.partial,
        given.lse,
        spec.softmax_scale * math.log2(math.e),
        given.tables.shape[1],
        shared,
        members,
        rows,
        *counts,
        **constants,
        **rotation(spec),
        HKV=spec.kv_heads,
        G=shape.group,
        BLOCK=shape.block_size,
        TILE=cut.tile,
        STAGES=cut.stages,
        WARPS=cut.warps,
        HALVES=cut.halves,
        CAP_LOG2=(spec.score_cap or 0.0) * math.log2(math.e),
        num_warps=cut.warps,
        **({} if cut.registers is None else {"maxnreg": cut.registers}),
    )
    split_alike(kernel)
    kernel = combine_parts_kernel[(spec.heads, rows)](
        given.partial,
        given.lse,
        given.active,
        given.counters,
        shared,
        members,
        out,
        *counts,
        **constants,
        PADDED=triton.next_power_of_2(min(cut.parts + cut.own, chunks)),
        num_warps=4,
    )
    split_alike(kernel)
