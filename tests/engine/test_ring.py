"""Messages through memory that two processes map."""

from collections.abc import Iterator
from random import Random
from threading import Semaphore, Thread

import pytest

from engine.parallel import ring
from engine.parallel.follower import _LeaderMessages
from engine.parallel.ring import LARGEST, ROOM, Ring, open_file


@pytest.fixture
def ends() -> Iterator[tuple[Ring, Ring]]:
    with open_file() as fd:
        yield Ring(fd), Ring(fd)


def never() -> None:
    raise AssertionError("there is a message")


def test_what_is_written_is_read_wherever_the_end_is(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends
    random = Random(1)
    total = 0
    while total < 5 * ROOM:
        messages = [random.randbytes(random.choice((0, 1, 7, 8, 9, 4000, 300_000))) for _ in range(9)]
        for message in messages:
            assert not writer.put(message, 0.0)
        assert [reader.take(never) for _ in messages] == messages
        total += sum(map(len, messages))


@pytest.mark.parametrize("place", [0, 8, ROOM // 2 - 8, ROOM // 2, ROOM // 2 + 8, ROOM - 8])
def test_the_largest_message_has_room_wherever_the_end_is(ends: tuple[Ring, Ring], place: int) -> None:
    writer, reader = ends
    while place:
        size = min(place, 8 + LARGEST)
        writer.put(bytes(size - 8), 0.0)
        reader.take(never)
        place -= size
    largest = Random(1).randbytes(LARGEST)
    writer.put(largest, 0.0)
    assert reader.take(never) == largest


def test_a_reader_that_does_not_read_is_waited_for_and_given_up(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends
    message = bytes(LARGEST)
    for _ in range(2):
        writer.put(message, 0.0)
    with pytest.raises(TimeoutError):
        writer.put(b"one more", 0.0)
    assert reader.take(never) == message
    writer.put(b"one more", 0.0)
    assert [reader.take(never), reader.take(never)] == [message, b"one more"], "nothing is lost"


def test_a_reader_with_nothing_to_read_sleeps_until_it_is_woken(
    ends: tuple[Ring, Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "_SPINS_S", 0.0)
    writer, reader = ends
    sleeps, woken = Semaphore(0), Semaphore(0)
    found = []

    def sleep() -> None:
        sleeps.release()
        woken.acquire()

    def read() -> None:
        found.extend(reader.take(sleep) for _ in range(2))

    thread = Thread(target=read)
    thread.start()
    sleeps.acquire()
    woken.release()  # for nothing: it looks, and sleeps on
    sleeps.acquire()
    assert writer.put(b"first", 0.0), "it is to be woken"
    woken.release()
    sleeps.acquire()
    assert writer.put(b"second", 0.0)
    woken.release()
    thread.join()
    assert found == [b"first", b"second"]


def test_what_is_too_long_comes_over_the_socket_in_its_turn(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends
    told = _LeaderMessages(reader)
    writer.put(b"before", 0.0)
    writer.put(b"", 0.0)
    writer.put(b"after", 0.0)
    told.hear(bytes(LARGEST + 1))
    assert [told.next() for _ in range(3)] == [b"before", bytes(LARGEST + 1), b"after"]
