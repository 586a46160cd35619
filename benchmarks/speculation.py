"""Speculation off and on, in turns: tokens/s on a CPU of answers that repeat earlier text, and of free chat.

    python -m benchmarks.speculation                             SmolLM2, greedy
    python -m benchmarks.speculation --identity 1000             random conversations instead: 0 tokens may differ
    python -m benchmarks.speculation --identity 1000 --recurrent     the same with layers of Qwen3.5
    python -m benchmarks.speculation --first 30                  the time to the first token instead
    python -m benchmarks.speculation --as-asked                  answers that do what they were asked to
    python -m benchmarks.speculation --index 100000              memory and time of an index of 100,000 tokens
    python -m benchmarks.speculation --pairs 1.7B:0.6B 4B:0.6B   a draft model, at simulated acceptances

Before every answer, the text of other answers is forgotten, so that no round finds the answer of another. Beside the
rates is their ratio by steps, in which each step counts as the median of the steps with as many rows, plus the time
spent finding guesses; brief disturbances by other programs hardly affect it. The cost of a step of 8 rows is given in
steps of one row. A small model often does not do as it is asked. With `--as-asked` the answer is given: everything is
computed and drawn as usual, then replaced, so that the time of a step is real, and guesses hold as often as they do in
such an answer. `--identity` plays random conversations (`benchmarks.conversations`) with a small model whose text
repeats itself, or with the given model; it exits with seed and step if a token differs.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.conversations import Checked, identical
from benchmarks.drafts import measure_pair
from benchmarks.repeating import SENTENCE, repeating_engine
from benchmarks.replayed import worth
from engine import Engine
from engine.sampling.sampler import SamplerState, sample
from engine.schedule.scheduler import PromptChunk
from engine.schedule.sequence import Priority, Sequence
from engine.schedule.speculating import Speculating
from engine.speculation.cost_model import MOST_ROWS
from engine.speculation.texts import Texts, from_elsewhere

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
SMOLLM2_TOKEN = 2 * 30 * 3 * 64 * 2
"""Bytes of KV per token: keys and values of 30 layers, 3 heads of 64 numbers of 2 bytes."""
TOLD = 10
"""Number of conversations between two reports."""
CHAT = "What makes a good morning? Tell me at length."
TASKS = {
    "editing": f"Write this file again, with state renamed to known:\n```python\n{FILE}\n```",
    "JSON": f"Translate the colours to French and give the whole JSON back:\n```json\n{RECORDS}\n```",
    "quoting": f"Quote this text word for word, then say in a sentence what it is about:\n\n{TALE}",
    "repeating": f"Repeat this text, but call the keeper a sailor:\n\n{TALE}",
    "free chat": CHAT,
    "long chat": f"Here is a file:\n```python\n{FILE}\n```\nForget about it now. {CHAT}",
}

AS_ASKED = {
    "editing": f"```python\n{FILE.replace('state', 'known')}\n```",
    "JSON": RECORDS.replace("red", "rouge").replace("blue", "bleu").replace("green", "vert"),
    "quoting": f"{TALE}\nIt is about a man who keeps a lighthouse.",
    "repeating": TALE.replace("keeper", "sailor"),
}


@contextmanager
def given(answer: list[int]) -> Iterator[None]:
    """Patch sampling to draw as usual, but to return the tokens of `answer` as far as it goes."""

    def says(logits: Tensor, state: SamplerState, mask: Tensor | None = None) -> int:
        at, drawn = state.step, sample(logits, state, mask)
        return answer[at] if at < len(answer) else drawn

    with patch("engine.schedule.answers.sample", says):
        yield


@dataclass(slots=True)
class Watched(Speculating):
    """A speculation that records the duration of its steps."""

    steps: list[tuple[int, float]] = field(default_factory=list)
    """Rows and seconds of the steps of this answer."""
    looking: list[float] = field(default_factory=list)
    """Seconds spent finding guesses before each step."""
    text: list[int] = field(default_factory=list)
    """All tokens of this answer and of the text before it."""

    def offer(self, chunks: list[PromptChunk]) -> list[PromptChunk]:
        began = perf_counter()
        found = Speculating.offer(self, chunks)
        self.looking.append(perf_counter() - began)
        return found

    def saw(self, checked: list[tuple[Sequence, int, int]], seconds: float) -> None:
        self.steps.append((sum(1 + guesses for _, guesses, _ in checked), seconds))
        Speculating.saw(self, checked, seconds)

    def ended(self, sequence: Sequence) -> None:
        if sequence.priority is Priority.PERSON:
            self.text = list(sequence.rows.token_ids)
        Speculating.ended(self, sequence)


def forget(engine: Engine, rows: bool) -> None:
    """Clear the text to guess from, and with `rows` also the cache; the known costs of steps are kept."""

    def job() -> None:
        if rows:
            engine.pieces.blocks.evict_all()
        known, watched = engine.engine_step.speculating, Watched(engine.pieces.scheduler)
        assert known is not None
        watched.pace._known, watched.drafts = known.pace._known, known.drafts
        engine.engine_step.speculating = watched

    engine.loop.call(job)


def measure(engine: Engine, text: str, tokens: int, how: Mapping[str, Any], rows: bool) -> dict[str, Any]:
    """Return the tokens of one answer, sampled as `how` says, with tokens/s and counts of guesses. With `rows` the
    prompt is computed, too."""
    forget(engine, rows)
    chat = engine.chat()
    params = engine.default_params(**{"repetition_penalty": 1.0, "max_tokens": tokens, **how})
    for _ in chat.send(text, params):
        pass
    assert chat.last is not None
    stats = chat.last.stats
    watched = engine.engine_step.speculating
    assert isinstance(watched, Watched)
    return {
        "tokens": chat.last.token_ids,
        "rate": stats.decode_tokens_per_s,
        "ttft": stats.ttft_s,
        "right": stats.accepted_tokens / max(stats.guessed_tokens, 1),
        "a step": stats.generated_tokens / max(stats.generated_tokens - stats.accepted_tokens, 1),
        "steps": watched.steps,
        "text": watched.text,
        "looking": statistics.median(watched.looking) * len(watched.looking),
    }


def compare(
    engine: Engine, names: list[str], tokens: int, rounds: int, temperature: float, as_asked: bool
) -> dict[str, Any]:
    """Compare off and on in turns; print and return the medians."""
    found: dict[str, Any] = {}
    print(
        f"{'':12}{'off':>9}{'on':>9}{'ratio':>8}{'by steps':>10}{'right':>8}{'a step':>8}{'8 rows':>8}"
        "   first token off, on"
    )
    for name in names:
        pairs = []
        answer = engine.tokenizer.encode_plain(AS_ASKED[name])[:tokens] if as_asked else []
        count = len(answer) or tokens
        for turn in range(rounds):
            order = ("off", "auto") if turn % 2 == 0 else ("auto", "off")
            drawn = {"temperature": temperature, "seed": turn}
            with given(answer):
                pair = {
                    how: measure(engine, TASKS[name], count, {**drawn, "speculation": how}, turn == 0)
                    for how in order
                }
            if pair["off"]["tokens"] != pair["auto"]["tokens"]:
                sys.exit(f"{name}, round {turn}: the tokens differ")
            pairs.append(pair)
        off, on = (
            {key: statistics.median(pair[how][key] for pair in pairs) for key in ("rate", "right", "a step")}
            for how in ("off", "auto")
        )
        ratio = statistics.median(pair["auto"]["rate"] / pair["off"]["rate"] for pair in pairs)
        costs = costs_of([step for pair in pairs for how in pair.values() for step in how["steps"]])
        spent = {
            how: sum(
                pair[how]["looking"] + sum(costs[rows] for rows, _ in pair[how]["steps"]) for pair in pairs
            )
            for how in ("off", "auto")
        }
        by_steps, dear = spent["off"] / spent["auto"], costs[max(costs)] / costs[1]
        first = [pairs[0][how]["ttft"] for how in ("off", "auto")]
        print(
            f"{name:12}{off['rate']:9.1f}{on['rate']:9.1f}{ratio:8.2f}{by_steps:10.2f}{on['right']:8.0%}"
            f"{on['a step']:8.2f}{dear if max(costs) == 8 else 0:8.2f}"
            f"   {first[0] * 1e3:.0f} ms, {first[1] * 1e3:.0f} ms",
            flush=True,
        )
        rows = {rows: cost / costs[1] for rows, cost in sorted(costs.items())}
        found[name] = {
            "off": off, "on": on, "ratio": ratio, "by steps": by_steps, "cost of rows": rows, "ttft": first,
            "worth": worth(pairs[0]["auto"]["text"], len(pairs[0]["auto"]["text"]) - len(pairs[0]["auto"]["tokens"])),
        }  # fmt: skip
    return found


def compare_first(engine: Engine, names: list[str], rounds: int) -> None:
    """Compare the time to the first token, off and on in turns, with nothing cached."""
    print(f"{'':12}{'off':>10}{'on':>10}{'on - off':>10}   medians in ms; the middle half of the differences")
    for name in names:
        found = {"off": list[float](), "auto": list[float]()}
        for turn in range(2 * rounds):
            how = ("off", "auto", "auto", "off")[turn % 4]
            found[how].append(1e3 * measure(engine, TASKS[name], 4, {"speculation": how}, True)["ttft"])
        off, on = map(statistics.median, found.values())
        more = [auto - plain for plain, auto in zip(*found.values(), strict=True)]
        low, middle, high = statistics.quantiles(more, n=4)
        print(f"{name:12}{off:10.1f}{on:10.1f}{middle:10.1f}   {low:.1f} to {high:.1f}", flush=True)


def costs_of(steps: list[tuple[int, float]]) -> dict[int, float]:
    """Return the median seconds of steps by rows: brief disturbances by other programs hardly affect it."""
    return {
        rows: statistics.median(seconds for count, seconds in steps if count == rows)
        for rows in {rows for rows, _ in steps}
    }


def weigh(count: int) -> None:
    """Print what an index of `count` tokens takes: memory, and time per token and per guess. No model is loaded."""
    random = Random(0)
    parts = [random.choices(range(49_152), k=random.randint(5, 60)) for _ in range(count // 100)]
    words = list(chain.from_iterable(random.choice(parts) for _ in range(count // 20)))[:count]
    texts = Texts(elsewhere=from_elsewhere([words[: len(words) // 2]]))
    text = texts.take(None, words[: len(words) // 2])
    adding, guessing = list[float](), list[float]()
    for at in range(len(words) // 2, len(words)):
        began = perf_counter()
        text.go_on(words[at : at + 1])
        added = perf_counter()
        texts.guess(text, MOST_ROWS - 1)
        adding.append(added - began)
        guessing.append(perf_counter() - added)
    size = (text.index.nbytes + 4 * len(text.path) + texts.elsewhere.nbytes) / len(words)
    slow = sorted(guessing)[-len(guessing) // 100]
    print(
        f"{len(words):,} tokens: {size:.1f} bytes and {statistics.median(adding) * 1e6:.1f} µs a token, "
        f"{statistics.median(guessing) * 1e6:.0f} µs a guess (99 of 100: {slow * 1e6:.0f}); "
        f"{size / SMOLLM2_TOKEN:.3%} of the KV of SmolLM2 135M"
    )


def compare_tokens(engine: Engine, count: int, first: int, words: list[str], seconds: float) -> None:
    """Play `count` random conversations, or as many as there is time for, and report the comparison now and then."""
    print(f"{engine.figures().decode}; {engine.figures().speculation}", flush=True)
    began, checked = perf_counter(), Checked()
    for start in range(0, count, TOLD):
        if perf_counter() - began > seconds:
            break
        checked += identical(engine, min(TOLD, count - start), first + start, words)
        print(
            f"{min(start + TOLD, count)} conversations, {checked.tokens:,} tokens: 0 differ. {checked.guessed:,} "
            f"guesses were checked, {checked.accepted:,} accepted; {perf_counter() - began:.0f} s",
            flush=True,
        )


def keep(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, help="only these")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: greedy; else each round has its seed"
    )
    parser.add_argument("--as-asked", action="store_true", help="answers are those that were asked for")
    parser.add_argument("--first", type=int, default=0, help="so many times the first token alone")
    parser.add_argument("--identity", type=int, default=0, help="compare so many random conversations")
    parser.add_argument("--recurrent", action="store_true", help="of a model with recurrent layers")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--seconds", type=float, default=inf, help="begin no more of them after so many")
    parser.add_argument(
        "--draft-seed",
        type=int,
        help="of a draft model for these; 0 is the model itself, so it is nearly always right",
    )
    parser.add_argument("--draft", help="a draft model for the one that is named")
    parser.add_argument("--index", type=int, default=0, help="weigh the index of so many tokens")
    parser.add_argument(
        "--pairs", nargs="+", metavar="LARGE:SMALL", help="shapes of Qwen3 (see benchmarks.drafts)"
    )
    parser.add_argument("--kinds", default="Q4_0:Q4_0", help="of their weights: Q4_0 or Q8_0")
    parser.add_argument("--acceptances", nargs="+", type=float, default=[0.5, 0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--device", default="cpu", help="of the pairs, and of random conversations")
    parser.add_argument("--threads", type=int, help="of a CPU, for the pairs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worth", type=Path, help="write here how many guesses held at each token")
    arguments = parser.parse_args()
    if arguments.index:
        return weigh(arguments.index)
    if arguments.pairs:
        large, small = arguments.kinds.split(":")
        pairs = {
            pair: measure_pair(
                *pair.split(":"),
                (large, small),
                arguments.device,
                arguments.threads,
                arguments.acceptances,
                arguments.tokens,
                arguments.rounds,
            )
            for pair in arguments.pairs
        }
        return keep(arguments.json, pairs)
    if arguments.identity and arguments.model is None:
        draft, device, recurrent = arguments.draft_seed, arguments.device, arguments.recurrent
        with repeating_engine(draft=draft, device=device, recurrent=recurrent) as small:
            return compare_tokens(
                small, arguments.identity, arguments.seed, SENTENCE.split(), arguments.seconds
            )
    engine = Engine.load(arguments.model or "smollm2", device="cpu", streams=8, draft=arguments.draft)
    with closing(engine):
        print(f"{engine.model_name}, {engine.figures().decode}; {engine.figures().speculation}", flush=True)
        if arguments.identity:
            return compare_tokens(engine, arguments.identity, arguments.seed, TALE.split(), arguments.seconds)
        if arguments.first:
            return compare_first(engine, arguments.tasks or ["free chat", "quoting"], arguments.first)
        names = arguments.tasks or list(AS_ASKED if arguments.as_asked else TASKS)
        found = compare(
            engine, names, arguments.tokens, arguments.rounds, arguments.temperature, arguments.as_asked
        )
        held = {name: figures.pop("worth") for name, figures in found.items()}
        if arguments.worth is not None:
            arguments.worth.write_text(json.dumps(held) + "\n", encoding="utf-8")
        keep(arguments.json, found)
    return None


if __name__ == "__main__":
    main()
