"""The search for the fastest choices: of each thing one after the other, by whole steps. It knows no GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

Numbers = tuple[int, ...]
Choice = Mapping[str, Numbers]
"""What is chosen for each thing; what is not named stays as it is."""
MARGIN = 0.005
"""A choice must make a whole step faster by this share of it: a product is a tenth to a quarter of a step, so that is 2
to 5% of the product. The medians of what is alike differ by less."""
SCREEN, CONFIRM = 8, 32
"""Rounds: of all candidates of a thing, and of the best one beside what is in use."""


class Measure(Protocol):
    """Times steps with several choices."""

    def __call__(self, choices: Sequence[Choice], rounds: int) -> Sequence[Sequence[float]]:
        """Seconds of a step, `rounds` of them with each choice by turns. Empty where a choice does not work."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """What was chosen, and seconds of a step without it and with it."""

    chosen: dict[str, Numbers]
    before: float
    after: float


def search(
    candidates: Mapping[str, Sequence[Numbers]],
    measure: Measure,
    in_time: Callable[[], bool] = lambda: True,
    guard: Measure | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Found:
    """The best of `candidates`, of which the first is in use. Things that come once time is up keep theirs.

    What is found lasts only where it is faster in the end, too, all together, and does not slow down the steps that
    `guard` measures. `told` gets the name of each thing before it is tried.
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
    if chosen and guard is not None:
        chosen = _guarded(chosen, guard)
    before, *tuned = (_middle(times) for times in measure([{}, chosen] if chosen else [{}], CONFIRM))
    if not tuned or not _faster(tuned[0], before):
        return Found({}, before, before)
    return Found(chosen, before, tuned[0])


def _guarded(chosen: dict[str, Numbers], guard: Measure) -> dict[str, Numbers]:
    """Those that are left once what slows the guarded steps down most was given up, one after the other."""
    while chosen:
        fewer = [{name: chosen[name] for name in chosen if name != left_out} for left_out in chosen]
        usual, now, *rest = map(_middle, guard([{}, chosen, *fewer], SCREEN))
        if now <= usual * (1 + MARGIN):
            break
        chosen = fewer[rest.index(min(rest))]
    return chosen


def _faster(one: float, other: float) -> bool:
    return one < other * (1 - MARGIN)


def _middle(times: Sequence[float]) -> float:
    return median(times) if times else float("inf")
