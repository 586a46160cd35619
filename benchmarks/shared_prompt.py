"""Several answers to one long prompt: the time of attention with and without sharing the prompt's rows.

    python -m benchmarks.shared_prompt --json benchmarks/results/shared_prompt.json [--streams 16] [--lengths 1024,8192]

The models have Qwen3's shapes in bf16 and random weights. The streams decode after one prompt that they all share,
after prompts of their own of the same length, and after short ones, in turns. The extra time of a step compared with
short prompts is the attention to the prompt: "shared" and "separate" in ms, and "times" is their ratio (goal: at
least 6 for 16 streams and 8,192 tokens). Prompts are computed beforehand; steps are timed where the engine hands
tokens out. Medians of the repeats are reported.
"""

import argparse
import statistics

import torch

from benchmarks.machine import Budget, Record
from benchmarks.options import every_shape, names, numbers, parse, parser_of, rounds
from benchmarks.shapes import SHAPES, random_engine, random_prompt
from benchmarks.streams import Crowd, Request, room_for
from engine import Engine
from engine.attention.choose import choose_attention
from models.spec import ModelSpec

SHORT = 64
"""Tokens of a short prompt."""
WARM = 16
"""Tokens of every stream before anything is counted, and left over at the end."""


def step_seconds(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Return the median seconds between two tokens while all streams decode."""
    for prompt in prompts:
        engine.warm(prompt)
    crowd = Crowd(engine, 0.6)
    streams = [crowd.start(Request(prompt, tokens + 2 * WARM)) for prompt in prompts]
    while crowd.running:
        crowd.wait()
    begin = max(stream.times[WARM] for stream in streams)
    end = min(stream.times[-WARM] for stream in streams)
    if end <= begin:
        raise RuntimeError("the streams were not there together; use more --tokens")
    return statistics.median(gap for stream in streams for gap in stream.gaps(begin, end))


def prompts_of(spec: ModelSpec, way: str, streams: int, length: int, seed: int) -> list[list[int]]:
    """Return a prompt for each stream."""
    if way == "shared":
        common = random_prompt(spec, length - 1, seed)
        # The last token differs, as messages after a common system prompt do.
        return [[*common, n] for n in range(streams)]
    return [random_prompt(spec, SHORT if way == "short" else length, seed + n) for n in range(streams)]


def run(shape: str, arguments: argparse.Namespace, budget: Budget, record: Record) -> None:
    """Measure every length with one shape."""
    spec, device = SHAPES[shape], torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = arguments.attention or "auto"
    block = choose_attention(attention, device, dtype, spec.attention.head_dim).block_size
    streams, tokens = arguments.streams, arguments.tokens
    rows = max(arguments.lengths) + tokens + 2 * WARM + 1
    print(
        f"\n{shape}, {streams} streams  [{budget.spent:.0f} s]\n"
        f"{'prompt':>10}{'short step':>13}{'shared':>12}{'separate':>12}{'times':>8}",
        flush=True,
    )
    with random_engine(
        spec,
        device=device,
        dtype=dtype,
        context=rows,
        num_blocks=(streams + 1) * (-(-rows // block) + 1),
        attention=attention,
        offload=0,
        **room_for(streams),
    ) as (engine, _):
        for length in arguments.lengths:
            runs: dict[str, list[float]] = {"short": [], "shared": [], "separate": []}
            for attempt in rounds(arguments.repeats, budget):
                for way, found in runs.items():
                    engine.loop.call(engine.pieces.blocks.evict_all)
                    seed = 100_000 * attempt + length
                    spent = step_seconds(engine, prompts_of(spec, way, streams, length, seed), tokens)
                    if attempt:
                        found.append(spent)
            if runs["short"]:
                report(length, runs, record, shape)


def report(length: int, runs: dict[str, list[float]], record: Record, shape: str) -> None:
    """Print and record the medians."""
    step = {way: statistics.median(found) for way, found in runs.items()}
    shared, separate = (step[way] - step["short"] for way in ("shared", "separate"))
    times = separate / shared if shared > 0 else float("inf")
    figures = {
        "step_s": step,
        "attention_shared_s": shared,
        "attention_separate_s": separate,
        "times": times,
        "runs_s": runs,
    }
    record.add(figures, "shapes", shape, "prompts", str(length))
    print(
        f"{length:>10,}{1e3 * step['short']:>10.3f} ms{1e3 * shared:>9.3f} ms{1e3 * separate:>9.3f} ms{times:>8.1f}",
        flush=True,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["0.6B"])
    parser.add_argument("--lengths", type=numbers, default=[1024, 8192], help="tokens of the shared prompt")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="tokens that are timed")
    parser.set_defaults(peers=[], repeats=3)
    arguments = parse(parser, ())
    every_shape(arguments, run, "streams")


if __name__ == "__main__":
    main()
