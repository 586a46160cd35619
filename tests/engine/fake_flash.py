"""What flash-attn 2.8 says of its functions, in plain torch: for tests on machines without it."""

import torch
from torch import Tensor

from tests.engine.attention_cases import plain


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """[batch, tokens, heads, dim] each; the mask is aligned at the bottom right corner."""
    assert causal
    return torch.stack([plain(*one) for one in zip(q, k, v, strict=True)]).to(q.dtype)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    causal: bool,
) -> Tensor:
    """Appends k and v at the rows `cache_seqlens` of the sequences, then attends over all rows."""
    assert causal
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    page = k_cache.shape[1]
    assert page % 256 == 0
    outs = []
    for i, start in enumerate(cache_seqlens.tolist()):
        rows = torch.arange(start + q.shape[1])
        at = block_table[i].long()[rows // page], rows % page
        new = at[0][start:], at[1][start:]
        k_cache[new], v_cache[new] = k[i], v[i]
        outs.append(plain(q[i], k_cache[at], v_cache[at]))
    return torch.stack(outs).to(q.dtype)
