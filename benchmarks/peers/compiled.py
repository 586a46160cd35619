"""Plain torch: a static cache, torch.compile, and one CUDA graph over the whole step and its argmax.

The functions below are what one would write by hand for one sequence. A layer is compiled once and used for all
layers (its weights are arguments). The residual is carried along, so that compiling the whole step would fuse nothing
more than the embedding. Position and token are read from device buffers; a graph is captured for every context, over
a cache of that length rounded up.

Attention is written in two ways, and the faster one is used for each context: torch's scaled_dot_product_attention with
a mask, or two batched products over pages of the cache, which spread a long context over the whole GPU.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.recording import wait_for
from models.network import FeedForwardWeights, LayerWeights, Network
from models.spec import ModelSpec

PAGE = 128


@dataclass(frozen=True, slots=True)
class Dims:
    """The numbers of a spec that the compiled functions need."""

    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in fp32, cast back before the weight."""
    y = x.float()
    scaled: Tensor = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def first(token: Tensor, position: Tensor, embedding: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the embedding [1, hidden], and cos and sin [1, head_dim], of int64 [1] token and position."""
    cos, sin = table[position].chunk(2, dim=-1)
    return embedding[token], torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def layer(
    x: Tensor,
    residual: Tensor,
    weights: tuple[Tensor, ...],
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    dims: Dims,
    paged: bool,
) -> tuple[Tensor, Tensor]:
    """Compute x and residual [1, hidden] -> (output of the MLP, residual before it); write K and V at `position`.

    The cache is [pages, Hkv, PAGE, D] if `paged`, else [1, Hkv, length, D].
    """
    input_norm, qkv, qk_norm, out, post_norm, gate_up, down = weights
    residual = residual + x
    heads = F.linear(norm(residual, input_norm, dims.eps), qkv).view(-1, dims.head_dim)
    rotated = dims.q_heads + dims.kv_heads
    qk = norm(heads[:rotated], qk_norm, dims.eps)
    qk = qk * cos + qk.roll(dims.head_dim // 2, -1) * sin
    q, k, v = qk[: dims.q_heads], qk[dims.q_heads :], heads[rotated:]
    if paged:
        keys[position // PAGE, :, position % PAGE] = k[None]
        values[position // PAGE, :, position % PAGE] = v[None]
        mixed = attend_pages(q, keys, values, position)
    else:
        keys[:, :, position] = k[None, :, None]
        values[:, :, position] = v[None, :, None]
        mask = torch.arange(keys.shape[2], device=keys.device) <= position
        folded = q.view(1, dims.kv_heads, -1, dims.head_dim)
        mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask[None, None, None])
    residual = residual + F.linear(mixed.reshape(1, -1), out)
    gate, up = F.linear(norm(residual, post_norm, dims.eps), gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down), residual


def attend_pages(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Attend with q [Hq, D] to pages [C, Hkv, PAGE, D] up to `position`: -> [Hkv, Hq / Hkv, D]."""
    pages, kv_heads, page, dim = keys.shape
    folded = q.view(1, kv_heads, -1, dim).expand(pages, -1, -1, -1).reshape(pages * kv_heads, -1, dim)
    scores = torch.bmm(folded, keys.reshape(-1, page, dim).transpose(1, 2)).view(pages, kv_heads, -1, page)
    rows = torch.arange(pages * page, device=q.device).view(pages, 1, 1, page)
    scores = (scores.float() * dim**-0.5).masked_fill(rows > position, float("-inf"))
    weights = (scores - scores.amax((0, 3), keepdim=True)).exp()
    total = weights.sum((0, 3))
    parts = torch.bmm(weights.to(q.dtype).view(pages * kv_heads, -1, page), values.reshape(-1, page, dim))
    mixed: Tensor = parts.view(pages, kv_heads, -1, dim).float().sum(0) / total[..., None]
    return mixed.to(q.dtype)


def last(x: Tensor, residual: Tensor, weight: Tensor, head: Tensor, dims: Dims) -> Tensor:
    """Return the logits [1, vocab]."""
    return F.linear(norm(residual + x, weight, dims.eps), head)


def choose(x: Tensor, residual: Tensor, weight: Tensor, head: Tensor, dims: Dims) -> Tensor:
    """Return the most likely token, int64 [1]."""
    return last(x, residual, weight, head, dims).argmax(-1)


def _weights(layer: LayerWeights) -> tuple[Tensor, ...]:
    """Return the weights that `layer` takes."""
    attention, feed_forward = layer.attention, layer.feed_forward
    assert isinstance(feed_forward, FeedForwardWeights)
    assert layer.attention_norm is not None
    assert layer.feed_forward_norm is not None
    assert attention.head_norm is not None
    return (
        layer.attention_norm.weight,
        attention.qkv.weight,
        attention.head_norm,
        attention.out.weight,
        layer.feed_forward_norm.weight,
        feed_forward.gate_up.weight,
        feed_forward.down.weight,
    )


class Step:
    """One decode step with one way of attention: its buffers, compiled functions, and graph for a context."""

    def __init__(
        self,
        spec: ModelSpec,
        model: Network,
        length: int,
        paged: bool,
        compiling: dict[str, Any] | None,
    ) -> None:
        """Allocate for a cache of up to `length` rows; `compiling` has torch.compile's options, None for eager."""
        self.paged = paged
        self._model = model
        self._dims = Dims(
            spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim, spec.final_norm.eps
        )
        embedding, rotary = model.embedding.data, model.layers[0].attention.rotary
        assert rotary is not None
        self._rotary = rotary
        self._embedding, self._device = embedding, embedding.device
        self._weights = [_weights(block) for block in model.layers]
        pages = max(2, -(-length // PAGE))
        heads, dim = spec.attention.kv_heads, spec.attention.head_dim
        shape = (pages, heads, PAGE, dim) if paged else (1, heads, pages * PAGE, dim)
        self._caches = [
            tuple(torch.randn(shape, dtype=embedding.dtype, device=self._device) for _ in range(2))
            for _ in model.layers
        ]
        self.token = torch.ones(1, dtype=torch.int64, device=self._device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._zero = torch.zeros(1, spec.hidden_size, dtype=embedding.dtype, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._views: list[tuple[Tensor, Tensor]] = []
        wrap = (lambda f: f) if compiling is None else (lambda f: torch.compile(f, **compiling))
        self._first, self._layer, self._choose = wrap(first), wrap(layer), wrap(choose)

    @torch.no_grad()
    def open(self, length: int) -> None:
        """Use the first `length` rows of the cache from now on, rounded up to pages; compile and capture a graph."""
        pages = max(2, -(-length // PAGE))  # a dimension of 1 is compiled as a constant
        self._graph = None
        self._views = []
        for keys, values in self._caches:
            views = tuple(c[:pages] if self.paged else c[:, :, : pages * PAGE] for c in (keys, values))
            for view in views:
                torch._dynamo.maybe_mark_dynamic(view, 0 if self.paged else 2)
            self._views.append((views[0], views[1]))
        self.position.zero_()
        if self._device.type != "cuda":
            self._run()
            return
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()

    def hidden(self) -> tuple[Tensor, Tensor]:
        """Return the last layer's output and residual for the token and the position in the buffers."""
        x, cos, sin = self._first(self.token, self.position, self._embedding, self._rotary)
        residual = self._zero
        for weights, (keys, values) in zip(self._weights, self._views, strict=True):
            x, residual = self._layer(
                x, residual, weights, keys, values, self.position, cos, sin, self._dims, self.paged
            )
        return x, residual

    def logits(self) -> Tensor:
        """Return the logits [1, vocab] for the token and the position in the buffers; neither of them advances."""
        x, residual = self.hidden()
        return last(x, residual, self._model.final_norm.weight, self._model.head.weight, self._dims)

    def _run(self) -> None:
        x, residual = self.hidden()
        weight, head = self._model.final_norm.weight, self._model.head.weight
        self.token.copy_(self._choose(x, residual, weight, head, self._dims))
        self.position.add_(1)

    @torch.no_grad()
    def decode(self, context: int, steps: int) -> float:
        """Return seconds per token of `steps` tokens after `context`."""
        self.position.fill_(context)
        wait_for(self._device)
        began = time.perf_counter()
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._run()
        wait_for(self._device)
        return (time.perf_counter() - began) / steps


class Compiled:
    """The faster of both ways of attention at each context."""

    def __init__(self, name: str, spec: ModelSpec, model: Network, length: int, mode: str | None) -> None:
        self.name = name
        compiling = {"mode": mode, "fullgraph": True}
        self._steps = [Step(spec, model, length, paged, compiling) for paged in (False, True)]
        self._chosen = self._steps[0]

    def prepare(self, context: int, steps: int) -> str | None:
        """Compile and capture for this context; return which attention was chosen."""
        rates = {}
        for step in list(self._steps):
            kind = "pages" if step.paged else "sdpa"
            try:
                step.open(context + steps + 1)
                step.decode(context, 8)
                rates[kind] = step.decode(context, 32), step
            except Exception as error:  # noqa: BLE001 - the other way may still work
                self._steps.remove(step)
                print(f"    {self.name}: no {kind} attention: {_line(error)}", flush=True)
        if not rates:
            raise RuntimeError("neither way of attention could be compiled")
        kind = min(rates, key=lambda name: rates[name][0])
        self._chosen = rates[kind][1]
        shown = ", ".join(f"{name} {1 / rate:.0f} tok/s" for name, (rate, _) in rates.items())
        return f"{kind} attention ({shown})"

    def decode(self, context: int, steps: int) -> float:
        """Return seconds per token of `steps` tokens after `context`."""
        return self._chosen.decode(context, steps)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.160}"
