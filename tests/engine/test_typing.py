"""Somebody types: drafts that typing on has superseded leave nothing behind, and take nothing from anybody."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from engine import SamplingParams
from engine.cache.offload import common_prefix
from engine.schedule.sequence import Sequence
from tests.engine.test_chat import CONFIG, ask
from tests.engine.tiny import TinyEngine, tiny_engine
from tests.fresh import FRESH, seeds

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
STROKES = FRESH or 150
"""An hour of typing at six keys a second are 21,600."""


def strokes(rng: Random, count: int) -> Iterator[str]:
    """A message as it grows: words are typed, mistyped, taken back, erased whole, and now and then all of it."""
    text = ""
    for _ in range(count):
        kind = rng.random()
        if len(text) > 120 or kind < 0.01:
            text = ""
        elif kind < 0.2:
            text = text[:-1]
        elif kind < 0.23:
            text = text[: rng.randint(0, len(text))]
        elif kind < 0.25:
            at = rng.randint(0, len(text))
            text = text[:at] + "x" + text[at:]
        else:
            text += rng.choice("aeinst é\n")
        yield text


@pytest.fixture
def engine(folder: Path) -> Iterator[TinyEngine]:
    """Its cache holds two conversations and 40 blocks."""
    with tiny_engine(folder, CONFIG, context=512, num_blocks=200) as engine:
        yield engine


@pytest.mark.parametrize("wait", [True, False], ids=["each is drawn", "most are overtaken"])
@pytest.mark.parametrize("ahead", [GREEDY, None], ids=["drawn", "warmed"])
def test_an_hour_of_typing_leaves_the_other_conversation_cached(
    engine: TinyEngine, ahead: SamplingParams | None, wait: bool
) -> None:
    other, chat = engine.chat(system="Other."), engine.chat(system="Mine.")
    for talk in (other, chat):
        for i in range(2):
            ask(engine, talk, f"question {i}", None, f"the answer with the number {i}")
            talk.settle(wait=True)
    cached, history, others = engine.blocks_cached(), chat.history, other.history
    room = engine.pieces.blocks.blocks_for(150)  # for the longest draft and the glue after it
    for stroke, draft in enumerate(strokes(Random(1 + seeds(1).start), STROKES)):
        chat.prepare(draft, params=ahead, wait=wait or stroke % 50 == 49)
        if stroke % 50 == 49:
            assert engine.blocks_cached() <= cached + room
            assert engine.cached_rows(others) == len(others)
            assert engine.cached_rows(history) == len(history)
            engine.check()
    chat.settle(wait=True)
    assert engine.blocks_cached() <= cached + 1, "and nothing of it is left"
    assert engine.cached_rows(history) == len(history)


@pytest.mark.parametrize(
    "drafts", [["hello w", "hello wo"], ["hello world", "hello"], ["hello world", "hello there"]]
)
def test_what_two_drafts_have_in_common_is_computed_once(engine: TinyEngine, drafts: list[str]) -> None:
    chat = engine.chat(system="Mine.")
    ask(engine, chat, "question", None, "answer")
    chat.settle(wait=True)
    one, two = drafts
    common = common_prefix(one, two)
    chat.prepare(one, wait=True, params=GREEDY)
    before = engine.scripted.rows_computed
    chat.prepare(two, wait=True, params=GREEDY)
    glue = len(engine.tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n"))
    assert engine.scripted.rows_computed - before == len(two) - common + glue
    engine.check()


def test_another_message_than_the_one_that_was_typed_leaves_nothing_of_it(engine: TinyEngine) -> None:
    chat, plain = (engine.chat(system="Mine.") for _ in range(2))
    ask(engine, plain, "sent", None, "answer")
    plain.settle(wait=True)
    cached = engine.blocks_cached()
    engine.evict_all()
    chat.prepare("a long message that is typed and never sent" * 3, wait=True, params=GREEDY)
    ask(engine, chat, "sent", None, "answer")
    chat.settle(wait=True)
    assert engine.blocks_cached() <= cached + 1
    assert engine.cached_rows(chat.history) == len(chat.history)


def test_only_the_loop_changes_a_sequence_that_was_handed_over(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: set[int] = set()
    submit = engine.submit
    foreign: list[str] = []

    def seen(sequence: Sequence) -> None:
        handed.add(id(sequence))
        keep.append(sequence)
        submit(sequence)

    def changed(sequence: Sequence, name: str, value: object) -> None:
        running = id(sequence) in handed and not sequence.finished.is_set()
        if running and name != "cancelled" and not engine.on_loop_thread:
            foreign.append(name)
        object.__setattr__(sequence, name, value)

    keep: list[Sequence] = []
    monkeypatch.setattr(engine, "submit", seen)
    monkeypatch.setattr(Sequence, "__setattr__", changed)
    chat = engine.chat(system="Mine.")
    for i, draft in enumerate(strokes(Random(2), 40)):
        chat.prepare(draft, params=GREEDY)
        if i % 5 == 4 and draft.strip():
            events = chat.send(draft, GREEDY)
            for _ in range(i % 4):
                next(events, None)
            chat.stop() if i % 2 else events.close()  # type: ignore[attr-defined]
            list(events)
            chat.settle()
            if len(chat.turns) > 2:
                chat.load(chat.turns[:1])
    assert keep
    assert foreign == []
