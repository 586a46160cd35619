"""Time to the first token of a conversation after a restart: from the tier on disk, compared with computing it anew.

    python -m benchmarks.resume [MODEL] [--tokens 8000] [--reading-s 2] [--repeats 3] [--rounds 21] [--device cpu]
                                [--llama-python PYTHON] [--json FILE] [--only-writing]

A conversation of --tokens tokens is made and written to disk. Then the next message is sent to several engines in
turns: one loaded without a tier on disk; one loaded with it, at once; one loaded with it, after --reading-s seconds
of reading; and the engine that never ended. The system's page cache stays as it is: the data was written a moment
ago. With `--llama-python`, an interpreter with llama-cpp-python, llama.cpp does the same with its prompt cache file
if the model is a GGUF file.

Before that, the cost of writing for decoding is measured: answers of 64 tokens while a conversation is written, and
while none is, in alternating order. Reported are the medians, the median of the ratios of the rounds, and the
processor time of writing as a share of that of decoding, which other programs on the machine disturb less.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter, process_time, sleep, thread_time
from typing import Any

from benchmarks.machine import describe
from benchmarks.peers.llama_resume import LlamaResumed
from engine.cache.rows import Rows
from engine.conversation.chat import Turn
from engine.device import pick_device
from engine.engine import Engine
from engine.kernels.native.library import default_threads
from engine.params import SamplingParams
from models.families.registry import load_spec
from models.hub.sources import resolve
from models.units import bytes_text

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
QUESTION = "{} times: which of the two lights is white?"
ANSWER, ANSWERS = 64, 3
"""The number of tokens of an answer whose rate is measured, and the number of answers."""
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
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python")
    parser.add_argument("--only-writing", action="store_true", help="measure nothing but what writing costs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        found = measured(arguments, Path(name))
    for line in lines(found, arguments):
        print(line)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": describe(pick_device(arguments.device).device), **found}, indent=1) + "\n"
        )


def measured(arguments: argparse.Namespace, store: Path) -> dict[str, Any]:
    """Return medians in seconds, and bytes on disk."""
    context = min(arguments.tokens + 512, load_spec(resolve(arguments.model)).max_positions)
    with loaded(arguments, store, context) as engine:
        decode_rate(engine)  # warms up: later steps are faster
        turns, rows = conversation(engine, arguments.tokens)
        found: dict[str, Any] = {"tokens": len(rows), **writing(engine, rows, arguments.rounds)}
        taken = sum(path.stat().st_size for path in store.rglob("benchmark.kv"))
        if arguments.only_writing:
            return found
        running = [first_token(engine, turns, 0.0, number, wait=True) for number in range(arguments.repeats)]
        print(f"running: {', '.join(f'{seconds:.3f}' for seconds in running)} s", flush=True)
        asked = [prompt_ids(engine, turns, number) for number in range(arguments.repeats)]
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
            print(f"{number}: {way} {times[way][-1]:.3f} s", flush=True)
    found |= {"running": median(running), "bytes": taken}
    found |= {way: median(seconds) for way, seconds in times.items()}
    if arguments.llama_python is not None:
        found["llama.cpp"] = llama(arguments, rows.token_ids, asked, context, store / "llama")
    return found


def llama(
    arguments: argparse.Namespace, held: list[int], asked: list[list[int]], context: int, file: Path
) -> dict[str, Any]:
    """Return the same for llama.cpp: medians in seconds."""
    gguf = resolve(arguments.model).gguf
    assert gguf is not None, "llama.cpp reads GGUF files only"
    given = arguments.llama_python, gguf, context, default_threads(), file
    times: dict[str, list[float]] = {"running": [], "computed": [], "at once": [], "after reading": []}
    with LlamaResumed(*given) as peer:
        version = peer.version
        times["computed"].append(peer.ask("read", held))
        times["running"] += [peer.ask("ask", ids) for ids in asked]
    for ids in asked:
        with LlamaResumed(*given) as peer:
            loading = peer.ask("load")
            asking = peer.ask("ask", ids)
        times["at once"].append(loading + asking)
        times["after reading"].append(max(loading - arguments.reading_s, 0.0) + asking)
        print(f"llama.cpp: load {loading:.3f} s, ask {asking:.3f} s", flush=True)
    return {
        "version": version,
        "bytes": file.stat().st_size,
        **{way: median(seconds) for way, seconds in times.items()},
    }


@contextmanager
def loaded(arguments: argparse.Namespace, store: Path | None, context: int) -> Iterator[Engine]:
    engine = Engine.load(arguments.model, device=arguments.device, context=context, disk=store, disk_gb=100)
    try:
        yield engine
    finally:
        engine.close()


def decode_rate(engine: Engine) -> float:
    """Return the median tokens/s of a few answers."""
    stops = dict.fromkeys(engine.tokenizer.stop_ids, -100.0)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, logit_bias=stops)
    rates = []
    for _ in range(ANSWERS):
        began, count = 0.0, 0
        for _ in engine.stream(engine.tokenizer.encode(SENTENCE), params):
            began = began or perf_counter()
            count += 1
        rates.append((count - 1) / (perf_counter() - began))
    return median(rates)


def conversation(engine: Engine, tokens: int) -> tuple[list[Turn], Rows]:
    """Make a conversation of `tokens` tokens and wait until it is on disk; return its turns and rows."""
    chat = engine.chat()
    chat.owner = "benchmark"
    each = len(engine.tokenizer.encode(SENTENCE))
    list(chat.send(SENTENCE * ((tokens - 300) // each), GREEDY))
    chat.settle(wait=True)
    written(engine, len(chat.history))
    return chat.turns, chat.history


def written(engine: Engine, tokens: int) -> None:
    """Wait until `tokens` tokens have been written in all, except for a last block that is not full."""
    while (now := engine.figures().disk) is not None and now.written_tokens <= tokens - engine.block_size:
        sleep(0.1)


def writing(engine: Engine, rows: Rows, rounds: int) -> dict[str, float]:
    """Measure decoding while the conversation is written again under another name, and while nothing is written."""
    disk = engine.disk
    assert disk is not None
    spent = [0.0]

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any) -> Any:
            began = thread_time()
            try:
                return work(*given)
            finally:
                spent[0] += thread_time() - began

        return counting

    disk.go_on, disk._write = counted(disk.go_on), counted(disk._write)  # type: ignore[method-assign]
    found: dict[str, list[float]] = {"rate": [], "rate beside": [], "own": []}
    for number in range(rounds):
        for beside in (False, True) if number % 2 else (True, False):
            before = engine.figures().disk
            assert before is not None
            if beside:
                engine.save(f"beside-{number}", rows)
            spent[0], cpu = 0.0, process_time()
            found["rate" + " beside" * beside].append(decode_rate(engine))
            if beside:
                found["own"].append(spent[0] / (process_time() - cpu - spent[0]))
                written(engine, before.written_tokens + len(rows))
            sleep(0.2)
    ratios = [b / a for a, b in zip(found["rate"], found["rate beside"], strict=True)]
    low, middle, high = quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    return {
        **{name: median(values) for name, values in found.items()},
        "rate ratio": middle,
        "lower quarter": low,
        "upper quarter": high,
    }


def prompt_ids(engine: Engine, turns: list[Turn], number: int) -> list[int]:
    chat = engine.chat()
    chat.load(turns)
    return chat._history.prompt(chat.turns, QUESTION.format(number), None).token_ids


def first_token(
    engine: Engine, turns: list[Turn], reading_s: float, number: int, wait: bool = False
) -> float:
    """Open a conversation and read for `reading_s`; return seconds from the next message to the first token."""
    chat = engine.chat()
    chat.load(turns)
    if wait or reading_s:
        chat.settle(wait=wait)
        sleep(reading_s)
    began = perf_counter()
    answer = chat.send(QUESTION.format(number), GREEDY)
    next(iter(answer))
    took = perf_counter() - began
    answer.close()
    return took


def lines(found: dict[str, Any], arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{arguments.model}, a conversation of {found['tokens']:,} tokens"
    yield (
        f"decoding while it is written        {found['rate beside']:9.1f} tok/s, {found['rate']:.1f} without: "
        f"{found['rate ratio']:5.3f}x (quartiles {found['lower quarter']:.3f} and {found['upper quarter']:.3f}); "
        f"writing takes {found['own']:.2%} of the processor's time"
    )
    if arguments.only_writing:
        return
    yield from resumed(found, arguments)
    if (peer := found.get("llama.cpp")) is not None:
        yield f"llama.cpp (llama-cpp-python {peer['version']})"
        yield from resumed(peer, arguments)


def resumed(found: dict[str, Any], arguments: argparse.Namespace) -> Iterator[str]:
    running, computed = found["running"], found["computed"]
    yield f"on disk                             {bytes_text(int(found['bytes'])):>9}"
    yield f"first token, the process runs on    {running * 1e3:9.1f} ms"
    yield f"after a restart, computed anew      {computed * 1e3:9.1f} ms"
    at_once, reading = found["at once"], found["after reading"]
    yield f"from disk, asked at once            {at_once * 1e3:9.1f} ms   {computed / at_once:5.1f}x as fast"
    yield (
        f"from disk, after {arguments.reading_s:g} s of reading     {reading * 1e3:9.1f} ms   "
        f"{reading / running:5.2f}x that of the running process"
    )


if __name__ == "__main__":
    main()
