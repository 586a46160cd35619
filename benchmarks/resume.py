"""The first token of a conversation that goes on after a restart: from the tier on disk, beside computing it anew.

    python -m benchmarks.resume [MODEL] [--tokens 8000] [--reading-s 2] [--repeats 3] [--device cpu] [--json FILE]

A conversation of so many tokens is made and written to disk. Then the engine is loaded again, several times by turns:
without a tier on disk; with one, and the next message comes at once; with one, after so many seconds of reading; and in
the engine that never ended. The page cache of the system stays as it is: what is read was written a moment ago. Before
that, what writing costs decoding: tokens/s while blocks are written, beside those without a tier.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

from benchmarks.machine import describe
from engine.conversation.chat import Turn
from engine.engine import Engine
from engine.params import SamplingParams
from models.units import bytes_text

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SENTENCE = (
    "The harbour at Lindvik has two lights, a green one on the breakwater and a white one on the hill. "
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--reading-s", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        found = measured(arguments, Path(name))
    for line in lines(found, arguments):
        print(line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": describe(), **found}, indent=1) + "\n")


def measured(arguments: argparse.Namespace, store: Path) -> dict[str, float]:
    """Medians in seconds, and bytes on disk."""
    context = arguments.tokens + 512
    with loaded(arguments, store, context) as engine:
        decode_rate(engine)  # what makes later steps faster is done
        turns, rate, alone = conversation(engine, arguments.tokens)
        taken = sum(path.stat().st_size for path in store.rglob("*.kv"))
        running = [first_token(engine, turns, 0.0, number, wait=True) for number in range(arguments.repeats)]
    times: dict[str, list[float]] = {"computed": [], "at once": [], "after reading": []}
    for number in range(arguments.repeats):
        for way, place, reading in (
            ("computed", None, 0.0),
            ("at once", store, 0.0),
            ("after reading", store, arguments.reading_s),
        ):
            with loaded(arguments, place, context) as engine:
                decode_rate(engine)
                times[way].append(first_token(engine, turns, reading, number))
    return {
        "running": median(running),
        **{way: median(seconds) for way, seconds in times.items()},
        "bytes": taken,
        "decoding": alone,
        "decoding beside writing": rate,
    }


@contextmanager
def loaded(arguments: argparse.Namespace, store: Path | None, context: int) -> Iterator[Engine]:
    engine = Engine.load(arguments.model, device=arguments.device, context=context, disk=store, disk_gb=100)
    try:
        yield engine
    finally:
        engine.close()


def decode_rate(engine: Engine) -> float:
    """Tokens/s of an answer of 64 tokens, the best of three."""
    stops = dict.fromkeys(engine.tokenizer.stop_ids, -100.0)
    params = SamplingParams(temperature=0.0, max_tokens=64, logit_bias=stops)
    best = 0.0
    for _ in range(3):
        began, count = 0.0, 0
        for _ in engine.stream(engine.tokenizer.encode(SENTENCE), params):
            began = began or perf_counter()
            count += 1
        best = max(best, (count - 1) / (perf_counter() - began))
    return best


def conversation(engine: Engine, tokens: int) -> tuple[list[Turn], float, float]:
    """One of so many tokens, which is on disk when this returns, and tokens/s of decoding while it is written and
    once it is."""
    chat = engine.chat()
    chat.owner = "benchmark"
    each = len(engine.tokenizer.encode(SENTENCE))
    list(chat.send(SENTENCE * ((tokens - 300) // each), GREEDY))
    chat.settle(wait=True)
    rates = [decode_rate(engine)]
    before = -1
    while (now := engine.figures().disk) is not None and now.written_tokens != before:
        before = now.written_tokens
        rates.append(decode_rate(engine))
        sleep(0.5)
    return chat.turns, median(rates), decode_rate(engine)


def first_token(
    engine: Engine, turns: list[Turn], reading_s: float, number: int, wait: bool = False
) -> float:
    """Seconds from the next message to the first token of its answer, `reading_s` after it was opened."""
    chat = engine.chat()
    chat.load(turns)
    if wait or reading_s:
        chat.settle(wait=wait)
        sleep(reading_s)
    began = perf_counter()
    answer = chat.send(f"{number} times: which of the two lights is white?", GREEDY)
    next(iter(answer))
    took = perf_counter() - began
    answer.close()
    return took


def lines(found: dict[str, float], arguments: argparse.Namespace) -> Iterator[str]:
    """The table."""
    running, computed = found["running"], found["computed"]
    yield f"{arguments.model}, a conversation of {arguments.tokens:,} tokens, {bytes_text(int(found['bytes']))} on disk"
    yield f"first token, the process runs on    {running * 1e3:9.1f} ms"
    yield f"after a restart, computed anew      {computed * 1e3:9.1f} ms"
    at_once, reading = found["at once"], found["after reading"]
    yield f"from disk, asked at once            {at_once * 1e3:9.1f} ms   {computed / at_once:5.1f}x as fast"
    yield (
        f"from disk, after {arguments.reading_s:g} s of reading     {reading * 1e3:9.1f} ms   "
        f"{reading / running:5.2f}x that of the running process"
    )
    share = found["decoding beside writing"] / found["decoding"]
    yield f"decoding while it is written        {found['decoding beside writing']:9.1f} tok/s {share:5.3f}x"


if __name__ == "__main__":
    main()
