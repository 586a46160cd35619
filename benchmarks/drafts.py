"""A draft model: the rate that the cost model predicts and the measured one. Part of `benchmarks.speculation`.

The models have the shapes of Qwen3 and random weights, so one cannot predict the other; acceptance is **simulated**.
The draft model computes everything as usual, but its guess is then replaced by the right token with the given
probability, and by a wrong one otherwise. Everything else is real: the steps, their costs, and the number of guessed
tokens.
"""

import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from benchmarks.random_gguf import write_random_qwen3
from benchmarks.shapes import SHAPES
from engine import Engine, SamplingParams
from engine.cache.rows import Rows
from engine.schedule.drafting import Drafting
from engine.schedule.sequence import Sequence
from engine.schedule.speculating import Speculating
from engine.speculation.pace import AGAIN, LEAST_GAIN, MOST_ROWS, Acceptance, Balance, Pace, Rate
from engine.speculation.sources import Asked, Guess

KINDS = {"Q4_0": Kind.Q4_0, "Q8_0": Kind.Q8_0}
CONTEXT = 2048


@dataclass(slots=True)
class Simulated(Drafting):
    """A draft model that is right with a given probability, as long as all earlier guesses were right."""

    truth: list[int] = field(default_factory=list)
    """The text as it will be."""
    acceptance: float = 1.0
    random: Random = field(default_factory=lambda: Random(0))

    def _longer(self, asked: Asked, guess: Guess, logits: Tensor) -> Guess:
        found = Drafting._longer(self, asked, guess, logits)  # called for its cost
        at = len(asked.tokens) + len(guess.tokens)
        right = self.truth[at] if at < len(self.truth) else found.tokens[-1]
        if self.random.random() >= self.acceptance:
            right = (right + 1) % self.vocab_size
        return Guess((*guess.tokens, right), chances=(*guess.chances, self.acceptance))


class Cycling(Pace):
    """A pace of 0 to 7 tokens in turn, whatever they gain, to measure the costs of all kinds of steps."""

    wanted = 0

    def turn_to(self, context: int) -> None:
        Pace.turn_to(self, context)
        self.wanted = (self.wanted + 1) % MOST_ROWS

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
    """Kind and seconds of each step."""

    def saw(self, checked: list[tuple[Sequence, int, int]], seconds: float) -> None:
        self.steps.append((f"{sum(1 + guesses for _, guesses, _ in checked)} rows", seconds))
        Speculating.saw(self, checked, seconds)

    def drafted(self, rows: int, seconds: float) -> None:
        self.steps.append((_draft(rows), seconds))
        Speculating.drafted(self, rows, seconds)


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


def usual(answers: Iterable[Said]) -> dict[str, float]:
    """Return the median seconds of each kind of step: brief disturbances by other programs hardly affect it."""
    kinds = dict[str, list[float]]()
    for kind, seconds in (step for said in answers for step in said.steps):
        kinds.setdefault(kind, []).append(seconds)
    return {kind: median(seconds) for kind, seconds in kinds.items()}


def expected_gain(costs: dict[str, float], acceptance: float) -> float:
    """Return the speed-up that the cost model predicts with the best number of guesses, where one step in AGAIN + 1 has
    none. A draft first reads what came since the previous one: two tokens if all guesses held, otherwise one."""
    best, tokens, chance = 1.0, 1.0, 1.0
    one, two = costs[_draft(1)], costs[_draft(2)]
    for count in range(1, MOST_ROWS):
        chance *= acceptance
        tokens += chance
        step = (costs[f"{1 + count} rows"] + count * one + chance * (two - one)) / costs["1 rows"]
        if tokens / step > LEAST_GAIN:
            best = max(best, (AGAIN * tokens + 1) / (AGAIN * step + 1))
    return best


def _draft(rows: int) -> str:
    """Name the kind of a draft model's step."""
    return f"draft of {rows}"


def measure_pair(
    large: str,
    small: str,
    kinds: tuple[str, str],
    device: str,
    threads: int | None,
    given: list[float],
    tokens: int,
    turns: int,
) -> list[dict[str, float]]:
    """Measure one pair of shapes at each acceptance; print and return the figures."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{what}.gguf" for what in ("large", "small")]
        for path, shape, kind in zip(paths, (large, small), kinds, strict=True):
            write_random_qwen3(path, SHAPES[shape], KINDS[kind], CONTEXT)
        engine = Engine.load(
            str(paths[0]), device=device, threads=threads, context=CONTEXT, draft=str(paths[1])
        )
        with closing(engine):
            drafts = engine._drafts
            if not isinstance(drafts, Drafting):
                sys.exit(f"{large}, {small}: {' '.join(engine.figures().notes)}")
            while engine._loop.call(lambda: engine._engine_step.while_idle()):
                pass  # the weights are being copied
            simulated = Simulated(**{part.name: getattr(drafts, part.name) for part in fields(Drafting)})
            prompt = Random(1).choices(range(SHAPES[large].vocab_size), k=64)
            known = Cycling(draft=drafts.cost)
            plain = answer(engine, prompt, tokens, "off", Watched(engine._scheduler, known))
            simulated.truth = [*prompt, *plain.tokens]
            costs = usual(
                answer(engine, prompt, tokens, "draft", Watched(engine._scheduler, known, drafts=simulated))
                for _ in range(4)
            )
            one = costs["1 rows"]
            rows = ", ".join(f"{costs[f'{count} rows'] / one:.2f}" for count in range(2, MOST_ROWS + 1))
            print(
                f"{large} {kinds[0]} with {small} {kinds[1]}, {engine.figures().decode}: a step takes "
                f"{one * 1e3:.1f} ms, of 2 to 8 rows {rows} times that, of the draft model "
                f"{costs[_draft(1)] / one:.2f}, of 2 rows {costs[_draft(2)] / one:.2f}\n"
                f"{'simulated':>10}{'off':>9}{'expected':>10}{'(later)':>9}{'by steps':>10}{'of expected':>13}"
                f"{'gain':>7}{'measured':>10}{'right':>7}{'a step':>8}",
                flush=True,
            )
            return [at(engine, simulated, known, costs, prompt, plain.tokens, rate, turns) for rate in given]


def at(
    engine: Engine,
    simulated: Simulated,
    known: Pace,
    costs: dict[str, float],
    prompt: list[int],
    plain: list[int],
    rate: float,
    turns: int,
) -> dict[str, float]:
    """Compare answers without and with guesses, in turns, where drafts hold with probability `rate`.

    Each step counts as the median of its kind, so that brief disturbances by other programs hardly affect the result.
    The rate is predicted from costs that were measured before. Beside it is the prediction from the costs of these
    answers' own steps ("later"), which shows what the machine did meanwhile.
    """
    simulated.acceptance = rate
    off, on = list[Said](), list[Said]()
    for turn in range(turns):
        simulated.random = Random(turn)
        pace = Pace()
        pace._known, pace.drafts.credit = known._known, 1e9  # the budget for drafts is not in question here
        pace.acceptance = Acceptance(drafts=[Rate(rate) for _ in range(5)], drafted=Rate(rate))
        how: Literal["off", "draft"]
        for how, said in (("off", off), ("draft", on)):
            # A shared pace would forget the costs of the other steps during those without guesses.
            watched = Watched(engine._scheduler, pace if how == "draft" else Pace(), drafts=simulated)
            said.append(answer(engine, prompt, len(plain), how, watched))
        if on[-1].tokens != plain:
            sys.exit(f"acceptance {rate}, turn {turn}: the tokens differ")
    took = usual([*off, *on])
    off_s, on_s = (
        sum(took[kind] for said in both for kind, _ in said.steps)
        / sum(len(said.tokens) - 1 for said in both)
        for both in (off, on)
    )
    expected_s, later_s = (
        off_s / expected_gain(known_costs, rate) for known_costs in (costs, {**costs, **took})
    )
    measured_off, measured_on = (1 / median(said.token_s for said in both) for both in (off, on))
    found = {
        "acceptance": rate,
        "off": 1 / off_s,
        "expected": 1 / expected_s,
        "by later costs": 1 / later_s,
        "by steps": 1 / on_s,
        "measured off": measured_off,
        "measured": measured_on,
        "right": sum(said.accepted for said in on) / max(sum(said.guessed for said in on), 1),
        "a step": median(said.a_step for said in on),
    }
    print(
        f"{rate:>10.1f}{1 / off_s:>9.1f}{1 / expected_s:>10.1f}{1 / later_s:>9.1f}{1 / on_s:>10.1f}"
        f"{expected_s / on_s:>13.1%}"
        f"{off_s / on_s:>7.2f}{measured_on / measured_off:>10.2f}{found['right']:>7.0%}{found['a step']:>8.2f}",
        flush=True,
    )
    return found


def answer(
    engine: Engine, prompt: list[int], tokens: int, how: Literal["off", "draft"], watched: Watched
) -> Said:
    """Get a greedy answer, drafted as `watched` does."""

    def job() -> None:
        engine._engine_step.speculating = watched

    engine._loop.call(job)
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
