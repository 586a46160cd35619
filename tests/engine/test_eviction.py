"""What a full cache gives up first, seen from a chat. (The rule itself: `engine/cache/blocks.py`, `test_blocks.py`.)"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cache.rows import Rows
from engine.conversation.chat import Chat
from engine.schedule.sequence import Priority, Sequence
from tests.engine.test_chat import CONFIG, ask
from tests.engine.tiny import TinyEngine, tiny_engine

SYSTEM = "You are terse."


@pytest.fixture
def small(folder: Path) -> Iterator[TinyEngine]:
    """An engine whose cache holds one context of 512 tokens and a block."""
    with tiny_engine(folder, CONFIG, context=512, num_blocks=129) as engine:
        yield engine


def talked(engine: TinyEngine) -> Chat:
    """A settled chat of some 250 rows with an abandoned branch that was used later than they were."""
    chat = engine.chat(system=SYSTEM)
    for i in range(3):
        ask(engine, chat, f"question {i}", "thoughts", f"the answer with the number {i}")
    chat.settle(wait=True)
    turns = list(chat.turns)
    ask(engine, chat, "never mind this", None, "a branch that nobody goes back to")
    chat.load(turns)
    chat.settle(wait=True)
    return chat


def others(length: int) -> list[int]:
    """A prompt of somebody else."""
    return [(7 * i) % 251 for i in range(length)]


def test_idle_work_of_another_chat_leaves_the_conversation_in_use_alone(small: TinyEngine) -> None:
    chat = talked(small)
    history = chat.history
    idle = Sequence(Rows.of(others(500)), Priority.IDLE)
    small.submit(idle)
    idle.finished.wait()
    assert 0 < small.cached_rows(idle.rows) < 500, "it has taken what was left and ended there"
    assert idle.error is None
    assert small.cached_rows(history) == len(history)


def test_a_person_who_needs_room_takes_the_branch_first_then_the_end_and_the_system_prompt_last(
    small: TinyEngine,
) -> None:
    chat = talked(small)
    history = chat.history
    left = []
    for length in range(200, 500, 20):
        small.warm(others(length))
        left.append(small.cached_rows(history))
    assert left[0] == len(history), "what was evicted so far is the branch, though it was used later"
    assert left == sorted(left, reverse=True)
    small.warm(others(476))
    system = len(small.tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"))
    assert 0 < small.cached_rows(history) < len(history)
    assert small.cached_rows(history) >= min(system, left[-1])
    ask(small, chat, "are you still there?", None, "yes")


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_a_full_cache_costs_time_and_never_an_answer(small: TinyEngine, think_cache: str) -> None:
    chats = [small.chat(system=f"Chat {i}.", think_cache=think_cache) for i in range(3)]  # type: ignore[arg-type]
    for i in range(4):
        for chat in chats:
            chat.settle()
            ask(small, chat, f"question {i}", "thoughts", "a rather long answer " * 2)
            small.check()
    assert [len(chat.turns) for chat in chats] == [4, 4, 4]
