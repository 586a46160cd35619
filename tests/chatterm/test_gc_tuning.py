"""When the chat collects garbage: at once if there is little to search, otherwise not at all."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from chatterm.screens.chat.gc_tuning import Garbage


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def garbage() -> Iterator[Garbage]:
    threshold = gc.get_threshold()
    found = Garbage()
    found.collect_rarely()
    yield found
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_a_cycle_is_freed_when_the_chat_is_idle(garbage: Garbage) -> None:
    gc.disable()
    gone = weakref.ref(Node())
    assert gone() is not None
    garbage.collect_now()
    assert gone() is None


def test_a_long_session_is_excluded_instead_of_searched(garbage: Garbage) -> None:
    gc.disable()
    excluded = gc.get_freeze_count()
    session = [[str(number)] for number in range(200_000)]
    garbage.collect_now()
    assert gc.get_freeze_count() > excluded + len(session)
    gone = weakref.ref(Node())
    garbage.collect_now()  # what was excluded does not count again
    assert gone() is None
