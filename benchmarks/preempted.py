"""More streams than the KV cache holds: the cost of preempting some and resuming them later.

    python -m benchmarks.preempted --json benchmarks/results/preempted.json [--shapes 0.6B,8B] [--streams 16]

The models have Qwen3's shapes in bf16 and random weights. The same requests run in three engines that take turns: one
with a cache for all of them, one with a cache of half that size that offloads evicted rows to host memory and brings
them back, and one with half that computes them again. Prompts are short and answers long, so that all streams start and
some must be preempted. Reported are tokens/s of all streams over the whole time, the number of preemptions, and the
seconds that each one cost, which include the emptier steps. Host memory is pinned beforehand, the first round is
discarded, and medians are reported.
"""

import argparse
import statistics
import time
from contextlib import ExitStack

import torch

from benchmarks.machine import Budget, Record
from benchmarks.offload import Always
from benchmarks.options import every_shape, names, parse, parser_of, rounds
from benchmarks.shapes import SHAPES, kv_bytes, random_engine, random_prompt
from benchmarks.streams import Request, room_for, serve
from engine import Engine
from engine.attention.choose import choose_attention
from engine.cache import host_memory

WAYS = ("roomy", "offload", "recompute")


def round_of(engine: Engine, requests: list[Request]) -> tuple[float, int]:
    """Return seconds of all requests together, and the number of preemptions."""
    engine.loop.call(engine.pieces.blocks.evict_all)
    if engine.pieces.cache.host is not None:
        engine.pieces.cache.host.prepare(wait=True)
    began = time.perf_counter()
    streams = serve(engine, requests, len(requests), 0.6)
    spent = time.perf_counter() - began
    return spent, sum(stream.sequence.preemptions for stream in streams)


def run(shape: str, arguments: argparse.Namespace, budget: Budget, record: Record) -> None:
    """Measure all three ways with one shape."""
    spec, device = SHAPES[shape], torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = arguments.attention or "auto"
    size = choose_attention(attention, device, dtype, spec.attention.head_dim).block_size
    rows = arguments.prompt + arguments.tokens
    blocks = arguments.streams * (-(-rows // size) + 1)
    host = 2 * blocks * size * kv_bytes(spec, dtype)
    host_memory.AHEAD_BYTES = host
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    often: dict[str, list[int]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        engines = {}
        for way in WAYS:
            engines[way], _ = stack.enter_context(
                random_engine(
                    spec,
                    device=device,
                    dtype=dtype,
                    context=rows + size,
                    num_blocks=blocks if way == "roomy" else blocks // 2,
                    attention=attention,
                    **room_for(arguments.streams),
                    offload=host if way == "offload" else 0,
                )
            )
            if (tier := engines[way].pieces.cache.host) is not None:
                tier.costs = Always()
        for attempt in rounds(arguments.repeats, budget):
            requests = [
                Request(random_prompt(spec, arguments.prompt, 1000 * attempt + n), arguments.tokens)
                for n in range(arguments.streams)
            ]
            for way, engine in engines.items():
                spent, preemptions = round_of(engine, requests)
                if attempt:
                    times[way].append(spent)
                    often[way].append(preemptions)
    if times["roomy"]:
        report(shape, arguments, times, often, record)


def report(
    shape: str,
    arguments: argparse.Namespace,
    times: dict[str, list[float]],
    often: dict[str, list[int]],
    record: Record,
) -> None:
    """Print and record the medians."""
    print(
        f"\n{shape}: {arguments.streams} streams, {arguments.prompt} tokens in, {arguments.tokens} out\n"
        f"{'':<12}{'tok/s':>10}{'seconds':>10}{'preempted':>12}{'each cost':>12}"
    )
    roomy = statistics.median(times["roomy"])
    for way in WAYS:
        spent, count = statistics.median(times[way]), statistics.median(often[way])
        rate = arguments.streams * arguments.tokens / spent
        figures: dict[str, object] = {
            "tokens_per_s": rate,
            "seconds": spent,
            "preemptions": count,
            "runs_s": times[way],
        }
        each = ""
        if way != "roomy" and count:
            figures["seconds_each"] = (spent - roomy) / count
            each = f"{1e3 * (spent - roomy) / count:.1f} ms"
        record.add(figures, "shapes", shape, way)
        print(f"{way:<12}{rate:>10,.0f}{spent:>10.2f}{count:>12.0f}{each:>12}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["0.6B"])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=1792, help="tokens of each answer")
    parser.set_defaults(peers=[], repeats=3)
    arguments = parse(parser, ())
    every_shape(arguments, run)


if __name__ == "__main__":
    main()
