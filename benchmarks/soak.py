"""Thousands of random requests at once, on a CPU with a tiny random model: nothing may leak, and all must be served.

    python -m benchmarks.soak [--requests 10000] [--streams 8] [--seed 0] [--json FILE]

Each of `--streams` threads makes one request after the other: prompts of 1 to 70 tokens with common beginnings,
answers of 1 to 50 tokens, with all kinds of sampling. Some are closed after a few tokens; some only warm a prompt,
for a user or as idle work that may be cancelled. The cache holds two contexts, so that sequences preempt each other,
and evicted rows go to a small host memory. At the end every block must be free once the cache is emptied, no sequence
may be alive, the threads must be those of the beginning, and the second half must not have taken more memory.
"""

import argparse
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import Engine, SamplingParams

CONTEXT = 128
MOST_GROWTH = 8 * 1024**2
"""Bytes that the second half of the requests may add to the process: gaps of the allocator, not data of requests."""


@dataclass
class Seen:
    """The results of the requests."""

    requests: int = 0
    tokens: int = 0
    cancelled: int = 0
    warmed: int = 0
    preempted: int = 0
    at_once: int = 0
    """The largest number of sequences that ran together."""
    restored: int = 0
    """Rows that came back from host memory."""
    seconds: float = 0.0
    grown: int = 0
    """Bytes added in the second half."""


def soak(engine: "Engine", requests: int, streams: int, seed: int = 0) -> Seen:
    """Serve `requests` random requests; raise AssertionError if anything of them is left."""
    from benchmarks.load import own_bytes

    seen = Seen()
    threads, alive = threading.active_count(), _alive()
    began = time.perf_counter()
    sizes = []
    for half in range(2):
        _serve(engine, requests // 2, streams, 2 * seed + half, seen)
        _check(engine)
        assert _alive() <= alive, f"{_alive() - alive} sequences live on"
        sizes.append(own_bytes())
    seen.grown = sizes[1] - sizes[0]
    seen.seconds = time.perf_counter() - began
    assert threading.active_count() == threads, [thread.name for thread in threading.enumerate()]
    return seen


def _serve(engine: "Engine", requests: int, streams: int, seed: int, seen: Seen) -> None:
    left = iter(range(requests))
    lock, errors = threading.Lock(), []

    def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while not errors:
            with lock:
                if next(left, None) is None:
                    return
            try:
                found = _request(engine, rng)
            except BaseException as error:
                errors.append(error)
                raise
            with lock:
                seen.requests += 1
                for name, count in found.items():
                    setattr(
                        seen,
                        name,
                        max(count, seen.at_once) if name == "at_once" else getattr(seen, name) + count,
                    )

    clients = [threading.Thread(target=client, args=(number,)) for number in range(streams)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    if errors:
        raise errors[0]
    figures = engine.figures().offload
    seen.restored = figures.restored_tokens if figures is not None else 0


def _request(engine: "Engine", rng: random.Random) -> Counter[str]:
    from engine.cache.rows import Rows
    from engine.schedule.sequence import Priority, Sequence

    prompt = _prompt(rng)
    kind = rng.random()
    if kind < 0.1:
        engine.warm(prompt)
        return Counter(warmed=1)
    if kind < 0.2:
        idle = Sequence(Rows.of(prompt), Priority.IDLE)
        engine.submit(idle)
        if rng.random() < 0.5:
            idle.cancelled = True
        idle.finished.wait()
        assert idle.error is None, idle.error
        return Counter(warmed=1)
    params = _params(rng)
    sequence = engine.start(Rows.of(prompt), params)
    stop_after = rng.randrange(12) if rng.random() < 0.25 else None
    tokens = 0
    for tokens, _ in enumerate(engine.events(sequence), 1):
        if tokens == stop_after:
            sequence.cancelled = True
    assert sequence.finish_reason is not None
    assert tokens == len(sequence.generated)
    cancelled = sequence.finish_reason.value == "cancelled"
    at_once = len(engine.pieces.scheduler.running)
    return Counter(tokens=tokens, cancelled=cancelled, preempted=sequence.preemptions, at_once=at_once)


def _prompt(rng: random.Random) -> list[int]:
    """Return one of a few beginnings, cut anywhere, and something of its own."""
    beginning = random.Random(rng.randrange(5)).choices(range(200), k=50)
    return beginning[: rng.randint(0, 50)] + rng.choices(range(200), k=rng.randint(1, 20))


def _params(rng: random.Random) -> "SamplingParams":
    from engine import SamplingParams

    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.2)),
        top_k=rng.choice((0, 20)),
        top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((1.0, 1.1)),
        seed=rng.choice((None, 7)),
        max_tokens=rng.choice((1, 4, 8, 50)),
        stop=rng.choice(((), ("word11",))),
    )


def _check(engine: "Engine") -> None:
    """Check that nothing is held, waits or runs."""

    def job() -> None:
        blocks, scheduler = engine.pieces.blocks, engine.pieces.scheduler
        assert not scheduler.has_work
        if engine.engine_step.has_work:  # a step that was launched before its sequences ended
            engine.engine_step.step()
        assert not engine.engine_step.has_work
        blocks.check()
        assert blocks.num_held == 0, f"{blocks.num_held} blocks are held by nobody"
        blocks.evict_all()
        assert blocks.num_free == blocks.num_blocks
        assert len(blocks.tier) == 0
        if engine.engine_step.decoding is not None:
            engine.engine_step.decoding.check([])

    engine.loop.call(job)


def _alive() -> int:
    """Return the number of sequences that something still refers to."""
    from engine.schedule.sequence import Sequence

    gc.collect()
    return sum(type(found) is Sequence for found in gc.get_objects())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    import torch

    from benchmarks.shapes import SHAPES, random_engine

    options = {
        "num_blocks": 2 * CONTEXT // 8 + 1,
        "block_size": 8,
        "max_chunk": 64,
        "offload": 1 << 22,
        "threads": 1,
    }
    device = torch.device("cpu")
    with random_engine(SHAPES["tiny"], device=device, dtype=torch.float32, context=CONTEXT, **options) as (
        engine,
        _,
    ):
        seen = soak(engine, arguments.requests, arguments.streams, arguments.seed)
    for name, value in asdict(seen).items():
        print(f"{name:>10}  {value:,.1f}" if isinstance(value, float) else f"{name:>10}  {value:,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(seen), indent=2) + "\n")
    if seen.grown > MOST_GROWTH:
        raise SystemExit(f"The second half added {seen.grown:,} bytes to the process: something leaks.")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
