"""Time to the first token of a prompt with KV on disk, compared with computing it, in one run; random weights.

    python -m benchmarks.restored [--shapes 8B] [--lengths 16384] [--kv-dtype auto] [--folder DIR] [--json FILE]

Each round computes a new prompt and has it written. Then the cache is emptied, and the prompt is asked for again with
the file dropped from the system's memory ("cold"), and once more with the file in memory ("cached"). "running" is the
time with the cache that was not emptied. At the end, another engine with the same weights is asked, as after a
restart; every answer must have the tokens and the probabilities of the running one. The rate of the disk is measured
by reading the same file with as many threads and no other work. The tier stays in use, whatever the engine would
decide; its decision is printed. The first round is a quarter as long and discarded; medians are reported. `--device
cpu --shapes tiny --lengths 256` tries it out.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import perf_counter, sleep

import torch

from benchmarks.machine import Budget, Record
from benchmarks.options import every_shape, names, numbers, parse, parser_of, rounds
from benchmarks.shapes import SHAPES, kv_bytes, random_engine, random_model, random_prompt
from engine import Engine, SamplingParams
from engine.attention.choose import choose_attention
from engine.cache.host_memory import Costs
from engine.cache.rows import Rows
from engine.store import disk
from engine.store.buffers import READERS
from engine.store.disk import DiskTier
from models.network import Network

ANSWER = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
STEP = 1 << 20
ROOM = 64
"""Rows for questions and answers."""
Told = list[tuple[int, float | None]]


class Always(Costs):
    """Costs that keep the tier in use, so that both ways are measured whatever the engine would decide."""

    @property
    def worth_it(self) -> bool:
        return True


@contextmanager
def keeping(network: Network, folder: Path, context: int, arguments: argparse.Namespace) -> Iterator[Engine]:
    """Provide an engine with a tier on disk that has looked through its folder."""
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

        def begin() -> DiskTier:
            tier = DiskTier(
                folder, 10**12, engine._cache, engine._blocks, engine._loop.post, lambda: {"seed": "0"}
            )
            tier.costs = Always()
            engine._disk = engine._engine_step.disk = tier
            return tier

        looked = Event()
        engine._loop.call(begin)._tasks.put(looked.set)
        looked.wait()
        engine._loop.call(lambda: None)
        yield engine


def asked(engine: Engine, prompt: list[int]) -> tuple[float, Told]:
    """Return seconds until the first token, and the answer."""
    began, first, told = perf_counter(), 0.0, Told()
    for event in engine.stream(prompt, ANSWER):
        first = first or perf_counter() - began
        told.append((event.token_id, event.logprob))
    return first, told


def written(engine: Engine, owner: str, prompt: list[int]) -> float:
    """Have a prompt written; return the seconds that it took."""
    tier = engine._disk
    assert tier is not None
    began = perf_counter()
    engine.save(owner, Rows.of(prompt))
    while engine._loop.call(lambda: bool(tier._wishes or tier._writing)):
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

    def read(at: int) -> int:
        return len(os.pread(fd, STEP, at))

    try:
        began = perf_counter()
        with ThreadPoolExecutor(readers) as pool:
            total = sum(pool.map(read, range(0, size, STEP)))
        return total / (perf_counter() - began)
    finally:
        os.close(fd)


def measured(
    network: Network, folder: Path, length: int, arguments: argparse.Namespace, budget: Budget
) -> dict[str, list[float]]:
    """Return times in seconds, and rates in bytes/s."""
    spec, device = network.spec, network.embedding.data.device
    found: dict[str, list[float]] = {}
    kept: list[tuple[list[int], Told]] = []
    readers = max(min((os.cpu_count() or 1) - 2, READERS[device.type]), 1)

    def back(engine: Engine, prompt: list[int], expected: Told) -> float:
        engine._loop.call(engine._blocks.evict_all)
        return again(engine, prompt, expected)

    def again(engine: Engine, prompt: list[int], expected: Told) -> float:
        tier = engine._disk
        assert tier is not None
        before = tier.restored
        took, told = asked(engine, prompt)
        came, whole = tier.restored - before, len(prompt) // engine.block_size * engine.block_size
        assert came >= whole, f"{came} of {whole} tokens came back"
        assert told == expected, "another text than that of the running process"
        return took

    with keeping(network, folder, length + ROOM, arguments) as engine:
        for attempt in rounds(arguments.repeats, budget):
            prompt = random_prompt(spec, length, attempt)
            if not attempt and arguments.repeats:  # the first round compiles kernels and does not count
                prompt = prompt[: length // 4 // engine.block_size * engine.block_size]
            question = [*prompt, 1, 2, 3]
            engine._loop.call(engine._blocks.evict_all)
            computed, _ = asked(engine, [*prompt, 4])
            running, expected = asked(engine, question)
            took = {"computed": computed, "running": running}
            nbytes = len(prompt) * engine._cache.kv[:, :, :1].nbytes
            took["write rate"] = nbytes / written(engine, f"r{attempt}", prompt)
            path = next(folder.rglob(f"r{attempt}.kv"))
            dropped(path)
            took["disk rate"] = rate(path, readers)
            took["still in memory"] = -1.0 if (resident := dropped(path)) is None else resident
            took["cold"] = back(engine, question, expected)
            took["cached"] = back(engine, question, expected)
            took["page cache rate"] = rate(path, readers)
            kept.append((question, expected))
            print(
                f"{attempt}: {', '.join(f'{name} {value:.4g}' for name, value in took.items())}", flush=True
            )
            for name, value in took.items():
                if attempt or not arguments.repeats:
                    found.setdefault(name, []).append(value)
        tier = engine._disk
        assert tier is not None
        known = tier.costs
        found |= {"brought_s": [known.brought or 0.0], "computed_s": [known.computed or 0.0]}
    with keeping(network, folder, length + ROOM, arguments) as engine:
        asked(engine, [1, 2, 3])
        found["restart"] = [again(engine, *kept[-1])]
    return found


def run(shape: str, arguments: argparse.Namespace, budget: Budget, record: Record) -> None:
    """Measure every length with one shape."""
    disk.PATIENCE_S = 600.0, 600.0  # measure it however slow it is
    spec, device = SHAPES[shape], torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = choose_attention(arguments.attention or "auto", device, dtype, spec.attention.head_dim).block_size
    network = random_model(spec, dtype, device, max(arguments.lengths) + ROOM)
    for length in arguments.lengths:
        length -= length % size
        with TemporaryDirectory(dir=arguments.folder) as name:
            found = measured(network, Path(name), length, arguments, budget)
        middle = {name: statistics.median(values) for name, values in found.items() if values}
        record.add({"medians": middle, "runs": found}, "shapes", shape, "lengths", str(length))
        show(shape, length, arguments.kv_dtype, kv_bytes(spec, dtype), middle)


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
    rates = "disk rate", "page cache rate", "write rate"
    print(", ".join(f"{name} {middle[name] / 1e9:.2f} GB/s" for name in rates))
    used = Costs(middle["brought_s"], middle["computed_s"]).worth_it
    print(
        f"as the engine measured: {middle['brought_s'] * 1e6:.1f} µs a token to bring back, "
        f"{middle['computed_s'] * 1e6:.1f} to compute: it would {'use' if used else 'do without'} the disk",
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
