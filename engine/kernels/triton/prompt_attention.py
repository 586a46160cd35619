# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention of many tokens over block tables, with one order of sums however a prompt is cut.

The plain twins are `engine/attention/sdpa.py` and `engine/attention/unusual.py`. One program takes some tokens of one
query head through all rows that they see. Tiles of rows begin at fixed rows, and rows that a token does not see add
exact zeros, so its bits do not depend on what is computed beside it. Rows before the windows of all tokens of a program
are not read. Features that a network does not use leave no code in the kernel.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import shared_bytes
from engine.kernels.triton.paged_attention import attend_tile, load_rows

STAGES = 2
"""Tiles of K and V that are in shared memory at once."""
FEW = 16
"""If a span has at most this many tokens, a program takes no more: the fewest that tl.dot accepts."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The work of a program."""

    queries: int
    """Tokens per program."""
    rows: int
    """Rows read at once."""
    warps: int

    def shared(self, head_bytes: int) -> int:
        """Return the most bytes of shared memory that a program takes."""
        return (self.queries + 2 * STAGES * self.rows) * head_bytes


TILES = (Tile(128, 64, 8), Tile(64, 32, 4))
"""The first tile that fits is used. In bf16 it fits in 99 KB (sm_86, sm_89, sm_120) for heads of up to 128 numbers, and
in 227 KB (sm_90) for heads of 256; the second one, for heads of 256, in 99 KB."""
WIDE, WIDE_TILES = 512, (Tile(64, 32, 8), Tile(32, 16, 4))
"""Those of heads of more than WIDE bytes, whose sums take 128 registers of each thread. In bf16 the first one fits in
227 KB for heads of 512 numbers, the second one in 99 KB."""


@cache
def choose_tile(head_bytes: int, shared: int) -> Tile:
    """Return the best tile for heads of `head_bytes`, a power of two, and `shared` bytes of memory per program."""
    tiles = TILES if head_bytes <= WIDE else WIDE_TILES
    return next((tile for tile in tiles if tile.shared(head_bytes) <= shared), tiles[-1])


@triton.jit(do_not_specialize=["table_stride"])
def _prompt_kernel(
    q, keys, values, span, table, out, scale_log2,
    STRIDE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr = 0,
    CAP_LOG2: tl.constexpr = 0.0, sinks=None, k_ends=None, table_stride=None,
    k_scales=None, v_scales=None, ROW: tl.constexpr = 0, FP8: tl.constexpr = False,
):  # fmt: skip
    """Attend to the rows of a span; arguments as in `prompt_attention`.

    STRIDE is the distance between tokens of q, in numbers; D is DIM rounded up to a power of two. ROW and its
    companions describe quantised rows, as in `kv_rows.py`. With k_ends, as in `ragged_attention`, `span` is its q_ends,
    and the tables are table_stride apart.
    """
    # The last tokens see the most rows, so they begin first.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    head, kv_head = tl.program_id(0), tl.program_id(0) // GROUP
    if k_ends is None:
        base, start, stop = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    else:
        which = tl.program_id(2)
        begin_of_span = tl.load(span + which)
        count = tl.load(span + which + 1) - begin_of_span
        if first >= count:
            return
        stop = tl.load(k_ends + which + 1) - tl.load(k_ends + which)
        start = stop - count
        base = start - begin_of_span
        first += begin_of_span
        table += which * table_stride
    token = first + tl.arange(0, QUERIES)
    dim = tl.arange(0, D)
    row = base + token
    here = q + token[:, None] * STRIDE + head * DIM + dim[None, :]
    wanted = None
    if k_ends is not None:
        wanted = (row < stop)[:, None]
        if DIM < D:
            wanted = wanted & (dim < DIM)[None, :]
    elif DIM < D:
        wanted = (dim < DIM)[None, :]
    queries = tl.load(here) if wanted is None else tl.load(here, wanted, 0.0)
    if sinks is None:
        m = tl.full([QUERIES], float("-inf"), tl.float32)
        l = tl.zeros([QUERIES], tl.float32)  # noqa: E741
    else:  # a sink is a row that every token sees and that has no value
        m = tl.zeros([QUERIES], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        l = tl.full([QUERIES], 1.0, tl.float32)  # noqa: E741
    acc = tl.zeros([QUERIES, D], tl.float32)
    end = tl.minimum(base + first + QUERIES, stop)
    end = tl.where(end > start, end, 0).to(tl.int32)  # nothing, if all tokens are padding
    oldest = 0
    if WINDOW > 0:  # `oldest` is the oldest row that the first token sees
        oldest = tl.maximum(tl.maximum(base + first, start) - (WINDOW - 1), 0)
    for begin in range(oldest // TILE * TILE, end, TILE):
        seen = begin + tl.arange(0, TILE)
        there = seen < end
        if WINDOW > 0:
            there = there & (seen >= oldest)
        block = tl.load(table + seen // BLOCK, there, 0).to(tl.int64)
        slot = block * BLOCK + seen % BLOCK
        inside = there[:, None]
        if DIM < D:
            inside = inside & (dim < DIM)[None, :]
        dtype: tl.constexpr = queries.dtype
        k = load_rows(keys, k_scales, slot, there, kv_head, dim, inside, dtype, KV_HEADS, DIM, ROW, FP8)
        v = load_rows(values, v_scales, slot, there, kv_head, dim, inside, dtype, KV_HEADS, DIM, ROW, FP8)
        visible = seen[None, :] <= row[:, None]
        if WINDOW > 0:
            visible = visible & (seen[None, :] > row[:, None] - WINDOW)
        m, l, acc = attend_tile(queries, k, v, visible, m, l, acc, scale_log2, CAP_LOG2)  # noqa: E741
    mixed = acc / tl.where(l > 0.0, l, 1.0)[:, None]
    heads = tl.num_programs(0)
    target = out + token[:, None] * (heads * DIM) + head * DIM + dim[None, :]
    if wanted is None:
        tl.store(target, mixed.to(out.dtype.element_ty))
    else:
        tl.store(target, mixed.to(out.dtype.element_ty), wanted)


def prompt_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    span: Tensor,
    table: Tensor,
    *,
    kv_heads: int,
    block_size: int,
    **asked: Any,
) -> Tensor:
    """Compute causal attention of tokens in consecutive rows; their K and V are already written.

    q [T, Hq, D], T a multiple of the tile's queries, heads side by side; keys and values [slots, Hkv, D] of one layer,
    contiguous, or bytes [slots, ROW] of quantised rows. span int32 [3]: the row of token 0, the first row that has a
    token, the row after the last one. Tokens outside these rows are padding; their output is finite but meaningless.
    table int32 [blocks]. span and table are read on the device. `asked` are arguments of `_launch`. Returns [T, Hq, D].
    """
    tile = tile_for(q)
    given = q, keys, values, span, table
    return _launch(tile, q.shape[0] // tile.queries, 1, given, kv_heads, block_size, **asked)


def ragged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    tables: Tensor,
    *,
    kv_heads: int,
    block_size: int,
    most_tokens: int,
    tile: Tile | None = None,
    **asked: Any,
) -> Tensor:
    """Compute the same for spans of any lengths, each over its own block table; tokens of no span are left unset.

    The tokens of span i are those of q [T, Hq, D] from q_ends[i] to q_ends[i + 1], at most `most_tokens`; the last one
    sees k_ends[i + 1] - k_ends[i] rows. An empty span has neither tokens nor rows. q_ends and k_ends int32 [spans + 1],
    tables int32 [spans, blocks] with a stride of 1 in the last dimension. `tile` None means that of `tile_for`.
    """
    tile = tile or tile_for(q)
    if most_tokens <= FEW:
        tile = replace(tile, queries=FEW, warps=4)
    spans = tables.shape[0]
    given = q, keys, values, q_ends, tables
    several = {"k_ends": k_ends, "table_stride": tables.stride(0)}
    return _launch(
        tile, triton.cdiv(most_tokens, tile.queries), spans, given, kv_heads, block_size, several, **asked
    )


def tile_for(q: Tensor) -> Tile:
    """Return the tile for heads q [T, Hq, D] on their GPU."""
    return choose_tile(triton.next_power_of_2(q.shape[2]) * q.element_size(), shared_bytes(q.device))


def _launch(
    tile: Tile,
    programs: int,
    spans: int,
    given: tuple[Tensor, ...],
    kv_heads: int,
    block_size: int,
    several: dict[str, Any] | None = None,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    **quantized: Any,
) -> Tensor:
    """Launch the kernel. Scores are multiplied by `scale` (None: D ** -0.5) and become cap * tanh(score / cap).

    A token sees `window` rows, including its own. sinks [Hq] is a score per head that has no value. `quantized` are the
    arguments of `KVCache.told`.
    """
    q, *_ = given
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    scale_log2 = (dim**-0.5 if scale is None else scale) * math.log2(math.e)
    _prompt_kernel[(heads, programs, spans)](
        *given, out, scale_log2,
        STRIDE=q.stride(0), GROUP=heads // kv_heads, DIM=dim, D=max(16, triton.next_power_of_2(dim)),
        KV_HEADS=kv_heads, BLOCK=block_size, QUERIES=tile.queries, TILE=tile.rows, WINDOW=window or 0,
        CAP_LOG2=(cap or 0.0) * math.log2(math.e), sinks=sinks, **(several or {}), **quantized,
        num_warps=tile.warps, num_stages=STAGES,
    )  # fmt: skip
    return out
