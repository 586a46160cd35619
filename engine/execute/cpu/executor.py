"""A step on a CPU: one call of the native kernels for rows of several sequences and the whole model.

The plain twin is `models/reference/decoder.py`. It reads the weights of the plain modules and writes the same KV cache.
Between the products it computes in fp32; what a product with quantised weights reads is rounded to int8, by 32
numbers with a common scale.
"""

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.cache.kv_cache import KVCache
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError, Pool
from models.families.llama import LlamaModel
from models.families.qwen3 import Qwen3Model
from models.reference.decoder import DecoderLayer, DecoderModel
from models.reference.layers import Linear
from models.weights.quantized import QuantizedLinear, QuantizedTensor

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""Numbers of the plain types in GGUF files."""
_PORTABLE = 0
"""The number of the first variant."""


def supports(model: DecoderModel) -> str | None:
    """Why the native kernels cannot run this model, as the middle of a sentence; None if they can."""
    if type(model) not in (Qwen3Model, LlamaModel):
        return f"there are no native kernels for {model.config.architecture}"
    if model.config.head_dim % 8:
        return f"there are no native kernels for a head_dim of {model.config.head_dim}"
    return native.problem()


@dataclass(frozen=True, slots=True)
class NativeSpan:
    """Tokens of one sequence, which lie from row `start` of a table of `blocks` on, with a position each."""

    tokens: Sequence[int]
    start: int
    positions: Sequence[int]
    blocks: Sequence[int]
    wanted: bool = True
    """Whether the logits that follow the last token are."""


class NativeDecoder:
    """Rows of several sequences through the model, from the host's values to logits."""

    def __init__(self, model: DecoderModel, cache: KVCache, pool: Pool, variant: int | None = None) -> None:
        """`variant` is a number of `pool.library.variants`, None the best. Raises NativeError for what does not fit."""
        self.name = f"native kernels, {pool.library.best_name}"
        self._pool = pool
        self._functions = pool.library.functions
        # Everything whose address the library gets.
        self._alive: list[object] = [model, cache]
        config = model.config
        layers = (native.Layer * len(model.layers))(*map(self._layer, model.layers))
        embedding = model.embed_tokens
        described = native.Model(
            layers=layers,
            final_norm=self._numbers(model.norm.weight),
            rotary=self._numbers(model.rotary_table),
            embedding=self._matrix(embedding.weight),
            head=self._linear(model.lm_head),
            layer_count=len(model.layers),
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            positions=model.positions,
            eps=config.rms_norm_eps,
        )
        if cache.kv.dtype not in TYPES or cache.kv.device.type != "cpu":
            raise NativeError(f"the KV cache is {cache.kv.dtype} on {cache.kv.device}")
        kept = native.Cache(
            k=cache.k.data_ptr(),
            v=cache.v.data_ptr(),
            slots=cache.k.shape[1],
            type=TYPES[cache.kv.dtype],
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
        self._vocab = config.vocab_size
        self.takes_prompts = isinstance(model.lm_head, QuantizedLinear) and number != _PORTABLE
        """Whether prompts are computed faster than by torch: quantised ones, and not by the portable kernels."""

    def run(self, spans: Sequence[NativeSpan], times: native.Times | None = None) -> Tensor:
        """Compute K and V of all rows of `spans`, and what follows those that want it: fp32 [wanted, vocab_size].

        Every row and all logits are the same to the bit whatever is beside them and however a sequence is split into
        spans: a row is rounded to int8 by itself, and its sums have one order. `times` gets the seconds of each part
        added. Raises NativeError for values out of range and for a span without tokens; then nothing was computed.
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
            place.blocks, place.row, place.count, place.wanted = (
                len(arrays[0]),
                span.start,
                count,
                span.wanted,
            )
        logits = torch.empty(sum(span.wanted for span in spans), self._vocab)
        with self._pool.held():
            wrong = self._functions.ct_decoder_run(self._handle, given, len(given), logits.data_ptr(), times)
        if wrong is not None:
            raise NativeError(wrong.decode())
        return logits

    def _layer(self, layer: nn.Module) -> native.Layer:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        head_norm = getattr(attention, "qk_norm", None)
        return native.Layer(
            input_norm=self._numbers(layer.input_layernorm.weight),
            head_norm=None if head_norm is None else self._numbers(head_norm.weight),
            mlp_norm=self._numbers(layer.post_attention_layernorm.weight),
            qkv=self._linear(attention.qkv_proj),
            output=self._linear(attention.o_proj),
            gate_up=self._linear(mlp.gate_up_proj),
            down=self._linear(mlp.down_proj),
        )

    def _linear(self, layer: Linear | QuantizedLinear) -> native.Linear:
        weights = layer.weights if isinstance(layer, QuantizedLinear) else [layer.weight]
        matrices = [self._matrix(weight) for weight in weights]
        bias = None if layer.bias is None else self._numbers(layer.bias)
        return native.Linear((native.Matrix * 3)(*matrices), bias, len(matrices))

    def _matrix(self, weight: Tensor | QuantizedTensor) -> native.Matrix:
        matrix = matrix_of(weight)
        self._alive.append(weight)
        return matrix

    def _numbers(self, numbers: Tensor) -> int:
        """The address of an fp32 copy."""
        copy = numbers.detach().to("cpu", torch.float32).contiguous()
        self._alive.append(copy)
        return copy.data_ptr()


def matrix_of(weight: Tensor | QuantizedTensor) -> native.Matrix:
    """How the library is told of a weight, which must outlive what it is told to. Raises NativeError."""
    if isinstance(weight, QuantizedTensor):
        data, qtype, rows, columns = weight.data, weight.qtype, weight.rows, weight.columns
    else:
        data, qtype, (rows, columns) = weight.detach(), TYPES.get(weight.dtype, -1), weight.shape
    if qtype < 0 or data.device.type != "cpu" or not data.is_contiguous():
        raise NativeError(f"there are no native kernels for {data.dtype} weights on {data.device}")
    row_bytes = data.nbytes // rows
    return native.Matrix(data.data_ptr(), row_bytes, qtype, rows, columns)
