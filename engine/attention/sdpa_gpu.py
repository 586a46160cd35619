"""The spans of a step on a GPU by scaled_dot_product_attention: its own kernels know the causal mask, none is built."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.parts import Parts
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.device import FULL_SPEED
from models.reference.attention import Attention


def gpu_step(cache: KVCache, batch: StepBatch) -> Attention:
    """One call after the other for each span."""
    parts: list[tuple[slice, Attention]] = []
    token = 0
    for span in batch.spans:
        parts.append((slice(token, token + span.count), GpuSpan(cache, span, has_gqa(cache.kv))))
        token += span.count
    return Parts(parts)


def has_gqa(kv: Tensor) -> bool:
    """Whether torch has a fast kernel for fewer KV heads than query heads: only its FlashAttention does."""
    if kv.dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(kv.device) >= FULL_SPEED


class GpuSpan:
    """One span; with `gqa` torch's kernel repeats the KV heads, else they are repeated in memory."""

    def __init__(self, cache: KVCache, span: Span, gqa: bool) -> None:
        from torch.nn.attention.bias import (
            causal_lower_right,
        )  # it imports triton, and a CPU needs none of it

        self._cache = cache
        self._span = span
        self._gqa = gqa
        # Row i of the span sees the whole prefix and the span up to itself; is_causal alone aligns at the left corner.
        self._bias = causal_lower_right(span.count, span.stop)
        runs = cache.slots(span.blocks, 0, span.stop)
        if len(runs) == 1:
            self._read: slice | None = slice(*runs[0])
            self._write: slice | Tensor = slice(runs[0][0] + span.start, runs[0][1])
            return
        size, device = cache.block_size, cache.kv.device
        self._read = None
        blocks = torch.tensor(span.blocks[: -(-span.stop // size)])
        rows = torch.arange(span.start, span.stop)
        self._write = (blocks[rows // size] * size + rows % size).to(device, non_blocking=True)
        self._blocks = blocks.to(device, non_blocking=True)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        keys, values = self._cache.k[layer_index], self._cache.v[layer_index]
        keys[self._write] = k
        values[self._write] = v
        if self._span.start > 0:
            k, v = self._rows(keys), self._rows(values)
        if self._span.count == 1:
            return _one_token(q, k, v)
        groups = q.shape[1] // k.shape[1]
        if not self._gqa and groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self._bias, enable_gqa=self._gqa and groups > 1
        )
        return out.squeeze(0).transpose(0, 1)

    def _rows(self, cache: Tensor) -> Tensor:
        """All rows the span sees, [rows, Hkv, D]: a view where they are one run, else gathered page by page."""
        if self._read is not None:
            return cache[self._read]
        pages = cache.view(-1, self._cache.block_size, *cache.shape[1:])
        return pages.index_select(0, self._blocks).flatten(0, 1)[: self._span.stop]


def _one_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [1, Hq, D], k and v [rows, Hkv, D] -> [1, Hq, D]; the heads of a group are the queries of one head."""
    queries = q.reshape(1, k.shape[1], -1, q.shape[2])
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    return F.scaled_dot_product_attention(queries, k, v).reshape(q.shape)
