"""Where the time goes when blocks are brought back from disk: when things happen on the tier's two threads."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from engine.store import disk
from engine.store.disk import DiskTier


@dataclass(slots=True)
class Opening:
    """What the disk's thread does when an engine starts, in seconds. No prompt waits for it on a GPU."""

    scanning: float = 0.0
    """Reading the headers of all files."""
    pinning: float = 0.0
    """Allocating the buffers, page-locked for a GPU, and starting the threads that read."""


@dataclass(slots=True)
class Parts:
    """One prompt: seconds since it was asked, and sums of seconds."""

    began: float = field(default_factory=perf_counter)
    looked_up: float = 0.0
    """The blocks on disk are known, and reading begins."""
    read: list[float] = field(default_factory=list)
    """A group of blocks is read and checked, for each group."""
    copied: float = 0.0
    """The device has copied the last group."""
    ended: float = 0.0
    """The prompt goes on to be computed."""
    waited: float = 0.0
    """Sum: groups that were read waited for the loop's thread."""
    taking: float = 0.0
    """Sum: the loop's thread took groups: made room, enqueued copies and noted the rows."""
    first: float = 0.0
    """The first token is there."""

    def now(self) -> float:
        """Return the seconds since the prompt was asked."""
        return perf_counter() - self.began

    def lines(self, nbytes: int) -> Iterator[str]:
        """Yield lines that describe it, for `nbytes` restored bytes."""
        if not self.read:
            yield "nothing came from disk"
            return
        reading = self.read[-1] - self.looked_up
        yield (
            f"looked up {_ms(self.looked_up)}, first of {len(self.read)} groups read {_ms(self.read[0])}, last "
            f"{_ms(self.read[-1])} ({nbytes / reading / 1e9:.1f} GB/s), copied {_ms(self.copied)}, "
            f"given to the scheduler {_ms(self.ended)}, first token {_ms(self.first)} ms"
        )
        yield f"groups waited {_ms(self.waited)} ms for the loop, which took them in {_ms(self.taking)} ms"


@contextmanager
def opening() -> Iterator[Opening]:
    """Measure the start of the disk tier that is opened within; it must have started before the end."""
    found = Opening()
    with ExitStack() as stack:
        scan, pin = disk.Folder, disk.Buffers.open

        def scanned(*given: Any) -> disk.Folder:
            began = perf_counter()
            folder = scan(*given)
            found.scanning = perf_counter() - began
            return folder

        def pinned(buffers: disk.Buffers) -> None:
            began = perf_counter()
            pin(buffers)
            found.pinning = perf_counter() - began

        stack.enter_context(patch.object(disk, "Folder", scanned))
        stack.enter_context(patch.object(disk.Buffers, "open", pinned))
        yield found


@contextmanager
def watched(tier: DiskTier) -> Iterator[Parts]:
    """Measure a prompt that is sent within and has its first token by the end."""
    parts = Parts()
    events: list[Any] = []
    bring, read, take, end = tier.bring, tier._buffers.read, tier._take, tier._end
    device = tier._cache.kv.device

    def mark() -> None:
        if device.type == "cuda":
            events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            events[-1].record()

    def bringing(*given: Any) -> None:
        mark()
        bring(*given)
        parts.looked_up = parts.now()

    def reading(*given: Any) -> Iterator[Any]:
        for group in read(*given):
            parts.read.append(parts.now())
            yield group

    def taking(*given: Any) -> None:
        began = parts.now()
        parts.waited += began - next(posted)
        take(*given)
        mark()
        parts.taking += parts.now() - began
        parts.copied = parts.now()

    def ending(*given: Any, **named: Any) -> None:
        parts.ended = parts.now()
        end(*given, **named)

    posted = iter(parts.read)
    with ExitStack() as stack:
        for owner, name, function in (
            (tier, "bring", bringing),
            (tier._buffers, "read", reading),
            (tier, "_take", taking),
            (tier, "_end", ending),
        ):
            stack.enter_context(patch.object(owner, name, function))
        yield parts
    if len(events) > 1:
        events[-1].synchronize()
        parts.copied = events[0].elapsed_time(events[-1]) / 1e3  # the device was idle at the first


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
