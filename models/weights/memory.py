"""Available memory, and the GPU whose memory is meant."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from models.weights.cgroups import PROC, groups, lines


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device now; None if the system does not tell."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = [
        int(line.split()[1]) * 1024 for line in lines(PROC / "meminfo") if line.startswith("MemAvailable:")
    ]
    return min((*free, *(max(limit - used, 0) for limit, used in group_limits())), default=None)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which calls that name no GPU, such as pinning memory, are for this one.

    Every thread has a current GPU of its own, at first the first one, which such a call would start for nothing.
    """
    is_named = device.type == "cuda" and device.index is not None
    return torch.cuda.device(device) if is_named else nullcontext()


def group_limits(proc: Path = PROC) -> list[tuple[int, int]]:
    """Return the limits of the cgroups that hold this process, each with what the group uses, in bytes.

    The process's own group and every group around it count, of cgroup v1 and of v2 (man 7 cgroups). What a group uses
    leaves out cached files, which the system drops before it refuses memory. Empty if nothing is limited.
    """
    try:
        return [limit for folder in groups("memory", proc) if (limit := _limit(folder)) is not None]
    except (ValueError, IndexError):  # not what the manual says: nothing is known
        return []


def _limit(folder: Path) -> tuple[int, int] | None:
    """Return the limit of one group and what it uses; None if it has no limit.

    Above memory.high nothing fails, but every allocation waits until as much is reclaimed: it counts as a limit.
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
    # v1 counts the groups within under names of their own.
    files = sum(
        int(counts.get(f"total_{kind}", counts.get(kind, 0))) for kind in ("inactive_file", "active_file")
    )
    return min(limits), int(used) - files
