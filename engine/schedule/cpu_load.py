"""Whether programs other than this one keep the CPU busy."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

LOOK_S = 1.0
"""The least seconds between two looks."""
SHARE = 0.25
"""The share of all cores from which other programs count as busy: beside our threads, they get less than they want."""
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Used:
    """CPU seconds used up to the moment `at`, in seconds of `perf_counter`."""

    at: float
    everybody: float | None
    """By all programs since the machine started; None if the system does not say."""
    own: float
    """By this process."""


def used() -> Used:
    """Return the CPU seconds used up to now."""
    times = os.times()
    return Used(perf_counter(), _everybody(_STAT), times.user + times.system)


def _everybody(stat: Path) -> float | None:
    if not hasattr(os, "sysconf"):  # Windows
        return None
    try:
        with stat.open(encoding="ascii") as lines:
            # user nice system idle iowait irq softirq steal; guests are in user and nice already
            ticks = [int(number) for number in lines.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    if not any(ticks):
        return None
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class OtherPrograms:
    """The other programs on this machine. The system is asked once a second at most."""

    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    used: Callable[[], Used] = used
    clock: Callable[[], float] = perf_counter
    busy: bool = False
    """The result of the last look."""
    free: int = 0
    """How many cores other programs left at the last look; all of them if the system does not say."""
    _before: Used | None = None

    def __post_init__(self) -> None:
        self.free = self.cores

    def are_busy(self) -> bool:
        """Return whether other programs took more than a quarter of the cores between the last two looks.

        If the system does not say, return whether more programs than there are cores, this one included, wanted to run
        in the last minute.
        """
        before = self._before
        if before is not None and self.clock() - before.at < LOOK_S:
            return self.busy
        now = self._before = self.used()
        if now.everybody is None:
            self.busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > self.cores
        elif before is not None and before.everybody is not None:
            others = ((now.everybody - before.everybody) - (now.own - before.own)) / (now.at - before.at)
            self.busy = others > SHARE * self.cores
            self.free = round(self.cores - others)
        return self.busy
