"""Where the time of one decode step goes: a table of kernels, from torch.profiler over the bare loop.

    python -m benchmarks.profile_decode [--shape 0.6B] [--context 512] [--json FILE]

Two runs of different length are profiled, and a step is their difference, so that one-time work cancels out. "gap" is
the time of a step measured without the profiler minus the kernels' own times. It is negative where kernels overlap,
as they do with programmatic dependent launch, where a kernel's time includes its waiting.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import Record, describe
from benchmarks.shapes import SHAPES, random_engine
from engine.kernels.recording import wait_for

SHORT, LONG = 8, 40


class Kernel(NamedTuple):
    """The launches of one kernel, and their total microseconds."""

    launches: float
    microseconds: float


def profiled(run: Callable[[int], object], steps: int, device: torch.device) -> dict[str, Kernel]:
    """Return every kernel of a run of `steps` steps, by name (on a CPU: every operator)."""
    gpu = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU],
        # The engine runs in a thread of its own, which matters for operators, not for kernels.
        experimental_config=_ExperimentalConfig(profile_all_threads=not gpu),
    ) as session:
        run(steps)
        wait_for(device)
    kernels: dict[str, Kernel] = {}
    for event in session.key_averages():
        spent = float(event.self_device_time_total if gpu else event.self_cpu_time_total)
        # Host operators that launch kernels also report the kernels' time as their own.
        if spent > 0.0 and event.device_type.name == ("CUDA" if gpu else "CPU"):
            kernels[event.key] = Kernel(float(event.count), spent)
    return kernels


def per_step(short: dict[str, Kernel], long: dict[str, Kernel], steps: int) -> dict[str, Kernel]:
    """Return the kernels of one step, from a run that is `steps` steps longer than another; longest first."""
    found = {}
    for name, kernel in long.items():
        before = short.get(name, Kernel(0.0, 0.0))
        if kernel.launches > before.launches:
            found[name] = Kernel(
                (kernel.launches - before.launches) / steps,
                (kernel.microseconds - before.microseconds) / steps,
            )
    return dict(sorted(found.items(), key=lambda item: -item[1].microseconds))


def table(kernels: dict[str, Kernel], step_us: float) -> str:
    """Format the kernels by their share of a step, their sum and the gap."""
    lines = [f"{'kernel':<72}{'launches':>9}{'us':>10}{'share':>8}"]
    for name, kernel in kernels.items():
        share = kernel.microseconds / step_us
        lines.append(f"{name[:70]:<72}{kernel.launches:>9.1f}{kernel.microseconds:>10.1f}{share:>8.1%}")
    launches = sum(kernel.launches for kernel in kernels.values())
    total = sum(kernel.microseconds for kernel in kernels.values())
    lines.append(f"{'all kernels':<72}{launches:>9.1f}{total:>10.1f}{total / step_us:>8.1%}")
    gap = step_us - total
    lines.append(f"{'gap':<72}{'':>9}{gap:>10.1f}{gap / step_us:>8.1%}")
    lines.append(f"{'step, without the profiler':<72}{'':>9}{step_us:>10.1f}{1e6 / step_us:>8.0f} tok/s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", help="the attention backend; default: what the engine chooses")
    parser.add_argument("--no-graph", action="store_true", help="without CUDA graphs")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    arguments = parser.parse_args()
    from benchmarks.stepping import bare_seconds

    device, context = torch.device(arguments.device), arguments.context
    options = {"attention": arguments.attention} if arguments.attention else {}
    if arguments.no_graph:
        options["graphs"] = False
    with random_engine(
        SHAPES[arguments.shape], device=device, dtype=torch.bfloat16, context=context + 256, **options
    ) as (engine, _):

        def run(steps: int) -> float:
            return bare_seconds(engine, context, steps)

        run(LONG)
        step_us = 1e6 * statistics.median(run(128) for _ in range(arguments.repeats))
        short, long = (profiled(run, steps, device) for steps in (SHORT, LONG))
    kernels = per_step(short, long, 2 * (LONG - SHORT))  # `bare_seconds` runs its steps twice
    if not kernels:
        raise SystemExit("The profiler saw no kernels; the driver may not let this user profile.")
    facts = describe(device)
    print(f"{facts['device']}, {arguments.shape} at context {context}, one step:\n{table(kernels, step_us)}")
    record = Record(arguments.json, facts, merge=True)
    figures = {
        "step_us": step_us,
        "gap_us": step_us - sum(kernel.microseconds for kernel in kernels.values()),
        "kernels": {name: kernel._asdict() for name, kernel in kernels.items()},
    }
    record.add(figures, "steps", f"{arguments.shape} at {context}")


if __name__ == "__main__":
    main()
