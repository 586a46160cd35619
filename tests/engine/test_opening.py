"""A history that is opened is warmed in idle time: how much of it is present is told, and it gives way to a person."""

from collections.abc import Iterator
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from torch import Tensor

from engine import SamplingParams
from engine.conversation.chat import Chat, Turn
from engine.conversation.turns import Answer
from tests.counting import PATIENCE, until
from tests.engine.tiny import TinyEngine, say, tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=50)


class Gate:
    """Lets the network compute one chunk for each `let`."""

    def __init__(self, engine: TinyEngine) -> None:
        self._tickets, self._taken = Semaphore(0), Semaphore(0)
        self.chunks: list[int] = []
        forward = engine.scripted.forward

        def gated(token_ids: Tensor, *rest: Any) -> Tensor:
            assert self._tickets.acquire(timeout=PATIENCE)
            self.chunks.append(token_ids.numel())
            hidden = forward(token_ids, *rest)
            self._taken.release()
            return hidden

        engine.scripted.forward = gated  # type: ignore[method-assign]

    def let(self, chunks: int) -> None:
        """Return when so many more chunks are computed."""
        self._tickets.release(chunks)
        for _ in range(chunks):
            assert self._taken.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self._tickets.release(100_000)


@pytest.fixture
def engine(folder: Path) -> Iterator[TinyEngine]:
    with tiny_engine(folder, max_chunk=16) as engine:
        yield engine


def history(turns: int) -> list[Turn]:
    return [Turn(f"a question {n} " * 4, Answer(f"an answer {n} " * 4)) for n in range(turns)]


def opened(engine: TinyEngine, policy: str = "exact") -> Chat:
    chat = engine.chat(think_cache=policy)  # type: ignore[arg-type]
    chat.load(history(4))
    return chat


def test_how_much_is_present_grows_until_it_is_all(engine: TinyEngine) -> None:
    gate = Gate(engine)
    chat = opened(engine)
    assert chat.present_tokens is None
    chat.settle()
    for _ in range(4):
        gate.let(1)
        # The step ends a moment after the network.
        until(lambda: chat.present_tokens == sum(gate.chunks))
    gate.open()
    chat.settle(wait=True)
    assert chat.present_tokens is None
    assert engine.cached_rows(chat.history) == chat.used_tokens


def test_a_message_ends_it_after_one_chunk_and_what_was_warmed_is_used(engine: TinyEngine) -> None:
    gate = Gate(engine)
    chat = opened(engine)
    chat.settle()
    gate.let(2)
    engine.scripted.script = say(engine, None, "yes")
    events = chat.send("so?", GREEDY)
    gate.open()
    list(events)
    assert chat.last is not None
    stats = chat.last.stats
    warmed = stats.warmed_tokens
    assert warmed in {sum(gate.chunks[:count]) for count in (2, 3)}, (
        "at most the chunk that had begun goes on"
    )
    assert stats.prefilled_tokens == stats.prompt_tokens - warmed
    assert chat.present_tokens is None


def test_after_the_answer_it_goes_on_where_it_was(engine: TinyEngine) -> None:
    chat = opened(engine)
    chat.settle(wait=True)
    old = chat.turns
    engine.scripted.script = say(engine, None, "yes")
    list(chat.send("so?", GREEDY))
    before = engine.scripted.rows_computed
    chat.load(old)
    chat.settle(wait=True)
    assert engine.scripted.rows_computed == before, "undo and branches find what is there"


def test_where_there_is_no_room_for_all_of_it_that_is_told(folder: Path) -> None:
    with tiny_engine(folder, num_blocks=64, context=1000) as engine:
        chat = engine.chat()
        chat.load(history(8))
        assert chat.used_tokens > 64 * 4
        chat.settle(wait=True)
        present = chat.present_tokens
        assert present is not None
        assert 0 < present <= 64 * 4
        assert engine.cached_rows(chat.history) == present


def test_masked_turns_are_told_too(engine: TinyEngine) -> None:
    engine.scripted.script = say(engine, "hm", "first") + say(engine, "hm", "second")
    chat = engine.chat(think_cache="mask")
    for text in ("one", "two"):
        list(chat.send(text, GREEDY))
    engine.evict_all()
    chat.settle(wait=True)
    assert chat.present_tokens is None
    assert engine.cached_rows(chat.history) == chat.used_tokens
