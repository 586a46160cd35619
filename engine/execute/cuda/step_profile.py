"""Shows in which kernel of which layer a decode step spends its time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from engine.kernels.recording import wait_for

STEPS = 32
MIXERS = {
    "attention_kernel": "attention",
    "parts_kernel": "attention",
    "convolve_kernel": "convolution",
    "recur_kernel": "recurrence",
    "latent_kernel": "latent attention",
}
"""The kernels of which every layer runs one once, and what they do."""
ATTENDS = tuple(MIXERS)
AFTER = ("o", "gate and up", "down")
"""The products of a layer after its attention."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel that ran, with times in microseconds on one clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ProfiledKernel:
    """A kernel of a layer, or one before or after the layers (layer None)."""

    layer: int | None
    name: str
    seconds: float
    """From the end of the previous kernel to its own end. Kernels overlap; so counted, the parts add up to the step."""


def record_trace(replay: torch.cuda.CUDAGraph, path: Path) -> list[Ran]:
    """Run a recorded step STEPS times and write a trace for Perfetto. Empty if the profiler may see nothing."""
    replay.replay()
    wait_for(torch.device("cuda"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as session:
        for _ in range(STEPS):
            replay.replay()
        wait_for(torch.device("cuda"))
    session.export_chrome_trace(str(path))
    on_gpu = [event for event in session.events() if event.device_type.name == "CUDA"]
    return [Ran(event.name, event.time_range.start, event.time_range.end) for event in on_gpu]


def median_kernels(ran: Iterable[Ran]) -> list[ProfiledKernel]:
    """Return the median of each kernel over several runs of a step, in order. Empty if `ran` holds no such steps."""
    runs = list(_steps(sorted(ran, key=lambda one: one.start)))
    if not runs:
        return []
    usual = max(map(len, runs))
    whole = [run for run in runs[1:] or runs if len(run) == usual]  # the first waits for the host
    names = [one.name for one in runs[0]] if len(runs[0]) == usual else [one.name for one in whole[0]]
    times = [
        median((run[at].end - (run[at - 1].end if at else run[at].start)) * 1e-6 for run in whole)
        for at in range(usual)
    ]
    return [
        ProfiledKernel(layer, name, seconds)
        for (layer, name), seconds in zip(_places(names), times, strict=True)
    ]


def _steps(ran: Sequence[Ran]) -> Iterable[list[Ran]]:
    """Split the kernels into steps; each begins with one embedding, or with that of the inputs of all layers too."""
    found: list[Ran] = []
    for one in ran:
        if "embedding" in one.name and not (found and "embedding" in found[-1].name):
            if found:
                yield found
            found = [one]
        elif found:
            found.append(one)
    if found:
        yield found


def _places(names: Sequence[str]) -> list[tuple[int | None, str]]:
    """Return the layer of each kernel of a step, and the name of its purpose."""
    attends = [at for at, name in enumerate(names) if name.startswith(ATTENDS)]
    # Before the layers there may be products, but then other kernels follow them.
    first = 1 + max(
        (at for at, name in enumerate(names[: min(attends, default=0)]) if "linear" not in name), default=0
    )
    before = attends[0] - first if attends else 0
    starts = [at - before for at in attends]
    for number, (last, at) in enumerate(pairwise(attends), 1):
        if (
            sum("linear" in name for name in names[last:at]) == 1
        ):  # beside the mixer before, whose output that is
            starts[number] = at
    if len(starts) > 1:
        # The last layer has as many kernels as the one of its kind before it, or else as the one before it.
        alike = [at for at in range(len(attends) - 1) if names[attends[at]] == names[attends[-1]]]
        at = alike[-1] if alike else len(starts) - 2
        starts.append(starts[-1] + starts[at + 1] - starts[at])
    found: list[tuple[int | None, str]] = []
    layer, products = -1, 0
    after: tuple[str, ...] = AFTER
    for at, name in enumerate(names):
        if layer + 1 < len(starts) and at == starts[layer + 1]:
            layer, products = layer + 1, 0
        inside = 0 <= layer < len(attends) and at < (starts[-1] if len(attends) > 1 else len(names))
        plain = name.removesuffix("_kernel")
        if not inside:
            found.append((None, "head" if "linear" in name else plain))
        elif at < attends[layer]:
            found.append((layer, "q, k, v" if "linear" in name else plain))
        elif name.startswith(ATTENDS):
            found.append((layer, next(does for mixer, does in MIXERS.items() if name.startswith(mixer))))
            after = ("v_b", *AFTER) if name.startswith("latent_kernel") else AFTER
        elif "linear" in name and products < len(after):
            found.append((layer, after[products]))
            products += 1
        else:
            found.append((layer, plain))
    return found
