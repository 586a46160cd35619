"""Speculation off beside on, in turns: tokens/s on a CPU of answers that repeat what was said, and of free chat.

    python -m benchmarks.speculation                             SmolLM2, greedy
    python -m benchmarks.speculation --identity 1000             random conversations instead: 0 tokens may differ

Before every answer all that is cached and known of other texts is forgotten: no round finds the answer of another.
The cost of a step of 8 rows, in steps of one row, is printed with the rates. `--identity` plays random conversations
(greedy and sampled, cut and resumed, branched, cancelled, with 1 to 8 streams), and ends with seed and step where a
token differs.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from engine import Engine, SamplingParams
from engine.cache.rows import Rows
from engine.conversation.chat import Chat
from engine.schedule.sequence import Sequence
from engine.schedule.speculating import Speculating

LINES = [
    f"def step_{n}(state, value):\n    total = state.get('{name}', 0) + value * {n}\n    state['{name}'] = total\n"
    f"    return total if total < {100 + n} else {n}\n"
    for n, name in enumerate(["apples", "pears", "plums", "figs", "dates"] * 12)
]
FILE = "\n".join(LINES)
"""A file of 300 lines."""
RECORDS = json.dumps(
    [
        {"id": n, "name": f"item {n}", "colour": ["red", "blue", "green"][n % 3], "price": 3 * n}
        for n in range(12)
    ],
    indent=1,
)
TALE = (
    "The old keeper climbed the stairs of the lighthouse every evening. He lit the lamp, wrote down the wind and the "
    "height of the waves, and looked for ships until midnight. In the winter of that year a whale came into the bay. "
) * 3
TASKS = {
    "editing": f"Write this file again, with state renamed to known:\n```python\n{FILE}\n```",
    "JSON": f"Translate the colours to French and give the whole JSON back:\n```json\n{RECORDS}\n```",
    "quoting": f"Quote this text word for word, then say in a sentence what it is about:\n\n{TALE}",
    "repeating": f"Repeat this text, but call the keeper a sailor:\n\n{TALE}",
    "free chat": "What makes a good morning? Tell me at length.",
}
FIGURES = ("rate", "ttft", "right", "a step")


def forget(engine: Engine) -> None:
    """Have nothing cached, and no text to guess from; the measured costs are kept."""

    def job() -> None:
        engine._blocks.evict_all()
        known = engine._engine_step.speculating
        if known is not None:
            pace = known.pace
            engine._engine_step.speculating = Speculating(engine._scheduler)
            engine._engine_step.speculating.pace.costs = pace.costs

    engine._loop.call(job)


def measure(engine: Engine, text: str, tokens: int, speculation: str) -> dict[str, Any]:
    """One answer: its tokens, tokens/s and what was guessed."""
    forget(engine)
    chat = engine.chat()
    params = engine.default_params(
        temperature=0.0, repetition_penalty=1.0, max_tokens=tokens, speculation=speculation
    )
    for _ in chat.send(text, params):
        pass
    assert chat.last is not None
    stats = chat.last.stats
    steps = max(stats.generated_tokens - stats.accepted_tokens, 1)
    return {
        "tokens": chat.last.token_ids,
        "rate": stats.decode_tokens_per_s,
        "ttft": stats.ttft_s,
        "right": stats.accepted_tokens / max(stats.guessed_tokens, 1),
        "a step": stats.generated_tokens / steps,
    }


def compare(engine: Engine, tokens: int, rounds: int) -> dict[str, Any]:
    """Off and on in turns; prints and returns the medians."""
    found: dict[str, Any] = {}
    print(
        f"{'':12}{'off':>9}{'on':>9}{'ratio':>8}{'right':>8}{'a step':>8}{'8 rows':>8}   first token off, on"
    )
    for name, text in TASKS.items():
        pairs = []
        for turn in range(rounds):
            order = ("off", "auto") if turn % 2 == 0 else ("auto", "off")
            pair = {how: measure(engine, text, tokens, how) for how in order}
            if pair["off"]["tokens"] != pair["auto"]["tokens"]:
                sys.exit(f"{name}, round {turn}: the tokens differ")
            pairs.append(pair)
        middle = {
            how: {
                key: statistics.median(pair[how][key] for pair in pairs)
                for key in ("rate", "ttft", "right", "a step")
            }
            for how in ("off", "auto")
        }
        ratio = statistics.median(pair["auto"]["rate"] / pair["off"]["rate"] for pair in pairs)
        known = engine._engine_step.speculating
        cost = known.pace.costs.of(8) if known is not None else 0.0
        off, on = middle["off"], middle["auto"]
        print(
            f"{name:12}{off['rate']:9.1f}{on['rate']:9.1f}{ratio:8.2f}{on['right']:8.0%}{on['a step']:8.2f}{cost:8.2f}"
            f"   {off['ttft'] * 1e3:.0f} ms, {on['ttft'] * 1e3:.0f} ms",
            flush=True,
        )
        found[name] = {"off": off, "on": on, "ratio": ratio, "cost of 8 rows": cost}
    return found


def conversation(engine: Engine, seed: int, speculation: str) -> Iterator[tuple[str, list[int]]]:
    """A random conversation: what was done, and the tokens that came of it."""
    random = Random(seed)
    chat, words = engine.chat(), TALE.split()
    for step in range(random.randint(2, 4)):
        text = " ".join(random.choices(words, k=random.randint(3, 20))) + ". Repeat that."
        params = engine.default_params(
            temperature=random.choice([0.0, 0.8]),
            repetition_penalty=random.choice([1.0, 1.1]),
            stop=random.choice([(), ("keeper",)]),
            seed=random.randrange(1000),
            max_tokens=random.randint(5, 40),
            speculation=speculation,
        )
        kind = random.choice(["send", "cut", "branch", "beside"])
        if kind == "branch" and chat.turns:
            list(chat.retry(params))
        elif kind == "cut":
            yield from _cut(chat, text, params, f"step {step}, cut")
            continue
        elif kind == "beside":
            streams = [
                engine.start(Rows.of(engine.tokenizer.encode_plain(f"{n} {text}")), params)
                for n in range(random.randint(1, 7))
            ]
            list(chat.send(text, params))
            for number, stream in enumerate(streams):
                yield f"step {step}, stream {number}", _heard(engine, stream)
        else:
            list(chat.send(text, params))
        assert chat.last is not None
        yield f"step {step}, {kind}", list(chat.last.token_ids)


def _cut(chat: Chat, text: str, params: SamplingParams, what: str) -> Iterator[tuple[str, list[int]]]:
    """An answer that is cut after some tokens, wherever that is, and resumed: the whole is what counts."""
    whole = params.max_tokens or 0
    events = chat.send(text, params)
    with closing(events):  # type: ignore[type-var]
        for _ in range(1 + whole // 3):
            next(events, None)
    last = chat.last
    if last is not None and not last.is_complete and (left := whole - len(last.token_ids)) > 0:
        list(chat.resume(replace(params, max_tokens=left)))
    assert chat.last is not None
    yield what, list(chat.last.token_ids)


def _heard(engine: Engine, sequence: Sequence) -> list[int]:
    return [event.token_id for event in engine.events(sequence)]


def identical(engine: Engine, count: int, first: int) -> None:
    """Compare so many random conversations; ends the program where one differs."""
    tokens = 0
    for seed in range(first, first + count):
        forget(engine)
        plain = list(conversation(engine, seed, "off"))
        forget(engine)
        for (what, expected), (_, found) in zip(plain, conversation(engine, seed, "auto"), strict=True):
            if expected != found:
                at = next(
                    (n for n, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), -1
                )
                sys.exit(f"seed {seed}, {what}: token {at} differs")
            tokens += len(found)
    print(f"{count} conversations, {tokens:,} tokens: 0 differ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--identity", type=int, default=0, help="compare so many random conversations")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    engine = Engine.load(arguments.model, device="cpu", streams=8)
    with closing(engine):
        print(f"{engine.model_name}, {engine.figures().decode}; {engine.figures().speculation}", flush=True)
        if arguments.identity:
            return identical(engine, arguments.identity, arguments.seed)
        found = compare(engine, arguments.tokens, arguments.rounds)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
