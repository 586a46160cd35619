"""Available memory."""

from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device now; None if the system does not tell."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limits = [*free, *_cgroup_bytes(Path("/sys/fs/cgroup"))]
    return min(limits) if limits else None


def _cgroup_bytes(folder: Path) -> list[int]:
    """Return what a container may still allocate: its limit minus its use without file cache; empty if unlimited."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        counts = dict(
            line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        )
        files = sum(int(counts.get(kind, 0)) for kind in ("inactive_file", "active_file"))
        return [] if limit == "max" else [int(limit) - used + files]
    except (OSError, ValueError):
        return []
