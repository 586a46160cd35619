"""Keeps the measured memory bandwidth in a file: measuring takes a second, which no start should take."""

import json
import platform
import re
from contextlib import suppress
from pathlib import Path

import torch

from models.files import write_whole
from models.hub.catalogue import cache_folder
from models.weights.cgroups import PROC, lines


def keep_bandwidth(device: torch.device | str, bytes_per_s: float) -> None:
    """Remember the read bandwidth of the memory of `device`; do nothing if the file cannot be written."""
    path = _path()
    known = {**_read(path), _name(torch.device(device)): bytes_per_s}
    with suppress(OSError):
        write_whole(path, json.dumps(known, indent=1) + "\n")


def known_bandwidth(device: torch.device, count: int = 1) -> float | None:
    """Return the bytes/s of `count` devices of this kind together, if one was measured here before; otherwise None."""
    value = _read(_path()).get(_name(device))
    return float(value) * count if isinstance(value, int | float) and value > 0 else None


def _path() -> Path:
    return cache_folder() / "bandwidth.json"


def _read(path: Path) -> dict[str, object]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _name(device: torch.device) -> str:
    """Return the key of the memory: a measurement holds as long as this stays the same."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """Return the name of the processor, for people."""
    found = re.search(r"^model name\s*:\s*(.+)$", "\n".join(lines(PROC / "cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()
