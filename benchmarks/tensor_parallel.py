"""Several GPUs that compute one model together, beside one GPU in the same run; random weights.

    python -m benchmarks.tensor_parallel --json benchmarks/results/tensor_parallel.json [--ranks 2]
        [--shapes 0.6B,8B,32B,70B,30B-A3B] [--rows 1,64] [--context 512] [--prompt 4096]

Steps of decoding are timed as they follow each other, `--rows` streams of `--context` tokens each, and a prompt of
`--prompt` tokens as it is cut for one person; medians of `--repeats`. All ranks are told of the same steps beforehand,
so what messages cost the host is not part of it. "Of copy" is what a step must move, over its time and the number of
GPUs, of what a large copy on one of them reads and writes. What one GPU has no room for is measured on all only. A sum
is that of a prompt, by the library.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.machine import Record, copy_bandwidth, describe, synchronize
from benchmarks.options import names, numbers, parse, parser_of
from benchmarks.shapes import SHAPES, moved_bytes, random_model, weight_bytes
from engine.batch import Span, StepBatch
from engine.build import Options, Pieces, build
from engine.execute.group import Group
from models.spec import ModelSpec

_STEPS = 32
"""Of decoding, between two looks at the clock."""
_BESIDE = 4 << 30
"""Bytes that a GPU needs beside the weights."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What each rank is to measure of a shape."""

    shape: str
    device: str
    rows: list[int]
    context: int
    prompt: int
    repeats: int


@dataclass(slots=True)
class Figures:
    """Seconds."""

    ranks: int
    decode: dict[int, float] = field(default_factory=dict)
    """A step, by its rows."""
    prompt: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    """One sum, by what adds up and its rows."""
    program: str = ""


def measure(asked: Asked, ranks: int, meeting: str, rank: int) -> Figures:
    """What `rank` of so many finds; all do the same."""
    device = torch.device(asked.device, rank) if asked.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    positions = max(asked.context + _STEPS * (asked.repeats + 2) + 64, asked.prompt + 64)
    group = Group.join(Path(meeting), rank, ranks, device) if ranks > 1 else None
    spec = SHAPES[asked.shape]
    network = random_model(spec, torch.bfloat16, device, positions, rank=(rank, ranks))
    options = Options(context=positions, streams=max(asked.rows), group=group, tuned=False)
    with torch.inference_mode():
        pieces = build(network, device, torch.bfloat16, options, ())
        found = Figures(ranks, program=pieces.decode_name)
        if rank == 0:
            print(f"  {asked.shape}, {ranks}: {found.program}", *pieces.notes, sep="; ", flush=True)
        if asked.prompt:
            found.prompt = prompt_s(pieces, asked, device)
        for rows in asked.rows:
            found.decode[rows] = decode_s(pieces, rows, asked, device)
        if group is not None:
            for rows in asked.rows:
                found.sums |= sum_s(group, rows, spec.hidden_size, device)
    return found


def prompt_s(pieces: Pieces, asked: Asked, device: torch.device) -> float:
    """Seconds of a prompt, cut as the scheduler cuts it."""
    most, tokens = pieces.scheduler.max_chunk, tuple(range(1, asked.prompt + 1))
    blocks = tuple(range(-(-asked.prompt // pieces.blocks.block_size)))

    def run() -> None:
        for start in range(0, asked.prompt, most):
            part = tokens[start : start + most]
            end = start + len(part)
            wanted = int(end == asked.prompt)
            pieces.runner.run(
                StepBatch((Span(blocks, start, len(part), part, tuple(range(start, end)), wanted),))
            )

    return median_s(run, asked.repeats, device)


def decode_s(pieces: Pieces, rows: int, asked: Asked, device: torch.device) -> float:
    """Seconds of a step of so many rows, each with a context of its own."""
    size, each = pieces.blocks.block_size, pieces.context_length
    blocks = [
        [(row * (each // size) + at) % pieces.blocks.num_blocks for at in range(-(-each // size))]
        for row in range(rows)
    ]
    runner, row = pieces.decode_runner, asked.context
    if runner is None:
        spans = [
            Span(tuple(table), asked.context, 1, (1,), (asked.context,), 1, asked.context) for table in blocks
        ]
        return median_s(partial(pieces.runner.run, StepBatch(tuple(spans))), asked.repeats, device)
    for slot in range(rows):
        runner.slots.put(slot, row, row)
        runner.slots.show(slot, blocks[slot])
    runner.slots.given.token.fill_(1)

    def run() -> None:
        nonlocal row
        for _ in range(_STEPS):
            runner.step(range(rows), row)
            row += 1

    return median_s(run, asked.repeats, device) / _STEPS


def sum_s(group: Group, rows: int, size: int, device: torch.device) -> dict[str, float]:
    """Seconds of a sum over the ranks, as prompts have it."""
    x = torch.ones(rows, size, dtype=torch.bfloat16, device=device)
    return {f"{rows} rows": median_s(lambda: group.sum(x), 20, device)}


def median_s(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median seconds of `run`, after two that do not count."""
    times = []
    for number in range(repeats + 2):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        if number >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def together(asked: Asked, ranks: int) -> Figures:
    """The figures of rank 0; a process for each rank, all ended afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(ranks, get_context("spawn"))
        try:
            meeting = str(Path(folder) / "meeting")
            results = [pool.submit(measure, asked, ranks, meeting, rank) for rank in range(ranks)]
            done, _ = wait(results, return_when=FIRST_EXCEPTION)
            for result in done:
                result.result()
            return results[0].result()
        finally:
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown(wait=True)


def compare(shape: str, arguments: argparse.Namespace, record: Record, copied: float) -> None:
    """Measure a shape on one GPU, where it has room, and on all of them."""
    spec: ModelSpec = SHAPES[shape]
    asked = Asked(
        shape, arguments.device, arguments.rows, arguments.context, arguments.prompt, arguments.repeats
    )
    one = None
    if fits(spec, arguments.device):
        one = together(asked, 1)
    many = together(asked, arguments.ranks)
    record.add({"one": asdict(one) if one else None, "many": asdict(many)}, shape)
    for rows in arguments.rows:
        moved = moved_bytes(spec, torch.bfloat16, arguments.context, 1)
        share = moved / many.decode[rows] / many.ranks / copied if rows == 1 else None
        beside = f"{one.decode[rows] / many.decode[rows]:5.2f}x of one" if one else "one has no room"
        told = f", {share:.0%} of copy" if share is not None else ""
        print(f"{shape:>8} {rows:3} rows  {rows / many.decode[rows]:8.0f} tok/s  {beside}{told}")
    if arguments.prompt:
        beside = f"{one.prompt / many.prompt:5.2f}x of one" if one else "one has no room"
        print(f"{shape:>8} prompt of {arguments.prompt}  {many.prompt * 1e3:8.1f} ms  {beside}")
    for name, taken in many.sums.items():
        print(f"{shape:>8} sum, {name}: {taken * 1e6:.0f} us", flush=True)


def fits(spec: ModelSpec, device: str) -> bool:
    """Whether the weights have room on one GPU; the embedding is read by row, but lies there."""
    if device != "cuda":
        return True
    embedding = 0 if spec.tied else spec.vocab_size * spec.hidden_size * 2
    return weight_bytes(spec, torch.bfloat16) + embedding + _BESIDE < torch.cuda.mem_get_info(0)[0]


def main() -> None:
    """Compare the shapes that are asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", type=names, default=["0.6B", "8B", "32B", "70B", "30B-A3B"])
    parser.add_argument("--rows", type=numbers, default=[1, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=4096)
    arguments = parse(parser, ())
    device = torch.device(arguments.device)
    record = Record(arguments.json, describe(device), arguments.merge)
    copied = copy_bandwidth(device)
    for shape in arguments.shapes:
        compare(shape, arguments, record, copied)


if __name__ == "__main__":
    main()
