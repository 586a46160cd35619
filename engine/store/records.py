"""A file of KV blocks: records that are only ever appended, each of which says what it is and whether it is whole.

    magic 4 | check of the payload 4 | size of the payload 8 | digest 32 | check of these 4 | payload

Little-endian; checks are CRC-32. A reader goes from header to header and stops at the first that is not one: what a
crash left half written is at the end, and is cut off before more is appended. Files are read and not mapped: a disk
that fails in the middle is then an error, where a mapping would end the process.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

_MAGIC = b"CKV1"
_HEAD = struct.Struct("<4sIQ32s")
_CHECK = struct.Struct("<I")
HEADER = _HEAD.size + _CHECK.size
LARGEST = 1 << 32
"""Bytes of a payload; a header that says more is none."""


@dataclass(frozen=True, slots=True)
class Record:
    """Where a block lies in a file."""

    digest: bytes
    """32 bytes that stand for its rows and all before them (see `engine/store/digests.py`)."""
    offset: int
    """Of the payload."""
    size: int
    check: int

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + self.size


def scan(fd: int, start: int = 0) -> Iterator[Record]:
    """The whole records of a file from byte `start` on, in order; payloads are not read. Raises OSError."""
    length = os.fstat(fd).st_size
    while (record := _header(os.pread(fd, HEADER, start), start)) is not None and record.end <= length:
        yield record
        start = record.end


def packed(digest: bytes, payload: bytes) -> bytes:
    """A record as it is appended."""
    head = _HEAD.pack(_MAGIC, crc32(payload), len(payload), digest)
    return head + _CHECK.pack(crc32(head)) + payload


def read(fd: int, record: Record, into: memoryview) -> bool:
    """Read the payload of a record. False where it is not what was written or not as long as `into`. Raises OSError."""
    if len(into) != record.size:
        return False
    done = 0
    while done < record.size:
        got = os.preadv(fd, [into[done:]], record.offset + done)
        if not got:
            return False
        done += got
    return crc32(into) == record.check


def _header(data: bytes, at: int) -> Record | None:
    if len(data) != HEADER or _CHECK.unpack(data[_HEAD.size :])[0] != crc32(data[: _HEAD.size]):
        return None
    magic, check, size, digest = _HEAD.unpack(data[: _HEAD.size])
    if magic != _MAGIC or not 0 < size <= LARGEST:
        return None
    return Record(digest, at + HEADER, size, check)
