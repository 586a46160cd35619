"""Answers several prompts at once: unrelated ones, or the same one several times."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from engine.cache.rows import Rows
from engine.conversation.requests import EventQueue, Requests
from engine.conversation.turns import Answer, ended
from engine.core import EngineCore
from engine.errors import EngineError
from engine.events import FinishReason, TokenEvent
from engine.params import SamplingParams
from engine.schedule.sequence import Sequence
from models.errors import ModelError

AT_ONCE = 256
"""The most prompts that are answered at the same time."""
AHEAD = 1024
"""The most later prompts that may overtake a slow one; their answers have to wait for it somewhere."""


@dataclass(slots=True)
class Prompt:
    """A prompt to be answered."""

    rows: Rows
    params: SamplingParams
    inside_think: bool = False
    """Whether the prompt opens a think span."""
    thinks: bool = True
    """Whether the answer may begin with thinking, to which a constraint does not apply."""
    origin: int = 0
    """The origin of the sequence."""
    shown: frozenset[int] = frozenset()
    """Special tokens that count as text in the answer."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer."""

    answer: Answer
    sequence: Sequence | None = None
    """None: the request was stopped before it had a sequence."""


Part = TokenEvent | Answer | AnswerEnd | EngineError | ModelError
"""Results of a prompt in order: its Answer before the first token, its tokens, the end. An error also ends it."""


@dataclass(slots=True)
class _RunningAnswer:
    sequence: Sequence
    answer: Answer = field(default_factory=Answer)
    has_begun: bool = False


def make_prompt(
    requests: Requests, messages: Items[Mapping[str, Any]], think: bool | None, params: SamplingParams
) -> Prompt:
    """Return the prompt that asks for an answer to `messages`, as `requests` makes it for clients.

    Raises ModelError if the template fails, EngineError if it drops a message or the last one is empty.
    """
    if not messages[-1]["content"].strip():
        raise EngineError("The prompt is empty; add some text.")
    asked = requests.asked(messages, think=think)
    return Prompt(asked.rows, params, asked.inside_think, think is not False)


class BatchGenerator:
    """Answers many prompts at the same time. Call `run` once; `stop` may be called from any thread."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._events: SimpleQueue[tuple[int, TokenEvent | None]] = SimpleQueue()
        self._running: dict[int, _RunningAnswer] = {}
        self._only: int | None = None
        self._stopped = False
        self._client = object()
        """The client of all its sequences, so that together they take turns with other clients."""

    def stop(self, but: int | None = None) -> None:
        """End every answer, or all except number `but`, within one step; what was produced is kept."""
        self._stopped, self._only = True, but
        for index, running in list(self._running.items()):
            if index != but:
                running.sequence.cancelled = True

    def run(
        self, prompts: Iterable[Prompt | EngineError | ModelError]
    ) -> Generator[tuple[int, Part], None, None]:
        """Yield the parts of each answer as they come, with the number of the prompt from 0. Closing cancels.

        Prompts are taken as they are needed; an error may stand in place of one. A prompt that begins like one being
        computed waits for it, so that shared rows are computed and kept once. Raises EngineError if the engine itself
        has stopped.
        """
        source = enumerate(prompts)
        held: tuple[int, Prompt, _RunningAnswer | None] | None = None
        done: set[int] = set()
        oldest, is_over = 0, False
        try:
            while True:
                while oldest in done:
                    done.remove(oldest)
                    oldest += 1
                if held is None and not is_over and len(self._running) < AT_ONCE:
                    taken = next(source, None)
                    if taken is None:
                        is_over = True
                    elif isinstance(taken[1], Prompt):
                        held = (taken[0], taken[1], self._leader(taken[1].rows))
                    else:
                        done.add(taken[0])
                        yield taken[0], taken[1]
                    continue
                if held is not None and held[0] < oldest + AHEAD and (held[2] is None or held[2].has_begun):
                    index, prompt, _ = held
                    held = None
                    if (end := self._start(index, prompt)) is not None:
                        done.add(index)
                        yield index, end
                    continue
                if not self._running:
                    return
                index, event = self._events.get()
                for part in self._came(index, event):
                    yield index, part
                if event is None:
                    done.add(index)
        finally:
            for running in self._running.values():
                running.sequence.cancelled = True

    def _leader(self, rows: Rows) -> _RunningAnswer | None:
        """Return a running request that is already computing a good part of these rows."""
        others = [running for running in self._running.values() if not running.has_begun]
        if not others:
            return None
        size = self._engine.cached_rows(rows) + self._engine.block_size
        if len(rows) <= size:
            return None
        return next((other for other in others if other.sequence.rows.keys[:size] == rows.keys[:size]), None)

    def _came(self, index: int, event: TokenEvent | None) -> Iterator[Part]:
        """Yield the parts that a token, or the end, of a sequence amounts to."""
        running = self._running[index]
        if event is None:
            del self._running[index]
        is_first, running.has_begun = not running.has_begun, True
        if is_first and running.sequence.error is None:
            yield self._begun(running)
        if event is not None:
            running.answer.add(event.text, event.kind)
            yield event
        else:
            yield self._ended(running)

    def _start(self, index: int, prompt: Prompt) -> EngineError | AnswerEnd | None:
        """Start a prompt. Return the part that ends it if it could not start, else None."""
        if self._stopped and index != self._only:
            return AnswerEnd(Answer(finish_reason=FinishReason.CANCELLED))

        def put(number: int, event: TokenEvent | None) -> None:
            self._events.put((number, event))

        def follow(sequence: Sequence) -> None:
            sequence.events = EventQueue(put, index)
            self._running[index] = _RunningAnswer(sequence)
            if self._stopped and index != self._only:  # stopped in between
                sequence.cancelled = True

        try:
            output = self._engine.output(prompt.params, prompt.inside_think, prompt.thinks, prompt.shown)
            self._engine.start(prompt.rows, prompt.params, output, None, prompt.origin, follow, self._client)
        except EngineError as error:
            self._running.pop(index, None)
            if self._engine.is_closed:
                raise
            return error
        return None

    def _begun(self, running: _RunningAnswer) -> Answer:
        answer, sequence = running.answer, running.sequence
        answer.stats, answer.seed = sequence.stats(), sequence.seed
        answer.ends_at = sequence.params.max_tokens if sequence.params is not None else None
        return answer

    def _ended(self, running: _RunningAnswer) -> AnswerEnd | EngineError:
        sequence = running.sequence
        if sequence.error is None:
            return AnswerEnd(
                ended(running.answer, sequence, sequence.stats(), self._engine.tokenizer), sequence
            )
        error = sequence.error
        if self._engine.is_closed or not isinstance(error, EngineError):
            raise error
        return error
