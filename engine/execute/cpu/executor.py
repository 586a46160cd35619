"""A step on a CPU: one call of the native kernels for rows of several sequences and the whole model.

The plain twin is `models/reference/decoder.py`. It reads the weights of the plain modules and writes the same KV cache.
Between the products it computes in fp32; what a product with quantised weights reads is rounded to int8, by 32
numbers with a common scale.
"""

import ctypes
import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Span
from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import not_native
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError, Pool
from models.network import (
    PLAIN,
    AttentionWeights,
    ExpertWeights,
    FeedForwardWeights,
    LayerWeights,
    Linear,
    Network,
    NormWeights,
    Weight,
)
from models.spec import Attention, Experts, FeedForward, Layer, ModelSpec, Norm

PORTABLE = 0
"""The number of the first variant."""


def unsupported(spec: ModelSpec) -> str | None:
    """Why the native kernels cannot run such a network here, as the middle of a sentence; None if they can."""
    return not_native(spec) or native.problem()


class NativeDecoder:
    """Rows of several sequences through the model, from the host's values to logits."""

    def __init__(self, network: Network, cache: KVCache, pool: Pool, variant: int | None = None) -> None:
        """`variant` is a number of `pool.library.variants`, None the best. Raises NativeError for what does not fit."""
        self.name = f"native kernels, {pool.library.best_name}"
        self._pool = pool
        self._functions = pool.library.functions
        # Everything whose address the library gets.
        self._alive: list[object] = [network, cache]
        self._tables: dict[int, int] = {}
        spec, attention, learned = network.spec, network.spec.attention, network.position_embedding
        layers = [self._layer(*pair) for pair in zip(spec.layers, network.layers, strict=True)]
        described = native.Model(
            layers=(native.Layer * len(layers))(*layers),
            # What scales the logits may as well scale what the head multiplies.
            final_norm=self._norm(spec.final_norm, network.final_norm, spec.logit_scale),
            embedding=self._matrix(network.embedding),
            learned=native.Matrix() if learned is None else self._matrix(Weight.plain(learned)),
            head=self._linear(network.head),
            layer_count=len(layers),
            hidden=spec.hidden_size,
            q_heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            positions=network.positions,
            # Rounded to the dtype, as checkpoints were trained.
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=network.dtype).item(),
            logit_cap=spec.logit_cap or 0.0,
        )
        if cache.kv.dtype not in PLAIN or cache.kv.device.type != "cpu":
            raise NativeError(f"the KV cache is {cache.kv.dtype} on {cache.kv.device}")
        kept = native.Cache(
            k=cache.k.data_ptr(),
            v=cache.v.data_ptr(),
            slots=cache.k.shape[1],
            type=PLAIN[cache.kv.dtype],
            block_size=cache.block_size,
        )
        reason = ctypes.c_char_p()
        number = pool.library.best if variant is None else variant
        with pool.held() as handle:
            self._handle = self._functions.ct_decoder_create(
                described, kept, handle, number, ctypes.byref(reason)
            )
        if not self._handle:
            raise NativeError((reason.value or b"no reason").decode())
        weakref.finalize(self, self._functions.ct_decoder_destroy, self._handle).atexit = False
        self._vocab = spec.vocab_size
        self.takes_prompts = network.is_quantized and number != PORTABLE
        """Whether prompts are computed faster than by torch: quantised ones, and not by the portable kernels."""

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Compute K and V of all rows of `spans`, and what follows those that want it: fp32 [wanted, vocab_size].

        Every row and all logits are the same to the bit whatever is beside them and however a sequence is split into
        spans: a row is rounded to int8 by itself, and its sums have one order. Raises NativeError for values out of
        range and for a span without tokens; then nothing was computed.
        """
        given = (native.Span * len(spans))()
        alive = []
        for span, place in zip(spans, given, strict=True):
            count = len(span.tokens)
            if count != len(span.positions):
                raise NativeError(f"a span has {count} tokens and {len(span.positions)} positions")
            arrays = [array("i", values) for values in (span.blocks, span.tokens, span.positions)]
            alive.append(arrays)
            place.table, place.tokens, place.positions = (a.buffer_info()[0] for a in arrays)
            place.blocks, place.row, place.count = len(arrays[0]), span.start, count
            place.wanted = span.wanted
        logits = torch.empty(sum(span.wanted for span in spans), self._vocab)
        with self._pool.held():
            wrong = self._functions.ct_decoder_run(self._handle, given, len(given), logits.data_ptr())
        if wrong is not None:
            raise NativeError(wrong.decode())
        return logits

    def _layer(self, spec: Layer, layer: LayerWeights) -> native.Layer:
        found = native.Layer(
            input_norm=self._norm(spec.attention_norm, layer.attention_norm),
            attention_post_norm=self._norm(spec.attention_post_norm, layer.attention_post_norm),
            mlp_norm=self._norm(spec.feed_forward_norm, layer.feed_forward_norm),
            mlp_post_norm=self._norm(spec.feed_forward_post_norm, layer.feed_forward_post_norm),
            attention=self._attention(spec.attention, layer.attention),
            qkv=self._linear(layer.attention.qkv),
            output=self._linear(layer.attention.out),
            residual_scale=spec.residual_scale,
        )
        feed, weights = spec.feed_forward, layer.feed_forward
        if isinstance(feed, Experts):
            assert isinstance(weights, ExpertWeights)
            found.experts = ctypes.pointer(self._experts(feed, weights))
        else:
            assert isinstance(weights, FeedForwardWeights)
            found.feed = self._feed(feed, weights)
        return found

    def _attention(self, spec: Attention, weights: AttentionWeights) -> native.Attention:
        heads = None if weights.head_norm is None else NormWeights(weights.head_norm)
        return native.Attention(
            head_norm=self._norm(spec.head_norm, heads),
            rotary=None if weights.rotary is None else self._table(weights.rotary),
            sinks=None if weights.sinks is None else self._numbers(weights.sinks),
            together=spec.norms_all_heads,
            rotated=spec.rotated,
            interleaved=spec.rope is not None and spec.rope.interleaved,
            window=spec.window or 0,
            scale=spec.softmax_scale,
            cap=spec.score_cap or 0.0,
        )

    def _experts(self, spec: Experts, weights: ExpertWeights) -> native.Experts:
        experts = (native.Feed * spec.count)(*(self._feed(spec.expert, each) for each in weights.experts))
        shared = None
        if spec.shared is not None:
            assert weights.shared is not None
            shared = self._feed(spec.shared, weights.shared)
        found = native.Experts(
            router=self._router(weights),
            selection_bias=None if weights.selection_bias is None else self._numbers(weights.selection_bias),
            experts=experts,
            shared=None if shared is None else ctypes.pointer(shared),
            count=spec.count,
            chosen=spec.chosen,
            sigmoid=spec.scoring == "sigmoid",
            renormalise=spec.renormalise,
            shared_gate=weights.shared_gate is not None,
        )
        self._alive += [experts, shared, found]
        return found

    def _router(self, weights: ExpertWeights) -> native.Linear:
        """The router, and the gate of the shared expert below it."""
        router, gate = weights.router, weights.shared_gate
        if gate is None:
            return self._linear(router)
        biases = [
            torch.zeros(each.rows) if each.bias is None else each.bias.float() for each in (router, gate)
        ]
        return self._linear(Linear((*router.parts, *gate.parts), torch.cat(biases)))

    def _feed(self, spec: FeedForward, weights: FeedForwardWeights) -> native.Feed:
        return native.Feed(
            gate_up=self._linear(weights.gate_up),
            down=self._linear(weights.down),
            activation=native.ACTIVATIONS.index(spec.activation),
            gated=spec.gated,
            gain=spec.gain,
            limit=spec.limit or 0.0,
            up_offset=spec.up_offset,
        )

    def _linear(self, linear: Linear) -> native.Linear:
        matrices = [self._matrix(weight) for weight in linear.parts]
        bias = None if linear.bias is None else self._numbers(linear.bias)
        return native.Linear((native.Matrix * 3)(*matrices), bias, len(matrices))

    def _matrix(self, weight: Weight) -> native.Matrix:
        matrix = matrix_of(weight)
        self._alive.append(weight)
        return matrix

    def _norm(self, spec: Norm | None, norm: NormWeights | None, scale: float = 1.0) -> native.Norm:
        """`scale` times a norm, or none."""
        if spec is None or norm is None:
            return native.Norm()
        weight = self._numbers((norm.weight.float() + spec.offset) * scale)
        bias = None if norm.bias is None else self._numbers(norm.bias.float() * scale)
        return native.Norm(weight, bias, spec.eps, spec.kind == "layer")

    def _numbers(self, numbers: Tensor) -> int:
        """The address of an fp32 copy."""
        copy = numbers.detach().to("cpu", torch.float32).contiguous()
        self._alive.append(copy)
        return copy.data_ptr()

    def _table(self, numbers: Tensor) -> int:
        """The same for what layers share."""
        return self._tables.get(id(numbers)) or self._tables.setdefault(id(numbers), self._numbers(numbers))


def matrix_of(weight: Weight) -> native.Matrix:
    """How the library is told of a weight, which must outlive what it is told to. Raises NativeError."""
    data = weight.data
    if data.device.type != "cpu" or not data.is_contiguous():
        raise NativeError(f"there are no native kernels for {data.dtype} weights on {data.device}")
    return native.Matrix(
        data.data_ptr(), data.nbytes // weight.rows, weight.format, weight.rows, weight.columns
    )
