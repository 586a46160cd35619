"""Available memory."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

_PROC = Path("/proc")


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device now; None if the system does not tell."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = [
        int(line.split()[1]) * 1024 for line in _lines(_PROC / "meminfo") if line.startswith("MemAvailable:")
    ]
    return min((*free, *(max(limit - used, 0) for limit, used in group_limits())), default=None)


def group_limits(proc: Path = _PROC) -> list[tuple[int, int]]:
    """Return the limits of the cgroups that hold this process, each with what the group uses, in bytes.

    The process's own group and every group around it count, of cgroup v1 and of v2 (man 7 cgroups). What a group uses
    leaves out cached files, which the system drops before it refuses memory. Empty if nothing is limited.
    """
    try:
        return [limit for folder in _groups(proc) if (limit := _limit(folder)) is not None]
    except (ValueError, IndexError):  # not what the manual says: nothing is known
        return []


def _groups(proc: Path) -> Iterator[Path]:
    """Yield the folders of the groups that limit this process's memory, from its own outwards."""
    own: dict[str, PurePosixPath] = {}
    for line in _lines(proc / "self/cgroup"):  # 4:memory:/user.slice, or 0::/user.slice for v2
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            own["cgroup" if controllers else "cgroup2"] = PurePosixPath(path)
    for line in _lines(proc / "self/mountinfo"):
        mount, _, kind = (part.split() for part in line.partition(" - "))
        if kind[0] not in own or (kind[0] == "cgroup" and "memory" not in kind[2].split(",")):
            continue
        root, at, group = mount[3], Path(mount[4]), own[kind[0]]
        # A container may see the path of its group on the host, or one outside of what is mounted: "/../..".
        inside = group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else ""
        folder = at / inside
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(at)))


def _limit(folder: Path) -> tuple[int, int] | None:
    """Return the limit of one group and what it uses; None if it has no limit.

    Above memory.high nothing fails, but every allocation waits until as much is reclaimed: it counts as a limit.
    """
    limits = [
        int(text)
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
        if (text := "".join(_lines(folder / name))).isdigit()
    ]
    used = "".join(_lines(folder / "memory.current") or _lines(folder / "memory.usage_in_bytes"))
    if not limits or not used.isdigit():
        return None
    counts = dict(line.split() for line in _lines(folder / "memory.stat") if line)
    # v1 counts the groups within under names of their own.
    files = sum(
        int(counts.get(f"total_{kind}", counts.get(kind, 0))) for kind in ("inactive_file", "active_file")
    )
    return min(limits), int(used) - files


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the system; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
