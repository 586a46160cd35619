"""The tuner's choices for a model with random weights, how long it takes, and what it gains.

python -m benchmarks.tune --shape 0.6B --format q4_0 --rows 1,2,8,16 --context 512,4000
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from statistics import median
from time import perf_counter

import torch

from benchmarks.decode_rows import BLOCK, STEPS, step_seconds
from benchmarks.formats import FORMATS, random_quantized
from benchmarks.shapes import SHAPES, random_model
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.decode_runner import make_decode_runner
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.kernel_configs import describe, table_cuts
from engine.execute.cuda.tuner import Tuner
from engine.params import SamplingParams


def compared(times: Sequence[float], tuned: Sequence[float]) -> str:
    """Format the medians of both, and how many times faster the second is."""
    before, after = median(times), median(tuned)
    return f"{before * 1e6:,.1f} us a step, tuned {after * 1e6:,.1f}: {before / after:.3f} times as fast"


def main() -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--format", choices=list(FORMATS), default="bf16")
    parser.add_argument("--rows", default="1,2,8,16")
    parser.add_argument("--context", default="512,4000")
    given = parser.parse_args()
    rows, contexts = ([int(x) for x in text.split(",")] for text in (given.rows, given.context))
    spec, device, heads = SHAPES[given.shape], torch.device("cuda"), SHAPES[given.shape].attention
    make = random_model if given.format == "bf16" else partial(random_quantized, name=given.format)
    network = make(spec, dtype=torch.bfloat16, device=device, positions=max(contexts) + STEPS)
    blocks = max(rows) * -(-(max(contexts) + STEPS) // BLOCK)
    cache = KVCache.uniform(
        len(spec.layers), blocks, BLOCK, heads.kv_heads, heads.head_dim, torch.bfloat16, device
    )
    cache.kv.zero_()
    began = perf_counter()

    def tell(name: str) -> None:
        print(f"{perf_counter() - began:>6.1f} s  {name}", flush=True)

    tuner = Tuner.of(network, cache, True, given.shape, lambda job: job(), lambda: False)
    found = tuner.run(tell)
    tell(f"done, with {len(os.sched_getaffinity(0))} cores")
    for name, cut in found.chosen.items():
        print(f"    {name}: {describe(name, cut)}")
    for count, (before, after) in found.seconds.items():
        print(f"    {count} rows: {before * 1e6:,.1f} to {after * 1e6:,.1f} us a step")
    usual = table_cuts(device)
    for context in contexts:
        runners = [
            make_decode_runner(
                network, cache, "triton", context + STEPS, max(rows), Graphs(), True, cuts=usual.with_(chosen)
            )
            for chosen in ({}, found.chosen)
        ]
        for count in rows:
            runs: tuple[list[float], list[float]] = [], []  # in turns, because a GPU's speed varies
            for _ in range(3):
                for times, runner in zip(runs, runners, strict=True):
                    times += step_seconds(runner, count, context, SamplingParams(temperature=0.0))
            print(f"context {context:>6,}, {count:>3} rows: {compared(*runs)}", flush=True)


if __name__ == "__main__":
    main()
