"""What marks of recurrent layers cost: decoding with and without them, and how long it takes to go on from one.

    python -m benchmarks.marks [--shapes Qwen3.5-4B,Qwen3.5-9B] [--layers 8] [--context 2048] [--steps 1024]
                               [--folder DIR] [--json FILE]

The weights are random. Answers to one prompt are decoded with marks after every 32 rows, as the engine takes them,
after every 512, and without any, in turns; the goal is at most 1% more time for a token. Then all marks and the log are
given up, and a table is opened again with all K and V in the cache: with its mark on the device, where nothing is
copied, with a copy of it in host memory, and with one on disk that the system does not hold in memory ("disk") or does
("cached"). Each time is compared with that of its bytes at 25 GB/s from host memory and 3 GB/s from disk. The first
round is discarded, and medians are reported. `--device cpu --shapes Qwen3.5-0.8B --layers 8` tries it out.
"""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from unittest.mock import patch

import torch

from benchmarks.machine import Budget, Record
from benchmarks.options import every_shape, names, parse, parser_of, rounds
from benchmarks.restored import Always, dropped, keep_on_disk, written
from benchmarks.shapes import SHAPES, random_engine, random_prompt
from engine import Engine, SamplingParams
from engine.cache import host_memory
from engine.cache.live_state import StatePlan
from engine.cache.rows import Rows
from engine.cache.state_bytes import state_bytes
from engine.cache.states import state_sizes
from engine.kernels.recording import wait_for
from engine.schedule import scheduler
from engine.schedule.sequence import Sequence
from engine.schedule.state_plan import BACK, state_plan

EVERY = {"none": 0, "512": 512, str(BACK): BACK}
"""After how many rows of an answer there is a mark, by the name of the way."""
RATES = {"host": 25e9, "disk": 3e9, "cached": 3e9}
"""The bytes/s with which times are compared."""
GOAL = 1.01
OWNER = "marks"


@contextmanager
def marks_after(every: int) -> Iterator[None]:
    """Take marks of an answer only where its row is a multiple of `every`; 0: nowhere."""

    def plan(sequence: Sequence, rows: int) -> StatePlan:
        found = state_plan(sequence, rows)
        at = tuple(row for row in found.at if every and row % every == 0)
        return replace(found, at=at) if found.is_brief else found

    with patch.object(scheduler, "state_plan", plan):
        yield


def token_seconds(engine: Engine, prompt: list[int], steps: int) -> float:
    """Return the seconds of a token of an answer, after its first one: on a CPU those of the processors."""
    clock = process_time if engine.device.type == "cpu" else perf_counter  # other programs disturb it less
    times = [
        clock()
        for _ in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=steps, speculation="off"))
    ]
    return (times[-1] - times[0]) / (len(times) - 1)


def give_up(engine: Engine, copies: bool) -> None:
    """Give up all marks and the log. With `copies`, they go to host memory first; without, none stay there."""
    blocks = engine.pieces.blocks
    marks = blocks.marks
    assert marks is not None

    def job() -> None:
        for mark in list(marks):
            if copies:
                marks.lose(mark)
            marks.drop(mark)
        for block in range(blocks.num_blocks):
            marks.log.drop(block)
        if not copies:
            blocks.tier.clear()
        wait_for(engine.device)

    engine.loop.call(job)


def opening_seconds(engine: Engine, prompt: list[int]) -> float:
    """Return the seconds until a table can go on after the last row of `prompt`, without computing any."""
    blocks = engine.pieces.blocks

    def job() -> float:
        began = perf_counter()
        table = blocks.open(prompt)
        wait_for(engine.device)
        spent, reached = perf_counter() - began, table.state.row if table.state is not None else 0
        blocks.close(table)
        if reached != len(prompt):
            raise RuntimeError(f"the state is that after {reached} of {len(prompt)} tokens")
        return spent

    return engine.loop.call(job)


def disk_seconds(engine: Engine, prompt: list[int]) -> float:
    """Return the same for a mark on disk."""
    give_up(engine, copies=False)
    began = perf_counter()
    engine.bring_back(Rows.of(prompt))
    return perf_counter() - began + opening_seconds(engine, prompt)


def measured(
    engine: Engine, folder: Path, prompt: list[int], steps: int, repeats: int, budget: Budget
) -> dict[str, list[float]]:
    """Return the seconds of each way."""
    found: dict[str, list[float]] = {name: [] for name in (*EVERY, "device", *RATES)}
    engine.warm(prompt)
    written(engine, OWNER, prompt)
    (file,) = folder.rglob(f"{OWNER}.kv")
    for attempt in rounds(repeats, budget):
        took = {}
        for name, every in EVERY.items():
            with marks_after(every):
                took[name] = token_seconds(engine, prompt, steps)
        engine.warm(prompt)
        took["device"] = opening_seconds(engine, prompt)
        give_up(engine, copies=True)
        took["host"] = opening_seconds(engine, prompt)
        dropped(file)
        took["disk"] = disk_seconds(engine, prompt)
        took["cached"] = disk_seconds(engine, prompt)
        for name, spent in took.items():
            if attempt:
                found[name].append(spent)
    return found


def run(shape: str, arguments: argparse.Namespace, budget: Budget, record: Record) -> None:
    """Measure one shape."""
    spec, device = SHAPES[shape], torch.device(arguments.device)
    spec = replace(spec, layers=spec.layers[: arguments.layers])
    mark = sum(state_sizes(spec).values())
    if not mark:
        raise SystemExit(f"{shape} has no recurrent layers; choose another of --shapes.")
    context, room = arguments.context + arguments.steps + 64, 16 * (mark + (64 << 20))
    host_memory.AHEAD_BYTES = room
    with (
        TemporaryDirectory(dir=arguments.folder) as name,
        random_engine(spec, device=device, dtype=torch.bfloat16, context=context, offload=room) as (
            engine,
            _,
        ),
    ):
        assert engine.pieces.cache.host is not None
        engine.pieces.cache.host.costs = Always()
        engine.pieces.cache.host.prepare(wait=True)
        keep_on_disk(engine, Path(name))
        prompt = random_prompt(spec, arguments.context, 1)
        found = measured(engine, Path(name), prompt, arguments.steps, arguments.repeats, budget)
        nbytes = state_bytes(engine.pieces.cache, len(prompt))
        decode = engine.figures().decode
    record.add({"bytes": nbytes, "decode": decode, "runs_s": found}, "shapes", shape)
    print(f"\n{shape}, {len(spec.layers)} layers, {nbytes / 2**20:.1f} MiB a mark with its log; {decode}")
    for name in EVERY:
        ratio = statistics.median(own / none for own, none in zip(found[name], found["none"], strict=True))
        goal = "" if name == "none" else f"{ratio:>8.3f}, {'reached' if ratio <= GOAL else 'missed'}"
        print(f"marks after {name:>5} rows {statistics.median(found[name]) * 1e3:>9.3f} ms a token{goal}")
    print(f"mark on device        {statistics.median(found['device']) * 1e3:>9.3f} ms")
    for name, rate in RATES.items():
        spent, expected = statistics.median(found[name]), nbytes / rate
        print(
            f"mark from {name:<12}{spent * 1e3:>9.3f} ms, {spent / expected:.2f} of {expected * 1e3:.3f} ms"
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["Qwen3.5-4B", "Qwen3.5-9B"])
    parser.add_argument("--layers", type=int, help="only the first so many layers; default: all")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=1024, help="tokens of an answer")
    parser.add_argument(
        "--folder", type=Path, help="where files are written; default: that of temporary files"
    )
    parser.set_defaults(peers=[])
    every_shape(parse(parser, ()), run, "layers", "context", "steps")


if __name__ == "__main__":
    main()
