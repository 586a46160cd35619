"""Random conversations, played without guesses and with every guess checked: all tokens must be the same.

Answers are greedy or sampled, with penalties, stop strings, think spans and grammars; they are cut and resumed,
branched, cancelled, or typed ahead, with 1 to 8 streams. Results that depend on when a step ends (the length of a
cancelled answer) are compared as far as they were read.
"""

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from itertools import islice
from operator import add
from random import Random
from typing import Any

from engine import Engine, SamplingParams
from engine.cache.rows import Rows
from engine.conversation.chat import Answer, Chat
from engine.events import TurnStats
from engine.params import Constraint
from engine.schedule.drafting import Drafting
from engine.schedule.sequence import Sequence
from engine.schedule.speculating import Speculating
from engine.speculation.cost_model import MOST_ROWS, Balance, CostModel
from engine.speculation.sources import Guess

KINDS = ("send", "cut", "branch", "beside", "cancelled", "typed")
SCHEMA = '{"type": "object", "properties": {"stairs": {"type": "integer"}}, "required": ["stairs"]}'
CONSTRAINTS = (
    None,
    None,
    None,
    Constraint("regex", "([a-s]{2,4}, )*(the|joke)\\."),
    Constraint("json_schema", SCHEMA),
    Constraint("lark", 'start: (WORD " ")+ "."\nWORD: /[a-t]{1,5}/'),
)


class Eager(CostModel):
    """A pace with which every guess is checked, whatever it costs."""

    @property
    def measures(self) -> bool:
        return False

    def drafts_more(
        self, guess: Guess, rows: int, tokens: float, most: int, texts: int, least: float
    ) -> bool:
        return len(guess.tokens) < most

    def best(
        self,
        guess: Guess,
        rows: int,
        tokens: float,
        balance: Balance,
        said: int,
        unread: int = 0,
        spent: float = 0.0,
    ) -> tuple[float, int]:
        return float(bool(guess.chances)), len(guess.tokens)

    def count(
        self,
        guess: Guess,
        rows: int,
        tokens: float,
        balance: Balance,
        said: int,
        unread: int = 0,
        spent: float = 0.0,
    ) -> int:
        return max(min(len(guess.tokens) - unread, MOST_ROWS - rows), 0)


@dataclass(slots=True)
class Checked:
    """Counts of what has been compared so far."""

    tokens: int = 0
    guessed: int = 0
    accepted: int = 0
    drafted: int = 0
    accepted_drafts: int = 0

    def __add__(self, other: "Checked") -> "Checked":
        return Checked(*map(add, astuple(self), astuple(other)))


@dataclass(slots=True)
class Outcome:
    """The result of a step of a conversation, and how its tokens were guessed."""

    what: str
    tokens: list[int]
    told: Any = None
    """Everything else about the step that must not depend on guesses."""
    stats: tuple[TurnStats, ...] = ()

    @property
    def checked(self) -> Checked:
        """The counts of this step."""
        counts = (
            Checked(0, one.guessed_tokens, one.accepted_tokens, one.drafted_tokens, one.accepted_drafts)
            for one in self.stats
        )
        return sum(counts, Checked(len(self.tokens)))

    @classmethod
    def of(cls, what: str, answer: Answer) -> "Outcome":
        """Return the outcome of an answer that was completed."""
        stats = answer.stats
        told = (answer.text, answer.reasoning, answer.finish_reason, answer.shown)
        counts = (stats.generated_tokens, stats.reasoning_tokens)
        return cls(what, list(answer.token_ids), (told, counts), (stats,))


def forget(engine: Engine, guesses: CostModel | None = None) -> None:
    """Clear the cache and the text to guess from; `guesses` sets how many guesses are made, None turns them off."""

    def job() -> None:
        engine.pieces.blocks.evict_all()
        engine.engine_step.speculating = None
        if guesses is not None:
            engine.engine_step.speculating = Speculating(
                engine.pieces.scheduler, guesses, drafts=engine.drafts
            )

    engine.loop.call(job)


def conversation(engine: Engine, seed: int, words: list[str], speculation: str) -> Iterator[Outcome]:
    """Play a random conversation made of these words; yield the outcome of each step."""
    random = Random(seed)
    chat = engine.chat(think_cache=random.choice(["exact", "mask"]))
    for step in range(random.randint(2, 4)):
        text = " ".join(random.choices(words, k=random.randint(3, 20))) + " Repeat that."
        params = _params(engine, random, speculation)
        kind = random.choice(KINDS)
        what, number = f"step {step}, {kind}", random.randint(1, 7)
        if kind == "branch" and chat.turns:
            list(chat.retry(params))
        elif kind == "cut":
            yield _cut(chat, text, params, what)
            continue
        elif kind == "cancelled":
            with closing(chat.send(text, params)) as events:  # type: ignore[type-var]
                heard = [event.token_id for event in islice(events, number)]
            chat.undo()  # how long the answer got depends on when it ended
            yield Outcome(what, heard)
            continue
        elif kind == "beside":
            yield from _beside(engine, chat, text, params, number, what)
            continue
        else:
            if kind == "typed":
                for end in (len(text) // 2, len(text)):
                    chat.prepare(text[:end], wait=number % 2 == 0, params=params if number % 3 else None)
            list(chat.send(text, params))
        assert chat.last is not None
        yield Outcome.of(what, chat.last)


def _params(engine: Engine, random: Random, speculation: str) -> SamplingParams:
    return engine.default_params(
        temperature=random.choice([0.0, 0.7, 1.0]),
        top_k=random.choice([0, 0, 5]),
        repetition_penalty=random.choice([1.0, 1.0, 1.05]),
        presence_penalty=random.choice([0.0, 0.0, 0.3]),
        frequency_penalty=random.choice([0.0, 0.0, 0.1]),
        stop=random.choice([(), (), ("keeper", "s t")]),
        constraint=random.choice(CONSTRAINTS),
        seed=random.randrange(1000),
        max_tokens=random.randint(5, 80),
        speculation=speculation,
    )


def _cut(chat: Chat, text: str, params: SamplingParams, what: str) -> Outcome:
    """Cut an answer at an arbitrary token, then resume it; the outcome is that of the whole."""
    whole = params.max_tokens or 0
    with closing(chat.send(text, params)) as events:  # type: ignore[type-var]
        for _ in islice(events, 1 + whole // 3):
            pass
    assert chat.last is not None
    stats = (chat.last.stats,)
    if not chat.last.is_complete and (left := whole - len(chat.last.token_ids)) > 0:
        list(chat.resume(replace(params, max_tokens=left)))
        stats += (chat.last.stats,)
    answer = chat.last
    # The finish reason is unknown if the answer already had all its tokens when it was cut.
    told = (answer.text, answer.reasoning, answer.shown)
    return Outcome(what, list(answer.token_ids), told, stats)


def _beside(
    engine: Engine, chat: Chat, text: str, params: SamplingParams, number: int, what: str
) -> Iterator[Outcome]:
    """Get an answer beside `number` other streams, one of which is cancelled."""
    streams = [
        engine.start(Rows.of(engine.tokenizer.encode_plain(f"{n} {text}")), replace(params, seed=n))
        for n in range(number)
    ]
    list(chat.send(text, params))
    assert chat.last is not None
    yield Outcome.of(what, chat.last)
    for n, stream in enumerate(streams):
        yield _heard(engine, stream, f"{what} {n}", 3 if n == 1 else None)


def _heard(engine: Engine, stream: Sequence, what: str, most: int | None) -> Outcome:
    """Read up to `most` tokens of a stream, then cancel it."""
    tokens = [event.token_id for event in islice(engine.events(stream), most)]
    stream.cancelled = True
    if most is not None:
        return Outcome(what, tokens)
    told = (stream.finish_reason, stream.tail, stream.rows.keys)
    return Outcome(what, tokens, told, (stream.stats(),))


def identical(engine: Engine, count: int, first: int, words: list[str]) -> Checked:
    """Compare `count` random conversations; if one differs, exit with its seed and step."""
    checked = Checked()
    for seed in range(first, first + count):
        forget(engine)
        plain = list(conversation(engine, seed, words, "off"))
        forget(engine, Eager())
        guessed = list(conversation(engine, seed, words, "auto"))
        engine.loop.call(engine.pieces.blocks.check)
        if isinstance(engine.drafts, Drafting):
            engine.loop.call(engine.drafts.blocks.check)
        if [one.what for one in plain] != [one.what for one in guessed]:
            sys.exit(f"seed {seed}: another conversation")
        for before, after in zip(plain, guessed, strict=True):
            if problem := difference(before, after):
                sys.exit(f"seed {seed}, {after.what}: {problem}")
            checked += after.checked
    return checked


def difference(one: Outcome, other: Outcome) -> str | None:
    """Describe the difference; None if there is none."""
    for at, (token, same) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if token != same:
            return f"token {at} is {same}, not {token}"
    if len(one.tokens) != len(other.tokens):
        return f"{len(other.tokens)} tokens, not {len(one.tokens)}"
    return None if one.told == other.told else f"{other.told}, not {one.told}"
