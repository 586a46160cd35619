"""What Python offers differently on Windows: locks on files, reading and writing at a place, processes of their own."""

import errno
import os
import subprocess
import sys
from threading import Lock
from typing import Any

_LOCKED = (1 << 43) + (1 << 31) - 2
"""The byte that is locked on Windows, where a lock keeps others from reading: no file has it, nor the place that a C
library makes of its lower 32 bits."""
_OFFSETS = Lock()
"""Held while a file's offset is moved, where Python cannot read or write without moving it."""

BINARY: int = getattr(os, "O_BINARY", 0)
"""For `os.open`: without it, Windows changes the ends of lines."""
NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
"""For `os.open`: not through a link; 0 where links need special rights."""


def try_lock(fd: int) -> bool:
    """Lock an open file for this process until it is closed. Return False if another one has locked it.

    Raises OSError if the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:
        return _try_lock_byte(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_lock_byte(fd: int) -> bool:
    import msvcrt

    before = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        os.lseek(fd, _LOCKED, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    except OSError as error:
        if error.errno not in (errno.EACCES, 0):  # Wine says 0
            raise
        return False
    finally:
        os.lseek(fd, before, os.SEEK_SET)
    return True


def read_at(fd: int, into: memoryview, offset: int) -> int:
    """Read at most `len(into)` bytes from byte `offset` of a file into `into`; return how many. Raises OSError."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    with _OFFSETS, open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(offset)
        return file.readinto(into) or 0


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset` of a file. Raises OSError."""
    rest = memoryview(data)
    while len(rest):
        if hasattr(os, "pwrite"):
            done = os.pwrite(fd, rest, offset)
        else:
            with _OFFSETS:
                os.lseek(fd, offset, os.SEEK_SET)
                done = os.write(fd, rest)
        rest, offset = rest[done:], offset + done


def total_memory() -> int | None:
    """Return the bytes of main memory; None if the system does not tell."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _windows_memory(1)


def free_memory() -> int | None:
    """Return the bytes of main memory that are available on Windows; None elsewhere."""
    return None if hasattr(os, "sysconf") else _windows_memory(2)


def _windows_memory(field: int) -> int | None:
    """Return a field of MEMORYSTATUSEX (GlobalMemoryStatusEx), in bytes: 1 in all, 2 available; None without it."""
    import ctypes

    status = (ctypes.c_uint64 * 8)(64)  # two 32-bit numbers, its size and the load, then seven of 64 bits
    try:
        is_told = ctypes.windll.kernel32.GlobalMemoryStatusEx(status)  # type: ignore[attr-defined, unused-ignore]
    except AttributeError:
        return None
    return int(status[field]) if is_told else None


def own_group() -> dict[str, Any]:
    """Return the arguments of `subprocess.Popen` for a process that Ctrl+C in this terminal does not reach."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    return {"start_new_session": True}
