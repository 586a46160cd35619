"""Microseconds for sampling one token inside a CUDA graph, compared with the plain torch sampler in the same run.

    python -m benchmarks.sampler [--vocab 151936] [--repeats 50] [--rows 1]

A graph contains `repeats` samplings of bf16 logits, so that launches from the host do not count. The plain sampler runs
launch by launch, because it cannot be captured, and its token is read. It draws for one row; the graph draws for
`--rows` rows at once. Without a GPU, the native CPU sampler is compared with the plain one, both on one thread.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch

from benchmarks.machine import describe
from engine.device import has_pdl
from engine.params import SamplingParams
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import SamplerState, sample

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
    "temperature": SamplingParams(temperature=0.7),
    "min_p": SamplingParams(temperature=0.7, min_p=0.05),
    "min_p, T=2": SamplingParams(temperature=2.0, min_p=0.1),
    "top_k 20, top_p": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top_k 128": SamplingParams(temperature=1.0, top_k=128),
    "top_p": SamplingParams(temperature=0.3, top_p=0.9),
    "top_p, flat": SamplingParams(temperature=0.7, top_p=0.9),
    "frequency": SamplingParams(temperature=0.7, top_k=20, frequency_penalty=0.5),
    "bias": SamplingParams(temperature=0.7, top_k=20, logit_bias={5: 1.0, 700: -2.0}),
    "logprobs": SamplingParams(temperature=0.7, top_k=20, logprobs=5),
    "top_k 500, top_p": SamplingParams(temperature=0.7, top_k=500, top_p=0.9),
}


def captured(work: Callable[[], object], repeats: int) -> Callable[[], object]:
    """Return a replay of `work`, `repeats` times, after it has run once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    return graph.replay


def microseconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Return the median time of `work` on the GPU, after a few discarded rounds."""
    times = []
    for _ in range(rounds + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return float(statistics.median(times[3:]))


def on_cpu(vocab: int, repeats: int) -> None:
    """Measure the native kernels in turns with the plain sampler."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    print(describe(device))
    print(f"{'setting':<20} {'us':>8} {'plain us':>9} {'ratio':>6}")
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 3
    for name, params in SETTINGS.items():
        native = SamplerState.create(params, [], vocab, device)
        times: tuple[list[float], list[float]] = [], []
        for _ in range(repeats):
            for state, taken in zip((native, replace(native, natively=None)), times, strict=True):
                began = perf_counter()
                sample(logits, state)
                taken.append((perf_counter() - began) * 1e6)
        ours, plain = map(statistics.median, times)
        print(f"{name:<20} {ours:8.1f} {plain:9.1f} {plain / ours:6.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--rows", type=int, default=1)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        on_cpu(arguments.vocab, arguments.repeats)
        return
    device = torch.device("cuda")
    pdl_possible = has_pdl(torch.device("cuda"))
    print(describe(device))
    logits = torch.randn(arguments.vocab, generator=torch.Generator(device).manual_seed(0), device=device)
    logits = (logits * 3).bfloat16()
    rows = arguments.rows
    batch = logits.repeat(rows, 1)
    active = torch.arange(rows, dtype=torch.int32, device=device)
    counters = torch.zeros(rows, 2, dtype=torch.int64, device=device)
    print(f"{'setting':<20} {'draw':<5} {'us':>7} {'with PDL':>9} {'plain us':>9} {'ratio':>6}")
    for name, params in SETTINGS.items():
        ours: dict[bool, float] = {}
        for pdl in (False, True) if pdl_possible else (False,):
            sampler = DeviceSampler(arguments.vocab, rows, device, pdl=pdl)
            for slot in range(rows):
                sampler.load(slot, params, [], [], seed=1 + slot)
            draw = sampler.draw(range(rows))
            replay = captured(partial(sampler.sample, batch, active, counters, draw), arguments.repeats)
            ours[pdl] = microseconds(replay) / arguments.repeats
        state = SamplerState.create(params, [], arguments.vocab, device)
        plain = microseconds(partial(sample, logits, state), arguments.repeats)
        overlapped = f"{ours[True]:9.2f}" if pdl_possible else f"{'-':>9}"
        best = min(ours.values())
        kind = f"{'race' if draw.race else 'any':<5}"
        print(f"{name:<20} {kind} {ours[False]:7.2f} {overlapped} {plain:9.2f} {plain / best:6.1f}")


if __name__ == "__main__":
    main()
