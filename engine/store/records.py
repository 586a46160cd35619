"""A file of KV blocks: append-only records, each with a digest that identifies its block and checksums.

    magic 4 | check of the payload 4 | size of the payload 8 | digest 32 | zeros 12 | check of these 4 | payload

Sizes are in bytes and numbers little-endian. Checks are CRC-32; that of a payload is taken over the checks of its
pieces, which are read in parallel. A header takes 64 bytes, so that payloads begin at a multiple of that if their sizes
are multiples, as those of KV blocks are: from other places, a processor copies at a third of the rate.

A reader goes from header to header and stops at the first invalid one: what a crash left incomplete is at the end, and
is cut off before more is appended. Files are read, not mapped, so a disk that fails in the middle causes an error,
where a mapping would end the process.
"""

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from engine.store.checks import crc32
from engine.store.readers import Readers
from models.system import read_at

_MAGIC = b"CKV3"
_HEAD = struct.Struct("<4sIQ32s12x")
_CHECK = struct.Struct("<I")
HEADER = _HEAD.size + _CHECK.size
LARGEST = 1 << 32
"""The most bytes of a payload; a header with more is invalid."""
PIECE = 2 << 20
"""Bytes of a payload that one thread reads at a time: many small reads would keep the threads waiting for Python."""


@dataclass(frozen=True, slots=True)
class Record:
    """The place of a block in a file."""

    digest: bytes
    """32 bytes that stand for its rows and all rows before them (see `engine/store/digests.py`)."""
    offset: int
    """The first byte of the payload."""
    size: int
    """The bytes of the payload."""
    check: int
    """The checksum of the payload."""

    @property
    def end(self) -> int:
        """The byte at which the next record begins."""
        return self.offset + self.size


def scan(fd: int, start: int = 0) -> Iterator[Record]:
    """Yield the complete records of a file from byte `start` on, in order, without reading payloads. Raises OSError."""
    length = os.fstat(fd).st_size
    while (record := _header(_head(fd, start), start)) is not None and record.end <= length:
        yield record
        start = record.end


def is_at_its_place(fd: int, record: Record) -> bool:
    """Return whether a file still has `record` in the same place. Raises OSError."""
    return next(scan(fd, record.offset - HEADER), None) == record


def header(digest: bytes, payload: memoryview) -> bytes:
    """Return the HEADER bytes to be written before a payload."""
    checks = [crc32(payload[at : at + PIECE]) for at in range(0, len(payload), PIECE)]
    head = _HEAD.pack(_MAGIC, _joined(checks), len(payload), digest)
    return head + _CHECK.pack(crc32(memoryview(head)))


def read(fd: int, record: Record, into: memoryview, readers: Readers) -> Callable[[], bool]:
    """Begin to read the payload of a record into `into`. The file may be closed before that is done.

    Call the returned function once: it waits, and returns False if the payload is damaged or not as long as `into`.
    Both raise OSError.
    """
    if len(into) != record.size:
        return lambda: False
    own = os.dup(fd)
    pieces: list[Future[int | None]] = []
    for at in range(0, record.size, PIECE):
        pieces.append(readers.submit(partial(_piece, own, into[at : at + PIECE], record.offset + at)))

    def is_whole() -> bool:
        wait(pieces)  # even if one fails, so that nobody writes to `into` afterwards
        os.close(own)
        checks = [check for piece in pieces if (check := piece.result()) is not None]
        return len(checks) == len(pieces) and _joined(checks) == record.check

    return is_whole


def _piece(fd: int, into: memoryview, offset: int) -> int | None:
    """Read a piece of a payload and return its check, or None if the file ends too early."""
    done = 0
    while done < len(into):
        got = read_at(fd, into[done:], offset + done)
        if not got:
            return None
        done += got
    return crc32(into)


def _head(fd: int, start: int) -> bytes:
    """Return the HEADER bytes from byte `start` on, or fewer at the end of the file."""
    head = bytearray(HEADER)
    return bytes(head[: read_at(fd, memoryview(head), start)])


def _joined(checks: list[int]) -> int:
    return crc32(memoryview(b"".join(map(_CHECK.pack, checks))))


def _header(data: bytes, at: int) -> Record | None:
    if len(data) != HEADER or _CHECK.unpack(data[_HEAD.size :])[0] != crc32(memoryview(data)[: _HEAD.size]):
        return None
    magic, check, size, digest = _HEAD.unpack(data[: _HEAD.size])
    if magic != _MAGIC or not 0 < size <= LARGEST:
        return None
    return Record(digest, at + HEADER, size, check)
