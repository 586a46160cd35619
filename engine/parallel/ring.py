"""Messages from rank 0 to another rank through shared memory: while both are busy, waking needs no system call.

    int64 written | int64 read | int64 sleeps | ... | messages, each a length and its bytes, at multiples of 8

`written` and `read` count bytes and only grow. Where a message does not fit before the end, a mark sends the reader to
the beginning. A reader that finds nothing for a while sets `sleeps`; the writer of the next message wakes it.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic, sleep

ROOM = 1 << 22
"""Bytes for messages."""
LARGEST = ROOM // 2 - 8
"""The most bytes of a message: with its length and the bytes skipped before it, it always fits in the ring."""
_HEAD = 64
_WRITTEN, _READ, _SLEEPS = 0, 1, 2
_TURN = -1
"""The mark in place of a length: the next message is at the beginning."""
_SPINS_S = 0.002
"""How long a reader polls before it sleeps, in seconds: about a step of a small model."""


@contextmanager
def open_file() -> Iterator[int]:
    """Yield a file descriptor of new memory for a ring; the memory is freed when no process has it open."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("ring")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, _HEAD + ROOM)
        yield fd
    finally:
        os.close(fd)


class Ring:
    """One end of the ring. One thread of one process writes, and one thread of another process reads."""

    def __init__(self, fd: int) -> None:
        """Map the memory; `fd` may be closed afterwards."""
        whole = memoryview(mmap.mmap(fd, _HEAD + ROOM))
        self._head = whole[:_HEAD].cast("q")
        self._bytes = whole[_HEAD:]
        self._lengths = self._bytes.cast("q")
        self._at = 0
        self._fence = Lock()

    def put(self, message: bytes, patience_s: float) -> bool:
        """Write a message of at most LARGEST bytes. Return whether the reader has to be woken.

        Raises TimeoutError when the reader makes too little room within `patience_s` seconds.
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
        """Return the next message. `asleep` is called after a while without one, and returns when there may be one."""
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
        """Make earlier writes visible before later ones: taking a lock is a memory fence for the processor."""
        with self._fence:
            pass
