"""Common parts of all downloads: progress that never decreases, a lock between processes, the check of disk space."""

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
"""Seconds between two progress reports; while data flows, stopping a download takes at most this long."""


class Meter:
    """Reports the bytes of one download to `on_progress`: never decreasing, and not too often.

    An exception from `on_progress` passes through; this is how a download is stopped.
    """

    def __init__(self, what: str, total: int | None, on_progress: OnProgress | None) -> None:
        self.what = what
        self.total = total
        self.on_progress = on_progress
        self._most = 0
        self._next_s = 0.0

    def at(self, done: int) -> None:
        """Note that `done` bytes are here; may be called as often as you like."""
        self._most = max(self._most, done if self.total is None else min(done, self.total))
        now = time.monotonic()
        if self.on_progress is not None and now >= self._next_s:
            self._next_s = now + REPORT_EVERY_S
            self.on_progress(Progress("download", self.what, self._most, self.total))

    def finish(self) -> None:
        """Send the last report: everything is here."""
        self._next_s = 0.0
        self.at(self._most if self.total is None else self.total)

    def pause(self, seconds: float) -> None:
        """Wait, but keep reporting, so that the user can stop the download meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0.0:
            time.sleep(min(left, REPORT_EVERY_S))
            self.at(0)


@contextmanager
def locked(path: Path, while_waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; call `while_waiting` now and then while another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    # Some network file systems have no locks: downloads to them are still checked, and moved into place as a whole.
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
    """Raise ModelError if `folder` has fewer than `needed` bytes free; `setting` moves it elsewhere."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"Not enough disk space in {folder}: {bytes_text(needed)} are needed, {bytes_text(free)} are "
            f"free; free some space, or set {setting} to a folder on another disk."
        )


def storage_error(error: OSError, folder: Path, setting: str) -> ModelError:
    """Return the error for a failure of the file system under `folder`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"The disk is full in {folder}; free some space, or set {setting} to a folder on another disk. "
            "The same command then continues."
        )
    reason = error.strerror or str(error)
    return ModelError(
        f"Cannot store the model in {folder} ({reason}); set {setting} to a folder you can write."
    )


def file_size(path: Path) -> int:
    """Return the bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
