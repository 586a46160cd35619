"""Progress reports of long-running work, such as a download or a load."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Progress:
    """One report. `done` never decreases within a stage; the last report of a stage has `done == total`."""

    stage: Literal["download", "load", "prepare", "check", "quantize"]
    what: str
    """What is being worked on, for display: a file name, "weights", "KV cache"."""
    done: int
    """Bytes done so far."""
    total: int | None
    """Bytes in all; None while unknown."""


OnProgress = Callable[[Progress], None]
