"""Attention by torch's scaled_dot_product_attention on any device: the reference for every other backend."""

from functools import cached_property
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.convolving import convolving
from engine.attention.parts import Parts, SpanRows, places
from engine.attention.sdpa_gpu import gpu_step
from engine.attention.unusual import Layers
from engine.attention.walks import recurrence_step
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention

SHORT = 64
"""Rows of a short message and the glue around it."""


class SdpaBackend:
    """Folds the query heads of a KV head into the query rows, so that K and V are read once and never repeated."""

    name = "sdpa"

    def __init__(self, cache: KVCache, unusual: Layers = MappingProxyType({})) -> None:
        """Attend in the layers of `cache`; `unusual` has those that are not plain softmax."""
        self._cache = cache
        self._unusual = unusual
        self._step = recurrence_step(cache.device)

    def plan(self, batch: StepBatch) -> Attention:
        """See `AttentionBackend`."""
        return convolving(self._attention(batch), self._cache, batch.spans, self._step)

    def _attention(self, batch: StepBatch) -> Attention:
        if self._cache.device.type == "cuda" and not self._unusual:
            return gpu_step(self._cache, batch)
        return Parts([(at, _SpanAttention(self._cache, span, self._unusual)) for at, span in places(batch)])


class _SpanAttention:
    """Attention of one span: without a cached prefix plainly causal, otherwise with a mask for its own rows."""

    def __init__(self, cache: KVCache, span: Span, unusual: Layers) -> None:
        self._cache = cache
        self._span = span
        self._unusual = unusual
        self._rows = SpanRows(cache, span)
        self._causal = span.start == 0 and span.count > 1
        self._folded: dict[int, Tensor] = {}
        """The mask for so many query heads per KV head, which most layers have in common."""

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        rule = self._unusual.get(layer_index)
        self._rows.write(layer_index, k, v)
        if rule is not None or not (self._causal and self._cache.keeps_exactly and k.shape[1]):
            k, v = self._rows.read(layer_index)
        if rule is not None:
            return rule.attend(q, k, v, self._span.stop - len(k))
        k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
        if self._causal:
            q = q.transpose(0, 1).unsqueeze(0)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.squeeze(0).transpose(0, 1)
        count, heads, dim = q.shape
        kv_heads = k.shape[1]
        mask = self._mask if self._mask is None else self._fold(self._mask, heads // kv_heads)
        # [t, Hkv, G, D] -> [1, Hkv, G * t, D]
        folded = q.reshape(count, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        if mask is not None and count <= SHORT and q.device.type == "cpu" and q.dtype == torch.bfloat16:
            out = _attend_short(folded, k, v, mask)
        else:
            out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        return out.view(kv_heads, -1, count, dim).permute(2, 0, 1, 3).reshape(count, heads, dim)

    @cached_property
    def _mask(self) -> Tensor | None:
        """The mask of a span after a cached prefix, [count, rows]; None for one row. Not every network needs it."""
        count, start, stop = self._span.count, self._span.start, self._span.stop
        if self._causal or count == 1:
            return None
        # Aligned at the lower right: row i of the span sees the whole prefix, and the span up to itself.
        hidden = torch.full((count, stop), float("-inf"), dtype=self._cache.dtype)
        return hidden.triu_(start + 1).to(self._cache.device)

    def _fold(self, mask: Tensor, groups: int) -> Tensor:
        if groups not in self._folded:
            self._folded[groups] = mask.repeat(groups, 1)
        return self._folded[groups]


def _attend_short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute scaled_dot_product_attention with the same rounding: scores and softmax in fp32.

    For few rows on a CPU, torch's bf16 kernel takes about 1.5 times as long as these products.
    """
    scores = torch.matmul(q.float() * q.shape[-1] ** -0.5, k.float().transpose(-1, -2))
    return torch.matmul(torch.softmax(scores.add_(mask), -1).to(v.dtype), v)
