"""Several GPUs of this machine: how they reach each other, and what dividing a model among them may give."""

import re
import subprocess
from dataclasses import dataclass
from itertools import permutations

import torch

from engine.execute.compatibility import not_divided, not_fused
from engine.machine.expected import PROGRAMS, Here, Speed, suited
from models.spec import ModelSpec

SUM_S = 10e-6
"""What adding up over two GPUs is taken to last, two times a layer. Nobody has measured it."""


@dataclass(frozen=True, slots=True)
class Links:
    """Of at least two GPUs."""

    count: int
    kinds: tuple[str, ...]
    """As nvidia-smi calls them, each once: "NV18" is NVLink of 18 lanes. Empty where it does not say."""
    direct: bool
    """Whether each can address the memory of every other one."""


@dataclass(frozen=True, slots=True)
class Split:
    """What a model is estimated to do in tokens/s, batch 1."""

    name: str
    alone: float
    divided: float


def find_links() -> Links | None:
    """None where there is one GPU at most."""
    count = torch.cuda.device_count()
    if count < 2:
        return None
    direct = all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(count), 2))
    command = ["nvidia-smi", "topo", "-m"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
        kinds = kinds_of(done.stdout, count)
    except (OSError, subprocess.TimeoutExpired):
        kinds = ()
    return Links(count, kinds, direct)


def kinds_of(topology: str, count: int) -> tuple[str, ...]:
    """The links between the first `count` GPUs in what `nvidia-smi topo -m` prints, each kind once, sorted."""
    found: set[str] = set()
    for line in topology.splitlines():
        name, *cells = re.sub(r"\x1b\[[0-9;]*m", "", line).split() or [""]
        own = int(name[3:]) if re.fullmatch(r"GPU\d{1,3}", name) else count
        if own < count <= len(cells) and cells[own] == "X":
            found.update(cell for cell in cells[:count] if re.fullmatch(r"[A-Z]{2,4}\d{0,3}", cell))
    return tuple(sorted(found))


def split(speed: Speed, spec: ModelSpec, here: Here, count: int) -> Split | None:
    """What `count` GPUs like this one may do together; None where that cannot be told."""
    if speed.tokens_per_s is None or not speed.fits:
        return None
    layers, alone = len(spec.layers), suited(spec, here).program
    together = PROGRAMS["plain modules"] if not_fused(spec) or not_divided(spec) else alone
    reading = (
        max(1 / speed.tokens_per_s - layers * alone.layer_s, 0.0) * alone.efficiency / together.efficiency
    )
    seconds = reading / count + layers * (together.layer_s + 2 * SUM_S)
    return Split(speed.name, speed.tokens_per_s, 1 / seconds)
