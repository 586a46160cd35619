"""Inputs for any attention backend, and plain attention in float64 as what they must give."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Case:
    """A step over a cache that holds the rows before it; every row that is not written is NaN."""

    cache: KVCache
    batch: StepBatch
    q: Tensor
    k: Tensor
    v: Tensor
    expected: Tensor
    """[T, Hq, D] float64."""

    def run(self, backend: AttentionBackend) -> Tensor:
        return backend.plan(self.batch)(1, self.q, self.k, self.v)

    def error(self, out: Tensor) -> float:
        """The relative error, by norm; NaN where something was read that nobody wrote."""
        assert out.shape == self.expected.shape
        return float((out.double() - self.expected).norm() / self.expected.norm())


def case(
    spans: list[tuple[int, int]],
    *,
    group: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    scattered: bool = True,
    kv_heads: int = 2,
    device: str | torch.device = "cpu",
) -> Case:
    """`spans` are (rows before, tokens); their blocks are scattered over the cache or one run each."""
    random = torch.Generator().manual_seed(sum(start * 7 + count for start, count in spans))
    needed = [-(-(start + count) // block_size) for start, count in spans]
    total = sum(needed) + 3
    ids = torch.randperm(total, generator=random).tolist() if scattered else list(range(1, total))
    cache = KVCache(2, total, block_size, kv_heads, dim, dtype, torch.device(device))
    cache.kv.fill_(float("nan"))
    batch: list[Span] = []
    parts: list[list[Tensor]] = []
    for (start, count), blocks in zip(spans, needed, strict=True):
        table, ids = tuple(ids[:blocks]), ids[blocks:]
        rows = start + count
        q = torch.randn(count, kv_heads * group, dim, generator=random).to(device, dtype)
        k, v = (torch.randn(rows, kv_heads, dim, generator=random).to(device, dtype) for _ in range(2))
        slots = [table[row // block_size] * block_size + row % block_size for row in range(start)]
        cache.k[1, slots], cache.v[1, slots] = k[:start], v[:start]
        batch.append(Span(table, start, count))
        parts.append([q, k[start:], v[start:], plain(q, k, v)])
    q, k, v, expected = (torch.cat(part) for part in zip(*parts, strict=True))
    return Case(cache, StepBatch(tuple(batch)), q, k, v, expected)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal at the right corner: q [t, Hq, D], k and v [rows, Hkv, D] -> [t, Hq, D], all in float64."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
    rows, last = (torch.arange(first, len(k), device=q.device) for first in (0, len(k) - len(q)))
    hidden = rows > last.unsqueeze(1)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
