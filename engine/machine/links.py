"""Several GPUs of this machine: how they are linked, and the estimated gain of dividing a model among them."""

import re
import subprocess
from dataclasses import dataclass
from itertools import permutations

import torch

from engine.execute.compatibility import not_divided, not_fused
from engine.machine.expected import PROGRAMS, Here, Speed, suited
from models.spec import ModelSpec

SUM_S = 8e-6
"""Seconds that one sum over two GPUs adds to a decode step; a layer needs two of them. Two H100 took 7.1 (8B) to 8.4
(32B) microseconds (`benchmarks/tensor_parallel.py`)."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links between at least two GPUs."""

    count: int
    kinds: tuple[str, ...]
    """The kinds that nvidia-smi reports, each once: "NV18" is NVLink of 18 lanes. Empty if it reports none."""
    direct: bool
    """Whether every GPU can address the memory of every other one."""


@dataclass(frozen=True, slots=True)
class SplitSpeed:
    """The estimated tokens/s of a model at batch 1, on one GPU and divided."""

    name: str
    alone: float
    divided: float


def find_links() -> Links | None:
    """Return the links between the GPUs; None if there are fewer than two."""
    count = torch.cuda.device_count()
    if count < 2:
        return None
    direct = all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(count), 2))
    command = ["nvidia-smi", "topo", "-m"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
        kinds = parse_links(done.stdout, count)
    except (OSError, subprocess.TimeoutExpired):
        kinds = ()
    return Links(count, kinds, direct)


def parse_links(topology: str, count: int) -> tuple[str, ...]:
    """Parse the output of `nvidia-smi topo -m`: the links between the first `count` GPUs, each kind once, sorted."""
    found: set[str] = set()
    for line in topology.splitlines():
        name, *cells = re.sub(r"\x1b\[[0-9;]*m", "", line).split() or [""]
        own = int(name[3:]) if re.fullmatch(r"GPU\d{1,3}", name) else count
        if own < count <= len(cells) and cells[own] == "X":
            found.update(cell for cell in cells[:count] if re.fullmatch(r"[A-Z]{2,4}\d{0,3}", cell))
    return tuple(sorted(found))


def split(speed: Speed, spec: ModelSpec, here: Here, count: int) -> SplitSpeed | None:
    """Estimate the speed on `count` GPUs like this one; None if it is unknown."""
    if speed.tokens_per_s is None or not speed.fits:
        return None
    layers, alone = len(spec.layers), suited(spec, here).program
    together = PROGRAMS["plain modules"] if not_fused(spec) or not_divided(spec) else alone
    reading = (
        max(1 / speed.tokens_per_s - layers * alone.layer_s, 0.0) * alone.efficiency / together.efficiency
    )
    seconds = reading / count + layers * (together.layer_s + 2 * SUM_S)
    return SplitSpeed(speed.name, speed.tokens_per_s, 1 / seconds)
