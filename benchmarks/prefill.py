"""Prompts at batch 1 in bf16 with published shapes and random weights: chatterm compared with its peers, in one run.

    python -m benchmarks.prefill --json benchmarks/results/prefill.json [--shapes 0.6B,8B] [--lengths 512,4096]
        [--llama-cpp DIR --gguf FILE] [--peers transformers,deterministic] [--formats q4_0,q8_0]
    python -m benchmarks.prefill --shapes Gemma-3-1B,Gemma-2-2B,Mistral-7B-v0.1 --peers pytorch,deterministic

Every prompt is new, so nothing is cached; evicted rows are dropped (see offload.py for the cost of keeping them). The
FLOPs of a prompt of T tokens are 2 * parameters * T (without embedding and head) + 2 * 2 * T^2 / 2 * Hq * D * L for
causal attention. "of matmul" is their rate as a share of that of a bf16 product of random 8192 x 8192 matrices,
measured in the same run. TTFT is the time from `engine.stream()` to the first token. "deterministic" is our engine
with the option that fixes the order of sums however a prompt is cut; its "cost" is the share of the prompt speed that
this takes. "pytorch" is our engine with PyTorch's attention, which has no graphs for prompts (`--attention sdpa`).
"transformers" only knows the shapes of Qwen3. `--formats` adds quantised weights, also random, to those in bf16;
their "cost" is the share of the bf16 speed that they take.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from benchmarks.formats import FORMATS, random_quantized
from benchmarks.machine import Budget, Record, describe, matmul_rate
from benchmarks.options import names, numbers, parse, parser_of
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.shapes import SHAPES, prefill_flops, random_engine, random_prompt, shared_tensors
from engine import Engine, SamplingParams
from engine.kernels.recording import wait_for
from models.spec import ModelSpec

DTYPE = torch.bfloat16
DETERMINISTIC = "ours, deterministic"
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "deterministic": (DETERMINISTIC, {"deterministic": True}),
    "pytorch": ("PyTorch's attention", {"attention": "sdpa"}),
}
"""Peers that are our engine: their display names, and the options in which they differ."""
PEERS = ("transformers", *OURS)


def warm_seconds(engine: Engine, prompt: list[int]) -> float:
    """Return seconds until the KV of a new prompt is present."""
    began = time.perf_counter()
    computed = engine.warm(prompt)
    wait_for(engine.device)  # the engine does not wait for results that are not read
    spent = time.perf_counter() - began
    if computed != len(prompt):
        raise RuntimeError(f"only {computed} of {len(prompt)} tokens were computed")
    return spent


def first_token_seconds(engine: Engine, prompt: list[int]) -> float:
    """Return seconds from `stream()` to the first token of a new prompt."""
    began = time.perf_counter()
    stream = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=2))
    next(stream)
    spent = time.perf_counter() - began
    for _ in stream:
        pass
    return spent


class Bench:
    """One run over shapes and lengths."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.repeats: int = arguments.repeats
        self.lengths: list[int] = arguments.lengths
        self.peers: list[str] = arguments.peers
        self.formats: list[str] = arguments.formats
        self.options = {"attention": arguments.attention} if arguments.attention else {}
        self.llama = LlamaCpp(arguments.llama_cpp, arguments.gguf) if arguments.llama_cpp else None
        self.budget = Budget(arguments.budget_s)
        self._seed = 0
        facts = describe(self.device) | {"dtype": "bfloat16", "repeats": self.repeats}
        self.record = Record(arguments.json, facts, arguments.merge)
        print(f"{facts['device']}, driver {facts['driver']}, {facts['versions']}", flush=True)

    def run(self, shape: str) -> None:
        """Measure every length with one shape."""
        spec = SHAPES[shape]
        self.rate = matmul_rate(self.device)
        self._note(self.rate / 1e12, shape, "matmul_TFLOP_per_s")
        print(
            f"\n{shape}: matmul {self.rate / 1e12:.1f} TFLOP/s  [{self.budget.spent:.0f} s]\n"
            f"{'':<24}{'tok/s':>12}{'TFLOP/s':>10}{'of matmul':>11}{'ms':>10}",
            flush=True,
        )
        with ExitStack() as stack:
            options = {"context": max(self.lengths) + 64, "offload": 0, **self.options}
            engine, model = stack.enter_context(
                random_engine(spec, device=self.device, dtype=DTYPE, **options)
            )
            print(f"  attention: {engine.figures().attention}", flush=True)
            others = {}
            for peer_name, (name, changed) in OURS.items():
                if peer_name in self.peers:
                    own = options | changed
                    others[name], _ = stack.enter_context(
                        random_engine(spec, device=self.device, dtype=DTYPE, network=model, **own)
                    )
            for form in self.formats:
                make = partial(random_quantized, spec, form, DTYPE, self.device, options["context"])
                others[f"ours, {form}"], _ = stack.enter_context(
                    random_engine(spec, device=self.device, dtype=DTYPE, make=make, **options)
                )
            peer = None
            if "transformers" in self.peers:
                from benchmarks.peers.transformers import Prefill

                peer = Prefill(spec, shared_tensors(model), self.device)
            for length in self.lengths:
                self._length(shape, spec, length, engine, others, peer)
        del engine, model, others, peer
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _length(
        self, shape: str, spec: ModelSpec, length: int, engine: Engine, others: dict[str, Engine], peer: Any
    ) -> None:
        runs: dict[str, list[float]] = {name: [] for name in ("ours", "ours, TTFT", *others)}
        if peer is not None:
            runs[peer.name] = []
        for attempt in range(self.repeats + 1):
            if not self.budget.allows(10.0):
                print(f"  {length}: stopped after {max(attempt - 1, 0)} rounds: no time", flush=True)
                break
            times = {
                "ours": warm_seconds(engine, self._prompt(spec, length)),
                "ours, TTFT": first_token_seconds(engine, self._prompt(spec, length)),
            }
            for name, other in others.items():
                times[name] = warm_seconds(other, self._prompt(spec, length))
            if peer is not None:
                try:
                    times[peer.name] = peer.prefill(self._prompt(spec, length))
                except torch.OutOfMemoryError:
                    print(f"  {length}: {peer.name} skipped: out of memory", flush=True)
                    runs.pop(peer.name, None)
                    peer = None
            if attempt:  # the first round only warms up
                for name in runs:
                    runs[name].append(times[name])
        for name, spent in runs.items():
            if spent:
                self._add(shape, spec, length, name, spent)
        if shape == "0.6B" and self.llama is not None and self.budget.allows(15.0):
            try:
                rates = self.llama.prefill(length, self.repeats)
                self._add(shape, spec, length, "llama.cpp", [length / rate for rate in rates])
                greedy = self.llama.greedy(length, self.repeats)
                self._add(shape, spec, length, "llama.cpp, TTFT", [greedy.ttft_s])
            except RuntimeError as error:
                print(f"  {length}: llama.cpp skipped: {error}", flush=True)
        self._ratios(shape, length)

    def _prompt(self, spec: ModelSpec, length: int) -> list[int]:
        self._seed += 1
        return random_prompt(spec, length, self._seed)

    def _add(self, shape: str, spec: ModelSpec, length: int, name: str, times: list[float]) -> None:
        spent = statistics.median(times)
        flops = prefill_flops(spec, length) / spent
        figures = {
            "tokens_per_s": length / spent,
            "TFLOP_per_s": flops / 1e12,
            "of_matmul": flops / self.rate,
            "seconds": spent,
            "runs_s": times,
        }
        self._note(figures, shape, "lengths", str(length), name)
        print(
            f"{f'{length}, {name}':<24}{length / spent:>12,.0f}{flops / 1e12:>10.1f}"
            f"{flops / self.rate:>11.1%}{spent * 1e3:>10.2f}",
            flush=True,
        )

    def _ratios(self, shape: str, length: int) -> None:
        rows = self.record.figures["shapes"][shape].get("lengths", {}).get(str(length), {})
        for name in (DETERMINISTIC, *(f"ours, {form}" for form in self.formats)):
            if name in rows:
                cost = 1.0 - rows["ours"]["seconds"] / rows[name]["seconds"]
                self._note(cost, shape, "lengths", str(length), name, "cost")
                print(
                    f"{'':<4}{name.removeprefix('ours, ')} costs {cost:.1%} of the prompt speed", flush=True
                )
        for name, peer in rows.items():
            mine = rows.get("ours, TTFT" if name.endswith("TTFT") else "ours")
            if mine is not None and not name.startswith("ours"):
                ratio = peer["seconds"] / mine["seconds"]
                self._note(ratio, shape, "lengths", str(length), name, "ours_over_it")
                print(f"{'':<4}ours over {name}: {ratio:.2f}", flush=True)

    def _note(self, value: Any, *keys: str) -> None:
        self.record.add(value, "shapes", *keys)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["0.6B", "8B"])
    parser.add_argument("--lengths", type=numbers, default=[512, 4096, 16384])
    parser.add_argument("--peers", type=names, default=["transformers"])
    quantized = tuple(name for name in FORMATS if name != "bf16")
    parser.add_argument("--formats", type=names, default=[], help=", ".join(quantized))
    arguments = parse(parser, PEERS, quantized)
    bench = Bench(arguments)
    for shape in arguments.shapes:
        bench.run(shape)
    print(f"{bench.budget.spent:.0f} s in all")


if __name__ == "__main__":
    main()
