"""The attention of one layer on a prompt: time and memory of our backends and of plain attention, in one run.

    python -m benchmarks.attention [--shapes 0.6B,8B] [--lengths 512,2048,8192] [--json FILE] [--svg FILE]

Plain attention writes all scores of all heads, takes their softmax in fp32 and multiplies the result by the values, as
the reference code of transformers does ("eager"). Our backends also write K and V into the pages of the KV cache. The
methods take turns, and medians are reported. Memory is the peak of a call beyond its inputs; it is not measured on a
CPU. Every output is compared with plain attention in fp32, and its relative error is printed.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.chart import Chart, Line, page
from benchmarks.machine import Record, describe, seconds
from benchmarks.options import names, numbers, parse, parser_of
from benchmarks.shapes import SHAPES
from engine.attention.choose import BLOCK_SIZES, make_backend, usable_backends
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from models.spec import Attention

PLAIN = "plain"
COLOURS = {"flash": "#2266cc", "triton": "#22a06b", "sdpa": "#c9820a", PLAIN: "#777777"}
COMPARED = 4096
"""The longest prompt, in rows, whose output is compared: fp32 scores of longer ones take too much memory."""
BAR = 40
Call = Callable[[], Tensor]


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
    groups, tokens = q.shape[1] // k.shape[1], len(q)
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    hidden = torch.full((tokens, tokens), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    scores = torch.matmul(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5 + hidden
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v).transpose(0, 1)


def calls(heads: Attention, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    """Return a call of each backend that works here, and of plain attention, for one random prompt."""
    generator = torch.Generator(device).manual_seed(length)
    q, k, v = (
        torch.randn(length, count, heads.head_dim, generator=generator, device=device, dtype=dtype)
        for count in (heads.heads, heads.kv_heads, heads.kv_heads)
    )
    found: dict[str, Call] = {}
    for name, why_not in usable_backends(device, dtype, heads.head_dim):
        if why_not is not None:
            print(f"    {name} is left out: {why_not}", flush=True)
            continue
        block = BLOCK_SIZES[name]
        blocks = -(-length // block)
        cache = KVCache.uniform(1, blocks, block, heads.kv_heads, heads.head_dim, dtype, device)
        backend = make_backend(name, cache)
        attend = backend.plan(StepBatch((Span(tuple(range(blocks)), 0, length),)))
        found[name] = lambda attend=attend: attend(0, q, k, v)  # type: ignore[misc]
    found[PLAIN] = lambda: plain_attention(q, k, v)
    if length <= COMPARED:
        truth = plain_attention(q.float(), k.float(), v.float())
        for name, call in found.items():
            error = float((call().view_as(truth).float() - truth).norm() / truth.norm())
            print(f"    {name:<8} error {error:.1e}", flush=True)
    return found


def memory_bytes(call: Call, device: torch.device) -> int | None:
    """Return the peak memory of a call beyond what was allocated before; None where it is not known."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure(found: dict[str, Call], repeats: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Return median seconds, and bytes if known, by name, without methods that need too much memory."""
    times: dict[str, list[float]] = {name: [] for name in found}
    taken: dict[str, int | None] = {}
    for _ in range(repeats):
        for name in list(times):
            try:
                times[name].append(seconds(found[name], device, 5))
                taken.setdefault(name, memory_bytes(found[name], device))
            except torch.OutOfMemoryError:
                print(f"    {name} is left out: it needs more memory than there is", flush=True)
                times.pop(name)
    return {
        name: {"seconds": statistics.median(spent)}
        | ({} if taken[name] is None else {"bytes": float(taken[name] or 0)})
        for name, spent in times.items()
    }


def show(length: int, figures: dict[str, dict[str, float]]) -> None:
    """Print the speed of each method relative to plain attention as bars, and its memory as a share of plain's."""
    plain = figures.get(PLAIN)
    if plain is None:
        return
    fastest = max(plain["seconds"] / each["seconds"] for each in figures.values())
    print(f"  {length:,} tokens: times as fast as plain attention")
    for name, each in figures.items():
        ratio = plain["seconds"] / each["seconds"]
        share = ""
        if "bytes" in each and plain["bytes"]:
            share = f", {each['bytes'] / 1e6:,.0f} MB = {each['bytes'] / plain['bytes']:.3f} of its memory"
        bar = "█" * max(1, round(BAR * ratio / fastest))
        print(f"    {name:<7}{bar:<{BAR}} {ratio:6.2f}x {each['seconds'] * 1e3:9.3f} ms{share}", flush=True)


def picture(shape: str, lengths: list[int], figures: dict[int, dict[str, dict[str, float]]]) -> str:
    """Draw time and memory against the length, as SVG."""
    seen = [name for name in COLOURS if any(name in each for each in figures.values())]
    labels = tuple(f"{length:,}" for length in lengths)

    def chart(title: str, what: str, unit: float) -> Chart:
        lines = []
        for name in seen:
            values = [figures[length].get(name, {}).get(what) for length in lengths]
            lines.append(
                Line(name, COLOURS[name], [None if value is None else value * unit for value in values])
            )
        return Chart(title, lines, "tokens of a prompt", labels)

    charts = [chart("Milliseconds a layer", "seconds", 1e3)]
    if any("bytes" in each for found in figures.values() for each in found.values()):
        charts.append(chart("MB beyond its input", "bytes", 1e-6))
    return page(
        f"Attention of one layer of {shape}", charts, "Our backends beside plain attention (PyTorch)."
    )


def main() -> None:
    """Run the benchmark; see the module."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["0.6B"])
    parser.add_argument("--lengths", type=numbers, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--svg", type=Path, help="write a picture of the last shape here")
    arguments = parse(parser, ())
    device = torch.device(arguments.device)
    facts = describe(device)
    record = Record(arguments.json, facts, arguments.merge)
    print(f"{facts['device']}, driver {facts['driver']}, {facts['versions']}", flush=True)
    for shape in arguments.shapes:
        print(shape, flush=True)
        figures = {}
        for length in arguments.lengths:
            with torch.inference_mode():
                found = calls(SHAPES[shape].attention, length, device, torch.bfloat16)
                figures[length] = measure(found, arguments.repeats, device)
            record.add(figures[length], shape, str(length))
            show(length, figures[length])
        if arguments.svg is not None:
            arguments.svg.write_text(picture(shape, arguments.lengths, figures), "utf-8")


if __name__ == "__main__":
    main()
