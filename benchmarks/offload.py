"""Bringing evicted rows back from host memory compared with computing them again, in one run.

    python -m benchmarks.offload --json benchmarks/results/offload.json [--shapes 0.6B,8B] [--lengths 2048,8192]

The models have known shapes in bf16 and random weights: Qwen3's, and others such as `--shapes Gemma-4-E4B,Qwen3.5-4B`,
with windows or recurrent layers, whose last rows or last state come back. The KV cache holds the longest prompt and
little more. Each round computes a new prompt in an empty cache, has another one that fills the cache evict it, and asks
for the first one again; all of it is brought back. "first" includes the time to offload the other prompt, which is
evicted for the first time. Then the two change places once more, and "back" is the time when both have copies in host
memory. "MB" is what is copied for that. "evicting" is the time of the prompt that fills the cache, relative to one
as long in an empty cache: the cost of offloading. Host memory is pinned beforehand. The lengths take turns, the first
round is discarded, and medians are reported. `--device cpu --shapes tiny --lengths 64,256` tries it out.
"""

import argparse
import statistics
import time

import torch

from benchmarks.machine import Budget, Record
from benchmarks.options import every_shape, names, numbers, parse, parser_of, rounds
from benchmarks.prefill import warm_seconds
from benchmarks.shapes import SHAPES, kv_bytes, random_engine, random_prompt
from engine import Engine
from engine.attention.choose import choose_attention
from engine.attention.unusual import kinds
from engine.cache import host_memory as host_kv
from engine.cache.copies import Offload, OffloadStates, Restore, RestoreStates
from engine.cache.host_memory import HostKV, PromptCosts
from engine.cache.states import state_sizes
from engine.kernels.recording import wait_for
from models.spec import ModelSpec

MOST_STATES = 12
"""There is host memory for so many states of recurrent layers."""
WIDTHS = 10, 12, 12, 12, 8, 8, 8, 10


class Always(PromptCosts):
    """Costs that keep the tier in use, so that both ways are measured whatever the engine would decide."""

    @property
    def worth_it(self) -> bool:
        return True


class CountedBytes:
    """Counts the bytes of slots that are brought back from host memory."""

    def __init__(self, host: HostKV) -> None:
        """Watch the copies of `host` from now on."""
        self.brought = 0
        self._host, self._carry_out = host, host.carry_out
        host.carry_out = self._count  # type: ignore[method-assign]

    def _count(self, copy: Offload | Restore | OffloadStates | RestoreStates) -> None:
        if isinstance(copy, Restore | RestoreStates):
            self.brought += len(copy.slots) * self._host.block_bytes
        self._carry_out(copy)


def back_seconds(engine: Engine, prompt: list[int]) -> float:
    """Return seconds until all rows of an offloaded prompt are in the cache again."""
    began = time.perf_counter()
    computed = engine.warm(prompt)
    wait_for(engine.device)
    spent = time.perf_counter() - began
    if computed:
        raise RuntimeError(f"{computed} of {len(prompt)} tokens had to be computed")
    return spent


def measured(
    engine: Engine, spec: ModelSpec, lengths: list[int], capacity: int, repeats: int, budget: Budget
) -> dict[int, dict[str, list[float]]]:
    """Return times in seconds, by length: "computed", "evicting", "first", "back"; and "bytes" copied for the last."""
    times: dict[int, dict[str, list[float]]] = {
        n: {"computed": [], "evicting": [], "first": [], "back": [], "bytes": []} for n in lengths
    }
    seed = 0
    assert engine.pieces.cache.host is not None
    counted = CountedBytes(engine.pieces.cache.host)
    for attempt in rounds(repeats, budget):
        for length in lengths:
            engine.loop.call(engine.pieces.blocks.evict_all)
            assert engine.pieces.cache.host is not None
            engine.pieces.cache.host.prepare(wait=True)
            seed += 2
            prompt, filler = random_prompt(spec, length, seed), random_prompt(spec, capacity, seed + 1)
            took = {
                "computed": warm_seconds(engine, prompt),
                "evicting": warm_seconds(engine, filler),
                "first": back_seconds(engine, prompt),
            }
            back_seconds(engine, filler)
            before = counted.brought
            took["back"] = back_seconds(engine, prompt)
            took["bytes"] = counted.brought - before
            for name, spent in took.items():
                if attempt:
                    times[length][name].append(spent)
    return times


def run(shape: str, arguments: argparse.Namespace, budget: Budget, record: Record) -> None:
    """Measure every length with one shape."""
    spec, device = SHAPES[shape], torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = arguments.attention or "auto"
    asked = kinds(spec.attentions.values())
    size = choose_attention(attention, device, dtype, asked[0].head_dim, asked).block_size
    blocks = -(-max(arguments.lengths) // size)
    token = kv_bytes(spec, dtype)
    room = 3 * blocks * size * token + MOST_STATES * sum(state_sizes(spec).values())
    host_kv.AHEAD_BYTES = room
    print(f"\n{shape}: {token:,} bytes a token, blocks of {size}  [{budget.spent:.0f} s]", flush=True)
    with random_engine(
        spec,
        device=device,
        dtype=dtype,
        context=blocks * size,
        num_blocks=blocks,
        attention=attention,
        decode_runner=False,
        offload=room,
    ) as (engine, _):
        assert engine.pieces.cache.host is not None
        costs = engine.pieces.cache.host.costs = Always()
        times = measured(engine, spec, arguments.lengths, blocks * size, arguments.repeats, budget)
    heads = zip(
        ("tokens", "computed", "first", "back", "ratio", "MB", "GB/s", "evicting"), WIDTHS, strict=True
    )
    print("".join(f"{head:>{width}}" for head, width in heads))
    for length, runs in times.items():
        if not runs["back"]:
            continue
        middle = {name: statistics.median(spent) for name, spent in runs.items()}
        ratio = middle["computed"] / middle["back"]
        rate = middle["bytes"] / middle["back"] / 1e9
        evicting = statistics.median(
            one / other for one, other in zip(runs["evicting"], times[max(times)]["computed"], strict=False)
        )
        figures = {"ratio": ratio, "GB_per_s": rate, "evicting": evicting, "runs_s": runs}
        record.add(figures, "shapes", shape, "lengths", str(length))
        print(
            f"{length:>10,}{middle['computed'] * 1e3:>9.1f} ms{middle['first'] * 1e3:>9.1f} ms"
            f"{middle['back'] * 1e3:>9.1f} ms{ratio:>8.2f}{middle['bytes'] / 1e6:>8.1f}{rate:>8.1f}{evicting:>10.2f}",
            flush=True,
        )
    if costs.brought is not None and costs.computed is not None:
        used = PromptCosts.worth_it.fget(costs)  # type: ignore[attr-defined]
        own = {"brought_s": costs.brought, "computed_s": costs.computed, "would_use": used}
        record.add(own, "shapes", shape, "as_the_engine_measured")
        back, compute = costs.brought * 1e6, costs.computed * 1e6
        print(f"as the engine measured: {back:.2f} µs a token to bring back, {compute:.2f} to compute")
        print(f"it would {'keep' if used else 'give up'} the tier")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["0.6B", "8B"])
    parser.add_argument("--lengths", type=numbers, default=[2048, 8192])
    parser.set_defaults(peers=[], repeats=3)
    arguments = parse(parser, ())
    every_shape(arguments, run)


if __name__ == "__main__":
    main()
