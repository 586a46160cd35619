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
from engine.execute.cpu.telling import Telling
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError, Pool
from models.network import PLAIN, Network, Weight
from models.spec import ModelSpec

QUANTISED = {"int8": 100, "fp8": 101}
"""`ct_kv_type`"""
PORTABLE = 0
"""The number of the first variant."""


def unsupported(spec: ModelSpec) -> str | None:
    """Why the native kernels cannot run such a network here, as the middle of a sentence; None if they can."""
    return not_native(spec) or native.problem()


def takes_prompts(network: Network, variant: int) -> bool:
    """Whether kernels of a variant are faster than torch for the prompts of such a network, too: they are where its
    weights are quantised, unless they are the portable ones."""
    return network.is_quantized and variant != PORTABLE


class NativeDecoder:
    """Rows of several sequences through the model, from the host's values to logits."""

    def __init__(self, network: Network, cache: KVCache, pool: Pool, variant: int | None = None) -> None:
        """`variant` is a number of `pool.library.variants`, None the best. Raises NativeError for what does not fit."""
        self.name = f"native kernels, {pool.library.best_name}"
        self._pool = pool
        self._functions = pool.library.functions
        told = Telling()
        self._alive = (network, cache, told)
        spec, attention, learned = network.spec, network.spec.attention, network.position_embedding
        layers = [told.layer(*pair) for pair in zip(spec.layers, network.layers, strict=True)]
        described = native.Model(
            layers=(native.Layer * len(layers))(*layers),
            # What scales the logits may as well scale what the head multiplies.
            final_norm=told.norm(spec.final_norm, network.final_norm, spec.logit_scale),
            embedding=told.matrix(network.embedding),
            learned=native.Matrix() if learned is None else told.matrix(Weight.plain(learned)),
            head=told.linear(network.head),
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
        number = QUANTISED.get(cache.row.kind, PLAIN.get(cache.kv.dtype))
        if number is None or cache.kv.device.type != "cpu":
            raise NativeError(f"the KV cache is {cache.kv.dtype} on {cache.kv.device}")
        kept = native.Cache(
            k=cache.k.data_ptr(),
            v=cache.v.data_ptr(),
            slots=cache.k.shape[1],
            type=number,
            block_size=cache.block_size,
        )
        reason = ctypes.c_char_p()
        chosen = pool.library.best if variant is None else variant
        with pool.held() as handle:
            self._handle = self._functions.ct_decoder_create(
                described, kept, handle, chosen, ctypes.byref(reason)
            )
        if not self._handle:
            raise NativeError((reason.value or b"no reason").decode())
        weakref.finalize(self, self._functions.ct_decoder_destroy, self._handle).atexit = False
        self._vocab = spec.vocab_size
        self._logits = torch.empty(0, self._vocab)
        self._rows: list[Tensor] = []
        self.takes_prompts = takes_prompts(network, chosen)
        """Whether prompts are computed faster than by torch."""

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Compute K and V of all rows of `spans`, and what follows those that want it: fp32 [wanted, vocab_size].

        Every row and all logits are the same to the bit whatever is beside them and however a sequence is split into
        spans: a row is rounded to int8 by itself, and its sums have one order. Raises NativeError for values out of
        range and for a span without tokens; then nothing was computed.
        """
        logits = torch.empty(sum(span.wanted for span in spans), self._vocab)
        self._run(spans, logits)
        return logits

    def step(self, spans: Sequence[Span]) -> list[Tensor]:
        """As `run`: fp32 [vocab_size] for each row that wants it, in memory that the next step overwrites."""
        wanted = sum(span.wanted for span in spans)
        if wanted > len(self._rows):
            # Fresh memory for every step would have to be mapped by the system, page by page.
            self._logits = torch.empty(wanted, self._vocab)
            self._rows = list(self._logits)
        self._run(spans, self._logits)
        return self._rows[:wanted]

    def interleave(self, nbytes: int) -> int:
        """Copy about `nbytes` more of the weights that are mapped from a file, in an order that is read faster, and let
        go of the file. Returns how many bytes are left.

        The bits of a row are the same before, meanwhile and afterwards. Raises NativeError when memory is short; what
        was not copied stays mapped.
        """
        with self._pool.held():
            left: int = self._functions.ct_decoder_interleave(self._handle, nbytes)
        if left < 0:
            raise NativeError("memory is short")
        return left

    def _run(self, spans: Sequence[Span], logits: Tensor) -> None:
        given = array("i")
        for span in spans:
            count = len(span.tokens)
            if count != len(span.positions):
                raise NativeError(f"a span has {count} tokens and {len(span.positions)} positions")
            given.extend((len(span.blocks), span.start, count, span.wanted))
            for values in (span.blocks, span.tokens, span.positions):
                given.extend(values)
        with self._pool.held():
            wrong = self._functions.ct_decoder_run(
                self._handle, given.buffer_info()[0], len(spans), logits.data_ptr()
            )
        if wrong is not None:
            raise NativeError(wrong.decode())
