"""The decode step on a CPU: one call of the native kernels for the whole model.

The plain twin is `models/reference/decoder.py`. It reads the weights of the plain modules and writes the same KV cache.
Between the products it computes in fp32; what a product with quantised weights reads is rounded to int8, by 32
numbers with a common scale.
"""

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import BIASES, lacking
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError, Pool
from models.features import Feature
from models.network import PLAIN, FeedForwardWeights, LayerWeights, Linear, Network, NormWeights, Weight
from models.spec import FeedForward, ModelSpec

SUPPORTED = BIASES | {Feature.HEAD_NORM}


def unsupported(spec: ModelSpec) -> str | None:
    """Why the native kernels cannot run such a network, as the middle of a sentence; None if they can."""
    lacks = lacking(spec, SUPPORTED)
    if lacks is not None:
        return f"the native kernels do not know {lacks}"
    if spec.attention.head_dim % 8:
        return f"there are no native kernels for a head_dim of {spec.attention.head_dim}"
    return native.problem()


class NativeDecoder:
    """One token through the model, from the host's values to logits."""

    def __init__(self, network: Network, cache: KVCache, pool: Pool, variant: int | None = None) -> None:
        """`variant` is a number of `pool.library.variants`, None the best. Raises NativeError for what does not fit."""
        self.name = f"native kernels, {pool.library.best_name}"
        self._pool = pool
        self._functions = pool.library.functions
        # Everything whose address the library gets.
        self._alive: list[object] = [network, cache]
        spec, attention = network.spec, network.spec.attention
        feed = spec.layers[0].feed_forward
        rotary = network.layers[0].attention.rotary
        assert isinstance(feed, FeedForward)
        assert rotary is not None
        described = native.Model(
            layers=(native.Layer * len(network.layers))(*map(self._layer, network.layers)),
            final_norm=self._numbers(network.final_norm.weight),
            rotary=self._numbers(rotary),
            embedding=self._matrix(network.embedding),
            head=self._linear(network.head),
            layer_count=len(network.layers),
            hidden=spec.hidden_size,
            inner=feed.size,
            q_heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            positions=network.positions,
            eps=spec.final_norm.eps,
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
        self._quantized = network.is_quantized
        self._portable = number == pool.library.variants["portable"]
        self._blocks: list[int] = []
        self._table = np.zeros(0, dtype=np.int32)
        self._logits = torch.empty(spec.vocab_size, dtype=torch.float32)

    def run(self, token: int, row: int, position: int, blocks: Sequence[int]) -> Tensor:
        """Compute a token that lies at `row` of a table of `blocks`: its K and V, and what follows it.

        Returns fp32 [vocab_size], which the next call overwrites. Raises NativeError for values out of range.
        """
        return self._run(token, row, position, blocks, None)

    def time(self, token: int, row: int, position: int, blocks: Sequence[int]) -> dict[str, float]:
        """Seconds that each part of such a step takes."""
        times = native.Times()
        self._run(token, row, position, blocks, times)
        return {name: getattr(times, name) for name in native.PARTS}

    @property
    def takes_chunks(self) -> bool:
        """Whether `run_chunk` is there for the model, whose weights must all be quantised, and faster than torch.

        The portable kernels are not: for many rows torch is faster, once it has made numbers of the weights.
        """
        return self._quantized and not self._portable

    def run_chunk(
        self,
        tokens: Sequence[int],
        start: int,
        positions: Sequence[int],
        blocks: Sequence[int],
        samples: bool = True,
    ) -> Tensor | None:
        """Compute `tokens`, which lie from row `start` of a table of `blocks` on: their K and V, and what follows.

        Returns fp32 [vocab_size] for the last one, which the next call overwrites; None unless `samples`. Raises
        NativeError for values out of range, for no tokens, and where the model does not take chunks.

        However a prompt is split into chunks, and token by token (`run`), every row and the logits are the same to the
        bit: a row is rounded to int8 by itself, and its sums have one order. Only the portable kernels, which take no
        chunks in the engine, add up otherwise in a decode step.
        """
        return self._run_chunk(tokens, start, positions, blocks, samples, None)

    def time_chunk(
        self, tokens: Sequence[int], start: int, positions: Sequence[int], blocks: Sequence[int]
    ) -> dict[str, float]:
        """Seconds that each part of such a chunk takes."""
        times = native.Times()
        self._run_chunk(tokens, start, positions, blocks, True, times)
        return {name: getattr(times, name) for name in native.PARTS}

    def _run_chunk(
        self,
        tokens: Sequence[int],
        start: int,
        positions: Sequence[int],
        blocks: Sequence[int],
        samples: bool,
        times: native.Times | None,
    ) -> Tensor | None:
        if not len(tokens) or len(tokens) != len(positions):
            raise NativeError(f"a chunk has {len(tokens)} tokens and {len(positions)} positions")
        table, ids, places = (np.array(values, dtype=np.int32) for values in (blocks, tokens, positions))
        given = native.Chunk(
            table.ctypes.data, ids.ctypes.data, places.ctypes.data, len(table), start, len(ids)
        )
        logits = self._logits.data_ptr() if samples else None
        with self._pool.held():
            wrong = self._functions.ct_decoder_run_chunk(self._handle, given, logits, times)
        if wrong is not None:
            raise NativeError(wrong.decode())
        return self._logits if samples else None

    def _run(
        self, token: int, row: int, position: int, blocks: Sequence[int], times: native.Times | None
    ) -> Tensor:
        if self._blocks != blocks:
            self._blocks = list(blocks)
            self._table = np.array(self._blocks, dtype=np.int32)
        given = native.Input(self._table.ctypes.data, len(self._blocks), token, row, position)
        with self._pool.held():
            wrong = self._functions.ct_decoder_run(self._handle, given, self._logits.data_ptr(), times)
        if wrong is not None:
            raise NativeError(wrong.decode())
        return self._logits

    def _layer(self, layer: LayerWeights) -> native.Layer:
        attention, feed = layer.attention, layer.feed_forward
        assert isinstance(feed, FeedForwardWeights)
        return native.Layer(
            input_norm=self._norm(layer.attention_norm),
            head_norm=None if attention.head_norm is None else self._numbers(attention.head_norm),
            mlp_norm=self._norm(layer.feed_forward_norm),
            qkv=self._linear(attention.qkv),
            output=self._linear(attention.out),
            gate_up=self._linear(feed.gate_up),
            down=self._linear(feed.down),
        )

    def _linear(self, linear: Linear) -> native.Linear:
        matrices = [self._matrix(weight) for weight in linear.parts]
        bias = None if linear.bias is None else self._numbers(linear.bias)
        return native.Linear((native.Matrix * 3)(*matrices), bias, len(matrices))

    def _matrix(self, weight: Weight) -> native.Matrix:
        matrix = matrix_of(weight)
        self._alive.append(weight)
        return matrix

    def _norm(self, norm: NormWeights | None) -> int:
        assert norm is not None
        return self._numbers(norm.weight)

    def _numbers(self, numbers: Tensor) -> int:
        """The address of an fp32 copy."""
        copy = numbers.detach().to("cpu", torch.float32).contiguous()
        self._alive.append(copy)
        return copy.data_ptr()


def matrix_of(weight: Weight) -> native.Matrix:
    """How the library is told of a weight, which must outlive what it is told to. Raises NativeError."""
    data = weight.data
    if data.device.type != "cpu" or not data.is_contiguous():
        raise NativeError(f"there are no native kernels for {data.dtype} weights on {data.device}")
    return native.Matrix(
        data.data_ptr(), data.nbytes // weight.rows, weight.format, weight.rows, weight.columns
    )
