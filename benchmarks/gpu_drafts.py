"""A draft model on a GPU: the rate that the cost model predicts and the measured one, with random weights.

    python -m benchmarks.gpu_drafts --large 8B --small 0.6B --acceptance 0.9 0.7 0.5

One random model cannot predict another, so acceptance is **simulated**: the draft model computes everything as usual,
and then each of its tokens is right with the given probability. Everything else is real: the steps, their costs, and
the number of guessed tokens. The tokens of the answers are compared, too.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from statistics import median
from typing import Any

import torch

from benchmarks.drafts import Cycling, Said, Watched, answer, expected_gain, usual
from benchmarks.machine import Record, describe
from benchmarks.options import parse, parser_of
from benchmarks.shapes import SHAPES, random_engine, random_model, random_prompt
from engine.sampling.sampler import Drawn
from engine.schedule.drafting_in_slots import SlotDrafting
from engine.schedule.speculating import AGAIN_IN_SLOTS
from engine.speculation.pace import Acceptance, Pace, Rate
from engine.speculation.sources import Asked, Guess

DTYPE, SIZES, CONTEXT = torch.bfloat16, (1, 2, 4, 8), 512


@dataclass(slots=True, kw_only=True)
class Simulated(SlotDrafting):
    """A draft model that is right with a given probability, as long as all earlier guesses were right."""

    truth: list[int] = field(default_factory=list)
    """The text as it will be."""
    acceptance: float = 1.0
    random: Random = field(default_factory=lambda: Random(0))

    def _guessed(self, asked: Asked, drawn: list[Drawn]) -> Guess:
        SlotDrafting._guessed(self, asked, drawn)  # called for its cost
        self.sure = self.acceptance
        coming = self.truth[len(asked.tokens) :][: len(drawn)]
        tokens = [
            token if self.random.random() < self.acceptance else (token + 1) % self.vocab_size
            for token in coming
        ]
        return Guess(tuple(tokens), chances=(self.acceptance,) * len(tokens))


def measure(large: str, small: str, given: list[float], tokens: int, turns: int) -> list[dict[str, float]]:
    """Measure one pair at each acceptance; print and return the figures."""
    device, most = torch.device("cuda"), CONTEXT + tokens + 16
    draft = random_model(SHAPES[small], DTYPE, device, most, seed=1)
    options: dict[str, Any] = {"draft": draft, "draft_name": small}
    with random_engine(SHAPES[large], device=device, dtype=DTYPE, context=most, **options) as (engine, _):
        drafts = engine._drafts
        if not isinstance(drafts, SlotDrafting):
            sys.exit(f"{large}, {small}: {' '.join(engine.figures().notes)}")
        known_fields = {part.name: getattr(drafts, part.name) for part in fields(SlotDrafting)}
        simulated = Simulated(**known_fields)
        prompt = random_prompt(SHAPES[large], CONTEXT, 1)
        known = Cycling(draft=drafts.cost, sizes=SIZES)
        plain = answer(engine, prompt, tokens, "off", Watched(engine._scheduler, known))
        simulated.truth = [*prompt, *plain.tokens]
        for _ in range(2):  # the graphs of the steps are recorded
            warm = answer(
                engine, prompt, tokens, "draft", Watched(engine._scheduler, known, drafts=simulated)
            )
            if warm.tokens != plain.tokens:
                sys.exit("the tokens differ")
        said = [answer(engine, prompt, tokens, "off", Watched(engine._scheduler, Pace(sizes=SIZES)))]
        said += [
            answer(engine, prompt, tokens, "draft", Watched(engine._scheduler, known, drafts=simulated))
            for _ in range(3)
        ]
        costs = filled(usual(said))
        one = costs["1 rows"]
        more = ", ".join(f"{costs[f'{count} rows'] / one:.2f}" for count in SIZES[1:])
        print(
            f"{large} with {small}, context {CONTEXT}: a step takes {one * 1e3:.2f} ms, of 2, 4, 8 rows "
            f"{more} times that, of the draft model {costs['draft'] / one:.2f} (by bytes {drafts.cost:.2f})\n"
            f"{'simulated':>10}{'off':>9}{'expected':>10}{'measured':>10}{'of expected':>13}{'gain':>7}"
            f"{'right':>7}{'a step':>8}",
            flush=True,
        )
        return [at(lambda how, watched: answer(engine, prompt, tokens, how, watched), engine, simulated, known,
                   costs, plain.tokens, rate, turns) for rate in given]  # fmt: skip


def filled(costs: dict[str, float]) -> dict[str, float]:
    """Fill in missing costs: 3 rows are computed as 4, 5 to 7 as 8; an unseen size costs as much as the next one."""
    found = dict(costs)
    for count in range(8, 0, -1):
        size = next(size for size in SIZES if size >= count)
        seen = [costs[f"{rows} rows"] for rows in range(1, 9)
                if f"{rows} rows" in costs and next(s for s in SIZES if s >= rows) == size]  # fmt: skip
        found[f"{count} rows"] = median(seen) if seen else found[f"{count + 1} rows"]
    return found


def at(
    ask: Callable[[Any, Watched], Said],
    engine: Any,
    simulated: Simulated,
    known: Pace,
    costs: dict[str, float],
    plain: Sequence[int],
    rate: float,
    turns: int,
) -> dict[str, float]:
    """Compare answers without and with guesses, in turns, where drafts hold with probability `rate`."""
    simulated.acceptance = simulated.sure = rate
    off, on = list[Said](), list[Said]()
    for turn in range(turns):
        simulated.random = Random(turn)
        pace = Pace(sizes=SIZES, again=AGAIN_IN_SLOTS)
        pace._known, pace.drafts.credit = known._known, 1e9  # the budget for drafts is not in question here
        pace.acceptance = Acceptance(drafts=[Rate(rate) for _ in range(5)], drafted=Rate(rate))
        off.append(ask("off", Watched(engine._scheduler, Pace(sizes=SIZES))))
        on.append(ask("draft", Watched(engine._scheduler, pace, drafts=simulated)))
        if on[-1].tokens != list(plain):
            sys.exit(f"acceptance {rate}, turn {turn}: the tokens differ")
    rates = [1 / median(said.token_s for said in both) for both in (off, on)]
    expected = rates[0] * expected_gain(costs, rate)
    found = {
        "acceptance": rate,
        "off": rates[0],
        "expected": expected,
        "measured": rates[1],
        "right": sum(said.accepted for said in on) / max(sum(said.guessed for said in on), 1),
        "a step": median(said.a_step for said in on),
    }
    print(
        f"{rate:>10.2f}{rates[0]:>9.1f}{expected:>10.1f}{rates[1]:>10.1f}{rates[1] / expected:>13.1%}"
        f"{rates[1] / rates[0]:>7.2f}{found['right']:>7.0%}{found['a step']:>8.2f}",
        flush=True,
    )
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--large", default="8B")
    parser.add_argument("--small", default="0.6B")
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.9, 0.8, 0.7, 0.6, 0.5])
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parse(parser, (), ())
    record = Record(arguments.json, describe(torch.device("cuda")), arguments.merge)
    pair = arguments.large, arguments.small
    for found in measure(*pair, arguments.acceptance, arguments.tokens, arguments.repeats):
        record.add(found, "drafts", f"{pair[0]} with {pair[1]}", f"{found['acceptance']}")


if __name__ == "__main__":
    main()
