"""Throughput of many streams: chatterm compared with nano-vllm, or with an older tree of itself, in one run.

    python -m benchmarks.batch --json benchmarks/results/batch.json [--streams 1,2,8,64,256] [--peers ours,nano-vllm]
        [--older TREE [--older-streams 1]] [--shapes 0.6B,8B]
    python -m benchmarks.batch --model smollm2 --device cpu --streams 1,8 --inputs 32,64 --outputs 64,128

The workload is nano-vllm's own: prompts of 100 to 1,024 random tokens, answers of 100 to 1,024 tokens, temperature
0.6, end-of-turn tokens ignored, random weights. At most the given number of streams run at a time. With few streams,
four requests follow each other on each, so that a run lasts some seconds. tokens/s are the generated tokens of all
requests divided by the time from the first request to the last token, prompts included. Nothing is served from the
cache, because every run has new prompts of the same lengths.

Each contestant is a process of its own on the same device (PYTHONPATH says where `nanovllm` is). They take turns; the
first round is discarded, and medians are reported. "of bound" is the share of what memory and arithmetic allow. Per
step, the bound is the longer of two times: reading the weights once and the KV of all running streams at the speed of
a large copy, or computing the products at the rate of random 8192 x 8192 matrices. For a prompt it is the time to
compute. Both speeds are measured in the same run, before the contestants start.
"""

import argparse
import gc
import os
import statistics
from collections.abc import Sequence as Items
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.cpu_chat import cpu_name
from benchmarks.machine import Budget, Record, copy_bandwidth, describe, matmul_rate
from benchmarks.options import names, numbers, parse, parser_of
from benchmarks.peers.serving import Server, Workload
from benchmarks.shapes import SHAPES, kv_bytes, prefill_flops, weight_bytes
from models.spec import ModelSpec
from models.weights.slots import layer_parameters

PEERS = ("ours", "nano-vllm")
FOLLOWING, FEW = 4, 32
"""With fewer than FEW streams, FOLLOWING requests follow each other on each stream."""
HERE = Path(__file__).resolve().parents[1]
OLDER = "older tree"


def workload(
    streams: int, inputs: Items[int], outputs: Items[int], tokens_up_to: int, number: int
) -> Workload:
    """Return workload `number`: its tokens, up to `tokens_up_to`, depend on the number, its lengths do not."""
    requests = streams if streams >= FEW else FOLLOWING * streams
    lengths, content = Random(0), Random(number)
    prompts = [
        [content.randint(0, tokens_up_to) for _ in range(lengths.randint(*inputs))] for _ in range(requests)
    ]
    tokens = [lengths.randint(*outputs) for _ in range(requests)]
    return Workload(prompts, tokens, streams, 0.6)


def most_rows(work: Workload) -> int:
    """Return the largest number of KV rows that the workload may hold at a time."""
    rows = [len(prompt) + tokens for prompt, tokens in zip(work.prompts, work.tokens, strict=True)]
    return sum(sorted(rows)[-work.at_once :])


def bound_seconds(spec: ModelSpec, work: Workload, bandwidth: float, rate: float) -> float:
    """Return the least seconds for the bytes (bf16, `bandwidth` in bytes/s) and the products (`rate` in FLOP/s).

    Of overlapping work, each step counts only the longer part. A prompt yields the first token of its answer.
    """
    dtype = torch.bfloat16
    weights, row = weight_bytes(spec, dtype), kv_bytes(spec, dtype)
    per_token = 2.0 * (layer_parameters(spec) + spec.vocab_size * spec.hidden_size)
    per_row = 4.0 * spec.attention.heads * spec.attention.head_dim * len(spec.layers)
    left = [(len(prompt), tokens - 1) for prompt, tokens in zip(work.prompts, work.tokens, strict=True)][::-1]
    running: list[tuple[int, int]] = []
    seconds = 0.0
    while left or running:
        while left and len(running) < work.at_once:
            length, tokens = left.pop()
            seconds += prefill_flops(spec, length) / rate
            running.append((length + 1, tokens))
        running = [(rows, tokens) for rows, tokens in running if tokens]
        rows = sum(rows for rows, _ in running)
        if running:
            products = per_token * len(running) + per_row * rows
            seconds += max((weights + row * rows) / bandwidth, products / rate)
        running = [(rows + 1, tokens - 1) for rows, tokens in running]
    return seconds


class Bench:
    """One run over shapes and numbers of streams."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.given = arguments
        self.device = torch.device(arguments.device)
        self.budget = Budget(arguments.budget_s)
        facts = describe(self.device) | {
            "workload": {
                "input_tokens": arguments.inputs,
                "output_tokens": arguments.outputs,
                "temperature": 0.6,
            },
            "repeats": arguments.repeats,
        }
        if self.device.type == "cpu":
            facts |= {"cpu": cpu_name(), "cores": os.cpu_count()}
        self.record = Record(arguments.json, facts, arguments.merge)
        print(f"{facts['device']}, driver {facts['driver']}, {facts['versions']}", flush=True)

    def run(self, what: str) -> None:
        """Measure all numbers of streams with one shape, or with the model `what`."""
        spec = SHAPES.get(what)
        if spec is not None and self.device.type == "cuda":
            self.bandwidth, self.rate = copy_bandwidth(self.device), matmul_rate(self.device)
            gc.collect()
            torch.cuda.empty_cache()
            self._note(self.bandwidth / 1e9, what, "copy_GB_per_s")
            self._note(self.rate / 1e12, what, "matmul_TFLOP_per_s")
        servers = self._servers(what, spec)
        try:
            vocabulary = spec.vocab_size if spec is not None else servers[0].about["vocabulary"]
            self.highest = min(10_000, vocabulary - 1)
            for streams in self.given.streams:
                self._streams(what, spec, streams, servers)
        finally:
            for server in servers:
                server.close()

    def _work(self, streams: int, number: int) -> Workload:
        return workload(streams, self.given.inputs, self.given.outputs, self.highest, number)

    def _servers(self, what: str, spec: ModelSpec | None) -> list[Server]:
        self.highest = 1
        most = max(self.given.streams)
        rows = max(most_rows(self._work(streams, 0)) for streams in self.given.streams)
        ours = ["--device", self.given.device, "--streams", str(most), "--rows", str(rows)]
        ours += ["--context", str(self.given.inputs[1] + self.given.outputs[1] + 64)]
        ours += ["--shape", what] if spec is not None else ["--model", what]
        if self.given.attention:
            ours += ["--attention", self.given.attention]
        module = "benchmarks.peers.our_streams"
        kinds = []
        if "ours" in self.given.peers:
            kinds.append(("ours", module, ours, [HERE]))
        if self.given.older is not None:
            # Its own benchmarks come first, too; modules that it lacks are imported from here.
            kinds.append((OLDER, module, ours, [self.given.older, HERE]))
        if "nano-vllm" in self.given.peers and spec is not None:
            shape = ["--shape", what, "--context", "4096", "--share", "0.9"]  # nano-vllm's own setting
            kinds.append(("nano-vllm", "benchmarks.peers.nano_vllm", shape, [HERE]))
        servers = []
        for kind in kinds:
            server = Server(*kind)
            servers.append(server)
            self._note(server.about, what, "servers", server.name)
            print(f"{what}, {server.name}: {server.about}  [{self.budget.spent:.0f} s]", flush=True)
        return servers

    def _streams(self, what: str, spec: ModelSpec | None, streams: int, servers: list[Server]) -> None:
        if not self.budget.allows(0.0):
            print(f"{what}, {streams} streams: skipped: no time", flush=True)
            return
        asked = [s for s in servers if s.name != OLDER or streams in self.given.older_streams]
        runs: dict[str, list[float]] = {server.name: [] for server in asked}
        for attempt in range(self.given.repeats + 1):
            work = self._work(streams, attempt)
            for server in asked:
                spent = server.seconds(work)
                if attempt:
                    runs[server.name].append(spent)
        where = (what, "streams", str(streams))
        self._note(work.generated, *where, "generated_tokens")
        bound = None
        if spec is not None and self.device.type == "cuda":
            bound = bound_seconds(spec, work, self.bandwidth, self.rate)
            self._note(work.generated / bound, *where, "bound_tokens_per_s")
        middle = {name: statistics.median(spent) for name, spent in runs.items()}
        print(f"{what}, {streams} streams, {len(work.tokens)} requests  [{self.budget.spent:.0f} s]")
        for name, spent in middle.items():
            figures = {"tokens_per_s": work.generated / spent, "seconds": spent, "runs_s": runs[name]}
            line = f"    {name:<14}{work.generated / spent:>10,.0f} tok/s{spent:>9.2f} s"
            if bound is not None:
                figures["of_bound"] = bound / spent
                line += f"{bound / spent:>8.1%} of bound"
            if name != "ours" and "ours" in middle:
                figures["ours_over_it"] = spent / middle["ours"]
                line += f",  ours over it: {spent / middle['ours']:.2f}"
            self._note(figures, *where, name)
            print(line, flush=True)

    def _note(self, value: Any, *keys: str) -> None:
        self.record.add(value, "shapes", *keys)


def _range(text: str) -> list[int]:
    low, high = numbers(text)
    return [low, high]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["0.6B"])
    parser.add_argument("--model", help="a model to load in place of random weights; then only ours is asked")
    parser.add_argument("--streams", type=numbers, default=[1, 2, 8, 64, 256])
    parser.add_argument("--peers", type=names, default=list(PEERS))
    parser.add_argument(
        "--inputs", type=_range, default=[100, 1024], help="least and most tokens of a prompt"
    )
    parser.add_argument(
        "--outputs", type=_range, default=[100, 1024], help="least and most tokens of an answer"
    )
    parser.add_argument("--older", type=Path, help="a folder with an older tree of chatterm")
    parser.add_argument("--older-streams", type=numbers, default=[1], help="what the older tree is asked for")
    parser.set_defaults(repeats=3)
    arguments = parse(parser, PEERS)
    bench = Bench(arguments)
    for what in [arguments.model] if arguments.model is not None else arguments.shapes:
        bench.run(what)
    print(f"{bench.budget.spent:.0f} s in all")


if __name__ == "__main__":
    main()
