"""Compute any `ModelSpec` in float64, row by row, from a checkpoint's tensors: executors are tested against it.

It uses nothing of models/ or engine/ except the descriptions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.recurrences import DeltaNet, Mamba2
from models.spec import (
    Activation,
    AltUp,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    ModelSpec,
    Norm,
    Rope,
    ShortConvolution,
)


@dataclass(slots=True)
class PlainNetwork:
    """One text at a time, without a cache. `tensors` are those of a checkpoint, named by the parts of slots."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    read: Tensor = field(default_factory=lambda: torch.empty(0))
    """What the mixer of the last layer has read."""
    router_gap: float = field(default=math.inf)
    """The smallest gap between the scores of the last expert that was chosen and the first that was not."""

    def logits(self, tokens: list[int]) -> Tensor:
        """[tokens, vocab]"""
        spec = self.spec
        x = self._get("embedding.weight")[tokens]
        x = self._norm("embedding_norm", spec.embedding_norm, x) * spec.embedding_scale
        if spec.learned_positions:
            x = x + self._get("position_embedding.weight")[: len(tokens)]
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        inputs = self._inputs(tokens, x)
        if spec.altup is not None:
            x = self._streams(spec.altup, x, inputs, kept)
        for index, layer in enumerate(spec.layers if spec.altup is None else ()):
            x = self._layer(index, layer, x, kept)
            x = x + self._of_input(index, x, inputs[:, index])
            x = x * self._get(f"layers.{index}.scalar") if layer.scalar else x
        x = self._norm("final_norm", spec.final_norm, x)
        logits = x @ self._get("embedding.weight" if spec.tied else "head.weight").T * spec.logit_scale
        return logits if spec.logit_cap is None else spec.logit_cap * torch.tanh(logits / spec.logit_cap)

    def _of_input(self, index: int, x: Tensor, given: Tensor) -> Tensor:
        """Return what the input [tokens, size] of a layer adds to its result x, which is 0 without any."""
        spec, at = self.spec.layer_inputs, f"layers.{index}."
        if spec is None:
            return torch.zeros_like(x)
        gate = activated(spec.activation, self._linear(f"{at}input_gate", x))
        return self._norm(
            f"{at}input_post_norm", spec.post_norm, self._linear(f"{at}input_out", gate * given)
        )

    def _streams(
        self, spec: AltUp, x: Tensor, inputs: Tensor, kept: dict[int, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Compute the layers of a network with AltUp: [tokens, hidden] -> the same shape."""

        def like(given: Tensor, other: Tensor) -> Tensor:
            sizes = (each.square().mean(-1, keepdim=True).sqrt() for each in (other, given))
            return given * next(sizes) / next(sizes)

        def routed(at: str, given: Tensor) -> Tensor:
            normed = self._norm(f"{at}altup_norm", spec.norm, given) / self.spec.hidden_size
            return torch.tanh(self._linear(f"{at}altup_router", normed))

        others = range(spec.count - 1)
        streams = [x, *(like(self._linear(f"stream_in.{i}", x), x) for i in others)]
        for index, layer in enumerate(self.spec.layers):
            at = f"layers.{index}."
            mixing = self._linear(f"{at}altup_predict", routed(at, streams[0]))
            predicted = [
                streams[i] + sum(mixing[:, i * spec.count + j, None] * streams[j] for j in range(spec.count))
                for i in range(spec.count)
            ]
            out = self._layer(index, layer, predicted[0], kept)
            shares = self._linear(f"{at}altup_correct", routed(at, out))
            streams = [p + (1 + shares[:, i, None]) * (out - predicted[0]) for i, p in enumerate(predicted)]
            first = streams[0] * self._get(f"{at}altup_scale")
            added = self._of_input(index, first, inputs[:, index])
            streams = [streams[0], *(stream + added for stream in streams[1:])]
        ends = [like(self._linear(f"stream_out.{i}", streams[i + 1]), streams[0]) for i in others]
        return torch.stack([streams[0], *ends]).mean(0)

    def _inputs(self, tokens: list[int], x: Tensor) -> Tensor:
        """Return the inputs of all layers [tokens, layers, size], size 0 without any."""
        spec = self.spec.layer_inputs
        if spec is None:
            return torch.empty(len(x), len(self.spec.layers), 0)
        shape = (len(x), -1, spec.size)
        known = [token if token < (spec.vocab_size or token + 1) else 0 for token in tokens]
        looked_up = self._get("layer_embedding.weight")[known] * math.sqrt(spec.size)
        projected = self._linear("layer_projection", x / math.sqrt(self.spec.hidden_size))
        normed = self._norm("layer_input_norm", spec.norm, projected.view(shape))
        return (normed + looked_up.view(shape)) / math.sqrt(2)

    def _get(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def _linear(self, name: str, x: Tensor, bias: bool = False) -> Tensor:
        out = x @ self._get(f"{name}.weight").T
        return out + self._get(f"{name}.bias") if bias else out

    def _norm(self, name: str, norm: Norm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        if name.endswith("v_norm") or not norm.weighted:
            return x
        x = x * (self._get(name if name.endswith("router_norm") else f"{name}.weight") + norm.offset)
        return x + self._get(f"{name}.bias") if norm.bias else x

    def _layer(self, index: int, layer: Layer, x: Tensor, kept: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        at = f"layers.{index}."
        if not layer.beside:
            self.read = self._norm(f"{at}attention_norm", layer.attention_norm, x)
        given = self.read
        if isinstance(layer.mixer, ShortConvolution):
            out = self._convolution(at, layer.mixer, given)
        elif isinstance(layer.mixer, DeltaNet):
            out = self._delta_net(at, layer.mixer, given)
        elif isinstance(layer.mixer, Mamba2):
            out = self._mamba2(at, layer.mixer, given)
        elif isinstance(layer.mixer, LatentAttention):
            out = self._latent_attention(at, layer.mixer, given)
        elif isinstance(layer.mixer, Attention):
            out = self._attention(index, layer.mixer, given, kept)
        else:
            out = torch.zeros_like(x)
        x = x + self._norm(f"{at}attention_post_norm", layer.attention_post_norm, out) * layer.residual_scale
        if layer.laurel is not None:
            low = self._linear(f"{at}laurel_right", self._linear(f"{at}laurel_left", given))
            x = (x + given + self._norm(f"{at}laurel_norm", layer.laurel.norm, low)) / math.sqrt(2)
        if not layer.parallel:
            given = self._norm(f"{at}feed_forward_norm", layer.feed_forward_norm, x)
        if isinstance(layer.feed_forward, Experts):
            out = torch.stack([self._mixture(at, layer.feed_forward, row) for row in given])
        elif layer.feed_forward is None:
            return x
        else:
            out = self._feed(at, "", layer.feed_forward, given)
        out = self._norm(f"{at}feed_forward_post_norm", layer.feed_forward_post_norm, out)
        return x + out * layer.residual_scale

    def _heads(self, at: str, part: str, spec: Attention, x: Tensor) -> Tensor:
        """Return the heads of q or k after norm and rotation, [rows, heads, head_dim]."""
        count, dim = len(x), spec.head_dim
        heads = self._linear(at + part, x, spec.qkv_bias).view(count, -1, dim)
        if spec.rope is not None and spec.norms_rotated:
            heads = rotated(spec.rope, heads)
        shape = (count, 1, -1) if spec.norms_all_heads else (count, -1, dim)
        heads = self._norm(f"{at}{part}_norm", spec.head_norm, heads.reshape(shape)).view(count, -1, dim)
        return heads if spec.rope is None or spec.norms_rotated else rotated(spec.rope, heads)

    def _attention(
        self, index: int, spec: Attention, x: Tensor, kept: dict[int, tuple[Tensor, Tensor]]
    ) -> Tensor:
        at, count, dim = f"layers.{index}.", len(x), spec.head_dim
        q = self._heads(at, "q", spec, x)
        if spec.query_scaling is not None:
            scaling = spec.query_scaling
            extensions = (torch.arange(count, dtype=torch.float64) + scaling.offset) // scaling.positions
            q = q * (1 + scaling.beta * (1 + extensions).log())[:, None, None]
        if spec.kv_from is None:
            v = self._linear(at + ("k" if spec.v_is_k else "v"), x, spec.qkv_bias).view(count, -1, dim)
            kept[index] = self._heads(at, "k", spec, x), self._norm(f"{at}v_norm", spec.v_norm, v)
        k, v = kept[index if spec.kv_from is None else spec.kv_from]
        outs = torch.zeros(count, spec.heads, dim, dtype=torch.float64)
        for head in range(spec.heads):
            keys, values = (part[:, head // (spec.heads // spec.kv_heads)] for part in (k, v))
            for row in range(count):
                first = 0 if spec.window is None else max(0, row + 1 - spec.window)
                if spec.chunk is not None:
                    first = row - row % spec.chunk
                scores = keys[first : row + 1] @ q[row, head]
                scores = scores * (dim**-0.5 if spec.scale is None else spec.scale)
                if spec.score_cap is not None:
                    scores = spec.score_cap * torch.tanh(scores / spec.score_cap)
                if spec.sinks:
                    scores = torch.cat([scores, self._get(f"{at}sinks")[head : head + 1]])
                outs[row, head] = scores.softmax(-1)[: row + 1 - first] @ values[first : row + 1]
        if spec.gate is not None:
            gates = 1 / (1 + (-self._linear(f"{at}attention_gate", x)).exp())
            outs = outs * gates.view(count, spec.heads, -1)
        return self._linear(f"{at}out", outs.flatten(1), spec.out_bias)

    def _latent_attention(self, at: str, spec: LatentAttention, x: Tensor) -> Tensor:
        """Attend with keys and values as the paper defines them, head by head."""
        count = len(x)
        if spec.q_rank is None:
            q = self._linear(f"{at}q", x)
        else:
            q = self._norm(f"{at}q_a_norm", spec.norm, self._linear(f"{at}q_a", x, spec.bias))
            q = self._linear(f"{at}q_b", q)
        q = q.view(count, spec.heads, -1)
        kept = self._linear(f"{at}kv_a", x, spec.bias)
        latents = self._norm(f"{at}kv_a_norm", spec.norm, kept[:, : spec.kv_rank])
        k_b = self._get(f"{at}k_b.weight").view(spec.heads, spec.kv_rank, -1)
        v_b = self._get(f"{at}v_b.weight").view(spec.heads, -1, spec.kv_rank)
        q_last, k_last = q[..., spec.nope_dim :], kept[:, spec.kv_rank :].unsqueeze(1)
        if spec.rope is not None:
            q_last, k_last = rotated(spec.rope, q_last), rotated(spec.rope, k_last)
        outs = torch.zeros(count, spec.heads, spec.v_dim, dtype=torch.float64)
        scale = (spec.nope_dim + spec.rope_dim) ** -0.5 if spec.scale is None else spec.scale
        for head in range(spec.heads):
            keys, values = latents @ k_b[head], latents @ v_b[head].T
            for row in range(count):
                scores = keys[: row + 1] @ q[row, head, : spec.nope_dim]
                scores = (scores + k_last[: row + 1, 0] @ q_last[row, head]) * scale
                outs[row, head] = scores.softmax(-1) @ values[: row + 1]
        return self._linear(f"{at}out", outs.flatten(1), spec.bias)

    def _delta_net(self, at: str, spec: DeltaNet, x: Tensor) -> Tensor:
        """Compute the formula of the paper, one value head after the other."""
        sizes = [spec.key_heads * spec.key_dim] * 2 + [spec.value_heads * spec.value_dim]
        given = torch.cat([self._linear(f"{at}delta_{part}", x) for part in "qkv"], -1)
        q, k, v = self._convolved(at, given, spec.conv_width).split(sizes, -1)
        q, k = (part.reshape(len(x), spec.key_heads, -1) for part in (q, k))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        v = v.reshape(len(x), spec.value_heads, -1)
        b, a = (self._linear(f"{at}delta_{part}", x) for part in "ba")
        decays = (self._get(f"{at}decay") * (1 + (a + self._get(f"{at}dt_bias")).exp()).log()).exp()
        outs, times = torch.zeros_like(v), spec.value_heads // spec.key_heads
        for head in range(spec.value_heads):
            reads = head % spec.key_heads if spec.alternating else head // times
            state = torch.zeros(spec.key_dim, spec.value_dim, dtype=torch.float64)
            for row in range(len(x)):
                state = state * decays[row, head]
                change = (v[row, head] - k[row, reads] @ state) / (1 + (-b[row, head]).exp())
                state = state + torch.outer(k[row, reads], change)
                outs[row, head] = q[row, reads] @ state / math.sqrt(spec.key_dim)
        outs = self._norm(f"{at}gated_norm", Norm(spec.norm_eps), outs).flatten(1)
        return self._linear(f"{at}delta_out", outs * activated("silu", self._linear(f"{at}delta_z", x)))

    def _mamba2(self, at: str, spec: Mamba2, x: Tensor) -> Tensor:
        """Compute the formula of the paper, one head after the other."""
        inner, size = self._linear(f"{at}ssm_in", x, spec.in_bias), spec.heads * spec.head_dim
        if spec.multipliers is not None:
            sizes = [size, size, *[spec.groups * spec.state_size] * 2, spec.heads]
            inner = inner * torch.tensor(spec.multipliers).double().repeat_interleave(torch.tensor(sizes))
        z, xbc, dt = inner.split([size, inner.shape[-1] - size - spec.heads, spec.heads], -1)
        convolved = self._convolved(at, xbc, spec.conv_width, spec.conv_bias)
        heads, b, c = convolved.split([size, *[spec.groups * spec.state_size] * 2], -1)
        heads = heads.reshape(len(x), spec.heads, -1)
        b, c = (part.reshape(len(x), spec.groups, -1) for part in (b, c))
        steps = (1 + (dt + self._get(f"{at}dt_bias")).exp()).log().clamp(*spec.step_limits)
        decay, skip, outs = self._get(f"{at}decay"), self._get(f"{at}skip"), torch.zeros_like(heads)
        for head in range(spec.heads):
            state = torch.zeros(spec.head_dim, spec.state_size, dtype=torch.float64)
            group = head * spec.groups // spec.heads
            for row in range(len(x)):
                step, given = steps[row, head], heads[row, head]
                state = (step * decay[head]).exp() * state + step * torch.outer(given, b[row, group])
                outs[row, head] = state @ c[row, group] + skip[head] * given
        gate, out = activated("silu", z), outs.flatten(1)
        if spec.norm_eps is None:
            return self._linear(f"{at}ssm_out", out * gate, spec.out_bias)
        given = (out if spec.norms_first else out * gate).unflatten(1, (spec.groups, -1))
        given = given / (given.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt()
        normed = given.flatten(1) * self._get(f"{at}gated_norm.weight")
        return self._linear(f"{at}ssm_out", normed * gate if spec.norms_first else normed, spec.out_bias)

    def _convolved(self, at: str, given: Tensor, width: int, bias: bool = False) -> Tensor:
        """Return the causal convolution of each channel of [rows, channels], after SiLU."""
        filters, outs = self._get(f"{at}filters.weight"), torch.zeros_like(given)
        for row in range(len(given)):
            for back in range(min(width, row + 1)):
                outs[row] += filters[:, width - 1 - back] * given[row - back]
        return activated("silu", outs + self._get(f"{at}filters.bias") if bias else outs)

    def _convolution(self, at: str, spec: ShortConvolution, x: Tensor) -> Tensor:
        b, c, x = self._linear(f"{at}conv_in", x, spec.bias).split(spec.size, -1)
        filters = self._get(f"{at}filters.weight")
        outs = torch.zeros_like(x)
        for row in range(len(x)):
            for back in range(min(spec.width, row + 1)):
                outs[row] += filters[:, spec.width - 1 - back] * b[row - back] * x[row - back]
        if spec.bias:
            outs += self._get(f"{at}filters.bias")
        return self._linear(f"{at}conv_out", c * outs, spec.bias)

    def _feed(self, at: str, prefix: str, spec: FeedForward, x: Tensor, expert: int | None = None) -> Tensor:
        gate, up, down = (
            f"{at}{prefix}{part}" + ("" if expert is None else f".{expert}")
            for part in ("gate", "up", "down")
        )
        inner = self._linear(up, x, spec.bias)
        if spec.activation == "xielu":
            inner = self._xielu(at, spec, inner)
        elif spec.gated:
            given = self._linear(gate, x, spec.bias)
            if spec.cutoff is not None:
                mean = given.mean(-1, keepdim=True)
                deviation = (given - mean).square().mean(-1, keepdim=True).sqrt()
                given = (given - mean - spec.cutoff * deviation).clamp(min=0)
            if spec.limit is not None:
                given, inner = given.clamp(max=spec.limit), inner.clamp(-spec.limit, spec.limit)
            inner = (inner + spec.up_offset) * activated(spec.activation, given, spec.gain)
        else:
            inner = activated(spec.activation, inner, spec.gain)
        return self._linear(down, inner, spec.bias)

    def _xielu(self, at: str, spec: FeedForward, x: Tensor) -> Tensor:
        stored = [self._get(f"{at}alpha_{part}") for part in "pn"] if spec.alphas is None else spec.alphas
        above, below = ((1 + torch.as_tensor(alpha, dtype=torch.float64).exp()).log() for alpha in stored)
        curve = (x.clamp(max=-1e-6).exp() - 1 - x) * (below + 0.5)
        return torch.where(x > 0, above * x.square(), curve) + x / 2

    def _mixture(self, at: str, spec: Experts, x: Tensor) -> Tensor:
        """[hidden] -> [hidden]"""
        given = self._norm(f"{at}router_norm", spec.router_norm, x)
        scores = self._linear(f"{at}router", given, spec.router_bias) * spec.router_scale
        shares = scores.softmax(-1) if spec.scoring == "softmax" else 1 / (1 + (-scores).exp())
        ranked = shares + self._get(f"{at}selection_bias") if spec.selection_bias else shares
        order = self._candidates(spec, ranked)
        best = order[: spec.chosen]
        if spec.chosen < len(order):
            gap = (ranked[best[-1]] - ranked[order[spec.chosen]]).item()
            self.router_gap = min(self.router_gap, gap)
        whole = max(sum(shares[expert].item() for expert in best), 1e-12) if spec.renormalise else 1.0
        scales = self._get(f"{at}expert_scales") if spec.expert_scales else torch.ones(spec.count)
        given = self._norm(f"{at}expert_norm", spec.expert_norm, x)
        if spec.latent is not None:
            given = self._linear(f"{at}latent_in", given, spec.latent_bias)
        out = torch.zeros_like(given)
        for expert in best:
            share = shares[expert] / whole * spec.scale * scales[expert]
            if spec.scales_inputs:
                out += self._feed(at, "experts.", spec.expert, given * share, expert)
            else:
                out += self._feed(at, "experts.", spec.expert, given, expert) * share
        if spec.latent is not None:
            out = self._linear(f"{at}latent_out", out, spec.latent_bias)
        out = self._norm(f"{at}expert_post_norm", spec.expert_post_norm, out)
        if spec.shared is not None:
            given = self._norm(f"{at}shared_norm", spec.shared_norm, x)
            shared = self._feed(at, "shared.", spec.shared, given)
            if spec.shared_gate:
                shared = shared / (1 + (-self._linear(f"{at}shared_gate", given)).exp())
            out += self._norm(f"{at}shared_post_norm", spec.shared_post_norm, shared)
        return out

    def _candidates(self, spec: Experts, ranked: Tensor) -> list[int]:
        """Return the experts of the best groups, best first; ranked is [count]."""
        size = spec.count // spec.groups
        groups = [
            sorted(range(at, at + size), key=lambda e: -ranked[e].item()) for at in range(0, spec.count, size)
        ]
        scores = [sum(ranked[expert].item() for expert in group[: spec.group_best]) for group in groups]
        order = sorted(range(spec.groups), key=lambda group: -scores[group])
        if spec.chosen_groups < spec.groups:
            gap = scores[order[spec.chosen_groups - 1]] - scores[order[spec.chosen_groups]]
            self.router_gap = min(self.router_gap, gap)
        best = [expert for group in order[: spec.chosen_groups] for expert in groups[group]]
        return sorted(best, key=lambda expert: -ranked[expert].item())


def activated(kind: Activation, x: Tensor, gain: float = 1.0) -> Tensor:
    """Apply the activations as their papers write them."""
    if kind == "silu":
        return x / (1 + (-gain * x).exp())
    if kind == "relu":
        return x.clamp(min=0)
    if kind == "relu2":
        return x.clamp(min=0) ** 2
    if kind == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def rotated(rope: Rope, x: Tensor) -> Tensor:
    """Rotate heads [rows, heads, head_dim] at the positions from 0 on; kinds: default and linear."""
    assert rope.kind in ("default", "linear")
    out, dims = x.clone(), rope.dims or x.shape[-1]
    for pair in range(dims // 2):
        one, other = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + dims // 2)
        frequency = rope.theta ** (-2 * pair / dims) / (rope.factor if rope.kind == "linear" else 1.0)
        if rope.frequency_factors is not None:
            frequency /= rope.frequency_factors[pair]
        angles = torch.arange(len(x), dtype=torch.float64) * frequency
        turned = torch.complex(x[..., one], x[..., other]) * torch.polar(
            torch.ones_like(angles), angles
        ).unsqueeze(1)
        out[..., one], out[..., other] = turned.real, turned.imag
    return out
