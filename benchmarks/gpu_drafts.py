"""A draft model on a GPU: the rate that the cost model predicts and the measured one, with random weights.

    python -m benchmarks.gpu_drafts --large 8B --small 0.6B --acceptance 0.9 0.7 0.5

One random model cannot predict another, so acceptance is **simulated**: the draft model computes everything as usual,
and then each of its tokens is right with the given probability. Everything else is real: the steps, their costs, and
the number of guessed tokens. The tokens of the answers are compared, too.
"""

import sys
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any, Literal

import torch

from benchmarks.drafts import HEAD, Said, Varying, Watched, answer, at, costs_of, told
from benchmarks.machine import Record, describe
from benchmarks.options import parse, parser_of
from benchmarks.shapes import SHAPES, random_engine, random_model, random_prompt
from engine.sampling.sampler import SampledToken
from engine.schedule.drafting_in_slots import SlotDrafting
from engine.schedule.speculating import AGAIN_IN_SLOTS
from engine.speculation.cost_model import CostModel
from engine.speculation.sources import DraftRequest, Guess

DTYPE, SIZES, CONTEXT = torch.bfloat16, (1, 2, 4, 8), 512


@dataclass(slots=True, kw_only=True)
class Simulated(SlotDrafting):
    """A draft model that is right with a given probability, as long as all earlier guesses were right."""

    truth: list[int] = field(default_factory=list)
    """The text as it will be."""
    acceptance: float = 1.0
    random: Random = field(default_factory=lambda: Random(0))

    def _guessed(self, asked: DraftRequest, drawn: list[SampledToken]) -> Guess:
        SlotDrafting._guessed(self, asked, drawn)  # called for its cost
        self.sure = self.acceptance
        coming = self.truth[len(asked.tokens) :][: len(drawn)]
        tokens = [
            token if self.random.random() < self.acceptance else (token + 1) % self.vocab_size
            for token in coming
        ]
        return Guess(tuple(tokens), chances=(self.acceptance,) * len(tokens))


def measure(large: str, small: str, given: list[float], tokens: int, turns: int) -> list[dict[str, Any]]:
    """Measure one pair at each acceptance; print and return the figures."""
    device, most = torch.device("cuda"), CONTEXT + tokens + 16
    draft = random_model(SHAPES[small], DTYPE, device, most, seed=1)
    options: dict[str, Any] = {"draft": draft, "draft_name": small}
    with random_engine(SHAPES[large], device=device, dtype=DTYPE, context=most, **options) as (engine, _):
        drafts = engine.drafts
        if not isinstance(drafts, SlotDrafting):
            sys.exit(f"{large}, {small}: {' '.join(engine.figures().notes)}")
        known_fields = {part.name: getattr(drafts, part.name) for part in fields(SlotDrafting)}
        simulated = Simulated(**known_fields)
        prompt = random_prompt(SHAPES[large], CONTEXT, 1)
        trying = Varying(draft=drafts.cost, sizes=SIZES, again=AGAIN_IN_SLOTS)

        def ask(how: Literal["off", "draft"], pace: CostModel) -> Said:
            return answer(
                engine, prompt, tokens, how, Watched(engine.pieces.scheduler, pace, drafts=simulated)
            )

        plain = ask("off", trying)
        simulated.truth = [*prompt, *plain.tokens]
        for _ in range(2):  # the graphs of the steps are recorded
            if ask("draft", trying).tokens != plain.tokens:
                sys.exit("the tokens differ")
        pairs = [(ask("off", CostModel(sizes=SIZES, again=AGAIN_IN_SLOTS)), ask("draft", trying))]
        print(
            f"{large} with {small}, context {CONTEXT}: a step takes {pairs[0][0].one_s * 1e3:.2f} ms; "
            f"{told(costs_of(pairs), SIZES[1:])} (by bytes a draft {drafts.cost:.2f})\n{HEAD}",
            flush=True,
        )
        return [at(ask, simulated, trying, plain.tokens, rate, turns) for rate in given]


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
