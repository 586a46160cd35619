"""Seconds per decode step alone, by number and length of the sequences; the tokens are not read.

python -m benchmarks.decode_rows --shapes 0.6B,8B --formats bf16,q4_0 --rows 1,2,8,64,256 --context 512,1024
    [--against TREE]

With `--against`, steps of this program and of the one in the source folder TREE (the parent commit, say) take turns on
one GPU, and the ratio of their medians is printed.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from benchmarks.formats import FORMATS, random_quantized
from benchmarks.shapes import SHAPES, random_model
from engine.batch import StateMoves
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows
from engine.cache.states import make_states
from engine.execute.cuda.decode_runner import DecodeRunner, make_decode_runner
from engine.execute.cuda.graphs import Graphs
from engine.params import SamplingParams
from models.spec import kv_sources

BLOCK, STEPS, WARM, ROUNDS, PROFILED = 32, 64, 2, 5, 8
ANSWER = "--answer"
"""The first argument of the process with other source."""


def round_seconds(runner: DecodeRunner, rows: int, context: int, params: SamplingParams) -> float:
    """Return seconds per step of `rows` sequences from row `context` on."""
    slots = list(range(rows))
    blocks = -(-(context + STEPS) // BLOCK)
    for slot in slots:
        runner.sampler.load(slot, params, [], [], slot)
        runner.slots.put(slot, context, context)
        runner.slots.show(slot, list(range(slot * blocks, (slot + 1) * blocks)))
    runner.slots.send()
    torch.cuda.synchronize()
    began = perf_counter()
    for step in range(STEPS):
        runner.step(slots, context + step)
    torch.cuda.synchronize()
    return (perf_counter() - began) / STEPS


def step_seconds(runner: DecodeRunner, rows: int, context: int, params: SamplingParams) -> list[float]:
    """Return `round_seconds` of several rounds, sorted, without those that compile and record."""
    return sorted([round_seconds(runner, rows, context, params) for _ in range(WARM + ROUNDS)][WARM:])


def kernel_times(runner: DecodeRunner, rows: int, context: int) -> str:
    """List the kernels that take most of a step: microseconds per step, calls per step, and name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for step in range(PROFILED):
            runner.step(list(range(rows)), context + step)
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)[:12]
    return "\n".join(
        f"    {k.self_device_time_total / PROFILED:>8.1f} us  {k.count / PROFILED:>6.1f}  {k.key[:80]}"
        for k in kernels
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """The case to measure: a shape, the formats of its weights and KV cache, the most rows and the longest context."""

    shape: str
    form: str
    rows: int
    context: int
    temperature: float
    plain: bool = False
    kv_dtype: str = "auto"


class Steps:
    """A random model whose steps are timed."""

    def __init__(self, asked: Asked) -> None:
        spec, device, room = SHAPES[asked.shape], torch.device("cuda"), asked.context + STEPS
        network = (
            random_model(spec, torch.bfloat16, device, room)
            if asked.form == "bf16"
            else random_quantized(spec, asked.form, torch.bfloat16, device, room)
        )
        blocks, formats = (
            asked.rows * -(-room // BLOCK),
            layer_rows(spec, torch.bfloat16, device, asked.kv_dtype),
        )
        cache = KVCache(formats, blocks, BLOCK, torch.bfloat16, device, sources=kv_sources(spec))
        cache.states = states = make_states(spec, asked.rows, device)
        for part in (*cache.parts, *(() if states is None else states.layers.values())):
            part.zero_()
        self.runner: DecodeRunner = make_decode_runner(
            network, cache, "triton", room, asked.rows, Graphs(), not asked.plain
        )
        for slot in range(0 if states is None else asked.rows):
            self.runner.slots.move(slot, StateMoves(slot, 0, ((1, slot),)), 0)
        self._params = SamplingParams(temperature=asked.temperature)

    def seconds(self, rows: int, context: int) -> float:
        """Return seconds per step."""
        return round_seconds(self.runner, rows, context, self._params)


class OtherSteps:
    """The same steps, timed in a process that runs the source in another folder."""

    def __init__(self, asked: Asked, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, ANSWER, json.dumps(asdict(asked))],
            env=os.environ
            | {"PYTHONPATH": f"{tree.resolve()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, rows: int, context: int) -> float:
        """Return seconds per step. Raises SystemExit when the process has failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(rows, context, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("The program in the other folder has failed.")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def answer(asked: Asked) -> None:
    """Answer each line of standard input with a measurement, until it ends."""
    steps = Steps(asked)
    for line in sys.stdin:
        rows, context = map(int, line.split())
        print(steps.seconds(rows, context), flush=True)


def compare(name: str, steps: Steps, other: OtherSteps | None, rows: int, context: int) -> None:
    """Measure both in turn and print a line."""
    sides: list[Steps | OtherSteps] = [steps] if other is None else [steps, other]
    rounds = [[side.seconds(rows, context) for side in sides] for _ in range(WARM + ROUNDS)][WARM:]
    middles = [median(times) for times in zip(*rounds, strict=True)]
    own = [times[0] * 1e6 for times in rounds]
    ratio = "" if other is None else f", the other {middles[1] * 1e6:.0f}: {middles[1] / middles[0]:.3f}x"
    print(
        f"{name}, context {context:>6}, {rows:>3} rows: {middles[0] * 1e6:>8.0f} us a step "
        f"({min(own):.0f} to {max(own):.0f}), {rows / middles[0]:>8.0f} tokens/s{ratio}",
        flush=True,
    )


def measure(asked: Asked, given: argparse.Namespace) -> None:
    """Measure every number of rows at every context with one model, which is freed afterwards."""
    steps, other = Steps(asked), None if given.against is None else OtherSteps(asked, given.against)
    name = f"{asked.shape} {asked.form}" + (
        "" if asked.kv_dtype == "auto" else f", KV cache {asked.kv_dtype}"
    )
    for context, rows in product(given.context, given.rows):
        compare(name, steps, other, rows, context)
        if given.profile:
            print(kernel_times(steps.runner, rows, context), flush=True)
    if other is not None:
        other.close()


def main() -> None:
    """Run the benchmark; see the module."""
    from benchmarks.options import check_names, names, numbers  # other source may lack them

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=names, default=["0.6B"])
    parser.add_argument("--formats", type=names, default=["bf16"])
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--context", type=numbers, default=[512, 1024])
    parser.add_argument("--kv-dtype", choices=["auto", "bf16", "fp8", "int8"], default="auto")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--plain", action="store_true", help="the plain modules")
    parser.add_argument("--profile", action="store_true", help="which kernels take how long")
    parser.add_argument("--against", type=Path, help="a folder with other source, measured in turn")
    given = parser.parse_args()
    check_names(parser, given, formats=tuple(FORMATS))
    for shape, form in product(given.shapes, given.formats):
        size = max(given.rows), max(given.context)
        measure(Asked(shape, form, *size, given.temperature, given.plain, given.kv_dtype), given)


if __name__ == "__main__":
    if sys.argv[1:2] == [ANSWER]:
        answer(Asked(**json.loads(sys.argv[2])))
    else:
        main()
