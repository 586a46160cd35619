"""The compiled functions of flash-attn 2.8 (`flash_attn_2_cuda`) in plain torch, for machines without them."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.engine.attention_cases import plain

PAGE = 256
"""Blocks have a multiple of this many rows."""


def fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seqlens_k: Tensor | None,
    rotary_cos: None,
    rotary_sin: None,
    cache_batch_idx: None,
    leftpad_k: None,
    block_table: Tensor | None,
    alibi_slopes: None,
    out: None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> tuple[Tensor, None]:
    """Take what the compiled function takes; `num_splits` 0 lets it choose."""
    assert rotary_cos is rotary_sin is cache_batch_idx is leftpad_k is alibi_slopes is out is None
    assert num_splits == 0
    window = (window_size_left, window_size_right)
    found = flash_attn_with_kvcache(
        q, k_cache, v_cache, causal=is_causal, k=k, v=v, cache_seqlens=seqlens_k, block_table=block_table,
        softmax_scale=softmax_scale, window_size=window, softcap=softcap,
    )  # fmt: skip
    return found, None


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: None,
    leftpad_k: None,
    block_table: Tensor,
    alibi_slopes: None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: None,
) -> tuple[Tensor, None, None, None]:
    """Take what the compiled function takes."""
    assert out is seqused_k is leftpad_k is alibi_slopes is generator is None
    assert not zero_tensors
    assert not return_softmax
    assert p_dropout == 0.0
    window = (window_size_left, window_size_right)
    found = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=is_causal,
        block_table=block_table, softmax_scale=softmax_scale, window_size=window, softcap=softcap,
    )  # fmt: skip
    return found, None, None, None


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    causal: bool,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Appends k and v at the rows `cache_seqlens` of the sequences, then attends over all rows.

    Without k and v it attends to the rows up to `cache_seqlens`; without a block table to k_cache and v_cache [batch,
    rows, heads, dim] as they are. The mask is aligned at the bottom right corner. A token sees window_size[0] rows
    before its own; -1: all.
    """
    assert causal
    asked = features(softmax_scale, window_size, softcap)
    if block_table is None:
        assert k is v is cache_seqlens is None
        return torch.stack([plain(*one, **asked) for one in zip(q, k_cache, v_cache, strict=True)]).to(
            q.dtype
        )
    assert cache_seqlens is not None
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    page = k_cache.shape[1]
    assert page % PAGE == 0
    outs = []
    for i, start in enumerate(cache_seqlens.tolist()):
        rows = torch.arange(start + (q.shape[1] if k is not None else 0))
        at = block_table[i].long()[rows // page], rows % page
        if k is not None:
            assert v is not None
            new = at[0][start:], at[1][start:]
            k_cache[new], v_cache[new] = k[i], v[i]
        outs.append(plain(q[i], k_cache[at], v_cache[at], **asked))
    return torch.stack(outs).to(q.dtype)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    block_table: Tensor,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Attends from the tokens of each sequence to its rows in blocks k and v [blocks, page, heads, dim].

    Sequence i has the tokens from cu_seqlens_q[i] to cu_seqlens_q[i + 1], and as many rows as cu_seqlens_k says in the
    same way. What is beyond the last one's is not written to: NaN here. Where max_seqlen_q is 1, the real one takes
    every token for a sequence.
    """
    assert causal
    asked = features(softmax_scale, window_size, softcap)
    assert max_seqlen_q > 1
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_k.is_contiguous()
    assert len(block_table) == len(cu_seqlens_q) - 1 == len(cu_seqlens_k) - 1
    page = k.shape[1]
    assert page % PAGE == 0
    out = torch.full_like(q, float("nan"))
    ends, rows_before = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i, (first, end) in enumerate(pairwise(ends)):
        count, seen = end - first, rows_before[i + 1] - rows_before[i]
        assert 0 <= count <= min(max_seqlen_q, seen)
        assert seen <= max_seqlen_k
        if count:
            rows = torch.arange(seen)
            at = block_table[i].long()[rows // page], rows % page
            out[first:end] = plain(q[first:end], k[at], v[at], **asked).to(q.dtype)
    return out


def features(softmax_scale: float | None, window_size: tuple[int, int], softcap: float) -> dict[str, Any]:
    """The same as `plain` calls it. What lies behind a token is hidden by `causal`."""
    before, behind = window_size
    assert behind in (-1, 0)
    return {"scale": softmax_scale, "window": before + 1 if before >= 0 else None, "cap": softcap or None}
