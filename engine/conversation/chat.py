"""Conversations: sends messages, and keeps the turns."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from time import perf_counter

from engine.cache.rows import Rows
from engine.conversation.batch_generation import AnswerEnd, BatchGenerator, Part, Prompt
from engine.conversation.cache_explainer import Explainer, Question
from engine.conversation.history import IdleWork, ThinkCache
from engine.conversation.import_turns import Adopter, infer_thinking
from engine.conversation.masked import restore
from engine.conversation.settings import ChatSettings, Think
from engine.conversation.turns import Answer, Turn, ended, gone_on, is_same, joined
from engine.core import EngineCore
from engine.errors import EngineError, check_room
from engine.events import DraftCost, FinishReason, TokenEvent, TurnStats
from engine.params import SamplingParams, seeds
from engine.schedule.output import Output
from engine.schedule.scheduler import MaskedRowsEvictedError
from engine.schedule.sequence import Owner, Sequence

__all__ = ["Answer", "Chat", "Think", "ThinkCache", "Turn"]


class Chat(ChatSettings):
    """A conversation with an engine. One answer at a time; `stop` may be called from any thread.

    The history is either what the chat template renders (`exact`), or what was generated, with the think spans
    masked out (`mask`): see `engine/cache/rows.py`.
    """

    def __init__(
        self,
        engine: EngineCore,
        system: str | None = None,
        think: Think = "auto",
        think_cache: ThinkCache = "exact",
    ) -> None:
        """Begin a conversation. Raises EngineError if the model cannot chat or an argument has an unknown value."""
        super().__init__(engine, system, think, think_cache)
        self._idle = IdleWork(engine)
        self.turns: list[Turn] = []
        self.owner: str | None = None
        """The name under which the conversation is kept on disk; None: it is not kept."""
        self._running: Sequence | None = None
        self._several: BatchGenerator | None = None
        """The candidates being answered, if any."""
        self._stopped = False
        self._hurried: Sequence | None = None
        self._explainer = Explainer()
        self._question: Question | None = None
        self._asked: Sequence | None = None
        """The sequence that computed the prompt of the running answer."""
        self._draft = ""
        """The text warmed last of a message that is being typed."""

    @property
    def last(self) -> Answer | None:
        """The latest answer, even while it runs; None before the first."""
        return self.turns[-1].answer if self.turns else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about this model's chat format."""
        return self._format.notes(self.system)

    @property
    def used_tokens(self) -> int:
        """Tokens of the context that the history takes."""
        return len(self.history)

    @property
    def present_tokens(self) -> int | None:
        """How many tokens of the history are present while idle work warms it; None: all, or an answer runs."""
        return self._idle.present

    @property
    def opening(self) -> list[int]:
        """The tokens that the next generation prompt puts before the answer and the history leaves out."""
        return self._format.openings[self._thinking]

    @property
    def history(self) -> Rows:
        """The rows of the conversation so far; none before it begins."""
        return self._history.rows(self.turns) if self.turns or self.system else Rows()

    # -- the conversation

    def send(self, text: str, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Send a message and yield the answer's tokens. Closing the generator cancels; what was produced is kept.

        The first `next()` raises ContextFullError if the prompt does not fit, EngineError for an empty message,
        ModelError if the template fails. The conversation is then unchanged.
        """
        self._stopped = False  # from now on, `stop` applies to this answer
        return self._send(text, params)

    def tell(self, results: Items[str], params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Send the results of the last answer's tool calls, one text each, and yield the answer. Raises as `send` does,
        and EngineError if there are no calls or results."""
        self._stopped = False
        return self._tell(tuple(results), params)

    def retry(self, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Answer the last message again; the new answer replaces the old one. Raises as `send` does."""
        self._stopped = False
        return self._retry(params)

    def resume(self, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Continue exactly where the last answer ended, with up to `max_tokens` new tokens.

        Yields only new tokens. Cached rows of the answer are not computed again. If `params` has no seed, sampling
        continues with the answer's own. If a crash cut the answer off, `max_tokens` is what was left of its limit. The
        first `next()` raises EngineError if the answer is complete or there is none, ContextFullError if nothing more
        fits.
        """
        self._stopped = False
        return self._resume(params)

    def candidates(
        self, text: str, count: int, params: SamplingParams | None = None
    ) -> Iterator[tuple[int, Part]]:
        """Answer `text` `count` times at once, with consecutive seeds from that of `params` on, if it has one.

        Yields the parts of each answer with its number from 0, as `BatchGenerator.run` does. The conversation does not
        change; to continue with one of the answers, `load` it. They share the prompt's rows. Raises as `send` does.
        """
        self._stopped = False
        self._several = BatchGenerator(self._engine)
        return self._candidates(self._several, text, count, params or self._engine.default_params())

    def stop(self, but: int | None = None) -> None:
        """End the latest answer within one step; what was produced is kept. Of candidates, all end, or all except
        number `but`."""
        if (several := self._several) is not None:
            several.stop(but)
        if but is not None:
            return
        self._stopped = True
        running = self._running
        if running is not None:
            running.cancelled = True

    def answer_now(self) -> None:
        """End the thinking of the running answer, from any thread: the tokens that close the think span follow, then
        the answer, in the same iterator. Does nothing if the answer is not thinking.
        """
        running = self._running
        if running is not None and running.output is not None and running.output.thinking.inside:
            self._hurried = running
            running.cancelled = True

    def load(self, turns: Iterable[Turn], params: SamplingParams | None = None) -> None:
        """Replace the history with these turns. `settle` makes them present.

        An answer keeps its token ids if they are tokens of this model that spell exactly its text
        (`engine/conversation/import_turns.py`); otherwise its text is tokenised. An answer without a finish reason was
        cut off by a crash while it was sampled with `params`; it may have been complete.
        """
        self._idle.stop()
        known = dict(enumerate(self.turns))
        adopter = Adopter(
            self._engine, self._format, self._thinking, params or SamplingParams(), self._history.tools
        )
        self.turns = [
            known[index] if is_same(known.get(index), turn) else adopter.adopted(turn)
            for index, turn in enumerate(turns)
        ]

    def undo(self) -> bool:
        """Drop the last message and its answer. Return False if there is none."""
        if not self.turns:
            return False
        self.turns = self.turns[:-1]
        return True

    def reset(self) -> None:
        """Forget every turn; the system prompt and the settings stay."""
        self._idle.stop()
        self.turns = []

    def count(self, draft: str) -> DraftCost:
        """Return what it would cost to send `draft`. Raises ModelError if the template fails."""
        history = self._history.rows(self.turns)
        rows = self._history.prompt(self.turns, draft, self._thinking)
        new = len(rows) - self._engine.cached_rows(rows)
        return DraftCost(
            tokens=max(len(rows) - len(history), 0),
            new=max(new, 1),  # the last row is always computed, because its logits are needed
            free=self._engine.context_length - len(rows),
        )

    # -- idle work

    def settle(self, wait: bool = False) -> None:
        """Warm the history as the next turn will see it, in idle time. Returns at once unless `wait` is set."""
        rows = self._history.rows(self.turns)
        self._idle.warm(rows, wait)
        self._engine.save(self.owner, rows)

    def prepare(self, draft: str, wait: bool = False, params: SamplingParams | None = None) -> None:
        """Warm a message that is still being typed, up to the last token that further typing cannot change.

        With `params`, those of the next `send`, warm it as if Enter came now, and draw the first token of the answer:
        if Enter does come then, the answer is there at once. If typing goes on, only the glue was computed in vain.
        Raises EngineError for a constraint that cannot be used.
        """
        if not draft.strip():
            return self.settle(wait)
        self._draft = draft
        if params is not None and not params.stop and params.max_tokens != 1:
            rows = self._history.prompt(self.turns, draft, self._thinking)
            if not rows.masked_until:
                output = self._output(params, self._thinking)
                return self._idle.draw(self._wanted(self.turns, draft, params), rows, params, output, wait)
        rows, start = self._history.typed(self.turns, draft, self._thinking)
        return self._idle.warm(rows, wait, start)

    # -- helpers

    def _send(self, text: str, params: SamplingParams | None) -> Iterator[TokenEvent]:
        if not text.strip():
            raise EngineError("The message is empty; write something first.")
        yield from self._answer(self.turns, Turn(text, Answer()), params)

    def _tell(self, results: tuple[str, ...], params: SamplingParams | None) -> Iterator[TokenEvent]:
        if not self.turns or not self.turns[-1].answer.calls or not results:
            raise EngineError("The last answer calls no tools; send a message instead.")
        yield from self._answer(self.turns, Turn("", Answer(), results=results), params)

    def _retry(self, params: SamplingParams | None) -> Iterator[TokenEvent]:
        if not self.turns:
            raise EngineError("There is no message to answer again; send one first.")
        yield from self._answer(self.turns[:-1], self.turns[-1], params)

    def _resume(self, params: SamplingParams | None) -> Iterator[TokenEvent]:
        if not self.turns:
            raise EngineError("There is no answer to continue; send a message first.")
        *before, turn = self.turns
        if turn.answer.is_complete:
            raise EngineError("The answer is already complete; retry it or send a message.")
        yield from self._answer(before, turn, params, turn)

    def _candidates(
        self, several: BatchGenerator, text: str, count: int, params: SamplingParams
    ) -> Iterator[tuple[int, Part]]:
        if not text.strip():
            raise EngineError("The message is empty; write something first.")
        self._idle.stop()
        before, opening = list(self.turns), self.opening
        rows = self._prompt_rows(before, text, self._thinking)
        check_room(len(rows) + 1, self._engine.context_length, goes_on=False)
        asks = Question(tuple(before), text, self.system, self.think_cache)
        begins, origin = self._format.begins(self._thinking), -self._idle.pause
        prompts = (
            # The first candidate computes the prompt; the others find it in the cache.
            Prompt(rows.copy(), replace(params, seed=seed), *begins, 0 if number else origin, self._shown)
            for number, seed in enumerate(seeds(params.seed, count))
        )
        try:
            for index, part in several.run(prompts):
                if isinstance(part, AnswerEnd) and part.sequence is not None:
                    self._read_calls(part.answer)
                    self._explain(Turn(text, part.answer, opening), asks, part.sequence)
                    self._show(part.answer, part.sequence)
                yield index, part
        finally:
            self._several = None
            self._idle.begin_pause()

    def _prompt_rows(
        self,
        before: list[Turn],
        text: str,
        think: bool | None,
        exact: bool = False,
        more: int = 0,
        results: Items[str] = (),
    ) -> Rows:
        """Return the rows of a prompt, and pin them. Evicted rows of masked turns are computed again; if that fails, or
        `more` rows in addition do not fit, return the rows of the `exact` policy."""
        rows = self._history.prompt(before, text, think, exact, results)
        if rows.masked_until and (
            rows.next_position + more >= self._engine.max_positions
            or not restore(self._engine, rows, Owner(self._follow, origin=-self._idle.pause))
        ):
            rows = self._history.prompt(before, text, think, True, results)
        self._engine.pin(rows)
        return rows

    def _follow(self, sequence: Sequence) -> None:
        """Make `stop` apply to this sequence; if it was called already, cancel the sequence at once."""
        self._running = sequence
        if self._stopped:
            sequence.cancelled = True

    def _answer(
        self, before: list[Turn], asked: Turn, params: SamplingParams | None, unfinished: Turn | None = None
    ) -> Iterator[TokenEvent]:
        """Answer the message of `asked`, or continue the `unfinished` turn."""
        params = params or self._engine.default_params()
        draft, self._draft = self._draft, ""
        text = asked.user
        asks = Question(tuple(before), text, self.system, self.think_cache, draft)
        # If a prompt is rendered as a whole, the message of a row is unknown.
        is_explained = unfinished is None and not self._history.is_rendered(before, asked.results)
        self._question = asks if is_explained else None
        if unfinished is not None or asked.results:
            self._idle.stop()
        elif (begun := self._begun(before, text, params)) is not None:
            sequence, turn, events, figures = begun
            return (yield from self._run(before, turn, sequence, events, figures))
        for exact in (False, False, True):
            sequence, turn = self._start(before, asked, params, exact, unfinished)
            given = sequence.earlier
            try:
                return (yield from self._run(before, turn, sequence))
            except MaskedRowsEvictedError:
                if len(turn.answer.token_ids) > given:
                    raise EngineError(
                        "The conversation was evicted from the KV cache during the answer; send a message to continue."
                    ) from None
        raise EngineError("The conversation could not be restored to the KV cache; start a new conversation.")

    def _start(
        self, before: list[Turn], asked: Turn, params: SamplingParams, exact: bool, unfinished: Turn | None
    ) -> tuple[Sequence, Turn]:
        """Queue the prompt, after restoring evicted rows of masked turns."""
        think = self._thinking
        if unfinished is not None:
            think = infer_thinking(self._format, unfinished.opening, think)
        earlier = [] if unfinished is None else unfinished.answer.token_ids
        rows = self._prompt_rows(before, asked.user, think, exact, len(earlier), asked.results)
        turn = Turn(asked.user, Answer(), self._format.openings[think], asked.results)
        output = self._output(params, think, rows)
        if unfinished is not None:
            turn.answer.token_ids = list(earlier)
            for event in output.replay(earlier):
                turn.answer.add(event.text, event.kind)
            rows.extend(earlier)
            params = gone_on(params, unfinished.answer)
        check_room(len(rows) + 1, self._engine.context_length, goes_on=unfinished is not None)
        given, origin = turn.answer.token_ids, -self._idle.pause
        self._asked = self._engine.start(rows, params, output, given, origin, self._follow)
        return self._asked, turn

    def _wanted(self, before: list[Turn], text: str, params: SamplingParams) -> object:
        """Return everything that an answer depends on."""
        functions = self.tools.functions if self.tools is not None else ()
        return list(before), text, params, self._thinking, self.system, self.think_cache, functions

    def _begun(
        self, before: list[Turn], text: str, params: SamplingParams
    ) -> tuple[Sequence, Turn, list[TokenEvent], TurnStats] | None:
        """Continue from the first token if `prepare` has drawn it. Return the sequence, its turn, token and figures."""
        began = perf_counter()
        taken = self._idle.take(self._wanted(before, text, params), self._follow)
        if taken is None:
            return None
        drawn, left = taken
        output = self._output(params, self._thinking)
        events = output.replay(drawn.generated)
        self._asked = drawn
        params = replace(params, seed=drawn.seed)
        waited = perf_counter() - began
        present = drawn.prompt_tokens - left
        stats = replace(
            drawn.stats(),
            cached_tokens=present,
            prefilled_tokens=left,
            warmed_tokens=present - drawn.hit.reused,
            ttft_s=waited,
            prefill_s=waited,
        )
        turn = Turn(text, Answer(), self._format.openings[self._thinking])
        return self._engine.go_on(drawn, params, output), turn, events, stats

    def _run(
        self,
        before: list[Turn],
        turn: Turn,
        sequence: Sequence,
        closing: Iterable[TokenEvent] = (),
        first: TurnStats | None = None,
    ) -> Iterator[TokenEvent]:
        """Yield the events of a sequence, after the `closing` events of new tokens with which it began.

        `first` has the figures of those tokens, or of the thinking if `answer_now` ended it.
        """
        answer = turn.answer
        given = len(answer.token_ids)
        began = False
        answer.seed = sequence.seed

        def taken(event: TokenEvent) -> TokenEvent:
            nonlocal began
            if not began:
                self.turns, began = [*before, turn], True
            answer.token_ids.append(event.token_id)
            answer.add(event.text, event.kind)
            answer.stats = joined(first, sequence)
            return event

        try:
            while True:
                answer.ends_at = sequence.params.max_tokens if sequence.params is not None else None
                self._follow(sequence)
                for event in closing:
                    yield taken(event)
                for event in self._engine.events(sequence):
                    yield taken(event)
                if self._hurried is not sequence or self._stopped:
                    return
                if sequence.finish_reason is not FinishReason.CANCELLED:
                    return  # it had already ended
                hurried = self._hurry(sequence)
                if hurried is None:
                    sequence.finish_reason = FinishReason.CONTEXT_FULL
                    return
                first = joined(first, sequence)
                sequence, closing = hurried
        finally:
            sequence.cancelled = True
            finish = (before, turn, sequence, given, first)
            if self._engine.on_loop_thread:  # garbage collection runs there, and must not wait
                Thread(target=self._finish, args=finish, name="finish").start()
            else:
                self._finish(*finish)

    def _hurry(self, thinking: Sequence) -> tuple[Sequence, list[TokenEvent]] | None:
        """Continue a sequence that was ended while thinking: its tokens, those that close the span, then the answer.

        Return the new sequence and the events of the closing tokens; None if there is no room for them.
        """
        assert thinking.output is not None
        assert thinking.params is not None
        before, said = thinking.output.thinking, thinking.generated
        closing = self._format.closing(before, said) if before.inside else []
        params = replace(thinking.params, seed=thinking.seed)
        output = self._engine.output(params, inside_think=before.given, shown=self._shown)
        output.replay(said)
        events = output.replay(closing)
        rows = thinking.rows.copy()
        rows.extend(closing)
        if len(rows) >= self._engine.context_length or rows.next_position >= self._engine.max_positions:
            return None
        if params.max_tokens is not None:
            params = replace(params, max_tokens=params.max_tokens + len(closing))
        return self._engine.start(rows, params, output, said + closing, thinking.origin), events

    def _finish(
        self, before: list[Turn], turn: Turn, sequence: Sequence, given: int, first: TurnStats | None
    ) -> None:
        """Record how an answer ended that had `given` tokens when it began."""
        sequence.finished.wait()
        self._running = None
        nothing = len(sequence.generated) == given
        self._idle.begin_pause(sequence.reached if nothing else None)
        if nothing and (sequence.error is not None or len(self.turns) > len(before)):
            return  # nothing was generated, so a retry that was stopped this early keeps the earlier answer
        ended(turn.answer, sequence, joined(first, sequence), self._engine.tokenizer)
        self._read_calls(turn.answer)
        question, asked, self._asked = self._question, self._asked, None  # freed now, while nobody waits
        self._explain(turn, question, asked)
        self._show(turn.answer, sequence)
        self.turns = [*before, turn]
        if self.think_cache == "mask":
            with suppress(EngineError):  # the answer is complete; the next turn tries again
                self._history.hide_last(self.turns)

    def _show(self, answer: Answer, sequence: Sequence) -> None:
        """Record which tokens of a finished answer the history shows."""
        start = sequence.output.thinking.answer_start if sequence.output is not None else 0
        answer.shown = self._format.answer_span(answer.token_ids, answer.text, start, bool(answer.calls))

    def _read_calls(self, answer: Answer) -> None:
        """Parse the calls out of a finished answer's text."""
        if self.tools is not None and (found := self.tools.read(answer.text))[1]:
            answer.text, answer.calls = found[0], list(found[1])

    def _output(self, params: SamplingParams, think: bool | None, rows: Rows | None = None) -> Output:
        asked = None if rows is None else rows.token_ids[rows.message_start :]
        return self._engine.output(params, *self._format.begins(think, asked), self._shown)

    @property
    def _shown(self) -> frozenset[int]:
        return self.tools.shown if self.tools is not None else frozenset()

    def _explain(self, turn: Turn, question: Question | None, asked: Sequence | None) -> None:
        """Record in a finished answer's figures why no more of its prompt was reused; `asked` computed the prompt."""
        if question is not None and asked is not None and asked.admitted:
            stats = turn.answer.stats
            turn.answer.stats = self._explainer.explain(stats, question, asked.rows, asked.hit)
        self._explainer.add([turn])
