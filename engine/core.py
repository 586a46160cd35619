"""The engine without conversations: owns the pieces, and says what the loop thread does with them."""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine.build import Options, build
from engine.cache.block_map import BlockMap, block_map
from engine.cache.offload import common_prefix
from engine.cache.prefix_index import Key
from engine.cache.rows import Rows, Span
from engine.errors import EngineError
from engine.events import DiskFigures, Figures, FinishReason, TokenEvent
from engine.execute.faults import explain
from engine.machine.bandwidth import known_bandwidth
from engine.parallel.ranks import Ranks
from engine.params import UNRECOMMENDED, SamplingParams
from engine.schedule.limits import check_rows
from engine.schedule.loop import Loop
from engine.schedule.moving import move_up
from engine.schedule.output import Output
from engine.schedule.outputs import Outputs
from engine.schedule.sequence import ANYBODY, Owner, Priority, Sequence, Status
from engine.schedule.speculating import how_speculated, make_speculating
from engine.schedule.step import EngineStep
from engine.schedule.tally import Traffic
from engine.speculation.sources import Source
from engine.speculation.texts import from_elsewhere
from engine.store.disk import DiskTier
from models.network import Network
from models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.execute.cuda.tuner import Tuner

T = TypeVar("T")
Follow = Callable[[Sequence], None]


class EngineCore:
    """One model, its KV cache, and a thread that serves sequences from it: what conversations stand on.

    Every public method may be called from any thread. `engine.engine.Engine` adds loading and conversations.
    """

    _outputs: Outputs | None = None

    def __init__(
        self,
        loop: Loop,
        network: Network,
        tokenizer: Tokenizer,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        notes: tuple[str, ...] = (),
        ranks: Ranks | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of `engine.build`; `ranks` compute the other parts of a network that is divided.

        Raises EngineError when nothing fits or does not work here.
        """
        pieces = build(network, device, dtype, Options(**options), notes)
        parts, self._ranks = 1, ranks
        if ranks is not None:
            ranks.lead(pieces)
            parts = ranks.count
        self.model_name = name
        self.device = device
        self.dtype = dtype
        self.tokenizer = tokenizer
        self.generation_defaults = tokenizer.generation_defaults
        self.max_positions = network.positions
        self.context_length = pieces.context_length
        self.spec = network.whole
        self.vocab_size = self.spec.vocab_size
        self._weight_bytes = network.nbytes * parts
        self._network = network
        self._tuner: Tuner | None = None
        self._disk: DiskTier | None = None
        self._no_disk: DiskFigures | None = None
        self._cache = pieces.cache
        self._kv_bytes = pieces.cache.kv.nbytes * parts
        self._kv_row = pieces.cache.row
        self._kv_token_bytes = 2 * len(network.spec.layers) * pieces.cache.row.nbytes * parts
        self._host = pieces.cache.host
        self._blocks = pieces.blocks
        self._scheduler = pieces.scheduler
        self._runner = pieces.runner
        self._decode_runner = pieces.decode_runner
        self._host_experts = pieces.on_host
        self._attention_name = pieces.attention_name
        self._decode_name = pieces.decode_name
        self._notes = pieces.notes
        self._host_bytes = pieces.on_host.nbytes if pieces.on_host is not None else 0
        # What is in host memory is read at another rate.
        self._bandwidth = known_bandwidth(device) if not self._host_bytes else None
        self._engine_step = EngineStep(
            device,
            tokenizer.stop_ids,
            self._scheduler,
            self._blocks,
            self._cache,
            self._runner,
            pieces.threads,
            jumps=not options.get("deterministic", False),
        )
        if ranks is not None:
            self._engine_step.watch = ranks.watch
        if pieces.decode_runner is not None:
            self._engine_step.decode_with(pieces.decode_runner)
        self._speculating = self._engine_step.speculating = make_speculating(
            self._scheduler, pieces.runner, pieces.decode_runner, pieces.draft
        )
        self.block_size = self._blocks.block_size
        self._pauses = count(1)
        self._loop = loop
        # Not the step's own methods: the loop outlives it (see `close`).
        loop.work(
            lambda: self._engine_step.has_work,
            lambda: self._engine_step.step(),
            lambda error: self._engine_step.end(error),
            lambda: self._engine_step.while_idle(),
        )

    # -- what people use

    def default_params(self, **overrides: Any) -> SamplingParams:
        """The sampling that the model's authors recommend, else (where they say nothing at all) ours, with changes.

        Raises EngineError for a value out of range.
        """
        return SamplingParams(**{**(self.generation_defaults or UNRECOMMENDED), **overrides})

    def stream(self, token_ids: list[int], params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Answer a prompt, token by token. Closing the generator cancels the request within one step.

        Raises EngineError for an empty prompt or an unknown token id, ContextFullError when it does not fit.
        """
        sequence = self.start(Rows.of(token_ids), params or self.default_params())
        try:
            yield from self.events(sequence)
        finally:
            sequence.cancelled = True

    def warm(self, token_ids: list[int]) -> int:
        """Make the KV of these tokens present. Returns how many had to be computed.

        Raises EngineError for an unknown token id, ContextFullError when they do not fit.
        """
        return self.warm_rows(Rows.of(token_ids))

    def know(self, texts: Iterable[Items[int]]) -> None:
        """Guess from these texts, too, instead of those that were known before; the latest comes first.

        They are tokens of this model. Returns once they can be looked up, which takes microseconds a token.
        """
        if (speculating := self._engine_step.speculating) is not None:
            index = from_elsewhere(texts)
            self._loop.post(lambda: speculating.texts.know(index))

    def figures(self) -> Figures:
        """What the engine holds and does right now."""
        done = total = 0
        for sequence in list(self._scheduler.running):
            if sequence.priority is Priority.PERSON and len(sequence.generated) == sequence.earlier:
                done = max(sequence.computed - sequence.cached_tokens, 0)
                total = sequence.prompt_tokens - sequence.cached_tokens
        return Figures(
            model_name=self.model_name,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            attention=self._attention_name,
            context_length=self.context_length,
            weight_bytes=self._weight_bytes,
            kv_bytes=self._kv_bytes,
            kv_dtype=self._kv_row.name,
            kv_token_bytes=self._kv_token_bytes,
            block_size=self.block_size,
            blocks_free=self._blocks.num_free,
            blocks_cached=self._blocks.num_cached,
            blocks_held=self._blocks.num_held,
            prefill_done=done,
            prefill_total=total,
            decode=self._decode_name,
            notes=sum(
                (one.notes for one in (self._tuner, self._speculating, self._disk) if one is not None),
                self._notes,
            ),
            bandwidth=self._bandwidth,
            host_bytes=self._host_bytes,
            draft_bytes=self._drafts.nbytes if self._drafts is not None else 0,
            offload=self._host.figures(self._blocks.tier) if self._host is not None else None,
            speculation=how_speculated(self._speculating, self.device.type),
            disk=self._disk.figures() if self._disk is not None else self._no_disk,
        )

    def traffic(self) -> Traffic:
        """Where people's answers are right now; returns at once, as `figures` does."""
        scheduler = self._scheduler
        asked = [
            s for s in [*scheduler.running, *scheduler.waiting] if s.params and s.priority is Priority.PERSON
        ]
        where = Counter(sequence.status for sequence in asked)
        return Traffic(where[Status.RUNNING], where[Status.WAITING], where[Status.PREEMPTED], scheduler.tally)

    @property
    def kv_token_bytes(self) -> int:
        """What a token takes in the KV cache."""
        return self._kv_token_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes of mapped weights that were copied since they were loaded."""
        owners = self.__dict__.get("_runner"), self._drafts  # none once closed
        return sum(owner.copied_bytes for owner in owners if owner is not None)

    @property
    def _drafts(self) -> Source | None:
        return self._speculating.drafts if self._speculating is not None else None

    def look_at_blocks(self, keys: list[Key], seen: Callable[[BlockMap], None]) -> None:
        """Have `seen` called with a picture of the blocks, between two steps. Returns at once.

        The branch is that of the person's running sequence, else `keys`. Raises EngineError once closed.
        """

        def job() -> None:
            running = [s.rows.keys for s in self._scheduler.running if s.priority is Priority.PERSON]
            found = block_map(self._blocks, running[-1] if running else keys)
            seen(replace(found, kv_dtype=self._kv_row.name, token_bytes=self._kv_token_bytes))

        self._loop.post(job)

    def close(self) -> None:
        """End the thread and free the memory. Running streams end as cancelled. Closing twice is fine."""
        if self._tuner is not None:
            self._tuner.stop()
        if self._disk is not None:
            with suppress(EngineError):  # it was closed before
                self._loop.post(self._scheduler.cancel_all)
                self._disk.finish()
        self._loop.close()
        if self._ranks is not None:
            self._ranks.close()
        if self._disk is not None:
            self._disk.close()
        if self._tuner is not None:
            self._tuner.join()
            self._tuner = None
        self.tokenizer.close()
        if self._host is not None:
            self._host.close()
            self._host = None
        self._speculating = None
        if self._host_experts is not None:
            self._host_experts.close()
            self._host_experts = None
        self._blocks.carry_out = lambda copy: None
        for owner_of_memory in ("_cache", "_network", "_runner", "_decode_runner", "_engine_step"):
            self.__dict__.pop(owner_of_memory, None)
        if self.device.type == "cuda":  # what it held is free for the next model, and for other programs
            gc.collect()
            torch.cuda.empty_cache()

    def tuner(self) -> "Tuner":
        """What measures how the kernels of a decode step run best here. Raises EngineError where nothing is to tune."""
        decode_runner = self._decode_runner
        if self._ranks is not None:
            raise EngineError("A model that several GPUs compute together cannot be tuned or profiled yet.")
        if decode_runner is None or not hasattr(decode_runner.program, "cuts"):
            raise EngineError(
                "Only the fused kernels of a GPU can be tuned or profiled; this model is computed by "
                f"{self._decode_name}."
            )
        from engine.execute.cuda.tuner import Tuner

        prompts = self._attention_name == "triton"
        return Tuner.of(
            self._network,
            self._cache,
            prompts,
            self.model_name,
            self._loop.call,
            lambda: self._engine_step.has_work,
        )

    def tune_when_idle(self) -> None:
        """Have the kernels tuned for the next start while nobody asks for anything, if they are not and can be."""
        with suppress(EngineError):
            tuner = self.tuner()
            if tuner.kept() is None:
                self._tuner = tuner
                tuner.start()

    # -- what conversations use

    def output(
        self,
        params: SamplingParams,
        inside_think: bool = False,
        thinks: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> Output:
        """What makes events of the tokens of one answer (see `Outputs.output`)."""
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
        """Queue a prompt to be answered. Take its events with `events`. Raises as `stream` does.

        `earlier` are the last tokens of `rows` when they are an answer that goes on; `max_tokens` counts them too.
        `origin` and `client` are those of the sequence. `follow` gets it before it may run: cancelled then, it says
        nothing.
        """
        if not rows:
            raise EngineError("The prompt is empty; write something first.")
        self.check_rows(rows, spare=1)
        unknown = [id for id in params.logit_bias if id >= self.vocab_size]
        if unknown:
            raise EngineError(
                f"logit_bias names token {unknown[0]}; this model has tokens 0 to {self.vocab_size - 1}."
            )
        answer = list(earlier or [])
        sequence = Sequence(
            rows,
            Priority.PERSON,
            params,
            output or self.output(params),
            client=client,
            origin=origin,
            generated=answer,
        )
        if follow is not None:
            follow(sequence)
        self.submit(sequence)
        return sequence

    def go_on(self, drawn: Sequence, params: SamplingParams, output: Output) -> Sequence:
        """The answer that begins with what idle work has drawn. Its rows are computed: nothing of them is looked at."""
        rows, answer = drawn.rows, list(drawn.generated)
        sequence = Sequence(rows, Priority.PERSON, params, output, origin=-drawn.origin, generated=answer)
        self.submit(sequence)
        return sequence

    def new_pause(self) -> int:
        """A number for the idle work of the time between two answers (see `Sequence.origin`)."""
        return next(self._pauses)

    def submit(self, sequence: Sequence) -> None:
        """Hand a sequence to the loop. What the disk has of its prompt is brought back first."""

        self._loop.post(lambda: self._bring(sequence, lambda: self._scheduler.add(sequence)))

    def bring_back(self, rows: Rows, owner: Owner = ANYBODY) -> None:
        """Have brought back what the disk has of `rows`, and nothing computed. Returns when that is over."""
        if self._disk is None:
            return
        waiting = Sequence(rows, owner.priority)
        if owner.follow is not None:
            owner.follow(waiting)
        self._loop.post(lambda: self._bring(waiting, waiting.finished.set))
        waiting.finished.wait()

    def _bring(self, sequence: Sequence, then: Callable[[], None]) -> None:
        """Call `then` when the disk has given what it has of a sequence."""
        disk, rows = self._engine_step.disk, sequence.rows
        if disk is None:
            return then()
        is_idle = sequence.priority is Priority.IDLE
        return disk.bring(rows.keys, rows.masked_until, is_idle, lambda: not sequence.cancelled, then)

    def taken_on_disk(self, owner: str) -> int:
        """Bytes that a conversation takes in the tier on disk. For the loop's thread."""
        return disk.taken(owner) if (disk := self._engine_step.disk) is not None else 0

    def save(self, owner: str | None, rows: Rows) -> None:
        """Have what is cached of `rows` written to disk in idle time, where there is a tier on disk, among what the
        conversation `owner` has there (letters, digits, - and _; None: nothing is). Returns at once."""

        def job() -> None:
            if (disk := self._engine_step.disk) is not None and owner is not None:
                disk.wish(owner, rows.keys, rows.masked_until)

        self._loop.post(job)

    def events(self, sequence: Sequence) -> Iterator[TokenEvent]:
        """The events of a started sequence until it ends. Raises what went wrong with it."""
        while (event := sequence.events.get()) is not None:
            yield event
        if sequence.error is not None:
            raise sequence.error

    @property
    def is_closed(self) -> bool:
        """Nothing can be asked for any more."""
        return self._loop.closed

    @property
    def on_loop_thread(self) -> bool:
        """Whether the caller is on the loop's thread: garbage may be collected there, nobody may wait there."""
        return self._loop.inside

    def warm_rows(self, rows: Rows, owner: Owner = ANYBODY) -> int:
        """Make the KV of `rows` present. Returns how many rows had to be computed."""
        self.check_rows(rows, spare=0)
        sequence = Sequence(rows, owner.priority, origin=owner.origin)
        self.submit(sequence)
        if owner.follow is not None:
            owner.follow(sequence)
        sequence.finished.wait()
        if sequence.error is not None:
            raise sequence.error
        return sequence.prompt_tokens - sequence.cached_tokens

    def promote(self, sequence: Sequence) -> None:
        """A person waits for this idle work from now on. Returns at once."""

        def job() -> None:
            sequence.priority = Priority.PERSON

        self._loop.post(job)

    def supersede(self, sequence: Sequence, draft: Rows, start: int, rows: Rows) -> None:
        """End the idle work `sequence`, and forget what `draft`, that it was for, has from row `start` on and `rows`,
        which take its place, have not. Returns at once.
        """

        def job() -> None:
            self._scheduler.finish(sequence, FinishReason.CANCELLED)
            self._blocks.forget(draft.keys, max(start, common_prefix(draft.keys, rows.keys)))

        self._loop.post(job)

    def pin(self, rows: Rows) -> None:
        """The conversation in use has these rows: they are evicted last, and by no idle work. Returns at once."""
        self._loop.post(lambda: self._blocks.pin(rows.keys))

    def forget(self, rows: Rows, start: int) -> None:
        """Free what is cached of `rows` from `start` on, unless somebody else uses it. Returns at once."""

        def job() -> None:
            self._blocks.forget(rows.keys, start)

        self._loop.post(job)

    def cached_rows(self, rows: Rows) -> int:
        """How many leading rows are present."""
        return self._loop.call(lambda: self._blocks.match(rows.keys))

    def hide(self, rows: Rows, spans: Items[Span], owner: Owner = ANYBODY, keep_rows: bool = False) -> Rows:
        """Take the rows in `spans` out: the rows after them move up, with their KV as it is (see Rows.hide).

        What of `rows` is not present is computed first. With `keep_rows`, `rows` stay as cache beside what is left of
        them, for an answer that may go on. Raises OutOfBlocksError when there is no room, EngineError when computing
        or copying fails.
        """
        hidden = rows.hide(spans)
        if self.cached_rows(hidden) < len(hidden):
            idle = owner.priority is Priority.IDLE
            if not idle:
                self.pin(rows)  # until they have moved, whatever idle work there is
            self.warm_rows(rows, owner)
            try:
                self._loop.call(
                    lambda: move_up(
                        self._blocks, self._cache, self._scheduler, rows, hidden, spans, keep_rows, idle
                    )
                )
            except (RuntimeError, MemoryError) as error:
                raise explain(error) from error
        return hidden

    # -- how it is done

    def check_rows(self, rows: Rows, spare: int = 0) -> None:
        """Raises as `stream` does where `rows` and `spare` more cannot be computed."""
        check_rows(rows, spare, self.vocab_size, self.context_length)
