"""Steps that check guesses on a GPU, with the shapes of Qwen3 and random weights: speculation off and on, in turns.

    python -m benchmarks.guesses --shapes 8B,0.6B --formats bf16,q4_0 --json benchmarks/results/guesses.json
    python -m benchmarks.guesses --chances --replay benchmarks/results/worth.json      as guesses held in real answers
    python -m benchmarks.guesses --chances --replay benchmarks/results/worth_asked.json        in answers as asked
    python -m benchmarks.guesses --chances --copy 16,64      weights that copy the prompt, but for one token in 16 or 64

Text from random weights cannot be guessed, so acceptance is **simulated**: the answer is known from a run without
guesses, and each guessed token is right with the given probability; after the first wrong one, all are wrong.
Everything else is real: the steps and their costs, the number of guessed tokens, and when none are guessed. "never"
means guesses that never hold; "none" means that there is nothing to guess. With `--replay`, as many guesses are right
at each token as suffix matching got right in the answers of a real model (`benchmarks.speculation --worth`). With
`--copy` nothing is simulated: suffix matching finds the copies that the weights (bf16, with an embedding separate
from the head) produce. The tokens of the answers are compared, too.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.copying import copied, teach
from benchmarks.formats import FORMATS, random_quantized
from benchmarks.machine import Record, describe
from benchmarks.options import names, numbers, parse, parser_of
from benchmarks.replayed import Replayed, Worth, partly
from benchmarks.shapes import SHAPES, random_engine, random_model, random_prompt
from engine import Engine, SamplingParams
from engine.cache.rows import Rows
from engine.schedule.speculating import Speculating
from engine.speculation.cost_model import Acceptance
from engine.speculation.sources import NOTHING, Guess
from engine.speculation.texts import ConversationText, Texts
from models.network import Network

DTYPE = torch.bfloat16


@dataclass(slots=True)
class Known(Texts):
    """Guesses the next tokens of `answer`, each right with a probability; with None there is nothing to guess."""

    answer: list[int] = field(default_factory=list)
    chance: float | None = None
    random: Random = field(default_factory=lambda: Random(0))

    def guess(self, text: ConversationText, most: int) -> Guess:
        """Guess as many tokens as after a match of 32 tokens."""
        if self.chance is None:
            return NOTHING
        coming = self.answer[len(text.path) :][:most]
        right = 0
        while right < len(coming) and self.random.random() < self.chance:
            right += 1
        return partly(coming, right, 32)


def answer(
    engine: Engine, prompt: list[int], tokens: int, texts: Texts | None
) -> tuple[list[int], float, float]:
    """Get a greedy answer. Return its tokens, tokens/s after the first, and tokens per step."""

    def job() -> None:
        known = engine.engine_step.speculating
        assert known is not None
        speculating = Speculating(engine.pieces.scheduler, known.pace, texts or Texts())
        speculating.pace.acceptance = Acceptance()
        engine.engine_step.speculating = speculating

    engine.loop.call(job)
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, speculation="off" if texts is None else "auto"
    )
    sequence = engine.start(Rows.of(prompt), params)
    said = [event.token_id for event in engine.events(sequence)]
    stats = sequence.stats()
    return said, stats.decode_tokens_per_s, len(said) / (len(said) - stats.accepted_tokens)


def named(chance: float) -> str:
    return "none" if chance < 0 else "never" if chance == 0 else f"{chance}"


def measure(
    shape: str,
    kind: str,
    contexts: list[int],
    chances: list[float],
    replay: dict[str, list[Worth]],
    turns: int,
) -> dict[str, Any]:
    """Compare off and on in turns at each context and chance, and with replayed guesses; print and return medians."""
    device, spec, most = torch.device("cuda"), SHAPES[shape], max(contexts) + 600
    make = (
        partial(random_model, spec, DTYPE, device, most)
        if kind == "bf16"
        else partial(random_quantized, spec, kind, DTYPE, device, most)
    )
    found: dict[str, Any] = {}
    with random_engine(spec, device=device, dtype=DTYPE, context=most, make=make) as (engine, _):
        for context in contexts:
            prompt = random_prompt(spec, context, 1)
            plain, _, _ = answer(engine, prompt, 500, None)
            whole = [*prompt, *plain]

            def drawn(chance: float, turn: int, whole: list[int] = whole) -> Texts:
                return Known(answer=whole, chance=None if chance < 0 else chance, random=Random(turn))

            def replayed(name: str, turn: int, whole: list[int] = whole, start: int = context) -> Texts:
                return Replayed(answer=whole, prompt=start, worth=replay[name])

            compare(engine, prompt, plain, partial(drawn, 0.95), 1)  # discarded: it records the steps' graphs
            texts = [(named(chance), len(plain), partial(drawn, chance)) for chance in chances]
            texts += [(f"as {name}", len(replay[name]), partial(replayed, name)) for name in replay]
            for name, count, make_texts in texts:
                figures = compare(engine, prompt, plain[:count], make_texts, turns)
                found[f"{context}, {name}"] = tell(f"{shape:6}{kind:7}{context:7,} {name}", figures)
    return found


def measure_copies(
    shape: str, contexts: list[int], every: list[int], turns: int, device: torch.device
) -> dict[str, Any]:
    """Compare off and on in turns with weights that copy the prompt, but for one token in so many (`every`).

    Print and return the medians.
    """
    spec, most = replace(SHAPES[shape], tied=False), max(contexts) + 600
    found: dict[str, Any] = {}
    for context in contexts:
        for changes in every:
            prompt, expected = copied(spec.vocab_size, context, 500, changes, 1)

            def make(text: list[int] = [*prompt[-1:], *expected]) -> Network:  # noqa: B006 - nobody changes it
                network = random_model(spec, DTYPE, device, most)
                teach(network, text)
                return network

            with random_engine(spec, device=device, dtype=DTYPE, context=most, make=make) as (engine, _):
                answer(engine, prompt, len(expected), Texts())  # records the steps' graphs
                figures = compare(engine, prompt, expected, lambda turn: Texts(), turns)
            name = f"{shape:6}bf16   {context:7,} one in {changes} is changed"
            found[f"{context}, one in {changes}"] = tell(name, figures)
    return found


def compare(
    engine: Engine, prompt: list[int], expected: list[int], make_texts: Callable[[int], Texts], turns: int
) -> dict[str, Any]:
    """Return the medians of off and on, in turns. Exit if an answer is not the expected one."""
    pairs = []
    for turn in range(turns):
        off = answer(engine, prompt, len(expected), None)
        on = answer(engine, prompt, len(expected), make_texts(turn))
        if not on[0] == off[0] == expected:
            sys.exit(f"context {len(prompt)}, turn {turn}: the tokens differ")
        pairs.append((off[1], on[1], on[2]))
    off_rate, on_rate, a_step = (statistics.median(pair[part] for pair in pairs) for part in range(3))
    speculating = engine.engine_step.speculating
    assert speculating is not None
    costs = [round(speculating.pace.costs.of(rows), 2) for rows in (2, 4, 8)]
    return {
        "off": off_rate, "on": on_rate, "ratio": on_rate / off_rate, "tokens a step": a_step,
        "cost of 2, 4, 8 rows": costs,
    }  # fmt: skip


def tell(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{name:>30}: off {figures['off']:7.1f}, on {figures['on']:7.1f} tok/s, {figures['ratio']:5.2f}x, "
        f"{figures['tokens a step']:.2f} tokens a step; 2, 4, 8 rows cost {figures['cost of 2, 4, 8 rows']}",
        flush=True,
    )
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["8B"])
    parser.add_argument("--formats", type=names, default=["bf16", "q4_0"])
    parser.add_argument("--contexts", type=numbers, default=[512])
    parser.add_argument("--chances", nargs="*", type=float, default=[-1, 0.0, 0.5, 0.7, 0.8, 0.9, 0.97])
    parser.add_argument("--replay", type=Path, help="what guesses were worth in real answers")
    parser.add_argument(
        "--copy", type=numbers, default=[], help="copy the prompt, with one token in every N changed"
    )
    arguments = parse(parser, (), tuple(FORMATS))
    replay = {}
    if arguments.replay is not None:
        read = json.loads(arguments.replay.read_text(encoding="utf-8"))
        replay = {name: [Worth(*one) for one in found] for name, found in read.items()}
    contexts, turns, device = arguments.contexts, arguments.repeats, torch.device(arguments.device)
    record = Record(arguments.json, describe(device), arguments.merge)
    for shape in arguments.shapes:
        for kind in arguments.formats if arguments.chances or replay else ():
            found = measure(shape, kind, contexts, arguments.chances, replay, turns)
            record.add(found, "guesses", f"{shape} {kind}")
        if arguments.copy:
            found = measure_copies(shape, contexts, arguments.copy, turns, device)
            record.add(found, "copies", shape)


if __name__ == "__main__":
    main()
