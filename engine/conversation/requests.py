"""Answers to clients that send the whole conversation with every message.

What they send back as answers is found as the ids that were sampled (`engine/conversation/recall.py`), so a prompt goes
on from the rows that are there; and what the next one probably begins with is warmed in idle time.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from queue import SimpleQueue
from threading import Lock
from typing import Any

from engine.cache.rows import Rows
from engine.conversation.adopt import Adopter
from engine.conversation.history import History
from engine.conversation.prompt import PromptFormat
from engine.conversation.recall import Place, Recall
from engine.conversation.rendered import rendered
from engine.conversation.turns import Answer, Turn, ended
from engine.core import EngineCore
from engine.errors import EngineError, check_room
from engine.events import TokenEvent
from engine.params import SamplingParams, seeds
from engine.schedule.sequence import Priority
from engine.schedule.sequence import Sequence as Running

_SETTLING = 32
"""Histories that wait to be warmed, at most; the ones that came first are given up."""

Take = Callable[[int, TokenEvent | None], None]
"""Gets each token of an answer with the answer's number, and None when it has ended; on the engine's thread, which it
must not hold up."""


@dataclass(slots=True)
class Asked:
    """A prompt, and what has to be known of it later."""

    rows: Rows
    inside_think: bool = False
    place: Place | None = None
    """Where its answer stands; None: it is no conversation."""
    system: str | None = None
    turns: tuple[Turn, ...] = ()
    text: str | None = None
    """The last message, where what follows the answer can be told."""
    think: bool | None = None
    shown: frozenset[int] = frozenset()
    """Special tokens that are text in the answer."""


class Requests:
    """Answers requests with an engine, many at once. From any thread; what may take a while is `asked`."""

    def __init__(self, engine: EngineCore, recall: Recall | None = None) -> None:
        """Raises EngineError when the model's chat template drops messages, ModelError when it fails."""
        self._engine = engine
        self._format = PromptFormat(engine.tokenizer)
        self._recall = recall or Recall()
        self._settling: deque[Running] = deque()
        self._lock = Lock()
        self.thinks = self._format.thinks()

    def asked(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        think: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        names: Mapping[str, Any] | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> Asked:
        """The prompt that asks for an answer to `messages`, which are as chat templates know them.

        `tools` are those that the model may call, `names` more names for the template. Raises ModelError when the
        template fails, EngineError when messages are missing or in an order that nobody can answer.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise EngineError("There is nothing to answer; end the messages with one of the user.")
        place = Place(tools=tools, names=names)
        answers: dict[int, Answer] = {}
        for index, message in enumerate(messages):
            found = None
            if message["role"] == "assistant" and not message.get("tool_calls"):
                found = self._recall.find(place.key(message["content"]))
            if found is not None:
                answers[index] = found
                place.add_ids(found.content_ids)
            else:
                place.add(message)
        if not tools and not names and (dialogue := _dialogue(messages)) is not None:
            system, said, text = dialogue
            turns = self._turns(said, answers, 1 if system is None else 2, params, think)
            rows = History(self._engine, self._format, system, "exact").prompt(turns, text, think)
            inside = self._format.inside[think]
            return Asked(rows, inside, place, system, tuple(turns), text, think, shown)
        tokenizer = self._engine.tokenizer
        ids = rendered(tokenizer, messages, answers, think=think, tools=tools, names=names)
        inside = self._format.opens_think(ids)
        return Asked(Rows.of(ids), inside, place, think=think, shown=shown)

    def completes(self, prompt: str | Sequence[int]) -> Asked:
        """The prompt that is this text, in which control tokens count as such, or these ids. Raises ModelError."""
        ids = self._engine.tokenizer.completes(prompt) if isinstance(prompt, str) else list(prompt)
        return Asked(Rows.of(ids), self._format.opens_think(ids))

    def begin(
        self, asked: Asked, params: SamplingParams, number: int, take: Take, client: Hashable = None
    ) -> Running:
        """Have the engine answer. Returns at once. `number` is what `take` gets; clients take turns.

        Raises EngineError for an empty prompt, ContextFullError when it does not fit.
        """
        check_room(len(asked.rows) + 1, self._engine.context_length, goes_on=False)

        def follow(sequence: Running) -> None:
            sequence.events = _Told(take, number)

        (seed,) = seeds(params.seed, number + 1)[number:]
        output = self._engine.output(params, asked.inside_think, asked.think is not False, asked.shown)
        return self._engine.start(
            asked.rows.copy(), replace(params, seed=seed), output, None, 0, follow, client
        )

    def leader(self, asked: Asked, running: Sequence[Running], client: Hashable = None) -> Running | None:
        """Who of those that run computes a good part of this prompt now: what begins after its first token finds that.

        Nobody whose turn comes after that of this `client`. It may take as long as a step of the engine.
        """
        others = [one for one in running if not one.first_token and not one.finished.is_set()]
        if not others:
            return None
        keys = asked.rows.keys
        size = self._engine.cached_rows(asked.rows) + self._engine.block_size
        if len(keys) <= size:
            return None
        mine = _count_before(others, client, inf)
        found = (other for other in others if other.rows.keys[:size] == keys[:size])
        return next(
            (other for other in found if _count_before(others, other.client, other.created) <= mine), None
        )

    def over(self, asked: Asked, sequence: Running, text: str, settles: bool = True) -> None:
        """An answer has ended that reads `text` without its thinking; it is known from now on. Returns soon.

        With `settles`, what the next message is sent with is warmed in idle time.
        """
        if asked.place is None or sequence.error is not None or not sequence.generated:
            return
        answer = ended(Answer(text), sequence, sequence.stats())
        start = sequence.output.thinking.answer_start if sequence.output is not None else 0
        answer.text = text
        answer.shown = self._format.answer_span(answer.token_ids, text, start)
        self._recall.note(asked.place.key(text), answer)
        if settles and asked.text is not None:
            turn = Turn(asked.text, answer, self._format.openings[asked.think])
            history = History(self._engine, self._format, asked.system, "exact")
            self._settle(history.rows([*asked.turns, turn]))

    def _settle(self, rows: Rows) -> None:
        if len(rows) > self._engine.context_length:
            return
        sequence = Running(rows, Priority.IDLE)
        with self._lock:
            self._settling.append(sequence)
            while len(self._settling) > _SETTLING or self._settling[0].finished.is_set():
                self._settling.popleft().cancelled = True
        self._engine.submit(sequence)

    def settled(self, timeout: float) -> bool:
        """Wait until nothing is left to be warmed, so many seconds at most; False when there is."""
        with self._lock:
            waiting = list(self._settling)
        return all(sequence.finished.wait(timeout) for sequence in waiting)

    def _turns(
        self,
        said: Sequence[tuple[str, str]],
        answers: Mapping[int, Answer],
        first: int,
        params: SamplingParams,
        think: bool | None,
    ) -> list[Turn]:
        """The turns of a dialogue whose first answer is message `first`."""
        adopter = Adopter(self._engine, self._format, think, params)
        turns = []
        for number, (user, text) in enumerate(said):
            known = answers.get(first + 2 * number)
            turns.append(
                Turn(user, known) if known is not None else adopter.adopted(Turn(user, Answer(text)))
            )
        return turns


def _count_before(running: Iterable[Running], client: Hashable, created: float) -> int:
    """How many of a client's there are that came before this time."""
    return sum(1 for one in running if one.client == client is not None and one.created < created)


class _Told(SimpleQueue[TokenEvent | None]):
    """Gives on what is put into it."""

    def __init__(self, take: Take, number: int) -> None:
        self._take, self._number = take, number

    def put(self, item: TokenEvent | None, block: bool = True, timeout: float | None = None) -> None:
        self._take(self._number, item)


def _dialogue(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[str | None, list[tuple[str, str]], str] | None:
    """The system prompt, messages with their answers, and the last message; None where it is no plain dialogue."""
    rest = list(messages)
    system = None
    if rest[0]["role"] == "system":
        system = rest.pop(0)["content"]
    roles = [message["role"] for message in rest]
    if roles != ["user", "assistant"] * (len(rest) // 2) + ["user"]:
        return None
    if any(message.get("tool_calls") or not message["content"].strip() for message in rest):
        return None
    texts = [message["content"] for message in rest]
    return system, list(zip(texts[:-1:2], texts[1::2], strict=True)), texts[-1]
