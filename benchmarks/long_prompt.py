"""A long prompt arrives while other streams decode: by how much it extends their longest wait for a token.

    python -m benchmarks.long_prompt --json benchmarks/results/long_prompt.json [--streams 8] [--lengths 4096,16384]

The models have Qwen3's shapes in bf16 and random weights. The streams decode; for a while nothing else happens, then
a prompt arrives, and they are watched until shortly after its first token. "longest" is the largest gap between two
tokens of any stream in the quiet time, "beside it" is the largest gap beside the prompt, and "more" is the difference
(goal: at most 20 ms), measured where the engine hands tokens out. "first token" is that of the prompt, then that on
an idle engine. Everything is repeated with new prompts; medians and the worst value are reported.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks.machine import Budget, Record
from benchmarks.options import every_shape, names, numbers, parse, parser_of, rounds
from benchmarks.shapes import SHAPES, random_engine, random_prompt
from benchmarks.streams import Crowd, Request, room_for
from engine import Engine
from models.spec import ModelSpec

BEFORE = 512
"""Prompt tokens of the streams that decode."""
WARM = 32
"""Tokens of each stream before anything is counted, and again after the prompt's first one."""


def first_token_s(engine: Engine, prompt: list[int]) -> float:
    """Return seconds to the first token on an idle engine."""
    crowd = Crowd(engine, 0.0)
    stream = crowd.start(Request(prompt, 1))
    while not stream.done:
        crowd.wait()
    return stream.times[0] - stream.started


def watch(engine: Engine, spec: ModelSpec, streams: int, prompt: list[int], quiet: float) -> dict[str, float]:
    """Return gaps in seconds without and with the prompt; `quiet` is how many seconds pass without it."""
    crowd = Crowd(engine, 0.6)
    tokens = engine.context_length - BEFORE - 1
    seed = prompt[0] + 1000 * prompt[1]
    others = [crowd.start(Request(random_prompt(spec, BEFORE, seed + n), tokens)) for n in range(streams)]

    def more(count: int) -> None:
        goal = [len(stream.times) + count for stream in others]
        while any(len(stream.times) < wanted for stream, wanted in zip(others, goal, strict=True)):
            if crowd.wait() in others and any(stream.done for stream in others):
                raise RuntimeError("a stream ended too early to be watched; use a longer --context")

    more(WARM)
    began = time.perf_counter()
    while time.perf_counter() - began < quiet:
        more(1)
    arrived = time.perf_counter()
    long = crowd.start(Request(prompt, 2))
    while not long.times:
        more(1)
    more(WARM)
    ended = time.perf_counter()
    crowd.cancel()

    def gaps(begin: float, end: float) -> list[float]:
        return [gap for stream in others for gap in stream.gaps(begin, end)]

    without, beside = gaps(began, arrived), gaps(arrived, ended)
    return {
        "longest_quiet_s": max(without),
        "longest_beside_s": max(beside),
        "more_s": max(beside) - max(without),
        "usual_gap_quiet_s": statistics.median(without),
        "first_token_s": long.times[0] - long.started,
    }


def run(shape: str, arguments: argparse.Namespace, budget: Budget, record: Record) -> None:
    """Measure prompts of every length beside the streams of one shape."""
    spec, device = SHAPES[shape], torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options: dict[str, Any] = {"attention": arguments.attention} if arguments.attention else {}
    longest = max(arguments.lengths)
    print(
        f"\n{shape}, {arguments.streams} streams  [{budget.spent:.0f} s]\n"
        f"{'prompt':>10}{'usual gap':>12}{'longest':>12}{'beside it':>12}{'more':>10}{'worst':>10}"
        f"{'first token':>14}{'idle engine':>14}",
        flush=True,
    )
    with random_engine(
        spec,
        device=device,
        dtype=dtype,
        context=max(longest + 64, arguments.context),
        num_blocks=arguments.num_blocks,
        offload=0,
        **room_for(arguments.streams + 1),
        **options,
    ) as (engine, _):
        for length in arguments.lengths:
            found: list[dict[str, float]] = []
            idle: list[float] = []
            for attempt in rounds(arguments.repeats, budget):
                first = first_token_s(engine, random_prompt(spec, length, 7000 + 2 * attempt))
                prompt = random_prompt(spec, length, 7001 + 2 * attempt)
                seen = watch(engine, spec, arguments.streams, prompt, 2 * first)
                if attempt:
                    found.append(seen)
                    idle.append(first)
            if found:
                report(length, found, idle, record, shape)


def report(length: int, found: list[dict[str, float]], idle: list[float], record: Record, shape: str) -> None:
    """Print and record the medians."""
    middle = {name: statistics.median(seen[name] for seen in found) for name in found[0]}
    worst = max(seen["more_s"] for seen in found)
    figures = middle | {"worst_more_s": worst, "first_token_idle_s": statistics.median(idle), "runs": found}
    record.add(figures, "shapes", shape, "prompts", str(length))
    cells = [
        middle["usual_gap_quiet_s"],
        middle["longest_quiet_s"],
        middle["longest_beside_s"],
        middle["more_s"],
    ]
    shown = "".join(
        f"{1e3 * cell:>{width - 3}.1f} ms" for cell, width in zip(cells, (12, 12, 12, 10), strict=True)
    )
    print(
        f"{length:>10,}{shown}{1e3 * worst:>7.1f} ms{1e3 * middle['first_token_s']:>11.1f} ms"
        f"{1e3 * statistics.median(idle):>11.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["0.6B"])
    parser.add_argument(
        "--lengths", type=numbers, default=[4096, 16384], help="tokens of the prompt that arrives"
    )
    parser.add_argument("--streams", type=int, default=8, help="that decode meanwhile")
    parser.add_argument("--context", type=int, default=20_000, help="rows that a stream may reach at most")
    parser.add_argument("--num-blocks", type=int, help="of the KV cache; default: what the engine takes")
    parser.set_defaults(peers=[], repeats=5)
    arguments = parse(parser, ())
    every_shape(arguments, run, "streams")


if __name__ == "__main__":
    main()
