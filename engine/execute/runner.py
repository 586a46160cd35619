"""The runner: from a batch to logits."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.attention.flash import FlashBackend
from engine.attention.triton import TritonBackend
from engine.batch import NONE, Recorded, Span, StateMoves, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import DIVIDED
from engine.execute.cpu import products
from engine.execute.cpu.executor import NativeDecoder, takes_prompts, unsupported
from engine.execute.cpu.interleaving import Interleaving
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.plain_modules import plain_modules
from engine.kernels.native.library import NativeError, Pool
from models.features import Feature, features
from models.network import Network
from models.reference.attention import Attention
from models.reference.collective import Collective
from models.reference.decoder import Decoder as Reference

if TYPE_CHECKING:
    from engine.execute.cuda.padded_prefill import PaddedPrefill
    from engine.execute.cuda.prefill import Sums


class DecoderModule(Protocol):
    """The part of a network that the runner calls (see `models/reference/decoder.py`)."""

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the hidden states [T, hidden_size] of int64 [T] token ids at int64 [T] positions."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits: [n, hidden_size] -> [n, vocab_size]."""


class Runner:
    """Runs plain modules or fused kernels. The tokens of all spans form one flat batch.

    On a CPU, native kernels compute all spans together if they support the model; if its weights are not quantised,
    they compute only the rows of answers. Which kernel computes a row depends only on whether the row belongs to a
    prompt.
    """

    def __init__(
        self,
        network: Network,
        backend: AttentionBackend,
        device: torch.device,
        on_host: HostExperts | None = None,
        peers: Collective | None = None,
    ) -> None:
        """`on_host` computes the experts in host memory while the GPU computes the rest. `peers` are the processes that
        compute the other parts of a divided network."""
        self._model: DecoderModule = plain_modules(network, None if on_host is None else on_host.mix, peers)
        self._on_host = on_host
        self._peers = peers
        self.together: Callable[[StepBatch], AbstractContextManager[None]] = lambda batch: nullcontext()
        """The context in which a step is computed, so that the other processes of a divided network compute it too."""
        self._backend = backend
        self._device = device
        self._padded: PaddedPrefill | None = None
        self._native: NativeDecoder | None = None
        self._interleaving: Interleaving | None = None
        self.pool: Pool | None = None
        """The threads of the native kernels; None if there are none."""

    @property
    def name(self) -> str:
        """The program of a decode step, for people."""
        if self._native is not None:
            return self._native.name
        return "plain modules, native products" if self.multiplies else "plain modules"

    def go_native(
        self, network: Network, cache: KVCache, threads: int, pool: Pool | None = None
    ) -> str | None:
        """Switch to native kernels for the work they do best, on the threads of `pool` if given.

        If they do not support `network`, return why, and let them compute only the products if the weights are
        quantised. Raises NativeError if the kernels cannot be set up after all.
        """
        reason = unsupported(network.spec, cache.row.kind) if network.share is None else DIVIDED
        if reason is None:
            self.pool = pool or Pool(threads)
            self._native = _native_decoder(network, cache, self.pool)
            self._interleaving = Interleaving(self._native, cache.nbytes)
        elif network.is_quantized and products.problem() is None:
            self.pool = pool or Pool(threads)
            self._model = Reference(network, products.NativeProduct(network, self.pool), peers=self._peers)
        return reason

    @property
    def multiplies(self) -> bool:
        """Whether native kernels compute the products and nothing else."""
        return self.pool is not None and self._native is None

    @torch.inference_mode()
    def fuse(
        self,
        network: Network,
        cache: KVCache,
        rows: int,
        graphs: Graphs | None,
        deterministic: bool,
        sums: "Sums | None" = None,
    ) -> str | None:
        """Switch to fused kernels if they support `network`; compile and record them. Otherwise return why they do not.

        `rows` is the most that a sequence holds. With `deterministic`, every span is summed in one order, whatever else
        is in the batch. Without it, short spans and batches of several spans run as `graphs`, unless torch computes
        attention. The cache must be empty, because its first block is written to. `sums` sum the products of a divided
        network. Raises ImportError if triton is not
        installed.
        """
        from engine.execute.cuda.fused_program import unsupported
        from engine.execute.cuda.padded_prefill import PaddedPrefill
        from engine.execute.cuda.prefill import FusedPrefill

        reason, found = unsupported(network), features(network.spec)
        if reason is None and deterministic and Feature.LATENT in found:
            reason = f"the fused kernels compute no prompts of {Feature.LATENT.value} in one order of sums"
        if reason is None and Feature.LATENT in found and cache.row.is_quantized:
            reason = f"there are no fused kernels for latents in {cache.row.kind}; use --kv-dtype auto"
        if reason is not None:
            return reason
        self._model = FusedPrefill(network, self._on_host, self._peers, sums)
        with cache.on_trial():
            count = min(32, cache.block_size)  # enough rows to compile the kernels for long prompts
            ids = torch.arange(count, device=self._device)
            moves = None if cache.states is None else StateMoves(NONE, 0, ((count, 0),))
            trial = StepBatch((Span((0,), 0, count, states=moves),))
            hidden = self._model.forward(ids, ids, self._backend.plan(trial))
            self._model.logits(hidden[-1:])
        if self._peers is not None or Feature.LATENT in found:
            return None
        if deterministic:
            self._padded = PaddedPrefill(network, cache, None, rows, graphs, self._on_host)
        elif graphs is not None and isinstance(self._backend, (FlashBackend, TritonBackend)):
            self._padded = PaddedPrefill(network, cache, self._backend, rows, graphs, self._on_host)
        if self._padded is not None:
            with cache.on_trial():
                self._padded.prepare()
        return None

    @property
    def firsts(self) -> int:
        """Number of steps so far that were slower than usual because they compiled or recorded something."""
        return self._padded.firsts if self._padded is not None else 0

    @property
    def recorded(self) -> Recorded:
        """The sizes that prompts are padded to. Empty for deterministic steps: there it matters where a slab ends."""
        padded = self._padded
        return Recorded() if padded is None or padded.deterministic else padded.recorded

    @property
    def is_divided(self) -> bool:
        """Whether other processes compute the other parts."""
        return self._peers is not None

    @property
    def checks_guesses(self) -> bool:
        """Whether several rows of one answer in a step have the same bits as rows decoded one by one."""
        return self._native is not None

    @property
    def all_native(self) -> bool:
        """Whether native kernels compute everything, including attention."""
        return self._native is not None and self._native.takes_prompts

    def uses_torch(self, batch: StepBatch) -> bool:
        """Return whether torch computes any products for `batch`."""
        if self._native is None:
            return not self.multiplies
        return not self.all_native and any(span.start < span.answer for span in batch.spans)

    def while_idle(self) -> bool:
        """Spend a few milliseconds on making later steps faster. Return whether there is more to do."""
        return self._interleaving is not None and self._interleaving.go_on()

    @property
    def copied_bytes(self) -> int:
        """Bytes of mapped weights copied since loading: memory that other programs can no longer use."""
        return 0 if self._interleaving is None else self._interleaving.copied

    def leave_cores(self, alone: bool, free: int) -> None:
        """Restrict the native kernels to one core, or else to those that are `free`, but at least half of theirs.

        Their threads wait for each other, so one that shares its core with another program holds up all.
        """
        if self.pool is None:
            return
        threads = 1 if alone else min(self.pool.threads, max((self.pool.threads + 1) // 2, free))
        if self.pool.working != threads:
            self.pool.set_working(threads)

    def run(self, batch: StepBatch) -> list[Tensor]:
        """Compute the rows of `batch` and return the logits [vocab] of each row that wants them, in order.

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
        """Compute prompt rows with the plain modules and answer rows with the native kernels."""
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

    @torch.inference_mode()  # not for native kernels: entering it costs more than all else around one of their steps
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


def _native_decoder(network: Network, cache: KVCache, pool: Pool) -> NativeDecoder:
    """Create the native decoder. Raises NativeError.

    If it computes prompts too, a 16-bit `cache` holds fp16, whose rounding is eight times finer than that of bf16.
    Values beyond the range of fp16 become its largest number.
    """
    dtype = cache.row.stored
    changes = (
        dtype == torch.bfloat16 and cache.is_free and takes_prompts(network, pool.library, pool.library.best)
    )
    if changes:
        cache.hold_as(torch.float16)
    try:
        return NativeDecoder(network, cache, pool)
    except NativeError:
        if changes:
            cache.hold_as(dtype)
        raise
