"""Inputs for any attention backend, and plain attention in float64 as what they must give."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.attention.unusual import Unusual
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.cache.window import Window
from models.spec import Attention


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
    unusual: dict[int, Unusual]
    """Its layer, where that is."""

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
    lets_go: bool = False,
    **asked: Any,
) -> Case:
    """`spans` are (rows before, tokens); their blocks are scattered over the cache or one run each.

    `asked`: window, scale, cap and sinks of the layer. With `lets_go` the network has no other layers: the blocks that
    nobody sees any more are the blank one in the tables.
    """
    heads = kv_heads * group
    layer = a_layer(heads, kv_heads, dim, device, **asked)
    window = Window(layer.spec.window, 64) if lets_go and layer.spec.window is not None else None
    random = torch.Generator().manual_seed(sum(start * 7 + count for start, count in spans))
    needed = [-(-(start + count) // block_size) for start, count in spans]
    total = sum(needed) + 3
    ids = torch.randperm(total, generator=random).tolist() if scattered else list(range(1, total))
    cache = KVCache.uniform(2, total, block_size, kv_heads, dim, dtype, torch.device(device), window)
    cache.kv[:, :, : total * block_size] = float("nan")
    batch: list[Span] = []
    parts: list[list[Tensor]] = []
    for (start, count), blocks in zip(spans, needed, strict=True):
        table, ids = tuple(ids[:blocks]), ids[blocks:]
        rows = start + count
        q = torch.randn(count, heads, dim, generator=random).to(device, dtype)
        k, v = (torch.randn(rows, kv_heads, dim, generator=random).to(device, dtype) for _ in range(2))
        first = cache.first_seen(start)
        slots = [table[row // block_size] * block_size + row % block_size for row in range(first, start)]
        cache.k[1][slots], cache.v[1][slots] = k[first:start], v[first:start]
        gone = first // block_size
        batch.append(Span((total,) * gone + table[gone:], start, count))
        parts.append([q, k[start:], v[start:], plain(q, k, v, sinks=layer.sinks, **asked_of(layer))])
    q, k, v, expected = (torch.cat(part) for part in zip(*parts, strict=True))
    unusual = {} if layer.spec.is_plain else {1: layer}
    return Case(cache, StepBatch(tuple(batch)), q, k, v, expected, unusual)


def a_layer(
    heads: int,
    kv_heads: int,
    dim: int,
    device: str | torch.device = "cpu",
    *,
    sinks: bool = False,
    **asked: Any,
) -> Unusual:
    """`asked`: its window, scale and cap."""
    spec = Attention(heads, kv_heads, dim, score_cap=asked.pop("cap", None), sinks=sinks, **asked)
    return Unusual(spec, torch.linspace(-2.0, 3.0, heads).to(device) if sinks else None)


def asked_of(layer: Unusual) -> dict[str, Any]:
    """What `plain` is told of it, but for the sinks."""
    return {
        "window": layer.spec.window,
        "chunk": layer.spec.chunk,
        "scale": layer.spec.scale,
        "cap": layer.spec.score_cap,
    }


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal at the right corner: q [t, Hq, D], k and v [rows, Hkv, D] -> [t, Hq, D], all in float64.

    A token sees `window` rows or those of its `chunk`, scores become cap * tanh(score / cap), and sinks [Hq] are scores
    without values. Where a token sees nothing, its output is 0.
    """
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    rows, last = (torch.arange(first, len(k), device=q.device) for first in (0, len(k) - len(q)))
    seen = rows <= last.unsqueeze(1)
    if window is not None:
        seen &= rows > last.unsqueeze(1) - window
    if chunk is not None:
        seen &= rows // chunk == (last // chunk).unsqueeze(1)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)), dim=-1)
    shares = scores.softmax(-1)[..., : len(k)].masked_fill(~seen.any(1).view(-1, 1), 0.0)
    v = torch.where(seen.any(0).view(-1, 1, 1), v, 0.0)  # what nobody sees is not read
    return torch.einsum("hts,shd->thd", shares, v)
