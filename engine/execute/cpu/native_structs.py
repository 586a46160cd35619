"""Describes weights to the native library: builds its structs, and keeps alive the memory they point to."""

import ctypes
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError
from models.network import (
    AttentionWeights,
    ConvolutionWeights,
    DeltaNetWeights,
    ExpertWeights,
    FeedForwardWeights,
    InputWeights,
    LatentWeights,
    LayerWeights,
    Linear,
    Mamba2Weights,
    Network,
    NormWeights,
    Weight,
)
from models.recurrences import DeltaNet, Mamba2
from models.reference.mamba2 import multiplied
from models.spec import (
    XIELU_BETA,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    LayerInputs,
    Norm,
    ShortConvolution,
)


class NativeStructs:
    """Builds structs from weights, and owns the memory they point to; it must outlive the library's use of them."""

    def __init__(self) -> None:
        self._alive: list[object] = []
        self._tables: dict[int, int] = {}

    def layers(self, network: Network) -> list[native.Layer]:
        """Describe all layers with all their parts."""
        spec = network.spec
        found = [
            self._layer(*pair, spec.layer_inputs) for pair in zip(spec.layers, network.layers, strict=True)
        ]
        for before, own in pairwise(found):
            if own.beside:
                own.input_norm = before.input_norm
        return found

    def _layer(self, spec: Layer, layer: LayerWeights, inputs: LayerInputs | None) -> native.Layer:
        before = self.norm(spec.attention_norm, layer.attention_norm)
        found = native.Layer(
            input_norm=before,
            attention_post_norm=self.norm(spec.attention_post_norm, layer.attention_post_norm),
            mlp_norm=before if spec.parallel else self.norm(spec.feed_forward_norm, layer.feed_forward_norm),
            mlp_post_norm=self.norm(spec.feed_forward_post_norm, layer.feed_forward_post_norm),
            residual_scale=spec.residual_scale,
            scalar=1.0 if layer.scalar is None else layer.scalar.item(),
            parallel=spec.parallel,
            beside=spec.beside,
        )
        if spec.mixer is not None:
            self._add_mixer(found, spec, layer)
        feed, weights = spec.feed_forward, layer.feed_forward
        if isinstance(feed, Experts):
            assert isinstance(weights, ExpertWeights)
            found.experts = ctypes.pointer(self._experts(feed, weights))
        elif isinstance(feed, FeedForward):
            assert isinstance(weights, FeedForwardWeights)
            found.feed = self._feed(feed, weights)
        if inputs is not None:
            assert layer.input is not None
            found.input = self._layer_input(inputs, layer.input)
        return found

    def _add_mixer(self, found: native.Layer, spec: Layer, layer: LayerWeights) -> None:
        """Describe the mixer of a layer that has one."""
        found.output = self.linear(layer.out)
        if isinstance(spec.mixer, ShortConvolution):
            assert isinstance(layer.mixer, ConvolutionWeights)
            found.qkv = self.linear(layer.mixer.inputs)
            found.convolution = self._convolution(spec.mixer, layer.mixer)
        elif isinstance(spec.mixer, LatentAttention):
            assert isinstance(layer.mixer, LatentWeights)
            found.qkv = self._side_by_side(layer.mixer.q, layer.mixer.kv_a)
            found.attention = self._absorbed(spec.mixer, layer.mixer)
            found.latent = self._latent(spec.mixer, layer.mixer)
        elif isinstance(spec.mixer, DeltaNet):
            assert isinstance(layer.mixer, DeltaNetWeights)
            found.qkv = self._side_by_side(layer.mixer.inputs, layer.mixer.gates)
            found.recurrence = self._delta_net(spec.mixer, layer.mixer)
        elif isinstance(spec.mixer, Mamba2):
            assert isinstance(layer.mixer, Mamba2Weights)
            found.qkv = self.linear(layer.mixer.inputs)
            found.recurrence = self._mamba2(spec.mixer, layer.mixer)
        else:
            qkv, gate = layer.attention.qkv, layer.attention.gate
            found.qkv = self.linear(qkv) if gate is None else self._side_by_side(qkv, gate)
            found.attention = self._attention(spec.attention, layer.attention)

    def layer_inputs(self, network: Network) -> native.Inputs:
        """Describe how the inputs of all layers are made."""
        spec, weights = network.spec.layer_inputs, network.layer_inputs
        if spec is None or weights is None:
            return native.Inputs()
        # With a larger eps, the norm of the projection is the same as if the projection had been scaled before.
        norm = replace(spec.norm, eps=spec.norm.eps * network.spec.hidden_size)
        return native.Inputs(
            embedding=self.matrix(weights.embedding),
            projection=self.linear(weights.projection),
            norm=self.norm(norm, weights.norm, 2**-0.5),
            # The scale of the embedding is rounded to the dtype, as in training.
            scale=torch.tensor(spec.size**0.5, dtype=network.dtype).item() * 2**-0.5,
            size=spec.size,
        )

    def _attention(self, spec: Attention, weights: AttentionWeights) -> native.Attention:
        heads = None if weights.head_norm is None else NormWeights(weights.head_norm)
        scaling = spec.query_scaling
        ones = None if spec.v_norm is None else NormWeights(torch.ones(spec.head_dim))
        return native.Attention(
            head_norm=self.norm(spec.head_norm, heads),
            v_norm=self.norm(spec.v_norm, ones),
            rotary=None if weights.rotary is None else self._table(weights.rotary),
            sinks=None if weights.sinks is None else self._numbers(weights.sinks),
            together=spec.norms_all_heads,
            later=spec.norms_rotated,
            rotated=spec.rotated,
            interleaved=spec.rope is not None and spec.rope.interleaved,
            window=spec.window or 0,
            scale=spec.softmax_scale,
            cap=spec.score_cap or 0.0,
            beta=0.0 if scaling is None else scaling.beta,
            original=0 if scaling is None else scaling.positions,
            q_heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            shares_kv=spec.kv_from is not None,
            v_is_k=spec.v_is_k,
            gate=0 if weights.gate is None else weights.gate.rows // spec.heads,
        )

    def _absorbed(self, spec: LatentAttention, weights: LatentWeights) -> native.Attention:
        """Describe the attention of all heads to the rows that are kept."""
        return native.Attention(
            rotary=None if weights.rotary is None else self._table(weights.rotary),
            rotated=spec.rotated,
            interleaved=spec.rope is not None and spec.rope.interleaved,
            scale=spec.softmax_scale,
            q_heads=spec.heads,
            kv_heads=1,
            head_dim=spec.row_size,
        )

    def _latent(self, spec: LatentAttention, weights: LatentWeights) -> native.Latent:
        return native.Latent(
            q_norm=self.norm(spec.norm, weights.q_norm),
            kv_norm=self.norm(spec.norm, weights.kv_norm),
            q_b=native.Linear() if weights.q_b is None else self.linear(weights.q_b),
            k_b=self.linear(weights.k_b),
            v_b=self.linear(weights.v_b),
            kv_rank=spec.kv_rank,
            nope=spec.nope_dim,
            rope=spec.rope_dim,
            values=spec.v_dim,
        )

    def _convolution(self, spec: ShortConvolution, weights: ConvolutionWeights) -> native.Convolution:
        return native.Convolution(
            filters=self._numbers(weights.filters.T),
            bias=None if weights.bias is None else self._numbers(weights.bias),
            width=spec.width,
            size=spec.size,
        )

    def _delta_net(self, spec: DeltaNet, weights: DeltaNetWeights) -> native.Recurrence:
        return native.Recurrence(
            filters=self._numbers(weights.filters.T),
            decay=self._numbers(weights.decay),
            dt_bias=self._numbers(weights.dt_bias),
            norm=native.Norm(self._numbers(weights.norm.weight), None, spec.norm_eps),
            kind=native.DELTA_NET,
            width=spec.conv_width,
            key_heads=spec.key_heads,
            value_heads=spec.value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            alternating=spec.alternating,
        )

    def _mamba2(self, spec: Mamba2, weights: Mamba2Weights) -> native.Recurrence:
        found = native.Recurrence(
            filters=self._numbers(weights.filters.T),
            bias=None if weights.conv_bias is None else self._numbers(weights.conv_bias),
            decay=self._numbers(weights.decay),
            dt_bias=self._numbers(weights.dt_bias),
            skip=self._numbers(weights.skip),
            kind=native.MAMBA2,
            width=spec.conv_width,
            key_heads=spec.groups,
            value_heads=spec.heads,
            key_dim=spec.state_size,
            value_dim=spec.head_dim,
            norms_first=spec.norms_first,
            least=spec.step_limits[0],
            most=spec.step_limits[1],
        )
        if spec.norm_eps is not None and weights.norm is not None:
            found.norm = native.Norm(self._numbers(weights.norm.weight), None, spec.norm_eps)
        if spec.multipliers is not None:
            ones = torch.ones(1, spec.output_size + spec.log_size)
            found.factors = self._numbers(multiplied(spec, ones))
        return found

    def _layer_input(self, spec: LayerInputs, weights: InputWeights) -> native.LayerInput:
        feed = native.Feed(
            gate_up=self.linear(weights.gate),
            down=self.linear(weights.out),
            activation=native.ACTIVATIONS.index(spec.activation),
            gated=True,
            gain=1.0,
        )
        return native.LayerInput(feed, self.norm(spec.post_norm, weights.post_norm))

    def _experts(self, spec: Experts, weights: ExpertWeights) -> native.Experts:
        found, shared = self.experts_alone(spec, weights), None
        if spec.shared is not None:
            assert weights.shared is not None
            shared = self._feed(spec.shared, weights.shared)
        found.router = self._router(weights)
        for name, norm in spec.norms.items():
            setattr(found, name.removeprefix("expert_"), self.norm(norm, weights.norms[name]))
        found.selection_bias = (
            None if weights.selection_bias is None else self._numbers(weights.selection_bias)
        )
        found.shared = None if shared is None else ctypes.pointer(shared)
        if weights.expert_scales is not None:
            found.expert_scales = self._numbers(weights.expert_scales)
        found.sigmoid, found.renormalise = spec.scoring == "sigmoid", spec.renormalise
        found.groups, found.chosen_groups, found.group_best = spec.groups, spec.chosen_groups, spec.group_best
        found.router_scale, found.scale = spec.router_scale, spec.scale
        found.shared_gate = weights.shared_gate is not None
        self._alive += [shared, found]
        return found

    def experts_alone(self, spec: Experts, weights: ExpertWeights) -> native.Experts:
        """Describe the routed experts, without their router."""
        experts = (native.Feed * spec.count)(*(self._feed(spec.expert, each) for each in weights.experts))
        self._alive.append(experts)
        return native.Experts(experts=experts, count=spec.count, chosen=spec.chosen)

    def _router(self, weights: ExpertWeights) -> native.Linear:
        """Describe the router, with the gate of the shared expert stacked below it."""
        gate = weights.shared_gate
        return self.linear(weights.router) if gate is None else self._side_by_side(weights.router, gate)

    def _side_by_side(self, first: Linear, second: Linear) -> native.Linear:
        """Describe two layers with the same input as one."""
        both, bias = (first, second), None
        if first.bias is not None or second.bias is not None:
            bias = torch.cat([torch.zeros(x.rows) if x.bias is None else x.bias.float() for x in both])
        return self.linear(Linear((*first.parts, *second.parts), bias))

    def _feed(self, spec: FeedForward, weights: FeedForwardWeights) -> native.Feed:
        alphas = torch.tensor(spec.alphas or (0.0, 0.0)) if weights.alphas is None else weights.alphas
        above, below = F.softplus(alphas.float()).tolist()
        return native.Feed(
            gate_up=self.linear(weights.gate_up),
            down=self.linear(weights.down),
            activation=native.ACTIVATIONS.index(spec.activation),
            gated=spec.gated,
            gain=spec.gain,
            limit=spec.limit or 0.0,
            up_offset=spec.up_offset,
            alpha_p=above,
            alpha_n=XIELU_BETA + below,
        )

    def linear(self, linear: Linear) -> native.Linear:
        """Describe up to three matrices with the same input, and their bias."""
        matrices = [self.matrix(weight) for weight in linear.parts]
        bias = None if linear.bias is None else self._numbers(linear.bias)
        return native.Linear((native.Matrix * native.MOST_PARTS)(*matrices), bias, len(matrices))

    def matrix(self, weight: Weight) -> native.Matrix:
        """Describe one weight and keep it alive."""
        matrix = to_matrix(weight)
        self._alive.append(weight)
        return matrix

    def norm(self, spec: Norm | None, norm: NormWeights | None, scale: float = 1.0) -> native.Norm:
        """Describe a norm multiplied by `scale`; an empty struct if there is no norm."""
        if spec is None or norm is None:
            return native.Norm()
        weight = self._numbers((norm.weight.float() + spec.offset) * scale)
        bias = None if norm.bias is None else self._numbers(norm.bias.float() * scale)
        return native.Norm(weight, bias, spec.eps, spec.kind == "layer")

    def _numbers(self, numbers: Tensor) -> int:
        """Return the address of an fp32 copy."""
        copy = numbers.detach().to("cpu", torch.float32).contiguous()
        self._alive.append(copy)
        return copy.data_ptr()

    def _table(self, numbers: Tensor) -> int:
        """Return the address of an fp32 copy that layers share."""
        return self._tables.get(id(numbers)) or self._tables.setdefault(id(numbers), self._numbers(numbers))


def to_matrix(weight: Weight) -> native.Matrix:
    """Describe a weight, which must outlive the struct. Raises NativeError if it is not contiguous in CPU memory."""
    data = weight.data
    if data.device.type != "cpu" or not data.is_contiguous():
        raise NativeError(f"there are no native kernels for {data.dtype} weights on {data.device}")
    return native.Matrix(
        data.data_ptr(),
        data.nbytes // weight.rows,
        weight.format,
        weight.rows,
        weight.columns,
        native.MAPPED if weight.is_mapped else native.ROWS,
    )
