"""The launches of a decode step's attention for many sequences: equal shares of all their rows."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from engine.execute.cuda.attend import AttentionInput, AttentionShape, rotation
from engine.kernels.triton.balanced_attention import (
    SHARE,
    balanced_attention_kernel,
    balanced_combine_kernel,
    share_kernel,
)
from engine.kernels.triton.launch import split_alike

LEAST_ROWS = 32
"""Rows of a share, at least: a part takes as long to write and to add as some rows to read."""
PARTS = 16
"""Parts that are added at once."""


@dataclass(frozen=True, slots=True)
class BalancedCut:
    """How `balanced_attention_kernel` is cut."""

    programs: int
    """As many as there are shares."""
    heads: int
    """KV heads of a program."""
    tile: int
    """Rows that a program holds at once."""
    stages: int
    warps: int

    def part_lines(self, dim: int) -> int:
        """Parts that a program leaves for each query head of a sequence; `dim` is a power of two."""
        return self.warps * 256 // dim // self.heads


@dataclass(frozen=True, slots=True)
class Shares:
    """Who reads what (`share_kernel`)."""

    lines: Tensor
    shares: Tensor


def choose_balanced_cut(shape: AttentionShape, multiprocessors: int) -> BalancedCut:
    """For any number of sequences of any length: as many programs as run at once."""
    warps, beside = 4, 4
    groups = warps * 256 // shape.dim
    heads = math.gcd(shape.spec.kv_heads, groups)
    line = 2 * groups * shape.dim * 2
    held = max(min(4, 16384 // line), 1)
    stages = 3
    return BalancedCut(
        multiprocessors * beside * heads // shape.spec.kv_heads, heads, held * groups // heads, stages, warps
    )


def make_shares(rows: int, programs: int, device: torch.device) -> Shares:
    """For steps of up to `rows` rows."""
    lines = torch.zeros(rows, 4, dtype=torch.int32, device=device)
    return Shares(lines, torch.zeros(1 + programs, 4, dtype=torch.int32, device=device))


def divide(given: AttentionInput, cut: BalancedCut, shares: Shares, rows: int, window: int | None) -> None:
    """Enqueue the cut of a step's first `rows` rows, for all layers with this window."""
    share_kernel[(triton.cdiv(cut.programs, SHARE.value),)](
        given.active,
        given.counters,
        shares.lines,
        shares.shares,
        rows,
        cut.programs,
        PADDED=max(triton.next_power_of_2(rows), 16),
        TILE=cut.tile,
        LEAST=max(LEAST_ROWS // cut.tile, 1),
        WINDOW=window or 0,
        num_warps=8,
    )


def attend_balanced(
    shape: AttentionShape, given: AttentionInput, out: Tensor, rows: int, cut: BalancedCut, shares: Shares
) -> None:
    """Enqueue the attention of the first `rows` rows of the batch into out [rows, q_heads * dim]."""
    spec, dim = shape.spec, shape.dim
    row = cut.part_lines(dim)
    constants: dict[str, Any] = {
        "HQ": spec.heads,
        "D": dim,
        "DIM": spec.head_dim,
        "PDL": shape.pdl,
        "launch_pdl": shape.pdl,
    }
    kernel = balanced_attention_kernel[(cut.programs, spec.kv_heads // cut.heads)](
        given.heads,
        given.norm_weight if given.norm_weight is not None else given.heads,
        given.rotary if given.rotary is not None else given.heads,
        given.k,
        given.v,
        given.tables,
        given.counters,
        shares.lines,
        shares.shares,
        given.partial,
        given.lse,
        spec.softmax_scale * math.log2(math.e),
        given.tables.shape[1],
        **constants,
        HKV=spec.kv_heads,
        H=cut.heads,
        **rotation(spec),
        BLOCK=shape.block_size,
        WARPS=cut.warps,
        R=cut.tile // row,
        STAGES=cut.stages,
        WINDOW=spec.window or 0,
        CAP_LOG2=(spec.score_cap or 0.0) * math.log2(math.e),
        num_warps=cut.warps,
    )
    split_alike(kernel)
    kernel = balanced_combine_kernel[(spec.heads, rows)](
        given.partial,
        given.lse,
        shares.lines,
        shares.shares,
        out,
        **constants,
        ROW=row,
        PARTS=PARTS,
        sinks=given.sinks,
        num_warps=4,
    )
    split_alike(kernel)
