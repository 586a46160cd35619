"""scaled_dot_product_attention for spans on a GPU, whose kernels know the causal mask, so none is built."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.parts import Parts, SpanRows, places
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.device import FULL_SPEED, is_amd
from models.reference.attention import Attention


def gpu_step(cache: KVCache, batch: StepBatch) -> Attention:
    """Return the attention of a step, with one call per span."""
    gqa = has_gqa(cache)
    return Parts([(tokens, GpuSpan(cache, span, gqa)) for tokens, span in places(batch)])


def has_gqa(cache: KVCache) -> bool:
    """Return whether torch has a fast kernel for fewer KV heads than query heads: only its FlashAttention has."""
    if cache.dtype not in (torch.bfloat16, torch.float16):
        return False
    return not is_amd() and torch.cuda.get_device_capability(cache.device) >= FULL_SPEED


class GpuSpan:
    """Attention of one span. With `gqa`, torch's kernel repeats the KV heads; otherwise they are repeated in memory."""

    def __init__(self, cache: KVCache, span: Span, gqa: bool) -> None:
        from torch.nn.attention.bias import causal_lower_right  # imports triton, which a CPU does not need

        self._span = span
        self._rows = SpanRows(cache, span)
        self._gqa = gqa
        self._reads = span.start > 0 or not cache.keeps_exactly
        # Row i sees the whole prefix, and the span up to itself; is_causal alone aligns at the upper left.
        self._bias = causal_lower_right(span.count, span.stop)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        self._rows.write(layer_index, k, v)
        if self._reads or not k.shape[1]:
            k, v = self._rows.read(layer_index)
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


def _one_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with q [1, Hq, D], k and v [rows, Hkv, D]; return [1, Hq, D]. A group's heads are queries of one head."""
    queries = q.reshape(1, k.shape[1], -1, q.shape[2])
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    return F.scaled_dot_product_attention(queries, k, v).reshape(q.shape)
