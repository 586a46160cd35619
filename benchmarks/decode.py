"""Decoding at batch 1 with the shapes of Qwen3 and random weights: chatterm compared with its peers, in one run.

    python -m benchmarks.decode --json benchmarks/results/decode.json [--shapes 0.6B,1.7B] [--contexts 128,512]
        [--formats bf16,q8_0,q4_0,q4_k_m] [--kv-dtype auto,fp8,int8]
        [--peers ours,transformers,compiled,compiled-max,llama.cpp] [--llama-cpp DIR --gguf FILE]

All peers share one copy of the weights and take turns; medians are reported, and the first round is discarded. GB/s
are the bytes that a token must move (weights and KV) divided by its time; "of copy" is that rate as a share of what a
large device-to-device copy reads and writes in the same run. llama.cpp is a separate program with a separate model
(0.6B only); it runs between the rounds of the others. Errors are those of the logits after each token of a random
text: ours from decode steps, those of transformers from one pass. Only chatterm runs quantised weights. They are made
on the device, with the types of llama.cpp's recipes for each matrix, and their bytes are those of our packing. For a
mixture of experts (30B-A3B, only chatterm) the bytes are those of the experts that a token uses.
"""

import argparse
import gc
import statistics
import time
from functools import partial
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.formats import FORMATS, random_quantized, read_bytes
from benchmarks.machine import Budget, Record, copy_bandwidth, describe
from benchmarks.options import names, numbers, parse, parser_of
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.shapes import SHAPES, cache_bytes, random_engine, random_prompt, shared_tensors
from engine import Engine
from engine.cache.kv_rows import token_bytes
from engine.execute.compatibility import has_experts
from engine.kernels.recording import wait_for
from models.network import Network
from models.spec import ModelSpec

PEERS = ("ours", "transformers", "compiled", "compiled-max", "llama.cpp")
ERROR_TOKENS, ERROR_PROMPTS = 512, 2
DTYPE = torch.bfloat16
FIRST_COST_S = {"transformers": 60.0, "compiled": 40.0, "compiled-max": 90.0}
"""Estimated seconds to compile a shape, used until one has been compiled."""


class Peer(Protocol):
    """A method that decodes at a context, in this process."""

    name: str

    def prepare(self, context: int, steps: int) -> str | None:
        """Compile, capture, allocate; may return what was chosen."""
        ...

    def decode(self, context: int, steps: int) -> float:
        """Return seconds per token."""
        ...


class Bench:
    """One run over shapes and contexts, with its record and its time budget."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.steps: int = arguments.steps
        self.repeats: int = arguments.repeats
        self.contexts: list[int] = arguments.contexts
        self.wanted: list[str] = arguments.peers
        self.options: dict[str, Any] = {}
        if arguments.attention:
            self.options["attention"] = arguments.attention
        if arguments.no_graph:
            self.options["graphs"] = False
        self.llama = LlamaCpp(arguments.llama_cpp, arguments.gguf) if arguments.llama_cpp else None
        self.budget = Budget(arguments.budget_s)
        self.first_cost = dict(FIRST_COST_S)
        facts = describe(self.device) | {"dtype": "bfloat16", "steps": self.steps, "repeats": self.repeats}
        self.record = Record(arguments.json, facts, arguments.merge)
        print(f"{facts['device']}, driver {facts['driver']}, {facts['versions']}", flush=True)

    def run(self, size: str, form: str, kv_dtype: str) -> None:
        """Measure one shape with weights in one of FORMATS and a KV cache of `kv_dtype`."""
        spec, shape = SHAPES[size], size if form == "bf16" else f"{size} {form}"
        if kv_dtype != "auto":
            shape += f" kv {kv_dtype}"
        self.bandwidth = copy_bandwidth(self.device)
        room = max(self.contexts) + self.steps + 64
        with random_engine(
            spec,
            device=self.device,
            dtype=DTYPE,
            context=room,
            make=None if form == "bf16" else partial(random_quantized, spec, form, DTYPE, self.device, room),
            kv_dtype=kv_dtype,
            **self.options,
        ) as (engine, model):
            self.weights, self.cache = read_bytes(model), partial(cache_bytes, spec, DTYPE, kind=kv_dtype)
            self._note(self.weights, shape, "weight_bytes")
            self._note(token_bytes(spec, DTYPE, kv_dtype), shape, "kv_bytes_per_token")
            print(
                f"\n{shape}: {self.weights / 1e9:.3f} GB of weights a token, copy {self.bandwidth / 1e9:.0f} GB/s, "
                f"floor {self.bandwidth / self.weights:.0f} tok/s; {engine.figures().decode}  "
                f"[{self.budget.spent:.0f} s]",
                flush=True,
            )
            peers = self._peers(spec, engine, model, room, shape == size)
            if size in ("0.6B", "tiny") and form == "bf16":
                self._errors(shape, spec, engine, model)
            costs = dict(self.first_cost)
            for context in self.contexts:
                self._context(shape, context, peers, costs)
        del peers, engine, model
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._table(shape)

    def _peers(self, spec: ModelSpec, engine: Engine, model: Network, room: int, plain: bool) -> list[Peer]:
        from benchmarks.peers.compiled import Compiled
        from benchmarks.peers.ours import BareLoop, Stream
        from benchmarks.peers.transformers import Transformers

        peers: list[Peer] = []
        for name in self.wanted:
            if name == "ours":
                peers += [BareLoop(engine), Stream(engine, spec)]
            elif not plain or has_experts(spec):
                continue
            elif name == "transformers":
                peers.append(Transformers(spec, shared_tensors(model), self.device))
            elif name == "compiled":
                peers.append(Compiled(name, spec, model, room, None))
            elif name == "compiled-max":
                peers.append(Compiled(name, spec, model, room, "max-autotune-no-cudagraphs"))
        return peers

    def _context(self, shape: str, context: int, peers: list[Peer], costs: dict[str, float]) -> None:
        """Prepare every peer that still fits into the budget, then measure all of them in turn."""
        print(f"  context {context}  [{self.budget.spent:.0f} s]", flush=True)
        # All figures of a row are of one run: those of an earlier run would not be comparable.
        self._note({"copy_GB_per_s": self.bandwidth / 1e9, "peers": {}}, shape, "contexts", str(context))
        ready: list[Peer] = []
        for peer in list(peers):
            if not self.budget.allows(costs.get(peer.name, 0.0)):
                self._skip(shape, context, peer.name, f"no time: it needs about {costs[peer.name]:.0f} s")
                continue
            began = time.monotonic()
            try:
                how = peer.prepare(context, self.steps)
                wait_for(self.device)
            except Exception as error:  # noqa: BLE001 - the other peers are still measured
                peers.remove(peer)
                self._skip(shape, context, peer.name, _line(error))
                continue
            costs[peer.name] = time.monotonic() - began
            if context == self.contexts[0]:
                self.first_cost[peer.name] = costs[peer.name]
            ready.append(peer)
            if how is not None:
                self._note(how, shape, "contexts", str(context), "peers", peer.name, "how")
                print(f"    {peer.name:<16}{how}, ready in {costs[peer.name]:.1f} s", flush=True)
        if shape == "0.6B" and self.llama is not None and "llama.cpp" in self.wanted:
            self._llama(shape, context, self.llama)
        runs: dict[str, list[float]] = {peer.name: [] for peer in ready}
        for attempt in range(self.repeats + 1):
            for peer in ready:
                gc.collect()  # garbage of one peer must not be collected in another's time
                spent = peer.decode(context, self.steps)
                if attempt:
                    runs[peer.name].append(1 / spent)
        for name, rates in runs.items():
            self._add(shape, context, name, rates)

    def _llama(self, shape: str, context: int, llama: LlamaCpp) -> None:
        if not self.budget.allows(15.0):
            self._skip(shape, context, "llama.cpp", "no time")
            return
        try:
            self._add(shape, context, "llama.cpp", llama.decode(context, self.steps, self.repeats))
            greedy = llama.greedy(context, self.repeats)
            self._add(shape, context, "llama.cpp, greedy", [greedy.tokens_per_s])
        except RuntimeError as error:
            self._skip(shape, context, "llama.cpp", _line(error))

    def _errors(self, shape: str, spec: ModelSpec, engine: Engine, model: Network) -> None:
        """Measure the error against fp32 of the logits of our decode steps, and of transformers' in bf16."""
        from benchmarks.peers import transformers as peer
        from benchmarks.stepping import forced_logits

        prompts = [random_prompt(spec, ERROR_TOKENS, 900 + n) for n in range(ERROR_PROMPTS)]
        errors: dict[str, list[float]] = {"transformers, bf16": [], "ours, bf16": []}
        try:
            tensors = shared_tensors(model)
            exact = peer.network_of(spec, {name: t.float() for name, t in tensors.items()}, self.device)
            rounded = peer.network_of(spec, tensors, self.device)
            for prompt in prompts:
                reference = peer.all_logits(exact, prompt, self.device)[1:]
                theirs = peer.all_logits(rounded, prompt, self.device)[1:]
                mine = forced_logits(engine, [prompt], len(prompt) - 1)[0]
                errors["transformers, bf16"] += relative_errors(theirs, reference)
                errors["ours, bf16"] += relative_errors(mine, reference)
            for name, found in errors.items():
                self._error(shape, name, found)
        except Exception as error:  # noqa: BLE001 - the speeds are still worth having
            print(f"  logits against fp32: not measured: {_line(error)}", flush=True)

    def _error(self, shape: str, name: str, errors: list[float]) -> None:
        figures = {"median": statistics.median(errors), "max": max(errors), "positions": len(errors)}
        self._note(figures, shape, "logits_against_fp32", name)
        print(
            f"  logits against fp32, {len(errors)} positions: {name:<20}relative error, median "
            f"{figures['median']:.3e}, maximum {figures['max']:.3e}",
            flush=True,
        )

    def _add(self, shape: str, context: int, name: str, rates: list[float]) -> None:
        rate = statistics.median(rates)
        moved = rate * (self.weights + self.cache(context + (self.steps + 1) / 2))
        where = (shape, "contexts", str(context), "peers", name)
        share = moved / self.bandwidth
        for key, value in (
            ("tokens_per_s", rate),
            ("GB_per_s", moved / 1e9),
            ("of_copy", share),
            ("runs", rates),
        ):
            self._note(value, *where, key)
        spread = (max(rates) - min(rates)) / rate
        print(
            f"    {name:<20}{rate:>8.1f} tok/s{moved / 1e9:>8.0f} GB/s{share:>7.1%} of copy, spread {spread:.1%}",
            flush=True,
        )

    def _skip(self, shape: str, context: int, name: str, why: str) -> None:
        self._note(why, shape, "contexts", str(context), "peers", name, "skipped")
        print(f"    {name:<20}skipped: {why}", flush=True)

    def _note(self, value: Any, *keys: str) -> None:
        self.record.add(value, "shapes", *keys)

    def _table(self, shape: str) -> None:
        contexts = self.record.figures["shapes"][shape]["contexts"]
        rows = {context: row["peers"] for context, row in contexts.items()}
        for context, figures in rows.items():
            for name, ratio in ratios(figures).items():
                self._note(ratio, shape, "contexts", context, "peers", name, "ours_over_it")
        print(f"\n{table(shape, rows)}\n", flush=True)


def relative_errors(logits: Tensor, reference: Tensor) -> list[float]:
    """Return |error| / |reference| (2-norms) of each row of logits [T, vocab]."""
    difference = logits.to(reference) - reference
    return [float(error) for error in difference.norm(dim=-1) / reference.norm(dim=-1)]


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Return our bare rate divided by each peer's at one context; empty without ours."""
    mine = figures.get("ours", {}).get("tokens_per_s")
    rates = {name: peer["tokens_per_s"] for name, peer in figures.items() if "tokens_per_s" in peer}
    return {} if mine is None else {name: mine / rate for name, rate in rates.items() if name != "ours"}


def table(shape: str, rows: dict[str, dict[str, Any]]) -> str:
    """Format everyone's tokens/s at each context, and ours as a share of the copy bandwidth."""
    names = list(dict.fromkeys(name for figures in rows.values() for name in figures))
    head = f"{shape + ', tok/s':<22}" + "".join(f"{context:>12}" for context in rows)
    lines = [head]
    for name in names:
        cells = [figures.get(name, {}).get("tokens_per_s") for figures in rows.values()]
        lines.append(f"{name:<22}" + "".join(f"{'-' if c is None else format(c, '.1f'):>12}" for c in cells))
    shares = [figures.get("ours", {}).get("of_copy") for figures in rows.values()]
    lines.append(
        f"{'ours, of copy':<22}" + "".join(f"{'-' if s is None else format(s, '.1%'):>12}" for s in shares)
    )
    for name in names:
        cells = [figures.get(name, {}).get("ours_over_it") for figures in rows.values()]
        if any(cell is not None for cell in cells):
            shown = "".join(f"{'-' if c is None else format(c, '.2f'):>12}" for c in cells)
            lines.append(f"{'ours / ' + name:<22}{shown}")
    return "\n".join(lines)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.160}"


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["0.6B", "1.7B", "4B", "8B"])
    parser.add_argument("--formats", type=names, default=["bf16"], help=", ".join(FORMATS))
    parser.add_argument(
        "--kv-dtype", type=names, default=["auto"], help="auto, bf16, fp8, int8: of our KV cache"
    )
    parser.add_argument("--contexts", type=numbers, default=[128, 512, 4096, 16384])
    parser.add_argument("--peers", type=names, default=list(PEERS))
    parser.add_argument("--steps", type=int, default=128, help="tokens decoded in each repeat")
    parser.add_argument("--no-graph", action="store_true", help="our engine without CUDA graphs")
    return parse(parser, PEERS, tuple(FORMATS))


def main() -> None:
    bench = Bench(arguments := _parse())
    for shape, form, kv_dtype in product(arguments.shapes, arguments.formats, arguments.kv_dtype):
        if not bench.budget.allows(20.0):
            print(f"\n{shape} {form}: skipped: no time", flush=True)
            continue
        bench.run(shape, form, kv_dtype)
    print(f"{bench.budget.spent:.0f} s in all")


if __name__ == "__main__":
    main()
