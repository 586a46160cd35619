"""Seconds per decode step alone, by number and length of the sequences; the tokens are not read.

python -m benchmarks.decode_rows --shape 0.6B --rows 1,2,8,64,256 --context 512,1024
"""

import argparse
from time import perf_counter

import torch

from benchmarks.shapes import SHAPES, random_model
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.decode_runner import DecodeRunner, make_decode_runner
from engine.execute.cuda.graphs import Graphs
from engine.params import SamplingParams

BLOCK, STEPS, ROUNDS, PROFILED = 32, 64, 5, 8


def step_seconds(runner: DecodeRunner, rows: int, context: int, params: SamplingParams) -> list[float]:
    """Return seconds per step of `rows` sequences from row `context` on, for each round but the first."""
    slots = list(range(rows))
    blocks = -(-(context + STEPS) // BLOCK)
    found = []
    for round in range(ROUNDS + 1):
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
        if round:
            found.append((perf_counter() - began) / STEPS)
    return sorted(found)


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


def main() -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--context", default="512,1024")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--plain", action="store_true", help="the plain modules")
    parser.add_argument("--profile", action="store_true", help="which kernels take how long")
    given = parser.parse_args()
    rows, contexts = ([int(x) for x in text.split(",")] for text in (given.rows, given.context))
    spec, device = SHAPES[given.shape], torch.device("cuda")
    network = random_model(spec, torch.bfloat16, device, max(contexts) + STEPS)
    blocks = max(rows) * -(-(max(contexts) + STEPS) // BLOCK)
    heads = spec.attention
    cache = KVCache(len(spec.layers), blocks, BLOCK, heads.kv_heads, heads.head_dim, torch.bfloat16, device)
    cache.kv.zero_()
    for context in contexts:
        runner = make_decode_runner(
            network, cache, "triton", context + STEPS, max(rows), Graphs(), not given.plain
        )
        for count in rows:
            times = step_seconds(runner, count, context, SamplingParams(temperature=given.temperature))
            middle = times[len(times) // 2]
            print(
                f"{given.shape}, context {context:>6}, {count:>3} rows: {middle * 1e6:>8.0f} us a step "
                f"({times[0] * 1e6:.0f} to {times[-1] * 1e6:.0f}), {count / middle:>8.0f} tokens/s",
                flush=True,
            )
            if given.profile:
                print(kernel_times(runner, count, context), flush=True)


if __name__ == "__main__":
    main()
