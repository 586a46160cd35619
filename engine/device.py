"""What this machine can do: devices, dtypes, memory."""

import os
from pathlib import Path

import torch

from engine.errors import EngineError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
GIB = 1024**3


def pick_device(name: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda". Raises EngineError when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda":
        if torch.cuda.is_available():
            return torch.device("cuda")
        why = (
            "this torch was built without CUDA"
            if not torch.version.cuda
            else "no usable NVIDIA GPU was found"
        )
        raise EngineError(f"--device cuda cannot be used: {why}. Use --device cpu or auto.")
    raise EngineError(f"There is no device {name!r}; it must be auto, cpu or cuda.")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for "auto" or one of DTYPES: bf16 wherever the device can, since decoding reads every weight."""
    if name == "auto":
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return torch.float16
        return torch.bfloat16
    if name not in DTYPES:
        raise EngineError(f"There is no dtype {name!r}; it must be auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def available_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device` without swapping; on a CPU within the limits of a container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_system_memory()]
    limits += [limit for limit in (_cgroup_memory(Path("/sys/fs/cgroup")),) if limit is not None]
    return min(limits)


def _system_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Elsewhere (macOS) only the total is known without a library; half of it is a safe guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_memory(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used, 0)


def gib(size: float) -> str:
    """Bytes for people, in GiB or MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 1024**2:.0f} MiB"
