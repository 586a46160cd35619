"""Facts about the machine of a benchmark, its maximum speeds, and recording of figures."""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Return the GPU, its driver and the versions of the measured packages."""
    versions: dict[str, str | None] = {}
    for name in ("torch", "triton", "transformers", "flash-attn"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = _imported_version(name)
    facts: dict[str, Any] = {"device": "CPU", "driver": None, "cuda": None, "versions": versions}
    if device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }
    return facts


def _imported_version(name: str) -> str | None:
    # A package that was unpacked rather than installed has no metadata.
    try:
        module = __import__(name.replace("-", "_"))
    except (ImportError, OSError):
        return None
    return getattr(module, "__version__", None)


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.splitlines()[0].strip() if shown.strip() else None


def seconds(function: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median seconds of one call, by device events on a GPU; the first calls are discarded."""
    times: list[float] = []
    for attempt in range(repeats + 3):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            function()
            ended.record()
            ended.synchronize()
            spent = began.elapsed_time(ended) / 1e3
        else:
            start = time.perf_counter()
            function()
            spent = time.perf_counter() - start
        if attempt >= 3:
            times.append(spent)
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Return the median bytes per second, read plus written, of a large copy on the device."""
    size = 2**31 if device.type == "cuda" else 2**24
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return float(2 * size / seconds(lambda: target.copy_(source), device))


def matmul_rate(device: torch.device) -> float:
    """Return the median floating-point operations per second of a bf16 product of random 8192 x 8192 matrices."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return float(2 * size**3 / seconds(lambda: torch.mm(a, b, out=out), device))


class Record:
    """The figures of a benchmark in nested dictionaries, written to a JSON file whenever one is added."""

    def __init__(self, path: Path | None, facts: dict[str, Any], merge: bool) -> None:
        """`merge` starts from the figures in the file; figures of the same name are replaced.

        Raises SystemExit if those were taken on another device or with other versions.
        """
        old = json.loads(path.read_text()) if merge and path is not None and path.exists() else {}
        for key in ("device", "driver", "versions"):
            if old.get(key, facts.get(key)) != facts.get(key):
                raise SystemExit(
                    f"{path} has figures of another {key}, {old[key]}; here it is {facts.get(key)}. "
                    "Write to another file, or do without --merge."
                )
        self.figures: dict[str, Any] = _merged(old, facts)
        self._path = path

    def add(self, value: Any, *keys: str) -> None:
        """Store `value` under a path of keys, and write the file."""
        place = self.figures
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside = self._path.with_name(self._path.name + ".new")
            beside.write_text(json.dumps(self.figures, indent=2) + "\n")
            beside.replace(self._path)


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = dict(old)
    for key, value in new.items():
        here = both.get(key)
        both[key] = _merged(here, value) if isinstance(here, dict) and isinstance(value, dict) else value
    return both


class Budget:
    """Wall-clock seconds for a whole run."""

    def __init__(self, seconds: float | None) -> None:
        self._began = time.monotonic()
        self._seconds = seconds

    @property
    def spent(self) -> float:
        """Return seconds since the start."""
        return time.monotonic() - self._began

    def allows(self, cost: float) -> bool:
        """Return whether something that takes `cost` seconds still fits."""
        return self._seconds is None or self.spent + cost <= self._seconds
