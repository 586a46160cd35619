"""The engine without conversations: owns the parts and defines what the loop thread does with them."""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import replace
from itertools import count
from sys import maxsize
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine.build import Pieces, build
from engine.cache.block import Key
from engine.cache.block_map import BlockMap, block_map
from engine.cache.offload import common_prefix
from engine.cache.rows import Rows, Span
from engine.errors import EngineError
from engine.events import DiskFigures, Figures, FinishReason, TokenEvent
from engine.execute.build_options import BuildOptions
from engine.execute.faults import explain
from engine.kernels import on_gpu
from engine.machine.bandwidth import known_bandwidth
from engine.machine.expected import read_bytes
from engine.parallel.ranks import Ranks
from engine.params import SUPPRESSED, UNRECOMMENDED, SamplingParams
from engine.schedule.answers import Answers
from engine.schedule.computing import Computing
from engine.schedule.hide_rows import Hiding, hide, move_up
from engine.schedule.limits import check_rows
from engine.schedule.loop import Loop
from engine.schedule.metrics import Traffic
from engine.schedule.output import Output
from engine.schedule.outputs import Outputs
from engine.schedule.sequence import ANYBODY, Owner, Priority, Sequence
from engine.schedule.speculating import how_speculated, make_speculating
from engine.schedule.step import EngineStep
from engine.speculation.sources import DraftSource
from engine.speculation.texts import from_elsewhere
from engine.store.disk import DiskTier
from models.network import Network
from models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.execute.cuda.tuner import Tuner

T = TypeVar("T")
Follow = Callable[[Sequence], None]


class EngineCore:
    """One model, its KV cache, and a thread that serves sequences; conversations are built on it.

    Every public method may be called from any thread. `engine.engine.Engine` adds loading and conversations.
    """

    _outputs: Outputs | None = None

    def __init__(
        self,
        loop: Loop,
        network: Network,
        tokenizer: Tokenizer,
        options: BuildOptions,
        *,
        name: str,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        """Build the parts. `ranks` compute the other parts of a divided network.

        Raises EngineError if nothing fits in memory or the model does not work here.
        """
        pieces = build(network, device, options)
        parts, self._ranks = 1, ranks
        if ranks is not None:
            ranks.lead(pieces)
            parts = ranks.count
        self._held: Pieces | None = pieces
        self.model_name = name
        self.device, self.dtype = device, network.dtype
        self.tokenizer = tokenizer
        self.generation_defaults = tokenizer.generation_defaults
        self.max_positions = network.positions
        self.context_length = pieces.context_length
        self.spec = network.whole
        self.vocab_size = self.spec.vocab_size
        self._tuner: Tuner | None = None
        self.disk: DiskTier | None = None
        self._no_disk: DiskFigures | None = None
        # Figures are asked for after `close` and after the host tier was dropped, too.
        self._blocks, self._scheduler, self._host = pieces.blocks, pieces.scheduler, pieces.cache.host
        host_bytes = pieces.on_host.nbytes if pieces.on_host is not None else 0
        # Host memory is read at another rate.
        bandwidth = known_bandwidth(device, parts) if not host_bytes else None
        self._figures = Figures(
            model_name=name,
            device=str(device),
            dtype=str(self.dtype).removeprefix("torch."),
            attention=pieces.attention_name,
            context_length=pieces.context_length,
            weight_bytes=network.nbytes * parts,
            **pieces.cache.figures(parts),
            block_size=pieces.blocks.block_size,
            decode=pieces.decode_name,
            notes=pieces.notes,
            bandwidth=bandwidth,
            read_bytes=read_bytes(self.spec, network.nbytes * parts) if bandwidth else 0,
            kv_share=pieces.kv_share,
            host_bytes=host_bytes,
        )
        self.engine_step = EngineStep(
            pieces.scheduler,
            Computing(device, pieces.scheduler, pieces.cache, pieces.runner, pieces.threads),
            Answers(pieces.scheduler, tokenizer.stop_ids),
            jumps=not options.deterministic,
        )
        if ranks is not None:
            self.engine_step.answers.watch = ranks.watch
        if pieces.decode_runner is not None:
            self.engine_step.decode_with(pieces.decode_runner)
        self._speculating = self.engine_step.speculating = make_speculating(
            pieces.scheduler, pieces.runner, pieces.decode_runner, pieces.draft
        )
        self.block_size = pieces.blocks.block_size
        self._pauses, self.loop = count(1), loop
        # Not the step's own bound methods: the loop outlives the step (see `close`).
        loop.work(
            lambda: self.engine_step.has_work,
            lambda: self.engine_step.step(),
            lambda error: self.engine_step.end(error),
            lambda: self.engine_step.while_idle(),
        )

    # -- the public interface

    def default_params(self, **overrides: Any) -> SamplingParams:
        """Return the sampling that the model's authors recommend (ours if they recommend none), with `overrides`.

        Tokens that they never want sampled get the bias SUPPRESSED. Raises EngineError if a value is out of range.
        """
        suppressed = {id: SUPPRESSED for id in self.tokenizer.suppressed_ids if id < self.vocab_size}
        bias = {"logit_bias": {**suppressed, **(overrides.get("logit_bias") or {})}} if suppressed else {}
        return SamplingParams(**{**(self.generation_defaults or UNRECOMMENDED), **overrides, **bias})

    def stream(self, token_ids: list[int], params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Answer a prompt, token by token. Closing the generator cancels the request within one step.

        Raises EngineError for an empty prompt or an unknown token id, ContextFullError if the prompt does not fit.
        """
        sequence = self.start(Rows.of(token_ids), params or self.default_params())
        try:
            yield from self.events(sequence)
        finally:
            sequence.cancelled = True

    def warm(self, token_ids: list[int]) -> int:
        """Make the KV of these tokens present. Return how many had to be computed.

        Raises EngineError for an unknown token id, ContextFullError if they do not fit.
        """
        return self.warm_rows(Rows.of(token_ids))

    def know(self, texts: Iterable[Items[int]]) -> None:
        """Guess from these texts as well, in place of those given before; the latest text comes first.

        They are tokens of this model. Returns once they are indexed, which takes microseconds per token.
        """
        if (speculating := self.engine_step.speculating) is not None:
            index = from_elsewhere(texts)
            self.loop.post(lambda: speculating.texts.know(index))

    def figures(self) -> Figures:
        """Return what the engine holds and does right now."""
        done = total = 0
        for sequence in list(self._scheduler.running):
            if sequence.priority is Priority.PERSON and len(sequence.generated) == sequence.earlier:
                done = max(sequence.computed - sequence.cached_tokens, 0)
                total = sequence.prompt_tokens - sequence.cached_tokens
        fixed, host, drafts = self._figures, self._host, self.drafts
        parts = self._tuner, self._speculating, self.disk
        return replace(
            fixed,
            blocks_free=self._blocks.num_free,
            blocks_cached=self._blocks.num_cached,
            blocks_held=self._blocks.num_held,
            marks=len(self._blocks.marks or ()),
            prefill_done=done,
            prefill_total=total,
            notes=sum((part.notes for part in parts if part is not None), fixed.notes),
            draft_bytes=drafts.nbytes if drafts is not None else 0,
            offload=host.figures(self._blocks.tier) if host is not None else None,
            speculation=how_speculated(self._speculating, self.device.type),
            disk=self.disk.figures() if self.disk is not None else self._no_disk,
        )

    def traffic(self) -> Traffic:
        """Return how many requests are running, waiting or preempted; returns at once, like `figures`."""
        scheduler = self._scheduler
        there = (*scheduler.running, *scheduler.waiting)
        where = Counter(s.status.value for s in there if s.params and s.priority is Priority.PERSON)
        return Traffic(where["running"], where["waiting"], where["preempted"], scheduler.tally)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes that a token takes in the KV cache."""
        return self._figures.kv_token_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes of mapped weights that were copied since loading."""
        owners = self._held.runner if self._held is not None else None, self.drafts
        return sum(owner.copied_bytes for owner in owners if owner is not None)

    @property
    def pieces(self) -> Pieces:
        """The parts, for work on the loop's thread (`loop.call`). Raises EngineError if the engine is closed."""
        if (pieces := self._held) is None:
            raise EngineError("The engine is closed; load the model again.")
        return pieces

    @property
    def drafts(self) -> DraftSource | None:
        """The draft model that guesses, if there is one."""
        return self._speculating.drafts if self._speculating is not None else None

    def look_at_blocks(self, keys: list[Key], seen: Callable[[BlockMap], None]) -> None:
        """Call `seen` with a snapshot of the blocks, between two steps. Returns at once.

        The branch shown is that of the person's running sequence, or `keys` if none runs. Raises EngineError if closed.
        """

        def job() -> None:
            running = [s.rows.keys for s in self._scheduler.running if s.priority is Priority.PERSON]
            found = block_map(self._blocks, running[-1] if running else keys)
            seen(replace(found, kv_dtype=self._figures.kv_dtype, token_bytes=self.kv_token_bytes))

        self.loop.post(job)

    def close(self) -> None:
        """End the thread and free the memory. Running streams end as cancelled. Closing twice is harmless."""
        if self._tuner is not None:
            self._tuner.stop()
        if self.disk is not None:
            with suppress(EngineError):  # the loop was closed before
                self.loop.post(self._scheduler.cancel_all)
                self.disk.finish()
        self.loop.close()
        if self._ranks is not None:
            self._ranks.close()
        if self.disk is not None:
            self.disk.close()
        if self._tuner is not None:
            self._tuner.join()
            self._tuner = None
        self.tokenizer.close()
        if self.lost_gpu or self._held is None:
            return  # nothing can be freed, or all was
        for on_host in (self._host, self._held.on_host):
            if on_host is not None:
                on_host.close()
        self._scheduler.logits.clear()
        self._blocks.carry_out, self._scheduler.leave = lambda copy: None, lambda sequence: None
        self._held = self._host = self._speculating = None
        del self.engine_step
        if self.device.type == "cuda":  # free the memory for the next model and for other programs
            gc.collect()
            torch.cuda.empty_cache()

    def tuner(self) -> "Tuner":
        """Return a tuner, which measures how the decode kernels run best here. Raises EngineError if it cannot."""
        pieces = self.pieces
        if self._ranks is not None:
            raise EngineError("A model that several GPUs compute together cannot be tuned or profiled yet.")
        if pieces.decode_runner is None or pieces.decode_runner.program.cuts is None:
            reason = f" ({why})" if (why := on_gpu.problem(self.device)) else ""
            raise EngineError(
                "Only the fused kernels of a GPU can be tuned or profiled; this model is computed by "
                f"{pieces.decode_name}{reason}."
            )
        from engine.execute.cuda.tuner import Tuner

        return Tuner.of(
            pieces.network,
            pieces.cache,
            pieces.attention_name == "triton",
            self.model_name,
            self.loop.call,
            lambda: self.engine_step.is_busy,
        )

    def tune_when_idle(self) -> None:
        """Tune the kernels for the next start while the engine is idle, if they can be tuned and are not."""
        with suppress(EngineError):
            tuner = self.tuner()
            if tuner.kept() is None:
                self._tuner = tuner
                tuner.start()

    # -- for conversations

    def output(
        self,
        params: SamplingParams,
        inside_think: bool = False,
        thinks: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> Output:
        """Return the object that turns the tokens of one answer into events (see `Outputs.output`)."""
        if self._outputs is None or self._outputs.tokenizer is not self.tokenizer:
            self._outputs = Outputs(self.tokenizer, self.vocab_size)
        return self._outputs.output(params, inside_think, thinks, shown)

    def start(
        self,
        rows: Rows,
        params: SamplingParams,
        output: Output | None = None,
        earlier: list[int] | None = None,
        origin: int = 0,
        follow: Follow | None = None,
        client: Hashable = None,
    ) -> Sequence:
        """Queue a prompt to be answered. Take its events with `events`. Raises the errors of `stream`.

        `earlier` are the last tokens of `rows` if they are an answer to continue; `max_tokens` counts them, too.
        `origin` and `client` are the sequence's. `follow` gets the sequence before it can run; if it cancels it there,
        no events come.
        """
        if not rows:
            raise EngineError("The prompt is empty; write something first.")
        self.check_rows(rows, spare=1)
        unknown = [id for id in params.logit_bias if id >= self.vocab_size]
        if unknown:
            raise EngineError(
                f"logit_bias names token {unknown[0]}; this model has tokens 0 to {self.vocab_size - 1}."
            )
        answer, output = list(earlier or []), output or self.output(params)
        sequence = Sequence(
            rows, Priority.PERSON, params, output, client=client, origin=origin, generated=answer
        )
        if follow is not None:
            follow(sequence)
        self.submit(sequence)
        return sequence

    def go_on(self, drawn: Sequence, params: SamplingParams, output: Output) -> Sequence:
        """Continue as an answer what idle work has drawn. The rows are known to be valid, so they are not checked."""
        rows, answer = drawn.rows, list(drawn.generated)
        sequence = Sequence(rows, Priority.PERSON, params, output, origin=-drawn.origin, generated=answer)
        self.submit(sequence)
        return sequence

    def new_pause(self) -> int:
        """Return a number for the idle work between two answers (see `Sequence.origin`)."""
        return next(self._pauses)

    def submit(self, sequence: Sequence) -> None:
        """Hand a sequence to the loop. Blocks of its prompt that are on disk are brought back first."""
        self.loop.post(lambda: self._bring(sequence, lambda: self._scheduler.add(sequence)))

    def bring_back(self, rows: Rows, owner: Owner = ANYBODY) -> None:
        """Bring back the blocks of `rows` that are on disk, compute nothing, and return when that is done."""
        if self.disk is None:
            return
        waiting = Sequence(rows, owner.priority)
        if owner.follow is not None:
            owner.follow(waiting)
        self.loop.post(lambda: self._bring(waiting, waiting.finished.set))
        waiting.finished.wait()

    def _bring(self, sequence: Sequence, then: Callable[[], None]) -> None:
        """Call `then` once the blocks of a sequence that are on disk have been brought back."""
        disk, rows = self.engine_step.disk, sequence.rows
        if disk is None:
            return then()
        is_idle = sequence.priority is Priority.IDLE
        keys = rows.keys if self._blocks.marks is None else sequence.reusable
        return disk.bring(keys, rows.masked_until, is_idle, lambda: not sequence.cancelled, then)

    def taken_on_disk(self, owner: str) -> int:
        """Return the bytes that a conversation takes in the disk tier. Call it on the loop's thread."""
        return disk.taken(owner) if (disk := self.engine_step.disk) is not None else 0

    def save(self, owner: str | None, rows: Rows) -> None:
        """Have the cached blocks of `rows` written to disk in idle time, if there is a disk tier, into the file of the
        conversation `owner` (letters, digits, - and _; None: write nothing). Returns at once."""

        def job() -> None:
            if (disk := self.engine_step.disk) is not None and owner is not None:
                disk.request_write(owner, rows.keys, rows.masked_until, rows.edges)

        self.loop.post(job)

    def events(self, sequence: Sequence) -> Iterator[TokenEvent]:
        """Yield the events of a started sequence until it ends. Raises the sequence's error, if it failed."""
        while (event := sequence.events.get()) is not None:
            yield event
        if sequence.error is not None:
            raise sequence.error

    @property
    def is_closed(self) -> bool:
        """Whether the engine is closed and takes no more requests."""
        return self.loop.closed

    @property
    def lost_gpu(self) -> bool:
        """Whether the engine is closed because the GPU was lost; only another process may use it again."""
        return self.loop.lost_gpu

    @property
    def on_loop_thread(self) -> bool:
        """Whether the caller is on the loop's thread, which must not wait; garbage collection may run there."""
        return self.loop.inside

    def warm_rows(self, rows: Rows, owner: Owner = ANYBODY, since: int = maxsize) -> int:
        """Make the KV of `rows` present, and all that was remembered of those from `since` on. Return how many rows had
        to be computed."""
        self.check_rows(rows, spare=0)
        sequence = Sequence(rows, owner.priority, origin=owner.origin, since=since)
        self.submit(sequence)
        if owner.follow is not None:
            owner.follow(sequence)
        sequence.finished.wait()
        if sequence.error is not None:
            raise sequence.error
        return sequence.prompt_tokens - sequence.cached_tokens

    def promote(self, sequence: Sequence) -> None:
        """Give this idle work a person's priority, because a person now waits for it. Returns at once."""

        def job() -> None:
            sequence.priority = Priority.PERSON

        self.loop.post(job)

    def supersede(self, sequence: Sequence, draft: Rows, start: int, rows: Rows) -> None:
        """Cancel the idle work `sequence`, which warmed `draft`. Forget the rows of `draft` from `start` on, except
        those that it shares with `rows`, which replace it. Returns at once.
        """

        def job() -> None:
            self._scheduler.finish(sequence, FinishReason.CANCELLED)
            self._blocks.forget(draft.keys, max(start, common_prefix(draft.keys, rows.keys)))

        self.loop.post(job)

    def pin(self, rows: Rows) -> None:
        """Mark `rows` as the conversation in use: evicted last, and never for idle work. Returns at once."""
        self.loop.post(lambda: self._blocks.pin(rows.keys))

    def forget(self, rows: Rows, start: int) -> None:
        """Free the cached rows of `rows` from `start` on, unless a sequence uses them. Returns at once."""

        def job() -> None:
            self._blocks.forget(rows.keys, start)

        self.loop.post(job)

    def cached_rows(self, rows: Rows) -> int:
        """Return how many leading rows are present."""
        return self.loop.call(lambda: self._blocks.match(rows.keys))

    def hide(self, rows: Rows, spans: Items[Span], owner: Owner = ANYBODY, keep_rows: bool = False) -> Rows:
        """Remove the rows in `spans`: the rows after them move up, with their KV unchanged (see Rows.hide).

        Rows that are not present are computed first. With `keep_rows`, the original `rows` stay in the cache beside the
        result, for an answer that may continue. Raises OutOfBlocksError if there is no room, EngineError if computing
        or copying fails.
        """
        whole = Hiding(rows, rows.hide(spans), spans)
        if self.cached_rows(whole.hidden) < len(whole.hidden):
            idle = owner.priority is Priority.IDLE
            if not idle:
                self.pin(rows)  # idle work must not evict them before they have moved

            def move(part: Hiding) -> None:
                self.warm_rows(part.rows, owner, part.since)
                self.loop.call(lambda: move_up(self.engine_step.computing, part, idle))

            try:
                hide(whole, self._blocks, self.cached_rows(rows), move)
            except (RuntimeError, MemoryError) as error:
                raise explain(error) from error
            if not keep_rows:
                self.forget(rows, spans[0][0])
        return whole.hidden

    # -- helpers

    def check_rows(self, rows: Rows, spare: int = 0) -> None:
        """Raise the errors of `stream` if `rows` and `spare` more rows cannot be computed."""
        check_rows(rows, spare, self.vocab_size, self.context_length)
