"""The search for the fastest choices, one thing after another, timed by whole steps. It knows nothing about GPUs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

Numbers = tuple[int, ...]
Choice = Mapping[str, Numbers]
"""The value chosen for each thing; a thing that is not named keeps its default."""
MARGIN = 0.005
"""The least share of a whole step that a choice must save. A product is a tenth to a quarter of a step, so this is 2 to
5% of the product. The medians of identical choices differ by less."""
WORTH = 0.02
"""The least share of a step that all choices together must save: an engine's steps differ a little from those that are
timed. On an H100, a choice that saved 1.5% of a timed step made real ones of Llama-3.2-1B 0.7% slower."""
SCREEN, CONFIRM = 8, 32
"""Rounds for all candidates of a thing, and for the best one against the current choice."""


class Measure(Protocol):
    """Times steps under several choices."""

    def __call__(self, choices: Sequence[Choice], rounds: int) -> Sequence[Sequence[float]]:
        """Return the seconds of `rounds` steps with each choice, measured in turn; empty for a choice that fails."""
        ...


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The choices made, and the seconds of a step without and with them."""

    chosen: dict[str, Numbers]
    before: float
    after: float


def search(
    candidates: Mapping[str, Sequence[Numbers]],
    measure: Measure,
    in_time: Callable[[], bool] = lambda: True,
    guards: Sequence[Measure] = (),
    told: Callable[[str], None] = lambda _: None,
) -> TuningResult:
    """Find the best of `candidates`, whose first is the default. Things reached after time is up keep their default.

    The result stands only if all choices together save WORTH at the end and do not slow down the steps that
    `guards` measure. `told` receives the name of each thing before it is tried.
    """
    chosen: dict[str, Numbers] = {}
    for name, (used, *others) in candidates.items():
        if not others or not in_time():
            continue
        told(name)
        now, *found = measure([chosen, *({**chosen, name: other} for other in others)], SCREEN)
        best = min(zip(map(_middle, found), others, strict=True))
        if not _faster(best[0], _middle(now)):
            continue
        with_it = {**chosen, name: best[1]}
        now, then = measure([chosen, with_it], CONFIRM)
        if best[1] != used and _faster(_middle(then), _middle(now)):
            chosen = with_it
    for guard in guards:
        chosen = _guarded(chosen, guard)
    before, *tuned = (_middle(times) for times in measure([{}, chosen] if chosen else [{}], CONFIRM))
    if not tuned or not _faster(tuned[0], before, WORTH):
        return TuningResult({}, before, before)
    return TuningResult(chosen, before, tuned[0])


def _guarded(chosen: dict[str, Numbers], guard: Measure) -> dict[str, Numbers]:
    """Drop choices one by one, the most harmful first, until the guarded steps are as fast as with the defaults."""
    while chosen:
        fewer = [{name: chosen[name] for name in chosen if name != left_out} for left_out in chosen]
        usual, now, *rest = map(_middle, guard([{}, chosen, *fewer], SCREEN))
        if now <= usual * (1 + MARGIN):
            break
        chosen = fewer[rest.index(min(rest))]
    return chosen


def _faster(one: float, other: float, margin: float = MARGIN) -> bool:
    return one < other * (1 - margin)


def _middle(times: Sequence[float]) -> float:
    return median(times) if times else float("inf")
