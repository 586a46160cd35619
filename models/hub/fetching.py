"""What every download shares: progress that never falls, a lock between processes, room on the disk."""

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from models.errors import ModelError
from models.progress import OnProgress, Progress
from models.units import bytes_text

REPORT_EVERY_S = 0.05
"""Seconds between two reports of progress; stopping a download takes at most this long while data flows."""


class Meter:
    """Reports the bytes of one download to `on_progress`: never falling, not too often.

    Whatever `on_progress` raises passes through, which is how a download is stopped.
    """

    def __init__(self, what: str, total: int | None, on_progress: OnProgress | None) -> None:
        self.what = what
        self.total = total
        self.on_progress = on_progress
        self._most = 0
        self._next_s = 0.0

    def at(self, done: int) -> None:
        """`done` bytes are here; call this as often as you like."""
        self._most = max(self._most, done if self.total is None else min(done, self.total))
        now = time.monotonic()
        if self.on_progress is not None and now >= self._next_s:
            self._next_s = now + REPORT_EVERY_S
            self.on_progress(Progress("download", self.what, self._most, self.total))

    def finish(self) -> None:
        """Everything is here: the last report."""
        self._next_s = 0.0
        self.at(self._most if self.total is None else self.total)

    def pause(self, seconds: float) -> None:
        """Wait, still reporting, so that a person can stop the download meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0.0:
            time.sleep(min(left, REPORT_EVERY_S))
            self.at(0)


@contextmanager
def locked(path: Path, while_waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; call `while_waiting` now and then while another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    # Some network file systems have no locks: what is downloaded there is still checked and moved in whole.
    with suppress(NotImplementedError):
        while True:
            try:
                lock.acquire(timeout=0.2)
                break
            except Timeout:
                while_waiting()
    try:
        yield
    finally:
        lock.release()


def need_space(folder: Path, needed: int, setting: str) -> None:
    """Raise ModelError when `folder` has fewer than `needed` bytes free; `setting` moves it elsewhere."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"Not enough disk space in {folder}: {bytes_text(needed)} are needed, {bytes_text(free)} are "
            f"free; free some space, or set {setting} to a folder on another disk."
        )


def storage_error(error: OSError, folder: Path, setting: str) -> ModelError:
    """The one line for an error of the file system under `folder`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"The disk is full in {folder}; free some space, or set {setting} to a folder on another disk. "
            "The same command then continues."
        )
    reason = error.strerror or str(error)
    return ModelError(
        f"Cannot store the model in {folder} ({reason}); set {setting} to a folder you can write."
    )


def size_of(path: Path) -> int:
    """Bytes of a file; 0 when there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
