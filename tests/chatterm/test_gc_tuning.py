"""When the chat collects garbage: at once if there is little to search, otherwise not at all."""

import gc
import sys
import threading
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


def test_what_survives_is_excluded_once_it_is_much_and_its_garbage_is_freed_before(garbage: Garbage) -> None:
    gc.disable()
    excluded = gc.get_freeze_count()
    gone, answers = weakref.ref(Node()), [[str(number)] for number in range(5_000)]
    garbage.collect_now()
    assert gc.get_freeze_count() == excluded
    answers += [[str(number)] for number in range(10_000)]
    garbage.collect_now()
    assert gc.get_freeze_count() >= excluded + len(answers)
    assert gone() is None


def test_a_search_for_garbage_ends_no_tuple_that_another_thread_is_making(garbage: Garbage) -> None:
    begun, counted, over = threading.Event(), threading.Event(), threading.Event()
    made: list[tuple[int, ...]] = []

    def waiting() -> Iterator[int]:
        yield 1
        begun.set()
        counted.wait()

    def make() -> None:
        try:
            made.append(tuple(waiting()))
        finally:
            over.set()

    def go_on(_: object, event: str, called: object) -> None:
        if event == "c_return" and called is gc.get_objects:  # another thread may run here
            counted.set()
            over.wait()

    thread = threading.Thread(target=make)
    thread.start()
    begun.wait()
    sys.setprofile(go_on)
    try:
        garbage.collect_now()
    finally:
        sys.setprofile(None)
        counted.set()
        thread.join()
    assert made == [(1,)]
