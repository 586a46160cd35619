"""Compute any `Network` in plain torch, on any device: the reference against which every faster executor is tested."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.network import (
    AltUpWeights,
    AttentionWeights,
    ConvolutionWeights,
    DeltaNetWeights,
    ExpertWeights,
    FeedForwardWeights,
    LatentWeights,
    LaurelWeights,
    LayerWeights,
    Linear,
    Mamba2Weights,
    Network,
    NormWeights,
    StreamWeights,
    Weight,
)
from models.recurrences import Mamba2, Recurrence
from models.reference import delta_net, latent, mamba2
from models.reference.activations import ACTIVATIONS, activated, rounded, xielu
from models.reference.attention import Attention, ConvolutionRows, LatentRows, RecurrentRows
from models.reference.collective import Collective
from models.reference.divided_norms import group_squares, head_squares
from models.reference.norms import apply_norm, scaled
from models.reference.products import choose_product
from models.reference.rope import StepPositions, rotate
from models.reference.tiled import TiledProduct, embed
from models.spec import Attention as AttentionSpec
from models.spec import (
    Experts,
    FeedForward,
    LatentAttention,
    Laurel,
    Layer,
    ShortConvolution,
)

QuantizedProduct = Callable[[Tensor, Sequence[Weight], Tensor | None], Tensor]
"""(x [T, columns], the parts of a layer, its bias) -> [T, rows of all parts], in the dtype of x"""

Embedding = Callable[[Weight, Tensor, torch.dtype], Tensor]
"""(weight, token ids int64 [T], dtype) -> [T, columns] in that dtype"""

HostMixture = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, x [T, hidden], experts of each row int32 [T, chosen], their shares fp32) -> their sum fp32 [T, hidden]"""


class Decoder:
    """A network without a KV cache or an attention kernel: both are supplied through the attention seam.

    Call it under torch.inference_mode().
    """

    def __init__(
        self,
        network: Network,
        quantized: QuantizedProduct | None = None,
        on_host: HostMixture | None = None,
        embedding: Embedding = embed,
        peers: Collective | None = None,
    ) -> None:
        """`quantized` computes products with quantised weights (None: TiledProduct), `on_host` computes experts in host
        memory, `embedding` looks up rows of a weight, and `peers` are the ranks with the other parts of the network."""
        self.network = network
        self.spec = network.spec
        self._on_host = on_host
        self._product = choose_product(network.dtype, network.device)
        self._quantized = quantized or TiledProduct(network.dtype, device=network.device)
        self._embedding = embedding
        self._peers = peers

    @property
    def positions(self) -> int:
        """The number of positions that the model supports."""
        return self.network.positions

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Compute token_ids and positions int64 [T] -> [T, hidden_size] after the final norm, in the model's dtype.

        T is flat over all sequences of the step. Positions must be less than `self.positions`.
        """
        network, spec, step = self.network, self.spec, StepPositions(positions)
        x = self.embed(token_ids, positions)
        inputs = self.layer_inputs(token_ids, x)
        if network.streams is not None:
            x = self._spread(network.streams, x)
        read: Tensor | None = None
        for index, (layer, weights) in enumerate(zip(spec.layers, network.layers, strict=True)):
            given = None if inputs is None else inputs[:, index]
            if weights.altup is not None:
                predicted = self._predict(weights.altup, x)
                out, read = self._layer(index, layer, weights, predicted[0], step, attention, read)
                x = self._correct(weights, predicted, out, given)
                continue
            x, read = self._layer(index, layer, weights, x, step, attention, read)
            if given is not None:
                x = x + self._of_input(weights, x, given)
            if weights.scalar is not None:
                x = x * weights.scalar
        if network.streams is not None:
            x = self._join(network.streams, x)
        return apply_norm(spec.final_norm, network.final_norm, x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head: [n, hidden_size] -> [n, vocab_size], in the model's dtype."""
        spec = self.spec
        logits = self._linear(self.network.head, hidden)
        if self._peers is not None:
            logits = self._peers.join_columns(logits)[:, : self.network.whole.vocab_size]
        logits = _scale(logits, spec.logit_scale)
        return logits if spec.logit_cap is None else torch.tanh(logits / spec.logit_cap) * spec.logit_cap

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Embed token_ids and positions int64 [T]: return the input of the first layer [T, hidden_size]."""
        network = self.network
        x = self._look_up(network.embedding, token_ids)
        if self.spec.embedding_norm is not None:
            x = scaled(self.spec.embedding_norm, x, None)
        if self.spec.embedding_scale != 1.0:
            x = x * rounded(self.spec.embedding_scale, x)
        if network.position_embedding is not None:
            x = x + network.position_embedding.index_select(0, positions)
        return x

    def _look_up(self, weight: Weight, token_ids: Tensor) -> Tensor:
        """Look up token ids int64 [T] in an embedding: -> [T, its columns]."""
        network, peers = self.network, self._peers
        if peers is None or network.share is None:
            return self._embedding(weight, token_ids, network.dtype)
        part = network.share.vocab  # other ranks have the other rows
        held = (token_ids >= part.start) & (token_ids < part.stop)
        rows = torch.where(held, token_ids - part.start, 0)
        x = self._embedding(weight, rows, network.dtype)
        return peers.sum(torch.where(held[:, None], x, 0.0))

    def layer_inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """Return the inputs of all layers [T, layers, size], for token ids int64 [T] and x, the input of the first
        [T, hidden_size]; None if they have none."""
        spec, weights = self.spec.layer_inputs, self.network.layer_inputs
        if spec is None or weights is None:
            return None
        shape = (len(x), len(self.spec.layers), spec.size)
        projected = self._linear(weights.projection, x) * self.spec.hidden_size**-0.5
        if spec.vocab_size is not None:
            token_ids = torch.where(token_ids < spec.vocab_size, token_ids, 0)
        looked_up = self._look_up(weights.embedding, token_ids)
        looked_up = looked_up * rounded(spec.size**0.5, x)
        return (apply_norm(spec.norm, weights.norm, projected.view(shape)) + looked_up.view(shape)) * 2**-0.5

    def _of_input(self, weights: LayerWeights, x: Tensor, given: Tensor) -> Tensor:
        """Return what a layer's own input [T, size] adds to its result x [T, hidden_size]."""
        spec, parts = self.spec.layer_inputs, weights.input
        assert spec is not None
        assert parts is not None
        gated = ACTIVATIONS[spec.activation](self._linear(parts.gate, x)) * given
        return apply_norm(spec.post_norm, parts.post_norm, self._linear(parts.out, gated))

    def _spread(self, weights: StreamWeights, x: Tensor) -> Tensor:
        """Make the streams [count, T, hidden_size] of AltUp from the first [T, hidden_size]."""
        return torch.stack([x, *(_of_magnitude(self._linear(each, x), x) for each in weights.inputs)])

    def _join(self, weights: StreamWeights, streams: Tensor) -> Tensor:
        """Join the streams [count, T, hidden_size] of AltUp: -> [T, hidden_size]."""
        first = streams[0]
        others = zip(weights.outputs, streams[1:], strict=True)
        return torch.stack(
            [first, *(_of_magnitude(self._linear(each, x), first) for each, x in others)]
        ).mean(0)

    def _route(self, weights: AltUpWeights, x: Tensor) -> Tensor:
        """Return one number from -1 to 1 for each row and stream: [T, hidden_size] -> [T, count]."""
        assert self.spec.altup is not None
        given = apply_norm(self.spec.altup.norm, weights.norm, x) * self.spec.hidden_size**-1.0
        return self._linear(weights.router, given).float().tanh().to(x.dtype)

    def _predict(self, weights: AltUpWeights, streams: Tensor) -> Tensor:
        """Mix the streams [count, T, hidden_size] before a layer: -> the same shape."""
        count = len(streams)
        mixed = self._linear(weights.predict, self._route(weights, streams[0])).view(-1, count, count)
        return torch.matmul(streams.permute(1, 2, 0), mixed.mT).permute(2, 0, 1) + streams

    def _correct(self, weights: LayerWeights, predicted: Tensor, out: Tensor, given: Tensor | None) -> Tensor:
        """Correct the streams that were predicted [count, T, hidden_size] by the result of a layer [T, hidden_size],
        whose own input is `given` [T, size]: -> the streams after the layer."""
        altup = weights.altup
        assert altup is not None
        shares = self._linear(altup.correct, self._route(altup, out)) + 1.0
        streams = (out - predicted[0]) * shares.T[:, :, None] + predicted
        if given is not None:
            streams[1:] += self._of_input(weights, streams[0] * altup.scale, given)
        return streams

    def _sum(self, x: Tensor) -> Tensor:
        """Sum a partial result over all ranks."""
        return x if self._peers is None else self._peers.sum(x)

    def _layer(
        self,
        index: int,
        spec: Layer,
        weights: LayerWeights,
        x: Tensor,
        step: StepPositions,
        attention: Attention,
        read: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute a layer, with what the mixer of the one before has read: return the result and what its mixer has
        read, all of them [T, hidden_size]."""
        if not spec.beside or read is None:
            read = apply_norm(spec.attention_norm, weights.attention_norm, x)
        given = read
        if isinstance(spec.mixer, ShortConvolution):
            assert isinstance(weights.mixer, ConvolutionWeights)
            out = self._convolve(index, spec.mixer, weights.mixer, given, attention)
        elif isinstance(spec.mixer, LatentAttention):
            assert isinstance(weights.mixer, LatentWeights)
            out = self._attend_to_latents(index, spec.mixer, weights.mixer, given, step, attention)
        elif isinstance(spec.mixer, Recurrence):
            assert isinstance(weights.mixer, DeltaNetWeights | Mamba2Weights)
            out = self._recur(index, spec.mixer, weights.mixer, given, attention)
        elif isinstance(spec.mixer, AttentionSpec):
            out = self._attend(index, spec.mixer, weights.attention, given, step, attention)
        if spec.mixer is not None:
            out = apply_norm(spec.attention_post_norm, weights.attention_post_norm, self._sum(out))
            x = x + _scale(out, spec.residual_scale)
        if spec.laurel is not None and weights.laurel is not None:
            x = (x + self._beside(spec.laurel, weights.laurel, given)) / math.sqrt(2)
        if not spec.parallel:
            given = apply_norm(spec.feed_forward_norm, weights.feed_forward_norm, x)
        feed, parts = spec.feed_forward, weights.feed_forward
        if isinstance(feed, Experts):
            assert isinstance(parts, ExpertWeights)
            out = self._mix(index, feed, parts, given)
        elif isinstance(feed, FeedForward):
            assert isinstance(parts, FeedForwardWeights)
            out = self._sum(self._feed(feed, parts, given))
        else:
            return x, read
        out = apply_norm(spec.feed_forward_post_norm, weights.feed_forward_post_norm, out)
        return x + _scale(out, spec.residual_scale), read

    def _beside(self, spec: Laurel, weights: LaurelWeights, x: Tensor) -> Tensor:
        """Compute the residual beside a mixer from the mixer's input: [T, hidden_size] -> the same shape."""
        return x + apply_norm(
            spec.norm, weights.norm, self._linear(weights.right, self._linear(weights.left, x))
        )

    def _attend(
        self,
        index: int,
        spec: AttentionSpec,
        weights: AttentionWeights,
        x: Tensor,
        step: StepPositions,
        attention: Attention,
    ) -> Tensor:
        heads = self._linear(weights.qkv, x).view(x.shape[0], -1, spec.head_dim)
        # q and k lie side by side in the packed projection, so that one pass norms and rotates both.
        count = spec.heads + spec.own_kv_heads
        qk = heads[:, :count]
        v = heads[:, spec.heads if spec.v_is_k else count :]
        if spec.v_norm is not None:
            v = scaled(spec.v_norm, v, None)
        if not spec.norms_rotated:
            qk = self._norm_heads(index, spec, weights.head_norm, qk)
        if weights.rotary is not None:
            assert spec.rope is not None
            qk = rotate(qk, step.rotation(weights.rotary), spec.rope.interleaved)
        if spec.norms_rotated:
            qk = self._norm_heads(index, spec, weights.head_norm, qk)
        q = qk[:, : spec.heads]
        if spec.query_scaling is not None:
            q = q * step.query_scale(spec.query_scaling).to(q.dtype)
        out = attention(index, q, qk[:, spec.heads :], v)
        if spec.gate is not None:
            assert weights.gate is not None
            out = out * self._linear(weights.gate, x).sigmoid().view(len(x), spec.heads, -1)
        return self._linear(weights.out, out.reshape(-1, spec.heads * spec.head_dim))

    def _attend_to_latents(
        self,
        index: int,
        spec: LatentAttention,
        weights: LatentWeights,
        x: Tensor,
        step: StepPositions,
        backend: Attention,
    ) -> Tensor:
        assert isinstance(backend, LatentRows)
        q, row = self._linear(weights.q, x), self._linear(weights.kv_a, x)
        both, read = (q, row), self._embedding
        out = latent.between(spec, weights, index, both, step, backend, self._linear, read)
        return self._linear(weights.out, out)

    def _convolve(
        self,
        index: int,
        spec: ShortConvolution,
        weights: ConvolutionWeights,
        x: Tensor,
        backend: Attention,
    ) -> Tensor:
        """Compute a short convolution; its sums are in fp32 and rounded once."""
        assert isinstance(backend, ConvolutionRows)
        b, c, x = self._linear(weights.inputs, x).chunk(3, dim=-1)
        rows = backend.last_rows(index, b * x, spec.width)
        out = torch.zeros_like(x, dtype=torch.float32) if weights.bias is None else weights.bias.float()
        for filters, each in zip(weights.filters.float().unbind(1), rows, strict=True):
            out = torch.addcmul(out, filters, each.float())
        return self._linear(weights.out, c * out.to(x.dtype))

    def _recur(
        self,
        index: int,
        spec: Recurrence,
        weights: DeltaNetWeights | Mamba2Weights,
        x: Tensor,
        backend: Attention,
    ) -> Tensor:
        assert isinstance(backend, RecurrentRows)
        given = self._linear(weights.inputs, x)
        if isinstance(spec, Mamba2):
            assert isinstance(weights, Mamba2Weights)
            squares = group_squares(self.network, self._peers, index)
            return self._linear(weights.out, mamba2.between(spec, weights, index, given, backend, squares))
        assert isinstance(weights, DeltaNetWeights)
        out = delta_net.between(spec, weights, index, given, self._linear(weights.gates, x), backend)
        return self._linear(weights.out, out)

    def _norm_heads(self, index: int, spec: AttentionSpec, weight: Tensor | None, qk: Tensor) -> Tensor:
        """Norm q and k heads [T, heads, head_dim], either each head, or all of q and all of k; the shape is kept."""
        norm = spec.head_norm
        if norm is None:
            return qk
        if weight is None:
            return scaled(norm, qk, None)
        if not spec.norms_all_heads:
            return apply_norm(norm, NormWeights(weight), qk)
        sizes = [spec.heads * spec.head_dim, spec.own_kv_heads * spec.head_dim]
        q, k = torch.split(qk.flatten(1), sizes, -1)
        squares = None if self._peers is None else head_squares(self.network, self._peers, index, q, k)
        parts = zip((q, k), torch.split(weight, sizes), squares or (None, None), strict=True)
        return torch.cat([apply_norm(norm, NormWeights(part), x, mean) for x, part, mean in parts], -1).view(
            qk.shape
        )

    def _feed(self, spec: FeedForward, weights: FeedForwardWeights, x: Tensor) -> Tensor:
        inner = self._linear(weights.gate_up, x)
        if spec.activation == "xielu":
            given = torch.tensor(spec.alphas, dtype=x.dtype) if weights.alphas is None else weights.alphas
            return self._linear(weights.down, xielu(given, inner))
        return self._linear(weights.down, activated(spec, inner))

    def _mix(self, index: int, spec: Experts, weights: ExpertWeights, x: Tensor) -> Tensor:
        """Compute the chosen experts of each token, one expert after the other, and add the shared one."""

        def normed(name: str, given: Tensor) -> Tensor:
            return apply_norm(spec.norms.get(name), weights.norms.get(name), given)

        given = normed("router_norm", x).to(weights.router.weight.dtype)
        scores = _scale(self._linear(weights.router, given).float(), spec.router_scale)
        shares = scores.softmax(-1) if spec.scoring == "softmax" else scores.sigmoid()
        ranked = shares if weights.selection_bias is None else shares + weights.selection_bias
        chosen = _in_best_groups(spec, ranked).topk(spec.chosen, dim=-1).indices
        shares = shares.gather(-1, chosen)
        if spec.renormalise:
            shares = shares / shares.sum(-1, keepdim=True).clamp_(min=1e-12)
        shares = _scale(shares, spec.scale)
        if weights.expert_scales is not None:
            shares = shares * weights.expert_scales[chosen]
        given = normed("expert_norm", x)
        if weights.latent_in is not None:
            given = self._linear(weights.latent_in, given)
        if weights.on_host:
            assert self._on_host is not None
            out = self._on_host(index, given, chosen.int(), shares).to(x.dtype)
        else:
            out = self._each(spec, weights, given, chosen, shares)
        if weights.latent_out is not None:
            out = self._linear(weights.latent_out, out)
        if spec.shared is None:
            return normed("expert_post_norm", self._sum(out))
        assert weights.shared is not None
        given = normed("shared_norm", x)
        shared = self._feed(spec.shared, weights.shared, given)
        if weights.shared_gate is not None:
            shared = shared * self._linear(weights.shared_gate, given).sigmoid()
        if spec.expert_post_norm is None and spec.shared_post_norm is None:
            return self._sum(out + shared)
        return normed("expert_post_norm", self._sum(out)) + normed("shared_post_norm", self._sum(shared))

    def _each(
        self, spec: Experts, weights: ExpertWeights, x: Tensor, chosen: Tensor, shares: Tensor
    ) -> Tensor:
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            given, share = x[tokens], shares[tokens, places, None].to(x.dtype)
            if spec.scales_inputs:
                found = self._feed(spec.expert, weights.experts[expert], given * share)
            else:
                found = self._feed(spec.expert, weights.experts[expert], given) * share
            out.index_add_(0, tokens, found)
        return out

    def _linear(self, linear: Linear, x: Tensor) -> Tensor:
        """Apply a linear layer: [T, columns] -> [T, rows]."""
        if linear.is_plain:
            return self._product(x, linear.weight, linear.bias)
        return self._quantized(x, linear.parts, linear.bias)


def _in_best_groups(spec: Experts, ranked: Tensor) -> Tensor:
    """Return the scores of experts [T, count] with -inf for those outside of the best groups."""
    if spec.groups == 1:
        return ranked
    grouped = ranked.view(len(ranked), spec.groups, -1)
    scores = grouped.topk(spec.group_best, dim=-1).values.sum(-1)
    best = scores.topk(spec.chosen_groups, dim=-1).indices
    is_out = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(-2)


def _of_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Scale x [T, size] to the root mean squares of the rows of `like`."""
    wanted = like.square().mean(-1, keepdim=True) ** 0.5
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


def _scale(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
