"""Messages from rank 0 to another rank through memory that both map: while both are busy, nobody calls the system.

    int64 written | int64 read | int64 sleeps | ... | messages, each a length and its bytes, at multiples of 8

`written` and `read` count bytes and only grow; where a message does not fit before the end, a mark sends the reader to
the beginning. A reader that has found nothing for a while says that it sleeps, and is woken by whoever writes next.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from threading import Lock
from time import monotonic, sleep

ROOM = 1 << 22
"""Bytes for messages."""
LARGEST = ROOM // 2 - 8
"""Of a message: with its length, and with what is skipped before it, it has room wherever the end is."""
_HEAD = 64
_WRITTEN, _READ, _SLEEPS = 0, 1, 2
_TURN = -1
"""Instead of a length: the next message is at the beginning."""
_SPINS_S = 0.002
"""How long a reader looks before it sleeps: a step of a small model takes as long."""


def open_file() -> int:
    """A descriptor of new memory for a ring, which goes when nobody has it open."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("ring")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _HEAD + ROOM)
    return fd


class Ring:
    """One end of it. One thread of one process writes, and one of another reads."""

    def __init__(self, fd: int) -> None:
        """Maps the memory; `fd` may be closed then."""
        whole = memoryview(mmap.mmap(fd, _HEAD + ROOM))
        self._head = whole[:_HEAD].cast("q")
        self._bytes = whole[_HEAD:]
        self._lengths = self._bytes.cast("q")
        self._at = 0
        self._fence = Lock()

    def put(self, message: bytes, patience_s: float) -> bool:
        """Write a message of at most LARGEST bytes. Returns whether the reader has to be woken.

        Raises TimeoutError when it has not read enough of what was written for so long.
        """
        size, place = 8 + -(-len(message) // 8) * 8, self._at % ROOM
        skipped = ROOM - place if place + size > ROOM else 0
        until = None
        while self._at + skipped + size - self._head[_READ] > ROOM:
            until = until or monotonic() + patience_s
            if monotonic() > until:
                raise TimeoutError
            sleep(0.001)
        if skipped:
            self._lengths[place // 8] = _TURN
            place = 0
        self._lengths[place // 8] = len(message)
        self._bytes[place + 8 : place + 8 + len(message)] = message
        self._at += skipped + size
        self._order()
        self._head[_WRITTEN] = self._at
        self._order()
        return self._head[_SLEEPS] != 0

    def take(self, asleep: Callable[[], None]) -> bytes:
        """The next message; `asleep` returns when there may be one, and is called after none came for a while."""
        until = monotonic() + _SPINS_S
        while self._head[_WRITTEN] == self._at:
            if monotonic() < until:
                sleep(0)
                continue
            self._head[_SLEEPS] = 1
            self._order()
            if self._head[_WRITTEN] == self._at:
                asleep()
            self._head[_SLEEPS] = 0
        self._order()
        if self._lengths[self._at % ROOM // 8] == _TURN:
            self._at += ROOM - self._at % ROOM
        place = self._at % ROOM
        length = self._lengths[place // 8]
        message = bytes(self._bytes[place + 8 : place + 8 + length])
        self._at += 8 + -(-length // 8) * 8
        self._order()
        self._head[_READ] = self._at
        return message

    def _order(self) -> None:
        """What was done before this is seen before what is done after it: a lock is a fence for the processor."""
        with self._fence:
            pass
