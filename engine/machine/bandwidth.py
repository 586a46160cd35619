"""The memory's bandwidth, kept from the time it was measured: measuring takes a second, which no start should."""

import json
import platform
import re
from contextlib import suppress
from pathlib import Path

import torch

from models.files import write_whole
from models.hub.catalogue import cache_folder


def keep_bandwidth(device: torch.device | str, bytes_per_s: float) -> None:
    """Remember what the memory of `device` reads. Where nothing can be written nothing is remembered."""
    path = _path()
    known = {**_read(path), _name(torch.device(device)): bytes_per_s}
    with suppress(OSError):
        write_whole(path, json.dumps(known, indent=1) + "\n")


def known_bandwidth(device: torch.device) -> float | None:
    """Bytes/s as they were measured on this machine; None when they never were."""
    value = _read(_path()).get(_name(device))
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _path() -> Path:
    return cache_folder() / "bandwidth.json"


def _read(path: Path) -> dict[str, object]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _name(device: torch.device) -> str:
    """What the memory belongs to: the same for as long as a measurement holds."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The processor, for people."""
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
