"""A question besides the conversation: it is answered in idle time, disturbs nothing and leaves nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import SamplingParams
from engine.cache.rows import Rows
from engine.conversation.aside import AsideRunner
from tests.counting import until
from tests.engine.tiny import TinyEngine, tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=12)


@pytest.fixture
def small(folder: Path) -> Iterator[TinyEngine]:
    """There is room for a conversation and a little more."""
    with tiny_engine(folder, context=172, num_blocks=44) as engine:
        yield engine


def until_idle(engine: TinyEngine) -> None:
    """Wait until nothing is computed any more."""
    until(lambda: not engine.loop.call(lambda: engine.engine_step.has_work))


def test_it_answers_and_what_it_cached_is_gone_afterwards(engine: TinyEngine) -> None:
    engine.scripted.script = list(engine.tokenizer.encode("A title<|im_end|>"))
    aside = AsideRunner(engine)
    assert aside.said is None
    aside.ask("what is this about?", Rows(), 24)
    until_idle(engine)
    assert aside.said == "A title"
    assert not aside.is_running
    assert engine.blocks_cached() > 0
    aside._forget()
    assert engine.blocks_cached() == 0
    engine.check()


def test_an_interrupted_one_says_nothing(engine: TinyEngine) -> None:
    aside = AsideRunner(engine)
    aside.ask("long " * 60, Rows(), 200)
    aside.stop()
    until_idle(engine)
    assert aside.said is None
    assert not aside.is_running


def test_one_that_does_not_fit_is_not_asked(engine: TinyEngine) -> None:
    aside = AsideRunner(engine)
    aside.ask("word " * 3000, Rows(), 24)
    assert not aside.is_running


@pytest.mark.parametrize("moment", ["ended", "running"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_conversation_is_the_same_with_and_without_it(
    engine: TinyEngine, params: SamplingParams, moment: str
) -> None:
    """Text, tokens and what was cached of the prompt; also where a person comes in the middle of it."""
    plain = engine.chat()
    expected = [list(plain.send("one", params)), list(plain.send("two", params))]
    figures = plain.last.stats if plain.last is not None else None
    engine.evict_all()
    chat, aside = engine.chat(), AsideRunner(engine)
    said = [list(chat.send("one", params))]
    aside.ask("a title for it?", chat.history, 8 if moment == "ended" else 400)
    if moment == "ended":
        until_idle(engine)
    aside.stop()
    said.append(list(chat.send("two", params)))
    assert said == expected
    assert chat.last is not None
    assert figures is not None
    for name in ("prompt_tokens", "cached_tokens", "prefilled_tokens", "generated_tokens", "warmed_tokens"):
        assert getattr(chat.last.stats, name) == getattr(figures, name), name
    engine.check()


def test_the_conversation_stays_cached_where_there_is_no_room_for_both(small: TinyEngine) -> None:
    chat, aside = small.chat(), AsideRunner(small)
    list(chat.send("x" * 60, GREEDY))
    chat.settle(wait=True)
    present = small.cached_rows(chat.history)
    assert present == len(chat.history)
    aside.ask("y" * 60, chat.history, 60)
    until_idle(small)
    assert small.cached_rows(chat.history) == present
    small.check()


def test_a_person_goes_first(engine: TinyEngine) -> None:
    """While somebody waits not one of its tokens is computed, also where nobody has stopped it."""
    chat, aside = engine.chat(), AsideRunner(engine)
    aside.ask("a title?", Rows(), 600)
    until(lambda: any(one.generated for one in engine.pieces.scheduler.running))
    (sequence,) = engine.pieces.scheduler.running
    events = chat.send("hello", GREEDY)
    next(events)
    before = len(sequence.generated)
    for _ in range(6):
        next(events)
    assert len(sequence.generated) == before
    events.close()  # type: ignore[attr-defined]
    aside.stop()
    until_idle(engine)
