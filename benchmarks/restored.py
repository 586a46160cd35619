"""Time to the first token of a prompt with KV on disk, compared with computing it, in one run; random weights.

    python -m benchmarks.restored [--shapes 8B] [--lengths 16384] [--kv-dtype auto] [--folder DIR] [--json FILE]

Each round computes a new prompt and has it written. Then the cache is emptied, and the prompt is asked for again with
the file dropped from the system's memory ("cold"), and once more with the file in memory ("cached"). "running" is the
time with the cache that was not emptied. At the end, other engines with the same weights are asked, as after a
restart, with the file in memory: first for 3 tokens, and at once for the prompt, so that whatever an engine does in its
first seconds counts. All kernels are compiled by then, as they are when an engine has loaded. Where the time goes is
printed for the last of them.

Every prompt is asked twice: for its time, and then for probabilities, which few want, so that no graph for them is
ready. The tokens and the probabilities must be those of the running engine. The rate of the disk is measured by reading
the same file with as many threads and no other work. The tier stays in use, whatever the engine would decide; its
decision is printed. The first round is a quarter as long and discarded; medians are reported. `--device cpu --shapes
tiny --lengths 256` tries it out.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter, sleep

import torch

from benchmarks.disk_parts import Opening, Parts, opening, watched
from benchmarks.machine import Budget, Record
from benchmarks.options import every_shape, names, numbers, parse, parser_of, rounds
from benchmarks.shapes import SHAPES, kv_bytes, random_engine, random_model, random_prompt
from engine import Engine, SamplingParams
from engine.attention.choose import choose_attention
from engine.cache.host_memory import PromptCosts
from engine.cache.rows import Rows
from engine.store import disk
from engine.store.buffers import READERS
from engine.store.disk import DiskTier
from models.network import Network

FIRST = SamplingParams(temperature=0.0, max_tokens=2)
ANSWER = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
STEP = 2 << 20
RESTARTS = 3
ROOM = 64
"""Rows for questions and answers."""
Told = list[tuple[int, float | None]]


class Always(PromptCosts):
    """Costs that keep the tier in use, so that both ways are measured whatever the engine would decide."""

    @property
    def worth_it(self) -> bool:
        return True


@contextmanager
def keeping(
    network: Network, folder: Path, context: int, arguments: argparse.Namespace
) -> Iterator[tuple[Engine, Opening]]:
    """Provide an engine with a tier on disk that has looked through its folder, and how long that took."""
    device = network.embedding.data.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = arguments.attention or "auto"
    size = choose_attention(attention, device, dtype, network.spec.attention.head_dim).block_size
    with random_engine(
        network.spec,
        device=device,
        dtype=dtype,
        network=network,
        context=context,
        num_blocks=-(-context // size) + 4,
        attention=attention,
        kv_dtype=arguments.kv_dtype,
        offload_gb=0.0,
    ) as (engine, _):
        with opening() as opened:
            keep_on_disk(engine, folder)
        yield engine, opened


def keep_on_disk(engine: Engine, folder: Path) -> DiskTier:
    """Give an engine a tier on disk that stays in use, once it has looked through its folder."""

    def begin() -> DiskTier:
        tier = DiskTier(
            folder,
            10**12,
            engine.pieces.cache,
            engine.pieces.blocks,
            engine.loop.post,
            lambda: {"seed": "0"},
        )
        tier.costs = Always()
        engine.disk = engine.engine_step.disk = tier
        return tier

    looked = Event()
    tier = engine.loop.call(begin)
    tier._tasks.put(looked.set)
    looked.wait()
    engine.loop.call(lambda: None)
    return tier


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Return the seconds until the first token."""
    began, first = perf_counter(), 0.0
    for _ in engine.stream(prompt, FIRST):
        first = first or perf_counter() - began
    return first


def asked(engine: Engine, prompt: list[int]) -> Told:
    """Return the answer with its probabilities."""
    return [(event.token_id, event.logprob) for event in engine.stream(prompt, ANSWER)]


def written(engine: Engine, owner: str, prompt: list[int]) -> float:
    """Have a prompt written; return the seconds that it took."""
    tier = engine.disk
    assert tier is not None
    began = perf_counter()
    engine.save(owner, Rows.of(prompt))
    while engine.loop.call(lambda: tier.has_writes):
        sleep(0.01)
    assert not tier.problem, tier.problem
    return perf_counter() - began


def dropped(path: Path) -> float | None:
    """Drop a file from the page cache. Return the share of it that stays in memory; None: not known."""
    with path.open("r+b", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size, found = path.stat().st_size, 0
        for number in range(64):
            try:
                found += os.preadv(file.fileno(), [bytearray(1)], size * number // 64, os.RWF_NOWAIT)
            except BlockingIOError:
                pass
            except OSError:
                return None
    return found / 64


def rate(path: Path, readers: int) -> float:
    """Return the bytes/s of reading a file with `readers` threads."""
    size, fd = path.stat().st_size, os.open(path, os.O_RDONLY)
    room: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(readers):
        room.put(bytearray(STEP))

    def read(at: int) -> int:
        into = room.get()
        count = os.preadv(fd, [into], at)
        room.put(into)
        return count

    try:
        with ThreadPoolExecutor(readers) as pool:
            began = perf_counter()
            total = sum(pool.map(read, range(0, size, STEP)))
            return total / (perf_counter() - began)
    finally:
        os.close(fd)


def measured(
    network: Network, folder: Path, length: int, arguments: argparse.Namespace, budget: Budget
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Return times in seconds and rates in bytes/s, and for ways to bring a prompt back, where the time went."""
    spec, device = network.spec, network.embedding.data.device
    found: dict[str, list[float]] = {}
    kept: list[tuple[list[int], Told]] = []
    readers = max(min((os.cpu_count() or 1) - 2, READERS[device.type]), 1)

    parts: dict[str, Parts] = {}

    def back(engine: Engine, way: str, prompt: list[int], expected: Told) -> float:
        engine.loop.call(engine.pieces.blocks.evict_all)
        return again(engine, way, prompt, expected)

    def again(engine: Engine, way: str, prompt: list[int], expected: Told) -> float:
        tier = engine.disk
        assert tier is not None
        before = tier.restored
        with watched(tier) as parts[way]:
            took = parts[way].first = first_token(engine, prompt)
        came, whole = tier.restored - before, len(prompt) // engine.block_size * engine.block_size
        assert came >= whole, f"{came} of {whole} tokens came back"
        assert asked(engine, prompt) == expected, "another text than that of the running process"
        return took

    with keeping(network, folder, length + ROOM, arguments) as (engine, _):
        for attempt in rounds(arguments.repeats, budget):
            prompt = random_prompt(spec, length, attempt)
            if not attempt and arguments.repeats:  # the first round compiles kernels and does not count
                prompt = prompt[: length // 4 // engine.block_size * engine.block_size]
            question = [*prompt, 1, 2, 3]
            engine.loop.call(engine.pieces.blocks.evict_all)
            took = {"computed": first_token(engine, [*prompt, 4]), "running": first_token(engine, question)}
            expected = asked(engine, question)
            token_bytes = engine.pieces.cache.kv[:, :, :1].nbytes
            took["write rate"] = len(prompt) * token_bytes / written(engine, f"r{attempt}", prompt)
            path = next(folder.rglob(f"r{attempt}.kv"))
            dropped(path)
            took["disk rate"] = rate(path, readers)
            took["still in memory"] = -1.0 if (resident := dropped(path)) is None else resident
            took["cold"] = back(engine, "cold", question, expected)
            took["cached"] = back(engine, "cached", question, expected)
            took["page cache rate"] = rate(path, readers)
            kept.append((question, expected))
            print(
                f"{attempt}: {', '.join(f'{name} {value:.4g}' for name, value in took.items())}", flush=True
            )
            for name, value in took.items():
                if attempt or not arguments.repeats:
                    found.setdefault(name, []).append(value)
        tier = engine.disk
        assert tier is not None
        known = tier.costs
        for name in (
            "brought",
            "computed",
            "cold",
        ):  # unknown where the system does not tell what is in memory
            found[f"{name}_s"] = [seconds for seconds in [getattr(known, name)] if seconds is not None]
    for _ in range(min(RESTARTS, arguments.repeats) or 1):
        with keeping(network, folder, length + ROOM, arguments) as (engine, opened):
            first_token(engine, [1, 2, 3])
            found.setdefault("restart", []).append(again(engine, "restart", *kept[-1]))
            for name, seconds in asdict(opened).items():
                found.setdefault(name, []).append(seconds)
    nbytes = len(kept[-1][0]) * token_bytes
    return found, {way: list(one.lines(nbytes)) for way, one in parts.items()}


def run(shape: str, arguments: argparse.Namespace, budget: Budget, record: Record) -> None:
    """Measure every length with one shape."""
    disk.PATIENCE_S = 600.0, 600.0  # measure it however slow it is
    spec, device = SHAPES[shape], torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = choose_attention(arguments.attention or "auto", device, dtype, spec.attention.head_dim).block_size
    network = random_model(spec, dtype, device, max(arguments.lengths) + ROOM)
    for length in arguments.lengths:
        length -= length % size
        if arguments.folder is not None:
            arguments.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=arguments.folder) as name:
            found, parts = measured(network, Path(name), length, arguments, budget)
        middle = {name: statistics.median(values) for name, values in found.items() if values}
        record.add(
            {"medians": middle, "runs": found, "parts": parts}, "shapes", shape, "lengths", str(length)
        )
        show(shape, length, arguments.kv_dtype, kv_bytes(spec, dtype), middle)
        for way, lines in parts.items():
            print(f"{way}: {lines[0]}", *lines[1:], sep="\n  ", flush=True)


def show(shape: str, length: int, kv_dtype: str, token: int, middle: dict[str, float]) -> None:
    def ms(name: str) -> str:
        return f"{middle[name] * 1e3:,.1f} ms, {middle['computed'] / middle[name]:.2f}x"

    resident = middle["still in memory"]
    memory = "not known" if resident < 0 else f"{resident:.0%}"
    print(f"\n{shape}, {length:,} tokens, KV {kv_dtype} ({token:,} bytes a token in the model's dtype)")
    print(f"first token, computed                    {middle['computed'] * 1e3:,.1f} ms")
    print(f"in the cache of the running process      {ms('running')}")
    print(f"from disk, cold ({memory} of it in memory)    {ms('cold')}")
    print(f"from disk, in the system's page cache    {ms('cached')}")
    print(f"another engine, as after a restart       {ms('restart')}; the same tokens and probabilities")
    print(
        f"before that, while it loads              {middle['scanning'] * 1e3:,.1f} ms to scan the folder, "
        f"{middle['pinning'] * 1e3:,.1f} ms to allocate buffers"
    )
    rates = "disk rate", "page cache rate", "write rate"
    print(", ".join(f"{name} {middle[name] / 1e9:.2f} GB/s" for name in rates))
    known = PromptCosts(*(middle.get(name) for name in ("brought_s", "computed_s", "cold_s")))
    for what, costs in (("in memory", known), ("cold", known.if_cold)):
        if costs.brought is not None and costs.computed is not None:
            print(
                f"as the engine measured, {what}: {costs.brought * 1e6:.1f} µs a token to bring back, "
                f"{costs.computed * 1e6:.1f} to compute: it would {'use' if costs.worth_it else 'do without'} it",
                flush=True,
            )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["8B"])
    parser.add_argument("--lengths", type=numbers, default=[16384])
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument(
        "--folder", type=Path, help="where files are written; default: that of temporary files"
    )
    parser.set_defaults(peers=[], repeats=3)
    every_shape(parse(parser, ()), run)


if __name__ == "__main__":
    main()
