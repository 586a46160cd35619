"""What flash-attn 2.8 says of its functions, in plain torch: for tests on machines without it."""

import torch
from torch import Tensor

from tests.engine.attention_cases import plain


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
) -> Tensor:
    """Appends k and v at the rows `cache_seqlens` of the sequences, then attends over all rows.

    Without k and v it attends to the rows up to `cache_seqlens`; without a block table to k_cache and v_cache [batch,
    rows, heads, dim] as they are. The mask is aligned at the bottom right corner.
    """
    assert causal
    if block_table is None:
        assert k is v is cache_seqlens is None
        return torch.stack([plain(*one) for one in zip(q, k_cache, v_cache, strict=True)]).to(q.dtype)
    assert cache_seqlens is not None
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    page = k_cache.shape[1]
    assert page % 256 == 0
    outs = []
    for i, start in enumerate(cache_seqlens.tolist()):
        rows = torch.arange(start + (q.shape[1] if k is not None else 0))
        at = block_table[i].long()[rows // page], rows % page
        if k is not None:
            assert v is not None
            new = at[0][start:], at[1][start:]
            k_cache[new], v_cache[new] = k[i], v[i]
        outs.append(plain(q[i], k_cache[at], v_cache[at]))
    return torch.stack(outs).to(q.dtype)
