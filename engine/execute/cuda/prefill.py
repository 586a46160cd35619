"""Runs many rows through the layers with the library's products, and one kernel between each two of them.

The plain twin is `models/reference/decoder.py`. Prompts use it, and decode steps of many rows (`fused_program.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.attention.convolving import ConvolvingStep
from engine.attention.walks import WalkStep
from engine.execute.cuda.add_norm import AddNorm, add_norm, normed
from engine.execute.cuda.convolution import convolve, most_seen
from engine.execute.cuda.decode_attention import rotation
from engine.execute.cuda.experts import activation, choose, has_post_norms, inner_norm, join, mix, norm_rows
from engine.execute.cuda.host_experts import HostExperts, not_for_padding
from engine.execute.cuda.packed import packed_embedding, packed_product
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.prefill import gate_kernel, position_kernel, unusual_position_kernel
from models.network import (
    ConvolutionWeights,
    DeltaNetWeights,
    ExpertWeights,
    FeedForwardWeights,
    LatentWeights,
    Linear,
    Mamba2Weights,
    Network,
)
from models.recurrences import DeltaNet, Mamba2, Recurrence
from models.reference import delta_net, latent, mamba2
from models.reference.attention import Attention, LatentRows, RecurrentRows
from models.reference.collective import Collective
from models.reference.decoder import Decoder
from models.reference.rope import StepPositions
from models.spec import Attention as AttentionSpec
from models.spec import Experts, FeedForward, LatentAttention, LayerInputs


@dataclass(frozen=True, slots=True)
class Projected:
    """What a mixer begins with, side by side for each row."""

    first: Tensor
    """[T, numbers] of its projections"""
    gates: Tensor | None
    """[T, numbers] of a second product of the same input"""


Attend = Callable[[int, Projected], Tensor]
"""(layer, projections) -> the input of its output projection [T, numbers]."""


@dataclass(frozen=True, slots=True)
class OnHost:
    """How the experts in host memory are computed."""

    experts: HostExperts
    fetches: bool
    """Whether they are copied to the device for it."""
    active: Tensor | None = None
    """int32 [T or more]: negative for padding rows, which choose no experts."""


class Products(Protocol):
    """Computes products of many rows, and the operation right after each."""

    @property
    def pdl(self) -> bool:
        """Whether the kernels between products use programmatic dependent launch."""
        ...

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """Multiply: [T, columns] -> [T, rows]."""
        ...

    def gated(self, linear: Linear, x: Tensor, spec: FeedForward) -> Tensor:
        """Multiply and gate: [T, columns] -> [T, size]. The first half of the product gates the second, if there is a
        gate."""
        ...

    def parts(self, linear: Linear, x: Tensor, place: Tensor | None = None) -> Tensor:
        """Multiply as `product` does, or return its summands fp32 [parts, T, rows]; `add_norm` takes both.

        The product may be written into `place` [T, rows].
        """
        ...


class Sums(Protocol):
    """Sums products over all ranks of a divided network."""

    def place(self, rows: int) -> Tensor | None:
        """Return [rows, hidden], where the next product is best written, or None if any place is as good."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, between: AddNorm, out: Tensor, total: Tensor) -> None:
        """Do what `add_norm` does with the sum of x (`Products.parts`) over all ranks."""
        ...


class LibraryProducts:
    """Implements `Products` with the library's products, which are the fastest for large ones."""

    pdl = False

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """See `Products`."""
        if not linear.is_plain:
            return packed_product(x, linear.parts, linear.bias)
        return F.linear(x, linear.weight, linear.bias)

    def gated(self, linear: Linear, x: Tensor, spec: FeedForward) -> Tensor:
        """See `Products`."""
        return apply_halves(self.product(linear, x), spec, self.pdl)

    def parts(self, linear: Linear, x: Tensor, place: Tensor | None = None) -> Tensor:
        """See `Products`."""
        if place is None or not linear.is_plain or linear.bias is not None:
            return self.product(linear, x)
        return torch.mm(x, linear.weight.t(), out=place)


LIBRARY = LibraryProducts()


def run_layers(
    network: Network,
    x: Tensor,
    attend: Attend,
    on_host: OnHost | None = None,
    by: Products = LIBRARY,
    sums: Sums | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """Run all layers: embedded tokens [T, hidden] -> the same shape, after the final norm.

    `sums` sum over ranks. `inputs` [T, layers, size] are those of each layer, if the network has any.
    """
    if on_host is not None and on_host.fetches:
        on_host.experts.fetched.begin()
    spec = network.spec
    given, residual = x, None
    post, scale, factor = None, 1.0, None

    def place() -> Tensor | None:
        return None if sums is None else sums.place(x.shape[-2])

    for index, (layer, weights) in enumerate(zip(spec.layers, network.layers, strict=True)):
        if weights.mixer is not None:
            between = AddNorm(post, scale, normed(layer.attention_norm, weights.attention_norm), factor)
            seen, residual = _add_norm(x, residual, between, by.pdl, sums)
            given = given if layer.beside else seen
            gates = None if weights.gates is None else by.product(weights.gates, given)
            mixed = attend(index, Projected(by.product(weights.projections, given), gates))
            x = by.parts(weights.out, mixed, place())
            post, factor = normed(layer.attention_post_norm, weights.attention_post_norm), None
            scale = layer.residual_scale
        if weights.feed_forward is not None:
            between = AddNorm(post, scale, normed(layer.feed_forward_norm, weights.feed_forward_norm), factor)
            given, residual = _add_norm(x, residual, between, by.pdl, sums)
            x = _feed(index, layer.feed_forward, weights.feed_forward, given, on_host, by, place())
            post = normed(layer.feed_forward_post_norm, weights.feed_forward_post_norm)
            scale = layer.residual_scale
        factor = weights.scalar
        if inputs is not None and spec.layer_inputs is not None and weights.input is not None:
            own, parts = spec.layer_inputs, weights.input
            _, residual = _add_norm(x, residual, AddNorm(post, scale, None), by.pdl, sums)
            inner = apply_gate(by.product(parts.gate, residual), inputs[:, index], input_gate(own), by.pdl)
            x, scale = by.parts(parts.out, inner), 1.0
            post = normed(own.post_norm, parts.post_norm)
    between = AddNorm(post, scale, normed(spec.final_norm, network.final_norm), factor)
    return _add_norm(x, residual, between, by.pdl, sums)[0]


class FusedPrefill:
    """Implements `runner.DecoderModule` for the networks that `engine.execute.cuda.fused_program` supports."""

    def __init__(
        self,
        network: Network,
        on_host: HostExperts | None = None,
        peers: Collective | None = None,
        sums: Sums | None = None,
    ) -> None:
        """`on_host` computes the experts in host memory. `peers` compute the other parts of a divided network, and
        `sums` sum the products of all parts."""
        self._network = network
        self._reference = Decoder(network, packed_product, embedding=packed_embedding, peers=peers)
        self._on_host = on_host
        self._sums = sums
        self._most_seen = most_seen(network.spec)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        active: Tensor | None = None,
        real: int | None = None,
    ) -> Tensor:
        """Run as `Decoder.forward` does. Tokens with a negative `active` are padding; `real` counts the others."""
        on_host = None
        if self._on_host is not None:
            fetches = self._on_host.fetches(len(token_ids) if real is None else real)
            on_host = OnHost(self._on_host, fetches, active)

        step = StepPositions(positions)

        def attend(index: int, projected: Projected) -> Tensor:
            if isinstance(weights := self._network.layers[index].mixer, LatentWeights):
                return self._attend_to_latents(index, weights, projected, step, attention)
            return self._attend(index, projected, positions, attention)

        x = self._reference.embed(token_ids, positions)
        inputs = self._reference.layer_inputs(token_ids, x)
        return run_layers(self._network, x, attend, on_host, sums=self._sums, inputs=inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        return self._reference.logits(hidden)

    def _recur(
        self, index: int, weights: DeltaNetWeights | Mamba2Weights, given: Projected, step: Attention
    ) -> Tensor:
        spec = self._network.spec.layers[index].mixer
        assert isinstance(spec, Recurrence)
        if isinstance(step, WalkStep):
            return step.mix(index, spec, weights, given.first, given.gates)
        assert isinstance(step, RecurrentRows)
        if isinstance(weights, Mamba2Weights):
            assert isinstance(spec, Mamba2)
            return mamba2.between(spec, weights, index, given.first, step)
        assert isinstance(spec, DeltaNet)
        assert given.gates is not None
        return delta_net.between(spec, weights, index, given.first, given.gates, step)

    def _attend_to_latents(
        self, index: int, weights: LatentWeights, given: Projected, step: StepPositions, backend: Attention
    ) -> Tensor:
        spec = self._network.spec.layers[index].mixer
        assert isinstance(spec, LatentAttention)
        assert isinstance(backend, LatentRows)
        assert given.gates is not None
        both = given.first, given.gates
        return latent.between(spec, weights, index, both, step, backend, LIBRARY.product, packed_embedding)

    def _attend(self, index: int, given: Projected, positions: Tensor, step: Attention) -> Tensor:
        mixer, projected = self._network.layers[index].mixer, given.first
        if isinstance(mixer, DeltaNetWeights | Mamba2Weights):
            return self._recur(index, mixer, given, step)
        if isinstance(mixer, ConvolutionWeights):
            assert isinstance(step, ConvolvingStep)
            out = projected.new_empty(len(projected), len(mixer.filters))
            convolve(mixer, projected, step.cache.k[index], step.seen(self._most_seen, index), out)
            return out
        spec, weights = self._network.spec.layers[index].attention, self._network.layers[index].attention
        heads = projected.view(projected.shape[0], -1, spec.head_dim)
        count = spec.heads + spec.own_kv_heads
        v = heads[:, spec.heads if spec.v_is_k else count :]
        if spec.v_norm is not None:
            v = F.rms_norm(v, v.shape[-1:], eps=spec.v_norm.eps)
        elif spec.v_is_k:
            v = v.clone()
        position(spec, heads, weights.head_norm, weights.rotary, positions)
        mixed = step(index, heads[:, : spec.heads], heads[:, spec.heads : count], v)
        if given.gates is not None:
            mixed = mixed * given.gates.sigmoid().view(len(projected), spec.heads, -1)
        return mixed.reshape(-1, spec.heads * spec.head_dim)


def position(
    spec: AttentionSpec, heads: Tensor, weight: Tensor | None, rotary: Tensor | None, positions: Tensor
) -> None:
    """Norm, rotate and scale q and k of heads [T, all heads, head_dim] in place."""
    norm, rope, count = spec.head_norm, spec.rope, spec.heads + spec.own_kv_heads
    if (norm, rope, spec.query_scaling) == (None, None, None):
        return
    tensors = heads, heads if weight is None else weight, heads if rotary is None else rotary, positions
    shape = {"HEADS": count, "ALL": heads.shape[1], "D": spec.head_dim}
    block = min(8, triton.next_power_of_2(count))
    dim = triton.next_power_of_2(spec.head_dim)
    usual = rope is not None and (spec.rotated, rope.interleaved, rope.exact) == (dim, False, False)
    usual = usual and not spec.norms_all_heads and not spec.norms_rotated and spec.query_scaling is None
    if usual and (norm is None or not (norm.offset or norm.rounds_last)):
        position_kernel[(heads.shape[0], triton.cdiv(count, block))](
            *tensors,
            **shape,
            BLOCK=block,
            EPS=norm.eps if norm is not None else 0.0,
            NORM=norm is not None,
            num_warps=2,
        )
        return
    if spec.norms_all_heads:
        block = triton.next_power_of_2(count)
    unusual_position_kernel[(heads.shape[0], triton.cdiv(count, block))](
        *tensors,
        **shape,
        Q_HEADS=spec.heads,
        PADDED=dim,
        BLOCK=block,
        **rotation(spec),
        num_warps=max(2, min(16, block * dim // 512)),
    )


def _feed(
    index: int,
    spec: FeedForward | Experts | None,
    weights: FeedForwardWeights | ExpertWeights,
    given: Tensor,
    on_host: OnHost | None,
    by: Products,
    place: Tensor | None = None,
) -> Tensor:
    """Run the feed-forward of a layer: [T, hidden] -> the same shape, or parts of it (`Products.parts`)."""
    if isinstance(weights, FeedForwardWeights):
        assert isinstance(spec, FeedForward)
        return by.parts(weights.down, by.gated(weights.gate_up, given, spec), place)
    assert isinstance(spec, Experts)
    beside = None
    if spec.shared is not None and weights.shared is not None:
        own = norm_rows(given, inner_norm(spec, weights, "shared_norm"))
        beside = _feed(index, spec.shared, weights.shared, own, None, LIBRARY)
        if weights.shared_gate is not None:
            beside = beside * LIBRARY.product(weights.shared_gate, own).sigmoid()
    if not weights.on_host:
        return mix(spec, weights, given, beside)
    assert on_host is not None
    experts = on_host.experts
    if on_host.fetches:
        out = mix(spec, experts.fetched.take(index), given, beside)
        experts.fetched.give_back(index)
        return out
    ids, shares = choose(spec, weights, given)
    if on_host.active is not None:
        ids = not_for_padding(on_host.active, ids)
    found = experts.mix(index, norm_rows(given, inner_norm(spec, weights, "expert_norm")), ids, shares)
    if has_post_norms(spec):
        out = found.to(given.dtype)
        join(spec, weights, out, beside, out)
        return out
    return (found if beside is None else found + beside).to(given.dtype)


def _add_norm(
    x: Tensor, residual: Tensor | None, between: AddNorm, pdl: bool, sums: Sums | None
) -> tuple[Tensor, Tensor]:
    """Return (`norm` of the sum, the sum) for residual [T, size] + x (`Products.parts`), which `sums` sum first.

    Without a residual, x is a sum already.
    """
    if residual is None and between.norm is None:
        return x, x
    total = x if residual is None else torch.empty_like(residual)
    out = total if between.norm is None else torch.empty_like(total)
    if sums is not None and residual is not None:
        sums.add_norm(x, residual, between, out, total)
        return out, total
    kernel = add_norm(x, residual, between, out, total, pdl)
    if pdl:
        split_alike(kernel)
    return out, total


def input_gate(spec: LayerInputs) -> FeedForward:
    """Return the feed-forward whose gate is that of a layer's input, and whose up is the input itself."""
    return FeedForward(spec.size, spec.activation)


def apply_halves(product: Tensor, spec: FeedForward, pdl: bool) -> Tensor:
    """Gate the second half of a product by the first, if `spec` has a gate, otherwise activate all -> [T, size]."""
    if not spec.gated:
        return apply_gate(product, None, spec, pdl)
    gate, up = product.chunk(2, dim=-1)
    return apply_gate(gate, up, spec, pdl)


def apply_gate(
    gate: Tensor, up: Tensor | None, spec: FeedForward, pdl: bool, out: Tensor | None = None
) -> Tensor:
    """Gate `up` by `gate`, both [T, size] with rows any distance apart -> [T, size], or `out`. Without up, activate
    `gate`.

    `pdl` is as for `WideProducts`.
    """
    rows, size = gate.shape
    inner = torch.empty(rows, size, dtype=gate.dtype, device=gate.device) if out is None else out
    block = min(2048, triton.next_power_of_2(size))
    kernel = gate_kernel[(rows, triton.cdiv(size, block))](
        gate,
        up,
        inner,
        SIZE=size,
        GATE_STRIDE=gate.stride(0),
        UP_STRIDE=0 if up is None else up.stride(0),
        BLOCK=block,
        PDL=pdl,
        GATE=activation(spec),
        num_warps=4,
        launch_pdl=pdl,
    )
    if pdl:
        split_alike(kernel)
    return inner
