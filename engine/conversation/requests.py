"""Answers clients that send the whole conversation with every message.

Answers that they send back are replaced by the ids that were sampled (`engine/conversation/token_recall.py`), so a
prompt continues from the cached rows. The probable beginning of the next prompt is warmed in idle time.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from json import dumps
from math import inf
from queue import SimpleQueue
from threading import Lock
from typing import Any

from engine.cache.rows import Rows
from engine.conversation.history import ThinkCache
from engine.conversation.masked import hide_last, restore
from engine.conversation.prompt import PromptFormat
from engine.conversation.template_prompt import Rendering
from engine.conversation.thinking_visibility import Views
from engine.conversation.token_recall import AnswerPlace, Calls, Recall
from engine.conversation.tools import to_message
from engine.conversation.turns import Answer, Turn, ended
from engine.core import EngineCore
from engine.errors import EngineError, check_room
from engine.events import TokenEvent
from engine.params import SamplingParams, seeds
from engine.schedule.sequence import Priority
from engine.schedule.sequence import Sequence as Running

_FORMATS = 16
"""The most sets of template variables for which a PromptFormat is kept."""
_SETTLING = 32
"""The most histories waiting to be warmed; the oldest are given up."""

Take = Callable[[int, TokenEvent | None], None]
"""Called with the answer's number and each of its tokens, then with None at the end. It runs on the engine's thread,
which it must not hold up."""


@dataclass(slots=True)
class PreparedPrompt:
    """A prompt, and what is needed to process its answer."""

    rows: Rows
    inside_think: bool = False
    place: AnswerPlace | None = None
    """The place of its answer; None: it is not a conversation."""
    exact: Callable[[], Rows] | None = None
    """Makes its rows without masked turns. None: it is not a conversation."""
    before_next: Callable[[Turn, Calls], Rows] | None = None
    """Returns the rows with which the prompt after this answer begins."""
    continues: bool = False
    """Whether there is an answer in it."""
    opening: list[int] = field(default_factory=list)
    """As in `Turn`."""
    think: bool | None = None
    shown: frozenset[int] = frozenset()
    """Special tokens that count as text in the answer."""
    owner: str = ""
    """The conversation's name on disk, shared by conversations that begin with the same messages."""


class Requests:
    """Answers requests with an engine, many at once. Thread-safe; `asked` may take a while."""

    def __init__(
        self, engine: EngineCore, recall: Recall | None = None, think_cache: ThinkCache = "exact"
    ) -> None:
        """`think_cache` is as in `Chat`.

        Raises EngineError if the model's chat template drops messages, ModelError if it fails.
        """
        self._engine = engine
        self._format = PromptFormat(engine.tokenizer)
        self._recall = recall or Recall()
        self._think_cache = think_cache
        self._views = Views()
        self._formats: dict[str, PromptFormat] = {}
        """Formats for requests with template variables of their own."""
        self._settling: deque[Running] = deque()
        self._lock = Lock()
        self.thinks = self._format.thinks()

    def asked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        think: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        names: Mapping[str, Any] | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> PreparedPrompt:
        """Return the prompt that asks for an answer to `messages`, which have the form chat templates expect.

        `tools` are those that the model may call, `names` additional variables for the template. Raises ModelError if
        the template fails, EngineError if messages are missing or in an order that cannot be answered.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise EngineError("There is nothing to answer; end the messages with one from the user.")
        messages = tuple(messages)
        place = AnswerPlace(tools=tools, names=names)
        answers: dict[int, Turn] = {}
        for index, message in enumerate(messages):
            found = self._recalled(place, message) if message["role"] == "assistant" else None
            if found is not None:
                answers[index] = found
                place.add_ids(found.answer.content_ids)
            else:
                place.add(message)
        format, masks = self._format_for(names), self._think_cache == "mask"
        rendering = Rendering(format, think, tools, self._views, masks, self._engine.max_positions)

        def exact() -> Rows:
            return replace(rendering, masks=False).rows(messages, answers)

        def before_next(turn: Turn, calls: Calls) -> Rows:
            more = [*messages, to_message(turn.answer.text, calls)]
            return rendering.rows(more, {**answers, len(messages): turn}, before_next=True)

        rows = rendering.rows(messages, answers)
        asked = PreparedPrompt(
            rows,
            format.opens_think(rows.token_ids[rows.message_start :]),
            place,
            exact,
            before_next,
            continues=any(message["role"] == "assistant" for message in messages),
            opening=format.openings[think],
            think=think,
            shown=shown,
            owner=_owner(messages),
        )
        is_present = not asked.rows.masked_until or restore(self._engine, asked.rows)
        return asked if is_present else self.exactly(asked)

    def exactly(self, asked: PreparedPrompt) -> PreparedPrompt:
        """Return the same prompt without masked turns, for use if their rows were evicted."""
        return asked if asked.exact is None else replace(asked, rows=asked.exact())

    def _format_for(self, names: Mapping[str, Any] | None) -> PromptFormat:
        if not names:
            return self._format
        key = dumps(names, sort_keys=True, default=repr)
        if (format := self._formats.get(key)) is None:
            if len(self._formats) >= _FORMATS:
                self._formats = {}
            format = self._formats[key] = PromptFormat(self._engine.tokenizer, names)
        return format

    def _recalled(self, place: AnswerPlace, message: Mapping[str, Any]) -> Turn | None:
        """Return the answer that a client sends back, unless the client has changed its thinking."""
        turn = self._recall.find(place.key(message["content"], _calls(message)))
        thought = message.get("reasoning_content", "").strip()
        return turn if turn is None or not thought or thought == turn.answer.reasoning.strip() else None

    def completes(self, prompt: str | Sequence[int]) -> PreparedPrompt:
        """Return a prompt of this text, in which control tokens count as such, or of these ids. Raises ModelError."""
        ids = self._engine.tokenizer.completes(prompt) if isinstance(prompt, str) else list(prompt)
        return PreparedPrompt(Rows.of(ids), self._format.opens_think(ids))

    def begin(
        self,
        asked: PreparedPrompt,
        params: SamplingParams,
        number: int,
        take: Take,
        client: Hashable = None,
        cancelled: bool = False,
    ) -> Running:
        """Start answering, and return at once. `number` is passed to `take`; clients take turns; if `cancelled`, the
        request ends before its first token.

        Raises EngineError for an empty prompt, ContextFullError if it does not fit.
        """
        check_room(len(asked.rows) + 1, self._engine.context_length, goes_on=False)

        def follow(sequence: Running) -> None:
            sequence.events = EventQueue(take, number)
            sequence.cancelled = cancelled

        (seed,) = seeds(params.seed, number + 1)[number:]
        output = self._engine.output(params, asked.inside_think, asked.think is not False, asked.shown)
        return self._engine.start(
            asked.rows.copy(), replace(params, seed=seed), output, None, 0, follow, client
        )

    def leader(
        self, asked: PreparedPrompt, running: Sequence[Running], client: Hashable = None
    ) -> Running | None:
        """Return a running request that is computing a good part of this prompt; a request that begins after its first
        token finds those rows.

        Requests whose turn comes after that of this `client` do not count. The call may take as long as an engine step.
        """
        unread = [one for one in running if not one.first_token and not one.finished.is_set()]
        keys, least = asked.rows.keys, self._engine.block_size
        # Compare without the engine's thread, which is in the middle of a step; most prompts share nothing.
        others = [one for one in unread if one.rows.keys[:least] == keys[:least]]
        if not others:
            return None
        size = self._engine.cached_rows(asked.rows) + least
        if len(keys) <= size:
            return None
        mine = _count_before(unread, client, inf)
        found = (other for other in others if other.rows.keys[:size] == keys[:size])
        return next(
            (other for other in found if _count_before(unread, other.client, other.created) <= mine), None
        )

    def over(
        self, asked: PreparedPrompt, sequence: Running, said: Answer, calls: Calls = (), settles: bool = True
    ) -> None:
        """Record an answer that has ended. `said` has its texts, without the `calls`.

        Returns soon. With `settles`, the probable beginning of the next prompt is warmed in idle time.
        """
        if asked.place is None or sequence.error is not None or not sequence.generated:
            return
        answer = ended(replace(said), sequence, sequence.stats(), self._engine.tokenizer)
        start = sequence.output.thinking.answer_start if sequence.output is not None else 0
        answer.text, answer.reasoning = said.text, said.reasoning
        answer.shown = self._format.answer_span(answer.token_ids, said.text, start, bool(calls))
        turn = Turn("", answer, asked.opening)
        self._recall.note(asked.place.key(said.text, calls), turn)
        masks = self._think_cache == "mask"
        if asked.before_next is None or not (masks or settles):
            return
        rows = asked.before_next(turn, calls)
        if masks and rows.said:
            with suppress(EngineError):  # the next turn tries again
                hide_last(self._engine, rows.said, keep_rows=not answer.is_complete)
        if settles:
            # A client that asks only once needs nothing on disk.
            self._settle(rows, asked.owner if asked.continues else None)

    def _settle(self, rows: Rows, owner: str | None) -> None:
        if len(rows) > self._engine.context_length:
            return
        self._engine.save(owner, rows)
        sequence = Running(rows, Priority.IDLE)
        with self._lock:
            self._settling.append(sequence)
            while len(self._settling) > _SETTLING or self._settling[0].finished.is_set():
                self._settling.popleft().cancelled = True
        self._engine.submit(sequence)

    def settled(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for each history that is to be warmed. Return False if one is unfinished."""
        with self._lock:
            waiting = list(self._settling)
        return all(sequence.finished.wait(timeout) for sequence in waiting)


def _count_before(running: Iterable[Running], client: Hashable, created: float) -> int:
    """Return how many requests of `client` were created before this time."""
    return sum(1 for one in running if one.client == client is not None and one.created < created)


class EventQueue(SimpleQueue[TokenEvent | None]):
    """Passes each item on to `take`."""

    def __init__(self, take: Take, number: int) -> None:
        self._take: Take | None = take
        self._number = number

    def put(self, item: TokenEvent | None, block: bool = True, timeout: float | None = None) -> None:
        take = self._take
        if item is None:  # break the cycle with the sequence, which only the garbage collector would free
            self._take = None
        if take is not None:
            take(self._number, item)


def _owner(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a name shared by conversations with the same first user message and system prompt."""
    first = messages[: 2 if messages[0]["role"] == "system" else 1]
    return "served-" + sha256(dumps(first, sort_keys=True, default=repr).encode()).hexdigest()[:24]


def _calls(message: Mapping[str, Any]) -> Calls:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]
