"""Launches the attention of a decode step on tensor cores; sequences may read a common prefix together."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.execute.cuda.decode_attention import AttentionInput, AttentionShape, padded_parts, rotation
from engine.execute.cuda.prefix_groups import Sharing
from engine.execute.cuda.tiles import FEW, IN_ORDER, IN_ORDER_DIM, SMALLEST, AttentionSplit, most_chunks
from engine.kernels.triton.attention_mma import parts_kernel
from engine.kernels.triton.combine import combine_parts_kernel
from engine.kernels.triton.launch import split_alike

GROUP = 4
"""Query heads per KV head (a power of two) from which tensor cores beat `attention_kernel`. Speed-up in whole steps on
an H200: Qwen3-8B, which has four, 1.01 to 1.05 for one to eight sequences of 500 rows and 1.11 for eight of 4,000."""
MOST_DIM = 256
"""The largest heads, rounded up to a power of two, for which a program's matrices fit into its registers."""
OWN_ROWS = 512
"""Rows of the largest part of a sequence's unshared rows, in a step with sharing."""
OWN_PROGRAMS, OWN_PART = 256, 256
"""Programs for a long sequence alone, over all of its KV heads: about two for each multiprocessor. But parts grow to
OWN_PART rows before there are more than half as many. With eight sequences of 4,000 rows, steps of 8B take 5,363 us in
16 parts each and 5,678 in 32; with one of 16,384, 4,765 in 16 parts and 4,552 in 32."""
OWN_PROGRAMS_OF_BYTES = 384
"""Programs where rows are quantised: more computation per byte, so three programs at once hide each other's waiting."""
FEW_REGISTERS = 168
"""Registers per thread with which three of those programs fit on a multiprocessor, with heads of 128."""
WHOLE_ROWS, WHOLE_LIMIT = 32, 2 * SMALLEST
"""The fewest sequences in a step, and the largest context limit, with which sequences may be attended to whole."""
WHOLE_PROGRAMS, WHOLE_PROGRAMS_OF_FEW_HEADS = 256, 1024
"""How many programs there must be at that limit, in proportion at smaller ones; the second number if fewer than GROUP
query heads share a KV head. On an H200 this saves 3 to 6 us per layer of Qwen3-8B with 32 and 64 sequences, and 6 with
128; on an H100, 1 to 2 us per layer of 0.6B with 64, and 3 to 9 with 128."""


@dataclass(frozen=True, slots=True)
class PartsCut:
    """How `parts_kernel` is cut."""

    parts: int
    """Programs per KV head for shared rows."""
    own: int
    """The most parts for the rows that a sequence has alone. With 1, where none are shared, sequences stay whole."""
    least: int
    """The fewest rows of such a part."""
    usual: int
    """Parts grow to this many rows before there are more than half of `own`; 0: no such rule."""
    programs: int
    """Programs per KV head for those parts: fewer than `own` if no sequence is long enough."""
    tile: int
    """Rows that a program reads at once."""
    stages: int
    """Tiles that a program copies ahead."""
    warps: int
    halves: int
    """Groups of warps that divide the query heads of a tile."""


def by_tensor_cores(shape: AttentionShape, given: AttentionInput, rows: int, limit: int) -> bool:
    """Return whether tensor cores attend to `rows` sequences of up to `limit` rows that share nothing."""
    if not can_use_tensor_cores(shape, given):
        return False
    return shape.group >= GROUP or _stay_whole(shape, rows, limit, given.k.element_size())


def _stay_whole(shape: AttentionShape, rows: int, limit: int, itemsize: int) -> bool:
    """Return whether one program per KV head attends to a whole sequence, whose output then needs no combination."""
    if (
        rows < WHOLE_ROWS
        or limit > WHOLE_LIMIT
        or itemsize == 1
        or shape.dim not in (64, 128)
        or shape.group == 1
    ):
        return False
    needed = WHOLE_PROGRAMS if shape.group >= GROUP else WHOLE_PROGRAMS_OF_FEW_HEADS
    return shape.spec.kv_heads * rows * WHOLE_LIMIT >= needed * limit


def _choose_start(shape: AttentionShape, given: AttentionInput, rows: int) -> str:
    """Return when the kernel after `parts_kernel` may start: the fastest choice on an H200.

    Microseconds per step for "at once" and "looked up": one token of 8B in Q4_K_M 1,813 and 1,802, and with 16,384 rows
    of fp8 4,644 and 4,406. But one token of 30B-A3B, which has eight query heads per KV head, takes 1,544 and 1,565
    (eight with 4,000 rows each, 5,169 and 5,045).
    """
    return "at once" if rows == 1 and shape.group > GROUP and not given.told else "looked up"


def can_use_tensor_cores(shape: AttentionShape, given: AttentionInput) -> bool:
    """Return whether `parts_kernel` supports the layer."""
    spec = shape.spec
    is_usual = (spec.window, spec.v_norm, spec.v_is_k, spec.kv_from) == (None, None, False, None)
    return is_usual and given.sinks is None and shape.dim <= MOST_DIM


def choose_shared_cut(
    shape: AttentionShape, rows: int, sharing: Sharing, own: int, itemsize: int = 2
) -> PartsCut:
    """Return the cut for sequences with up to `own` unshared rows: programs that all run at once and end together.

    Two or three of them fit on a multiprocessor. Shared rows are cut into two programs for each multiprocessor, if
    there are enough.
    """
    lanes, wide = sharing.members * shape.group, max(shape.dim // 128, 1)
    tile = 64 if shape.dim <= 64 else 32
    stages = max((64 if lanes <= 32 else 96) * 1024 // (2 * itemsize * tile * shape.dim), 2)
    warps = 4 if lanes <= 32 else 4 * wide
    parts = max(2 * shape.multiprocessors // shape.spec.kv_heads, sharing.tiles)
    own_parts = min(-(-own // OWN_ROWS), most_chunks(rows) // 2)
    return PartsCut(parts, own_parts, 256, 0, own_parts, tile, stages, warps, min(lanes // 16, warps // 2))


def choose_own_cut(
    shape: AttentionShape, rows: int, limit: int, itemsize: int = 2, split: AttentionSplit | None = None
) -> PartsCut:
    """Return the cut for sequences of up to `limit` rows that share nothing. The cut of each of a few sequences depends
    on its own length, and on `split` if given."""
    tile = 64 if shape.dim <= 128 else 32
    stages = max(16 * 1024 // (tile * shape.dim), 2)  # with quantised rows, more take room for no gain
    least = 128 if rows <= FEW else 256 if rows < 32 else 512
    if rows >= 64 and shape.dim == 128 and itemsize > 1:
        # Four programs fit on a multiprocessor, not three.
        tile, stages, least = 32, 3, 1024
    if _stay_whole(shape, rows, limit, itemsize):
        least = limit
        if tile == 64:
            stages = 2
    if split is not None:
        least = split.rows
    most, usual = -(-limit // least), 0
    if rows <= FEW:
        programs = OWN_PROGRAMS if itemsize > 1 else OWN_PROGRAMS_OF_BYTES
        own = min(max(programs // shape.spec.kv_heads, 1), most_chunks(rows) - 1)
        if itemsize > 1:
            usual = max(OWN_PART, least)
            most = min(most, max(own // 2, -(-limit // usual)))
    else:
        own = min(most, most_chunks(rows) // 2)
    return PartsCut(0, own, least, usual, min(own, most), tile, stages, 4, 1)


def _told(given: AttentionInput) -> dict[str, Any]:
    """Return the arguments for quantised rows, with views by which `parts_kernel` can read two bytes at a time."""
    if not given.told:
        return {}
    return {**given.told, "k_pairs": given.k.view(torch.int16), "v_pairs": given.v.view(torch.int16)}


def attend_mma(
    shape: AttentionShape,
    given: AttentionInput,
    out: Tensor | None,
    rows: int,
    sharing: Sharing | None,
    cut: PartsCut,
    shared: Tensor,
    members: Tensor,
    overlaps: bool = True,
) -> None:
    """Enqueue the attention of the first `rows` rows of the batch into out [rows, q_heads * dim].

    For `out` None and for `overlaps`, see `attend`.

    `shared` int32 [rows] and `members` int32 [tiles, members] on the device say which sequences read rows together
    (`share`). They may change from step to step; all 0 and all -1 mean no sharing. Without `sharing` they must be that,
    with shapes [rows] and [16]. `can_use_tensor_cores` must be true of the layer.
    """
    spec, dim, chunks = shape.spec, shape.dim, most_chunks(rows)
    together = sharing or Sharing(max(16 // shape.group, 1), 1)
    count = min(cut.parts + cut.own, chunks) if sharing is not None else cut.programs
    is_whole = out is not None and sharing is None and cut.own == 1 and given.gates is None
    if is_whole:  # nothing to combine
        chunks = 1
    assert can_use_tensor_cores(shape, given)
    assert sharing is None or sharing.tiles <= cut.parts
    assert is_whole or cut.own < chunks
    assert together.members * shape.group >= 16 * cut.halves
    counts = together.tiles, chunks, cut.parts, cut.own, cut.least, cut.usual
    constants: dict[str, Any] = {
        "HQ": spec.heads,
        "D": dim,
        "DIM": spec.head_dim,
        "MEMBERS": together.members,
        "PDL": shape.pdl,
    }
    is_limited = given.told and sharing is None and dim == 128 and shape.group <= 16
    kernel = parts_kernel[(spec.kv_heads, cut.parts + cut.programs * rows)](
        *given.arguments(spec, out if is_whole else None),
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
        launch_pdl=shape.pdl and overlaps,
        **_told(given),
        START=_choose_start(shape, given, rows),
        **({"maxnreg": FEW_REGISTERS} if is_limited else {}),
    )
    split_alike(kernel)
    if out is None or is_whole:
        return
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
        gates=given.gates,
        BY_HEAD=spec.gate == "heads",
        PADDED=padded_parts(count, dim),
        SHARES=sharing is not None,
        IN_ORDER=IN_ORDER if spec.head_dim == IN_ORDER_DIM else 0,
        num_warps=4,
        launch_pdl=shape.pdl,
    )
    split_alike(kernel)
