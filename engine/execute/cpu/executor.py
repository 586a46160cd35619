"""A decode step on a CPU: one call of the native kernels runs the whole model for rows of several sequences.

The plain twin is `models/reference/decoder.py`. The executor reads the weights of the plain modules and writes the same
KV cache. It computes in fp32 between products; the input of a product with quantised weights is rounded to int8, in
groups of 32 numbers with a common scale.
"""

import ctypes
import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import NONE, Span, StateMoves
from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import not_native
from engine.execute.cpu.native_structs import NativeStructs
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.features import Feature, features
from models.network import PLAIN, Network, Weight
from models.spec import ModelSpec

QUANTIZED = {"int8": 100, "fp8": 101}
"""The `ct_kv_type` of each quantised cache."""
_NO_STATES = StateMoves(NONE, 0, ())
PORTABLE = 0
"""The index of the portable variant, the first one."""
BF16 = "avx512bf16"
"""The variant with instructions for bf16."""


def unsupported(spec: ModelSpec, kv_kind: str = "plain") -> str | None:
    """Return why the native kernels cannot run the network here, as the middle of a sentence; None if they can.

    `kv_kind` is that of the rows in the KV cache (`engine.cache.kv_rows.KVRow`).
    """
    if kv_kind in QUANTIZED and Feature.LATENT in features(spec):
        return f"there are no native kernels for latents in {kv_kind}; use --kv-dtype auto"
    return not_native(spec) or native.problem()


def takes_prompts(network: Network, library: NativeLibrary, variant: int) -> bool:
    """Return whether kernels of `variant` also beat torch at prompts of this network.

    They do if its weights are quantised, unless the variant is the portable one. In bf16 they do with instructions for
    it, unless torch has AMX. At recurrences they always do, because torch walks row by row.
    """
    if Feature.RECURRENCE in features(network.spec):
        return True
    if network.is_quantized:
        return variant != PORTABLE
    has_amx = torch.cpu._is_amx_tile_supported()
    return network.dtype == torch.bfloat16 and variant == library.variants.get(BF16) and not has_amx


class NativeDecoder:
    """Runs rows of several sequences through the model, from the values of the spans to logits."""

    def __init__(self, network: Network, cache: KVCache, pool: Pool, variant: int | None = None) -> None:
        """Set up `variant` (None: the best) of `pool.library.variants`. Raises NativeError if it does not fit."""
        self.name = f"native kernels, {pool.library.best_name}"
        self._pool = pool
        self._functions = pool.library.functions
        told = NativeStructs()
        self._alive = (network, told)
        self._cache = cache
        spec, learned = network.spec, network.position_embedding
        layers = told.layers(network)
        for layer, row, k, v, group in zip(layers, cache.rows, cache.k, cache.v, cache.groups, strict=True):
            layer.kept = native.Kept(k.data_ptr(), v.data_ptr(), slots=len(k), table=group)
            if layer.convolution.width:
                layer.convolution.type = PLAIN[row.dtype]
            if layer.recurrence.width:
                layer.recurrence.type = PLAIN[row.dtype]
        states = cache.states
        if states is not None:
            for index, numbers in states.layers.items():
                layers[index].recurrence.states = numbers.data_ptr()
        described = native.Model(
            layers=(native.Layer * len(layers))(*layers),
            # The scale of the logits is folded into the weights of the final norm, whose output the head multiplies.
            final_norm=told.norm(spec.final_norm, network.final_norm, spec.logit_scale),
            embedding=told.matrix(network.embedding),
            learned=native.Matrix() if learned is None else told.matrix(Weight.plain(learned)),
            head=told.linear(network.head),
            inputs=told.layer_inputs(network),
            layer_count=len(layers),
            hidden=spec.hidden_size,
            positions=network.positions,
            # Rounded to the dtype, as in training.
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=network.dtype).item(),
            logit_cap=spec.logit_cap or 0.0,
        )
        number = QUANTIZED.get(cache.row.kind, PLAIN.get(cache.row.stored))
        if number is None or cache.device.type != "cpu":
            raise NativeError(f"the KV cache is {cache.row.stored} on {cache.device}")
        tables = 1 + len(cache.pools)
        slots = 0 if states is None else states.slots
        kept = native.Cache(type=number, block_size=cache.block_size, tables=tables, states=slots)
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
        self.takes_prompts = takes_prompts(network, pool.library, chosen)
        """Whether prompts are computed faster than by torch."""

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Write K and V of all rows of `spans`; return the logits of the wanted rows: fp32 [wanted, vocab_size].

        The bits of a row do not depend on the other rows, nor on how its sequence is split into spans: each row is
        rounded to int8 by itself and summed in a fixed order. Raises NativeError for values out of range and for a span
        without tokens; nothing is computed then.
        """
        logits = torch.empty(sum(span.wanted for span in spans), self._vocab)
        self._run(spans, logits)
        return logits

    def step(self, spans: Sequence[Span]) -> list[Tensor]:
        """Do what `run` does; return fp32 [vocab_size] for each wanted row, in memory that the next step overwrites."""
        wanted = sum(span.wanted for span in spans)
        if wanted > len(self._rows):
            # The system would have to map fresh memory page by page in every step.
            self._logits = torch.empty(wanted, self._vocab)
            self._rows = list(self._logits)
        self._run(spans, self._logits)
        return self._rows[:wanted]

    def interleave(self, nbytes: int) -> int:
        """Copy about `nbytes` more of the file-mapped weights into a layout that is read faster; give back their pages.

        Return how many bytes are left. The bits of a row are the same before, during and after the copying. Raises
        NativeError if there is too little memory; weights that were not copied stay mapped.
        """
        with self._pool.held():
            left: int = self._functions.ct_decoder_interleave(self._handle, nbytes)
        if left < 0:
            raise NativeError("memory is short")
        return left

    def _run(self, spans: Sequence[Span], logits: Tensor) -> None:
        given, groups = array("i"), range(1, 1 + len(self._cache.pools))
        for span in spans:
            count, moves = len(span.tokens), span.states or _NO_STATES
            if count != len(span.positions):
                raise NativeError(f"a span has {count} tokens and {len(span.positions)} positions")
            given.extend((len(span.blocks), span.start, count, span.wanted))
            given.extend((moves.source, moves.row, len(moves.saves)))
            given.extend(span.blocks)
            for group in groups:
                given.extend(self._cache.seen_table(span, group))
            given.extend(span.tokens)
            given.extend(span.positions)
            for numbers in zip(*moves.saves, strict=True):
                given.extend(numbers)
        with self._pool.held():
            wrong = self._functions.ct_decoder_run(
                self._handle, given.buffer_info()[0], len(spans), logits.data_ptr()
            )
        if wrong is not None:
            raise NativeError(wrong.decode())
