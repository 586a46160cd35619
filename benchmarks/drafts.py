"""A draft model: the rate that the cost model predicts and the measured one. Part of `benchmarks.speculation`.

The models have the shapes of Qwen3 and random weights, so one cannot predict the other; acceptance is **simulated**.
The draft model computes everything as usual, but its guess is then replaced by the right token with the given
probability, and by a wrong one otherwise. Everything else is real: the steps, their costs, and the number of guessed
tokens.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol

from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from benchmarks.random_gguf import write_random_gguf
from benchmarks.shapes import SHAPES
from engine import Engine, SamplingParams
from engine.cache.rows import Rows
from engine.schedule.cpu_load import Used, used
from engine.schedule.drafting import Drafting
from engine.schedule.sequence import Sequence
from engine.schedule.speculating import Speculating
from engine.speculation.cost_model import (
    LEAST_GAIN,
    MOST_ROWS,
    Acceptance,
    AcceptanceRate,
    Balance,
    CostModel,
)
from engine.speculation.sources import DraftRequest, Guess

KINDS = {"Q4_0": Kind.Q4_0, "Q8_0": Kind.Q8_0}
CONTEXT = 2048
BUSY = 0.1
"""Cores kept busy by other programs above which a turn is repeated."""
SPARE = 3
"""The most turns to repeat, for each turn that is wanted."""


@dataclass(slots=True)
class Simulated(Drafting):
    """A draft model that is right with a given probability, as long as all earlier guesses were right."""

    truth: list[int] = field(default_factory=list)
    """The text as it will be."""
    acceptance: float = 1.0
    random: Random = field(default_factory=lambda: Random(0))

    def _longer(self, asked: DraftRequest, guess: Guess, logits: Tensor) -> Guess:
        found = Drafting._longer(self, asked, guess, logits)  # called for its cost
        at = len(asked.tokens) + len(guess.tokens)
        right = self.truth[at] if at < len(self.truth) else found.tokens[-1]
        if self.random.random() >= self.acceptance:
            right = (right + 1) % self.vocab_size
        return Guess((*guess.tokens, right), chances=(*guess.chances, self.acceptance))


@dataclass(slots=True)
class Varying(CostModel):
    """A pace of 0 to 7 tokens at random, whatever they gain, to measure the costs of all kinds of steps."""

    wanted: int = 0
    random: Random = field(default_factory=lambda: Random(0))

    def turn_to(self, context: int) -> None:
        CostModel.turn_to(self, context)
        self.wanted = self.random.randrange(MOST_ROWS)

    def drafts_more(
        self, guess: Guess, rows: int, tokens: float, most: int, texts: int, least: float
    ) -> bool:
        return len(guess.tokens) < min(self.wanted, most)

    def best(
        self,
        guess: Guess,
        rows: int,
        tokens: float,
        balance: Balance,
        said: int,
        unread: int = 0,
        spent: float = 0.0,
    ) -> tuple[float, int]:
        return float(len(guess.tokens)), len(guess.tokens)


@dataclass(slots=True)
class Watched(Speculating):
    """A speculation that records the duration of its steps."""

    steps: list[tuple[str, float]] = field(default_factory=list)
    """Kind and seconds of each step, and of each chain of drafts before it."""
    _drafted: int = 0
    """Tokens of the chain that was drafted for this step."""
    _chain_s: float = 0.0

    def saw(self, checked: list[tuple[Sequence, int, int]], seconds: float) -> None:
        if self._drafted:
            self.steps.append((chain_of(self._drafted), self._chain_s))
        self._drafted, self._chain_s = 0, 0.0
        self.steps.append((step_of(sum(1 + guesses for _, guesses, _ in checked)), seconds))
        Speculating.saw(self, checked, seconds)

    def drafted(self, rows: int, seconds: float) -> None:
        self._drafted += bool(rows)
        self._chain_s += seconds
        Speculating.drafted(self, rows, seconds)


def step_of(rows: int) -> str:
    """Name the kind of a step."""
    return f"{rows} rows"


def chain_of(tokens: int) -> str:
    """Name the kind of a chain of drafts."""
    return f"chain of {tokens}"


@dataclass(frozen=True, slots=True)
class Said:
    """An answer."""

    tokens: list[int]
    token_s: float
    """Seconds per token after the first."""
    guessed: int
    accepted: int
    steps: list[tuple[str, float]]

    @property
    def a_step(self) -> float:
        return len(self.tokens) / (len(self.tokens) - self.accepted)

    @property
    def one_s(self) -> float:
        """Median seconds of a step of one row."""
        return median(seconds for kind, seconds in self.steps if kind == step_of(1))


def costs_of(pairs: Iterable[tuple[Said, Said]]) -> dict[str, float]:
    """Return the median cost of each kind of step, in steps of one row of the pair's first answer, which has no guesses
    and came just before the second. Short disturbances, and a machine whose speed changes, hardly affect it."""
    kinds = {step_of(1): [1.0]}
    for off, tried in pairs:
        for kind, seconds in tried.steps:
            if kind != step_of(1):
                kinds.setdefault(kind, []).append(seconds / off.one_s)
    return {kind: median(costs) for kind, costs in kinds.items()}


def expected_gain(costs: dict[str, float], acceptance: float, again: int) -> tuple[float, int]:
    """Return the speed-up that the cost model predicts with the best number of guesses, and that number. One step in
    `again` + 1 has no guesses."""
    best, found, tokens, chance = 1.0, 0, 1.0, 1.0
    for count in range(1, MOST_ROWS):
        chance *= acceptance
        tokens += chance
        step, chain = costs.get(step_of(1 + count)), costs.get(chain_of(count))
        if step is None or chain is None or tokens / (step + chain) <= LEAST_GAIN:
            continue
        gain = (again * tokens + 1) / (again * (step + chain) + 1)
        if gain > best:
            best, found = gain, count
    return best, found


class Drafts(Protocol):
    """A simulated draft model."""

    acceptance: float
    random: Random


Ask = Callable[[Literal["off", "draft"], CostModel], Said]
"""Gets the answer without guesses, or with drafts at this pace."""
HEAD = (
    f"{'simulated':>10}{'off':>9}{'expected':>10}{'measured':>10}{'of expected':>13}{'gain':>7}{'right':>7}"
    f"{'a step':>8}{'guesses':>9}{'best':>6}{'repeated':>10}"
)


def at(
    ask: Ask, drafts: Drafts, trying: Varying, plain: list[int], rate: float, turns: int
) -> dict[str, Any]:
    """Compare answers without and with guesses, in turns, where drafts hold with probability `rate`; print and return
    the figures.

    Between the two is an answer with every number of guesses, `trying`: it tells the costs that the prediction is made
    of. What an answer takes between its steps, per token, is expected to stay the same. Turns that other programs
    disturbed are repeated.
    """
    drafts.acceptance, drafts.random = rate, Random(0)
    off, tried, on = list[Said](), list[Said](), list[Said]()
    spare = SPARE * turns
    while len(on) < turns:
        before = used()
        pace = CostModel(sizes=trying.sizes, again=trying.again)
        pace._known, pace.drafts.credit = trying._known, 1e9  # the budget for drafts is not in question here
        pace.acceptance = Acceptance(
            drafts=[AcceptanceRate(rate) for _ in range(5)], drafted=AcceptanceRate(rate)
        )
        # A shared pace would forget the costs of the other steps during those without guesses.
        off.append(ask("off", CostModel(sizes=trying.sizes, again=trying.again)))
        tried.append(ask("draft", trying))
        on.append(ask("draft", pace))
        if not on[-1].tokens == tried[-1].tokens == off[-1].tokens == plain:
            sys.exit(f"acceptance {rate}, turn {len(on)}: the tokens differ")
        if spare and others(before, used()) > BUSY:
            spare -= 1
            for said in (off, tried, on):
                said.pop()
    costs = costs_of(zip(off, tried, strict=True))
    predicted, best = expected_gain(costs, rate, trying.again)
    between = max(median(1 - _mean_s(said) / said.token_s for said in off), 0.0)
    expected = 1 / (between + (1 - between) / predicted)
    gain = median(without.token_s / given.token_s for without, given in zip(off, on, strict=True))
    off_rate = 1 / median(said.token_s for said in off)
    guessed, steps = sum(said.guessed for said in on), sum(len(said.tokens) - said.accepted for said in on)
    found = {
        "acceptance": rate,
        "off": off_rate,
        "expected": off_rate * expected,
        "measured": off_rate * gain,
        "of expected": gain / expected,
        "gain": gain,
        "right": sum(said.accepted for said in on) / max(guessed, 1),
        "a step": median(said.a_step for said in on),
        "guesses": guessed / steps,
        "best": best,
        "repeated": SPARE * turns - spare,
        "costs": [costs.get(step_of(rows), 0.0) for rows in range(1, MOST_ROWS + 1)],
        "chains": [costs.get(chain_of(count), 0.0) for count in range(1, MOST_ROWS)],
    }
    print(
        f"{rate:>10.1f}{off_rate:>9.1f}{off_rate * expected:>10.1f}{off_rate * gain:>10.1f}{gain / expected:>13.1%}"
        f"{gain:>7.2f}{found['right']:>7.0%}{found['a step']:>8.2f}{found['guesses']:>9.2f}{best:>6}"
        f"{found['repeated']:>10}",
        flush=True,
    )
    return found


def others(before: Used, after: Used) -> float:
    """Return how many cores other programs kept busy between two looks; 0.0 if the system does not say."""
    if before.everybody is None or after.everybody is None:
        return 0.0
    return (after.everybody - before.everybody - after.own + before.own) / (after.at - before.at)


def _mean_s(said: Said) -> float:
    return fmean(seconds for _, seconds in said.steps)


def told(costs: dict[str, float], sizes: Iterable[int]) -> str:
    """Describe the costs of steps of several rows, and of chains of one and four drafts."""
    rows = ", ".join(f"{costs[step_of(count)]:.2f}" for count in sizes if step_of(count) in costs)
    chains = " and ".join(f"{costs[chain_of(count)]:.2f}" for count in (1, 4) if chain_of(count) in costs)
    return f"steps of {', '.join(map(str, sizes))} rows cost {rows} steps of one row, chains of 1 and 4 drafts {chains}"


def measure_pair(
    large: str,
    small: str,
    kinds: tuple[str, str],
    device: str,
    threads: int | None,
    given: list[float],
    tokens: int,
    turns: int,
) -> list[dict[str, Any]]:
    """Measure one pair of shapes at each acceptance; print and return the figures."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{what}.gguf" for what in ("large", "small")]
        for path, shape, kind in zip(paths, (large, small), kinds, strict=True):
            write_random_gguf(path, SHAPES[shape], KINDS[kind], CONTEXT)
        engine = Engine.load(
            str(paths[0]), device=device, threads=threads, context=CONTEXT, draft=str(paths[1])
        )
        with closing(engine):
            drafts = engine.drafts
            if not isinstance(drafts, Drafting):
                sys.exit(f"{large}, {small}: {' '.join(engine.figures().notes)}")
            while engine.loop.call(lambda: engine.engine_step.while_idle()):
                pass  # the weights are being copied
            simulated = Simulated(**{part.name: getattr(drafts, part.name) for part in fields(Drafting)})
            prompt = Random(1).choices(range(SHAPES[large].vocab_size), k=64)
            trying = Varying(draft=drafts.cost)

            def ask(how: Literal["off", "draft"], pace: CostModel) -> Said:
                return answer(
                    engine, prompt, tokens, how, Watched(engine.pieces.scheduler, pace, drafts=simulated)
                )

            plain = ask("off", trying)
            simulated.truth = [*prompt, *plain.tokens]
            pairs = [(ask("off", CostModel()), ask("draft", trying))]
            print(
                f"{large} {kinds[0]} with {small} {kinds[1]}, {engine.figures().decode}: "
                f"{told(costs_of(pairs), range(2, MOST_ROWS + 1))}\n{HEAD}",
                flush=True,
            )
            return [at(ask, simulated, trying, plain.tokens, rate, turns) for rate in given]


def answer(
    engine: Engine, prompt: list[int], tokens: int, how: Literal["off", "draft"], watched: Watched
) -> Said:
    """Get a greedy answer of `tokens` tokens, drafted as `watched` does."""

    def job() -> None:
        engine.engine_step.speculating = watched

    engine.loop.call(job)
    sequence = engine.start(
        Rows.of(prompt), SamplingParams(temperature=0.0, max_tokens=tokens, speculation=how)
    )
    said = [event.token_id for event in engine.events(sequence)]
    stats = sequence.stats()
    return Said(
        said,
        stats.decode_s / max(len(said) - 1, 1),
        stats.guessed_tokens,
        stats.accepted_tokens,
        watched.steps,
    )
