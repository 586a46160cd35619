"""Steps that check guesses on a GPU, at the shapes of Qwen3 with random weights: speculation off beside on, in turns.

    python -m benchmarks.guesses --shapes 8B,0.6B --formats bf16,q4_0 --json benchmarks/results/guesses.json

Random weights say nothing that could be guessed, so acceptance is **simulated**: the answer is known from a run without
guesses, and each guess of a row is right with the given chance; from the first wrong one on all are wrong. All else is
as it is: steps and what they cost, how many tokens are guessed, when there are none. "never" are guesses that never
hold; "none": there is nothing to guess. The tokens are compared, too.
"""

import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch

from benchmarks.formats import FORMATS, random_quantized
from benchmarks.machine import Record, describe
from benchmarks.options import names, numbers, parse, parser_of
from benchmarks.shapes import SHAPES, random_engine, random_model, random_prompt
from engine import Engine, SamplingParams
from engine.cache.rows import Rows
from engine.schedule.speculating import Speculating
from engine.speculation.pace import Acceptance
from engine.speculation.sources import NOTHING, Guess
from engine.speculation.texts import Text, Texts

DTYPE = torch.bfloat16


@dataclass(slots=True)
class Known(Texts):
    """Guesses what comes next in `answer`, each token with a chance; None: there is nothing to guess."""

    answer: list[int] = field(default_factory=list)
    chance: float | None = None
    random: Random = field(default_factory=lambda: Random(0))

    def guess(self, text: Text, most: int) -> Guess:
        """As long as a match of 32 tokens would be."""
        if self.chance is None:
            return NOTHING
        coming = self.answer[len(text.path) :][:most]
        right = 0
        while right < len(coming) and self.random.random() < self.chance:
            right += 1
        return Guess((*coming[:right], *((token + 1) % 100 for token in coming[right:])), 32)


def answer(
    engine: Engine, prompt: list[int], tokens: int, texts: Texts | None
) -> tuple[list[int], float, float]:
    """A greedy answer: its tokens, tokens/s after the first, and tokens a step."""

    def job() -> None:
        known = engine._engine_step.speculating
        assert known is not None
        speculating = Speculating(engine._scheduler, known.pace, texts or Texts())
        speculating.pace.acceptance = Acceptance()
        engine._engine_step.speculating = speculating

    engine._loop.call(job)
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, speculation="off" if texts is None else "auto"
    )
    sequence = engine.start(Rows.of(prompt), params)
    said = [event.token_id for event in engine.events(sequence)]
    stats = sequence.stats()
    return said, stats.decode_tokens_per_s, len(said) / (len(said) - stats.accepted_tokens)


def measure(shape: str, kind: str, contexts: list[int], chances: list[float], turns: int) -> dict[str, Any]:
    """Off and on in turns at each context and chance; prints and returns the medians."""
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
            known = Known(answer=[*prompt, *plain])
            for chance in [0.95, *chances]:  # the first is thrown away: steps are recorded
                known.chance = None if chance < 0 else chance
                pairs = []
                for turn in range(turns):
                    known.random = Random(turn)
                    off = answer(engine, prompt, 500, None)
                    on = answer(engine, prompt, 500, known)
                    if on[0] != off[0]:
                        sys.exit(f"{shape} {kind}, context {context}, chance {chance}: the tokens differ")
                    pairs.append((off[1], on[1], on[2]))
                rates = [statistics.median(pair[part] for pair in pairs) for part in range(3)]
                speculating = engine._engine_step.speculating
                assert speculating is not None
                costs = [round(speculating.pace.costs.of(rows), 2) for rows in (2, 4, 8)]
                name = "none" if chance < 0 else "never" if chance == 0 else f"{chance}"
                print(
                    f"{shape:6}{kind:7}{context:7,} {name:>6}: off {rates[0]:7.1f}, on {rates[1]:7.1f} tok/s, "
                    f"{rates[1] / rates[0]:5.2f}x, {rates[2]:.2f} tokens a step; 2, 4, 8 rows cost {costs}",
                    flush=True,
                )
                found[f"{context}, {name}"] = {
                    "off": rates[0], "on": rates[1], "ratio": rates[1] / rates[0], "tokens a step": rates[2],
                    "cost of 2, 4, 8 rows": costs,
                }  # fmt: skip
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names, default=["8B"])
    parser.add_argument("--formats", type=names, default=["bf16", "q4_0"])
    parser.add_argument("--contexts", type=numbers, default=[512])
    parser.add_argument("--chances", nargs="+", type=float, default=[-1, 0.0, 0.5, 0.7, 0.8, 0.9, 0.97])
    arguments = parse(parser, (), tuple(FORMATS))
    record = Record(arguments.json, describe(torch.device("cuda")), arguments.merge)
    for shape in arguments.shapes:
        for kind in arguments.formats:
            found = measure(shape, kind, arguments.contexts, arguments.chances, arguments.repeats)
            record.add(found, "guesses", f"{shape} {kind}")


if __name__ == "__main__":
    main()
