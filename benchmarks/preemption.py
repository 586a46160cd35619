"""How much running idle work delays a first token: its time compared with that on an idle engine, in one run.

    python -m benchmarks.preemption [--repeats 15] [--message 200] [--json benchmarks/results/preemption.json]

The idle work is a warm as long as the context, started shortly before the message arrives at a random moment. It is
never cancelled, so only the scheduler makes it give way. The two cases take turns, each message is new, and medians
are reported. Most of a message's wait is the rest of the chunk that is running; `chunk` is the rows of that chunk.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import Engine


def first_token_s(engine: "Engine", message: list[int]) -> float:
    """Return seconds from the request to the first token."""
    from engine import SamplingParams

    began = time.perf_counter()
    stream = engine.stream(message, SamplingParams(temperature=0.0, max_tokens=1))
    for _ in stream:
        break
    took = time.perf_counter() - began
    stream.close()  # type: ignore[attr-defined]
    return took


def measure(engine: "Engine", message_tokens: int, repeats: int, seed: int = 0) -> dict[str, Any]:
    """Measure both cases in turn; the first pair is discarded."""
    from engine.cache.rows import Rows
    from engine.schedule.sequence import Priority, Sequence

    rng = random.Random(seed)
    alone, beside, chunks, depths = [], [], [], []
    for _ in range(repeats + 1):
        alone.append(first_token_s(engine, words(rng, message_tokens)))
        idle = Sequence(Rows.of(words(rng, engine.context_length)), Priority.IDLE)
        engine.submit(idle)
        while idle.computed == 0:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.1, 0.8))
        depths.append(idle.computed)
        message = words(rng, message_tokens)
        beside.append(first_token_s(engine, message))
        chunks.append(engine.pieces.scheduler.idle_chunk)
        if idle.finished.is_set():
            raise SystemExit("The idle work ended too early to be in the way; use a larger --context.")
        idle.cancelled = True
        idle.finished.wait()
    ratios = [late / free for free, late in zip(alone[1:], beside[1:], strict=True)]
    return {
        "message_tokens": message_tokens,
        "idle_ttft_s": statistics.median(alone[1:]),
        "busy_ttft_s": statistics.median(beside[1:]),
        "ratio": statistics.median(beside[1:]) / statistics.median(alone[1:]),
        "ratio_of_pairs": statistics.median(ratios),
        "worst_pair": max(ratios),
        "idle_chunk_rows": statistics.median(chunks[1:]),
        "idle_rows_done": statistics.median(depths[1:]),
    }


def words(rng: random.Random, length: int) -> list[int]:
    """Return random token ids; no two prompts share a prefix."""
    return [rng.randint(100, 40_000) for _ in range(length)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int)
    parser.add_argument("--message", type=int, nargs="+", default=[200], help="tokens of the message")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    from benchmarks.cpu_chat import cpu_name
    from engine import Engine

    engine = Engine.load(arguments.model, device=arguments.device, context=arguments.context)
    figures: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "model": engine.model_name,
        "device": str(engine.device),
        "repeats": arguments.repeats,
        "messages": [],
    }
    print(f"{'message':>10}{'idle engine':>14}{'idle work runs':>16}{'ratio':>8}{'worst':>8}{'chunk':>8}")
    for length in arguments.message:
        row = measure(engine, length, arguments.repeats)
        figures["messages"].append(row)
        print(
            f"{length:>10}{row['idle_ttft_s'] * 1e3:>11.0f} ms{row['busy_ttft_s'] * 1e3:>13.0f} ms"
            f"{row['ratio']:>8.2f}{row['worst_pair']:>8.2f}{row['idle_chunk_rows']:>8.0f}"
        )
    engine.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
