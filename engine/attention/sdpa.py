"""Attention by torch's scaled_dot_product_attention on any device: the reference for every other backend."""

from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.parts import places
from engine.attention.sdpa_gpu import gpu_step
from engine.attention.unusual import Layers, Unusual
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention

SHORT = 64
"""Rows of a short message and the glue around it."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One span: its tokens in the step, its rows in the cache, and what it may see."""

    tokens: slice
    write: list[tuple[slice, slice]]
    """(slots, tokens of the span) for each contiguous run to write."""
    read: list[slice]
    """The slots of all rows that any row of the span may see, as contiguous runs."""
    mask: Tensor | None
    """[count, rows] to add to the scores; None if nothing is hidden, or if `causal` hides it."""
    causal: bool
    """Whether there is no cached prefix, so that attention is plainly causal."""


class SdpaBackend:
    """Folds the query heads of a KV head into the query rows, so that K and V are read once and never repeated."""

    name = "sdpa"

    def __init__(self, cache: KVCache, unusual: Layers = MappingProxyType({})) -> None:
        """Attend in the layers of `cache`; `unusual` has those that are not plain softmax."""
        self._cache = cache
        self._unusual = unusual

    def plan(self, batch: StepBatch) -> Attention:
        """See `AttentionBackend`."""
        if self._cache.device.type == "cuda" and not self._unusual:
            return gpu_step(self._cache, batch)
        plans = [self._plan(span, tokens) for tokens, span in places(batch)]
        return _SdpaStep(self._cache, plans, self._unusual)

    def _plan(self, span: Span, tokens: slice) -> _Plan:
        cache = self._cache
        write, done = [], 0
        for first, end in cache.slots(span.blocks, span.start, span.stop):
            write.append((slice(first, end), slice(done, done + end - first)))
            done += end - first
        causal = span.start == 0 and span.count > 1
        return _Plan(
            tokens=tokens,
            write=write,
            read=[slice(*run) for run in cache.slots(span.blocks, cache.first_seen(span.start), span.stop)],
            mask=None if causal or span.count == 1 else self._mask(span),
            causal=causal,
        )

    def _mask(self, span: Span) -> Tensor:
        # Aligned at the lower right: row i of the span sees the whole prefix, and the span up to itself.
        hidden = torch.full((span.count, span.stop), float("-inf"), dtype=self._cache.dtype)
        return hidden.triu_(span.start + 1).to(self._cache.device)


class _SdpaStep:
    def __init__(self, cache: KVCache, plans: list[_Plan], unusual: Layers) -> None:
        self._cache = cache
        self._plans = plans
        self._unusual = unusual

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, rule = self._cache, self._unusual.get(layer_index)
        if len(self._plans) == 1:
            return _attend(self._plans[0], q, k, v, cache, layer_index, rule)
        parts = [
            _attend(p, q[p.tokens], k[p.tokens], v[p.tokens], cache, layer_index, rule) for p in self._plans
        ]
        return torch.cat(parts)


def _attend(
    plan: _Plan, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, rule: Unusual | None
) -> Tensor:
    """Attend with q [t, Hq, D], k and v [t, Hkv or 0, D]; return [t, Hq, D]."""
    for slots, tokens in plan.write if k.shape[1] else ():
        cache.write(layer, slots, k[tokens], v[tokens])
    if plan.causal and rule is None and cache.keeps_exactly and k.shape[1]:
        seen_k, seen_v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    else:
        seen_k, seen_v = (_rows(cache, layer, x[layer], plan.read) for x in (cache.k, cache.v))
    if rule is not None:
        return rule.attend(q, seen_k[0].transpose(0, 1), seen_v[0].transpose(0, 1))
    if plan.causal:
        q = q.transpose(0, 1).unsqueeze(0)
        out = F.scaled_dot_product_attention(q, seen_k, seen_v, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)
    count, heads, dim = q.shape
    kv_heads = seen_k.shape[1]
    mask = plan.mask
    if mask is not None:
        mask = mask.repeat(heads // kv_heads, 1)
    # [t, Hkv, G, D] -> [1, Hkv, G * t, D]
    folded = q.reshape(count, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
    if mask is not None and count <= SHORT and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        out = _attend_short(folded, seen_k, seen_v, mask)
    else:
        out = F.scaled_dot_product_attention(folded, seen_k, seen_v, attn_mask=mask)
    return out.view(kv_heads, -1, count, dim).permute(2, 0, 1, 3).reshape(count, heads, dim)


def _attend_short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute scaled_dot_product_attention with the same rounding: scores and softmax in fp32.

    For few rows on a CPU, torch's bf16 kernel takes about 1.5 times as long as these products.
    """
    scores = torch.matmul(q.float() * q.shape[-1] ** -0.5, k.float().transpose(-1, -2))
    return torch.matmul(torch.softmax(scores.add_(mask), -1).to(v.dtype), v)


def _rows(cache: KVCache, layer: int, stored: Tensor, runs: list[slice]) -> Tensor:
    """Return the rows in `runs` of a layer's K or V, [1, Hkv, rows, D]: a view if contiguous, else gathered."""
    rows = stored[runs[0]] if len(runs) == 1 else torch.cat([stored[run] for run in runs])
    return cache.read(layer, rows).transpose(0, 1).unsqueeze(0)
