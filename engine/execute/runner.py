"""From a batch to logits."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.attention.flash import FlashBackend
from engine.attention.triton import TritonBackend
from engine.batch import Recorded, Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import DIVIDED
from engine.execute.cpu import products
from engine.execute.cpu.executor import NativeDecoder, takes_prompts, unsupported
from engine.execute.cpu.interleaving import Interleaving
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.host_experts import HostExperts
from engine.kernels.native.library import NativeError, Pool
from models.network import Network
from models.reference.attention import Attention
from models.reference.decoder import Decoder as Reference
from models.reference.peers import Peers

if TYPE_CHECKING:
    from engine.execute.cuda.padded_prefill import PaddedPrefill


class Decoder(Protocol):
    """What the runner needs of a network (see `models/reference/decoder.py`)."""

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """int64 [T], int64 [T] -> hidden states [T, hidden_size]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""


class Runner:
    """Runs the plain modules, or fused kernels; the tokens of all spans lie side by side in one flat batch.

    On a CPU native kernels compute all spans together, where there are some for the model: of a model whose weights
    are not quantised only the rows of answers. What computes a row depends on nothing but whether it is a prompt's.
    """

    def __init__(
        self,
        network: Network,
        backend: AttentionBackend,
        device: torch.device,
        on_host: HostExperts | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`on_host` computes the experts that lie in host memory while all else is on a GPU; `peers` the other parts of
        a network that is divided."""
        self._model: Decoder = (
            Reference(network, on_host=None if on_host is None else on_host.mix)
            if peers is None
            else _part(network, peers)
        )
        self._on_host = on_host
        self._peers = peers
        self.together: Callable[[StepBatch], AbstractContextManager[None]] = lambda batch: nullcontext()
        """What a step is computed in, where others have to compute it, too."""
        self._backend = backend
        self._device = device
        self._padded: PaddedPrefill | None = None
        self._native: NativeDecoder | None = None
        self._interleaving: Interleaving | None = None
        self.pool: Pool | None = None
        """The threads of the native kernels."""

    @property
    def name(self) -> str:
        """The program of a decode step, for people."""
        if self._native is not None:
            return self._native.name
        return "plain modules, native products" if self.multiplies else "plain modules"

    def go_native(
        self, network: Network, cache: KVCache, threads: int, pool: Pool | None = None
    ) -> str | None:
        """Compute with native kernels from now on what they are best at, where there are some for `network`; with the
        threads of `pool`, if any.

        Else say why not, and have them compute the products where its weights are quantised. Raises NativeError when
        they cannot be had after all.
        """
        reason = unsupported(network.spec) if network.share is None else DIVIDED
        if reason is None:
            self.pool = pool or Pool(threads)
            self._native = _native_decoder(network, cache, self.pool)
            self._interleaving = Interleaving(self._native, cache.kv.nbytes)
        elif network.is_quantized and products.problem() is None:
            self.pool = pool or Pool(threads)
            self._model = Reference(network, products.NativeProduct(network, self.pool), peers=self._peers)
        return reason

    @property
    def multiplies(self) -> bool:
        """Whether native kernels compute the products, and nothing else."""
        return self.pool is not None and self._native is None

    @torch.inference_mode()
    def fuse(
        self, network: Network, cache: KVCache, rows: int, graphs: Graphs | None, deterministic: bool
    ) -> str | None:
        """Run `network` with fused kernels from now on, where there are some for it; compile and record them.

        Else say why not. `rows` is the most that a sequence holds. Deterministic: every span is computed in one order
        of sums, whatever is beside it; else short spans and several at once run as `graphs`, unless torch attends.
        The cache must be empty: its first block is written to. Raises ImportError where triton is not installed.
        """
        from engine.execute.cuda.fused_program import unsupported
        from engine.execute.cuda.padded_prefill import PaddedPrefill
        from engine.execute.cuda.prefill import FusedPrefill

        if (reason := unsupported(network)) is not None:
            return reason
        self._model = FusedPrefill(network, self._on_host, self._peers)
        count = min(32, cache.block_size)  # more than few: what long prompts take is compiled
        ids = torch.arange(count, device=self._device)
        hidden = self._model.forward(ids, ids, self._backend.plan(StepBatch((Span((0,), 0, count),))))
        self._model.logits(hidden[-1:])
        if self._peers is not None:  # what they exchange for a prompt is not recorded
            return None
        if deterministic:
            self._padded = PaddedPrefill(network, cache, None, rows, graphs, self._on_host)
        elif graphs is not None and isinstance(self._backend, (FlashBackend, TritonBackend)):
            self._padded = PaddedPrefill(network, cache, self._backend, rows, graphs, self._on_host)
        if self._padded is not None:
            self._padded.prepare()
        return None

    @property
    def firsts(self) -> int:
        """Steps so far that took longer than they will from now on, because something was compiled or recorded."""
        return self._padded.firsts if self._padded is not None else 0

    @property
    def recorded(self) -> Recorded:
        """What prompts are padded to. Deterministic steps are not told of: where a slab ends matters there."""
        padded = self._padded
        return Recorded() if padded is None or padded.deterministic else padded.recorded

    @property
    def is_divided(self) -> bool:
        """Whether other processes compute the other parts."""
        return self._peers is not None

    @property
    def checks_guesses(self) -> bool:
        """Whether several rows of one answer in a step have the bits of rows that are decoded one by one."""
        return self._native is not None

    @property
    def all_native(self) -> bool:
        """Whether native kernels compute everything, attention included."""
        return self._native is not None and self._native.takes_prompts

    def uses_torch(self, batch: StepBatch) -> bool:
        """Whether torch has products to compute for `batch`."""
        if self._native is None:
            return not self.multiplies
        return not self.all_native and any(span.start < span.answer for span in batch.spans)

    def while_idle(self) -> bool:
        """Do a little of what makes later steps faster, in some milliseconds. Returns whether more is left of it."""
        return self._interleaving is not None and self._interleaving.go_on()

    @property
    def copied_bytes(self) -> int:
        """Bytes of mapped weights that were copied since: they take memory that no other program can have."""
        return 0 if self._interleaving is None else self._interleaving.copied

    def set_alone(self, alone: bool) -> None:
        """Whether the native kernels keep to one core from now on."""
        if self.pool is not None and self.pool.alone is not alone:
            self.pool.set_alone(alone)

    def run(self, batch: StepBatch) -> list[Tensor]:
        """Compute the rows of `batch` and return the logits [vocab] of each row whose are wanted, in order.

        The next call may overwrite them.
        """
        spans = batch.spans
        if self._native is None:
            with self.together(batch):
                return self._run(spans)
        if self._native.takes_prompts:
            return self._native.step(spans)
        return self._run_apart(self._native, spans)

    def _run_apart(self, native: NativeDecoder, spans: tuple[Span, ...]) -> list[Tensor]:
        """The rows of prompts by the plain modules, those of answers by the native kernels."""
        parts = [span.cut(span.answer) for span in spans]
        prompts = tuple(prompt for prompt, _ in parts if prompt is not None)
        answers = tuple(answer for _, answer in parts if answer is not None)
        of_prompts = iter(self._run(prompts) if prompts else [])
        of_answers = iter(native.step(answers) if answers else [])
        return [
            next(logits)
            for prompt, answer in parts
            for part, logits in ((prompt, of_prompts), (answer, of_answers))
            if part is not None
            for _ in range(part.wanted)
        ]

    @torch.inference_mode()  # native kernels need none, and it takes longer than all else around a step of theirs
    def _run(self, spans: tuple[Span, ...]) -> list[Tensor]:
        if self._padded is not None and self._padded.takes(spans):
            return self._padded.run(spans)
        token_ids = [token for span in spans for token in span.tokens]
        positions = [position for span in spans for position in span.positions]
        ends = accumulate(span.count for span in spans)
        last = [row for span, end in zip(spans, ends, strict=True) for row in range(end - span.wanted, end)]
        hidden = self._model.forward(
            torch.tensor(token_ids, device=self._device),
            torch.tensor(positions, device=self._device),
            self._backend.plan(StepBatch(spans)),
        )
        # Only the rows that are sampled from go through the head.
        return list(self._model.logits(hidden[last])) if last else []


def _part(network: Network, peers: Peers) -> Reference:
    """Plain modules for a part of a network, but for the products with weights that are packed for a GPU."""
    if not network.is_packed or network.device.type == "cpu":
        return Reference(network, peers=peers)
    from engine.execute.cuda.packed import packed_embedding, packed_product

    return Reference(network, packed_product, embedding=packed_embedding, peers=peers)


def _native_decoder(network: Network, cache: KVCache, pool: Pool) -> NativeDecoder:
    """Where it computes prompts, too, 16 bits of `cache` hold fp16, which rounds an eighth as coarsely as bf16; what
    lies beyond its range becomes the largest number there is. Raises NativeError.
    """
    dtype = cache.kv.dtype
    changes = dtype == torch.bfloat16 and cache.is_free and takes_prompts(network, pool.library.best)
    if changes:
        cache.hold_as(torch.float16)
    try:
        return NativeDecoder(network, cache, pool)
    except NativeError:
        if changes:
            cache.hold_as(dtype)
        raise
