"""How much memory there is."""

from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device now; None where the system does not say."""
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
    """What a container may still allocate: its limit less what it cannot drop, files are; empty if unlimited."""
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
