"""The memory that is available on a device, and the context for calls on one of several GPUs."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from models.system import free_memory
from models.weights.cgroups import PROC, groups, lines


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device now; None if the system does not tell."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = [
        int(line.split()[1]) * 1024 for line in lines(PROC / "meminfo") if line.startswith("MemAvailable:")
    ]
    if (windows := free_memory()) is not None:
        free.append(windows)
    return min((*free, *(max(limit - used, 0) for limit, used in group_limits())), default=None)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which calls that name no GPU, such as pinning memory, use this one.

    Every thread has a current GPU of its own, which is the first GPU by default; such a call would initialise it
    needlessly.
    """
    is_named = device.type == "cuda" and device.index is not None
    return torch.cuda.device(device) if is_named else nullcontext()


def group_limits(proc: Path = PROC) -> list[tuple[int, int]]:
    """Return (limit, used), in bytes, for each cgroup around this process that has a limit.

    These are the process's own group and those that contain it, of cgroup v1 and v2 (man 7 cgroups). Cached files do
    not count as used: the system drops them before it refuses memory.
    """
    try:
        return [limit for folder in groups("memory", proc) if (limit := _limit(folder)) is not None]
    except (ValueError, IndexError):  # not in the format of the manual: no limit is known
        return []


def _limit(folder: Path) -> tuple[int, int] | None:
    """Return (limit, used) of one group in bytes; None if it has no limit.

    memory.high counts as a limit, too: above it nothing fails, but every allocation waits until memory is reclaimed.
    """
    limits = [
        int(text)
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
        if (text := "".join(lines(folder / name))).isdigit()
    ]
    used = "".join(lines(folder / "memory.current") or lines(folder / "memory.usage_in_bytes"))
    if not limits or not used.isdigit():
        return None
    counts = dict(line.split() for line in lines(folder / "memory.stat") if line)
    # v1 has other names for the figures that include the groups within.
    files = sum(
        int(counts.get(f"total_{kind}", counts.get(kind, 0))) for kind in ("inactive_file", "active_file")
    )
    return min(limits), int(used) - files
