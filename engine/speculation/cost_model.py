"""How many tokens to guess: as many as pay, by the measured time of larger steps and how often guesses hold."""

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt
from operator import mul
from statistics import median, median_low

from engine.speculation.sources import Guess

MOST_ROWS = 8
"""The most rows of a step. Up to here rows have the bits of rows computed one by one, and each costs less than a step.
"""
LEAST_GAIN = 1.05
"""Guesses must be expected to raise the tokens per second by this factor."""
CREDIT = 1.0
"""Steps that guesses may cost an answer before any of them held."""
SAVED = 2.0
"""The most saved steps that are remembered: guesses that held long ago pay for no more than these."""
SHARE = 0.01
"""Share of an answer's steps that guesses may cost in addition."""
_LENGTHS = (4, 6, 10, 20)
"""Thresholds of the match length: guesses hold more often from each on."""
_BELIEVED = (0.4, 0.5, 0.6, 0.75, 0.85)
"""Initial estimate, by match length, of how often a guessed token is right if all places agree."""
_SURE = (0.3, 0.5, 0.7, 0.9)
"""Thresholds of the probability that a draft model gives its token: it holds more often from each on."""
_BELIEVED_DRAFTS = (0.2, 0.35, 0.5, 0.7, 0.9)
"""Initial estimate, by that probability, of how often such a token is right."""
DRAFTED = 0.75
"""Initial estimate for a token yet to be drafted: higher than is likely, or the rate would never be measured."""
_BELIEFS, _REMEMBERED = 12, 60
"""How many observations the initial estimate counts as, and how many are remembered."""
_HOPE = 0.5
"""Standard deviations added to a measured rate: otherwise guesses that failed a few times by chance would never be
tried again. `Balance` bounds what this may cost."""
RELAX = 1 / 256
"""Share by which a measured rate returns to its initial estimate, for each token at which guesses were not worth
checking or making: a text in which they never hold says little about the next one."""
DRAFT_CREDIT, DRAFT_SAVED = 4.0, 8.0
"""CREDIT and SAVED for drafts, over all answers together: how often drafts hold says little about a single answer."""
_DIVIDED = 0.7
"""Factor on the initial estimate if the places do not agree."""
_ROW = 0.15
"""Initial estimate of the cost of one more row, in steps."""
_DRAFT_ROW = 0.35
"""The same for a draft model, in its own steps."""
ENOUGH = 3
"""Steps of one row that must be measured before other steps are compared with them."""
LATEST = 9
"""Latest steps that a median is taken over."""
LATELY = 5
"""The same for the time of a step of one row, which changes where other programs compute now and then."""
DOUBT = 2
"""Measurements that the earlier estimate counts as: one slow step changes nothing yet."""
FADES = 64
"""After this many steps in a row without guesses, one measurement of each larger size is forgotten."""
AGAIN = 32
"""After this many steps with guesses, one step has none, to measure the time that guesses have to beat."""
NEAR = 32
"""Steps with guesses are compared with steps without any that came before them by at most `again` / NEAR steps: the
machine may have had another speed earlier."""
SHORT = 512
"""Contexts up to this many rows share their costs; longer ones do so by powers of two."""


EVERY_SIZE = tuple(range(1, MOST_ROWS + 1))


def _believed_costs() -> list[float]:
    return [1 + _ROW * more for more in range(MOST_ROWS)]


@dataclass(slots=True)
class StepCosts:
    """The time of a step of 1 to 8 rows, in steps of one row: medians, because an interrupted step says nothing."""

    unit_s: float = 0.0
    """Seconds of a step of one row as fast as the machine is now; 0.0 while too few have been seen."""
    believed: list[float] = field(default_factory=_believed_costs)
    """The initial estimate for each number of rows."""
    sizes: tuple[int, ...] = EVERY_SIZE
    """Numbers of rows that are computed: a step of any other number takes as long as one of the next size."""
    near: int = AGAIN // NEAR
    """For so many steps after a step of one row, others are compared with it."""
    ratios: list[float] = field(default_factory=list)
    """The current estimate for each number of rows."""
    since: int = 0
    """Steps since the last one without guesses."""
    _ones: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LATEST))
    """The latest steps of one row: their numbers and seconds."""
    _lately: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))
    """Seconds of a step of one row, derived from each of the latest steps."""
    _steps: int = 0
    """Number of the latest step."""
    _seen: dict[int, deque[float]] = field(default_factory=dict)
    """By number of rows, the costs of the latest steps of several rows."""
    _plain: int = 0
    """Steps in a row without guesses."""
    _apart: int = 0
    """Steps since the last step of one row."""
    draft: float = 0.0
    """Initial estimate of the time of a draft model's step, in steps of one row."""
    _drafts: dict[int, deque[float]] = field(default_factory=dict)
    """By number of rows, the costs of the draft model's latest steps; with 0 rows, of its latest chains besides."""

    _sized: list[int] = field(default_factory=list)
    """For each number of rows, how many are computed."""

    def __post_init__(self) -> None:
        self.ratios = list(self.believed)
        rows = range(MOST_ROWS + 1)
        self._sized = [next(size for size in self.sizes if size >= count) for count in rows]

    def of(self, rows: int) -> float:
        """Return the cost of a step of `rows` rows."""
        return self.ratios[self._sized[rows] - 1]

    def saw(self, rows: int, seconds: float, texts: int = 1) -> None:
        """Record the seconds of a step of `rows` rows: the newest one of each of `texts` texts, and guesses.

        While several texts are answered for long, no step has one row: its time is derived from larger steps.
        """
        if not 1 <= texts <= rows <= MOST_ROWS:
            return
        is_plain, rows = rows == texts, self._sized[rows]
        self._steps += 1
        self.since, self._plain = (0, self._plain + 1) if is_plain else (self.since + 1, 0)
        self._apart = 0 if rows == 1 else self._apart + 1
        if rows == 1 or (is_plain and (not self.unit_s or self._apart > FADES)):
            self._ones.append((self._steps, seconds / self.of(rows)))
            self._lately.append(seconds / self.of(rows))
        elif self.unit_s:
            latest = self._seen.setdefault(rows, deque(maxlen=LATEST))
            if unit_s := self._beside(latest):
                latest.append(min(max(seconds / unit_s, 1.0), float(rows)))
                self._judge()
            if len(latest) > DOUBT:
                self._lately.append(seconds / self.of(rows))
        self.unit_s = median(self._lately) if len(self._ones) >= ENOUGH else 0.0
        if is_plain and self._plain % FADES == 0:
            self._fade()

    def drafted(self, rows: int, seconds: float) -> None:
        """Record the seconds that a step of `rows` rows took the draft model; with 0 rows, those that a chain of its
        steps took besides."""
        latest = self._drafts.setdefault(rows, deque(maxlen=LATEST))
        if unit_s := self._beside(latest):
            latest.append(seconds / unit_s)

    def of_draft(self, rows: int) -> float:
        """Return the cost of a draft model's step of `rows` rows, derived from the nearest number that was measured."""
        measured = [other for other, latest in self._drafts.items() if other and latest]
        near = min(measured, key=lambda other: abs(other - rows), default=None)
        if near is None:
            return self.draft * (1 + _DRAFT_ROW * (rows - 1))
        return median(self._drafts[near]) * (1 + _DRAFT_ROW * (rows - 1)) / (1 + _DRAFT_ROW * (near - 1))

    @property
    def of_chain(self) -> float:
        """The cost of a chain of the draft model's steps besides these."""
        latest = self._drafts.get(0)
        return median(latest) if latest else 0.0

    def _beside(self, latest: deque[float]) -> float:
        """Return the seconds of a step of one row just before, to compare a step with whose kind has the costs
        `latest`. If there was none, a kind that is hardly known is compared with `unit_s`; 0.0: do not compare."""
        beside = [seconds for at, seconds in self._ones if self._steps - at <= self.near]
        if beside:
            return median_low(beside)  # a disturbance makes it slower
        return self.unit_s if len(latest) <= DOUBT else 0.0

    def _fade(self) -> None:
        """Forget old measurements: the cost of guesses was not measured for long and may have changed."""
        _drop_one(self._seen)
        _drop_one(self._drafts)
        self._judge()

    def _judge(self) -> None:
        """Update the estimates. For a number of rows that was hardly measured, each extra row costs as much as with the
        nearest number that was. More rows never cost less: if two numbers contradict this, the one that was measured
        more often counts."""
        often = [rows for rows, latest in self._seen.items() if len(latest) > DOUBT]
        known, costs = {rows: self._weighed(rows, self.believed[rows - 1]) for rows in often}, self.ratios
        for rows in range(2, MOST_ROWS + 1):
            cost = self.believed[rows - 1]
            near = min(known, key=lambda other: abs(other - rows), default=None)
            if near is not None:
                cost = 1 + (known[near] - 1) * (rows - 1) / (near - 1)
            costs[rows - 1] = known[rows] if rows in known else self._weighed(rows, cost)
        seen = [len(self._seen.get(rows, ())) for rows in range(1, MOST_ROWS + 1)]
        for at in range(MOST_ROWS - 2, 0, -1):
            if seen[at] < seen[at + 1]:
                costs[at] = min(costs[at], costs[at + 1])
        for at in range(1, MOST_ROWS):
            costs[at] = max(costs[at], costs[at - 1])

    def _weighed(self, rows: int, believed: float) -> float:
        """Return the median of the measurements for `rows` rows and DOUBT times the estimate `believed`."""
        return float(median([*[believed] * DOUBT, *self._seen.get(rows, ())]))


def _drop_one(seen: dict[int, deque[float]]) -> None:
    """Forget the oldest measurement of each key."""
    for key, latest in list(seen.items()):
        if latest:
            latest.popleft()
        if not latest:
            del seen[key]


Kind = tuple[int, bool]
"""A class of guesses from texts that hold about equally often: the range of the match length, and whether all places
agreed."""


@dataclass(slots=True)
class AcceptanceRate:
    """How often guesses held lately; the initial estimate counts as some observations."""

    belief: float
    """The initial estimate."""
    seen: float = 0.0
    """How many observations are remembered."""
    now: float = -1.0
    """The current estimate."""

    def __post_init__(self) -> None:
        self.now = self.belief

    @property
    def hoped(self) -> float:
        """The rate plus _HOPE standard deviations, at most 1."""
        return min(self.now + _HOPE * sqrt(self.now * (1 - self.now) / (self.seen + _BELIEFS)), 1.0)

    def saw(self, right: bool) -> None:
        self.seen = min(self.seen + 1, _REMEMBERED)
        self.now += (right - self.now) / (self.seen + _BELIEFS)

    def relax(self) -> None:
        """Weigh the observations less and the initial estimate more."""
        self.now += (self.belief - self.now) * RELAX
        self.seen -= self.seen * RELAX


@dataclass(slots=True)
class Acceptance:
    """How often a guessed token was right if all before it were."""

    rates: dict[Kind, float] = field(default_factory=dict)
    """For guesses from texts."""
    drafts: list[AcceptanceRate] = field(
        default_factory=lambda: [AcceptanceRate(chance) for chance in _BELIEVED_DRAFTS]
    )
    """For guesses of a draft model, by how sure it was."""
    drafted: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(DRAFTED))
    """For tokens that a draft model is yet to guess."""

    def of(self, guess: Guess, at: int = 0) -> float:
        """Return the rate for token number `at` of this guess."""
        if guess.chances:
            return self.drafts[_sureness(guess, at)].hoped
        return self.rates.get(_kind(guess), _believed(guess))

    def hold(self, guess: Guess) -> list[float]:
        """Return for each token of a guess how likely it and all before it are right."""
        count = len(guess.tokens)
        each = [self.of(guess, at) for at in range(count)] if guess.chances else [self.of(guess)] * count
        return list(accumulate(each, mul))

    def saw(self, guess: Guess, offered: int, held: int) -> None:
        """Record that of `offered` tokens of a guess the first `held` were right."""
        rate = 0.0 if guess.chances else self.of(guess)
        for at in range(min(held + 1, offered)):
            if guess.chances:
                self.drafts[_sureness(guess, at)].saw(at < held)
                self.drafted.saw(at < held)
            else:
                rate += ((at < held) - rate) / 16
        if not guess.chances:
            self.rates[_kind(guess)] = rate

    def passed(self, guess: Guess) -> None:
        """Record that a guess from a text was not worth checking."""
        rate = self.of(guess)
        self.rates[_kind(guess)] = rate + (_believed(guess) - rate) * RELAX

    def relax(self) -> None:
        """Record that no drafts were worth making."""
        for rate in (self.drafted, *self.drafts):
            rate.relax()


def _sureness(guess: Guess, at: int) -> int:
    return sum(guess.chances[at] >= chance for chance in _SURE)


def _kind(guess: Guess) -> Kind:
    return sum(guess.length >= length for length in _LENGTHS), guess.agreed


def _believed(guess: Guess) -> float:
    at, agreed = _kind(guess)
    return _BELIEVED[at] if agreed else _DIVIDED * _BELIEVED[at]


@dataclass(slots=True)
class Balance:
    """Tracks whether guesses pay in one answer, in steps of one row, and bounds their cost to a share of the answer."""

    saved: float = 0.0
    """The steps saved so far, at most `most`; negative if guesses cost more than they saved."""
    credit: float = CREDIT
    most: float = SAVED

    def allows(self, cost: float, tokens: int) -> bool:
        """Return whether a guess that costs `cost` if it fails may be made after `tokens` tokens of the answer."""
        return self.saved - cost >= -(self.credit + SHARE * tokens)

    def saw(self, saved: float) -> None:
        """Record the steps that a step with guesses saved; negative if it cost more."""
        self.saved = min(self.saved + saved, self.most)


@dataclass(slots=True)
class CostModel:
    """Decides for each step, over all answers together. Only the loop thread may use it."""

    costs: StepCosts = field(default_factory=StepCosts)
    """The costs at the current context length."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    sizes: tuple[int, ...] = EVERY_SIZE
    """Step sizes; see `StepCosts`."""
    again: int = AGAIN
    """See AGAIN."""
    _known: dict[int, StepCosts] = field(default_factory=dict)
    """Costs by context length: the longer it is, the more of a step is attention, which each row pays for itself."""
    drafts: Balance = field(default_factory=lambda: Balance(credit=DRAFT_CREDIT, most=DRAFT_SAVED))
    """The balance of the draft model, over all answers."""
    draft: float = 0.0
    """The initial estimate of the time of a draft model's step, in steps of one row."""

    def turn_to(self, context: int) -> None:
        """Use the costs for a step that attends to `context` rows in all."""
        size = max(context, SHORT).bit_length()
        if size not in self._known:
            near = min(self._known, key=lambda other: abs(other - size), default=None)
            known = StepCosts(draft=self.draft) if near is None else self._known[near]
            self._known[size] = StepCosts(
                believed=list(known.ratios),
                sizes=self.sizes,
                near=self.again // NEAR,
                draft=known.of_draft(1),
            )
        self.costs = self._known[size]

    @property
    def measures(self) -> bool:
        """Whether the next step has no guesses, to measure the time that guesses have to beat."""
        return not self.costs.unit_s or self.costs.since >= self.again

    def count(
        self,
        guess: Guess,
        rows: int,
        tokens: float,
        balance: Balance,
        said: int,
        unread: int = 0,
        spent: float = 0.0,
    ) -> int:
        """Return how many tokens of `guess` to check in a step that so far has `rows` rows and yields `tokens` tokens.

        The answer has `said` tokens, and `balance` is its own. The first `unread` tokens of the guess have been drawn
        but not read; they are not counted. `spent`, the cost of drafting the guess, is paid whatever is checked.
        """
        if self.measures or not guess.tokens:
            return 0
        count = self.best(guess, rows, tokens, balance, said, unread, spent)[1]
        if not count and not guess.chances:
            self.acceptance.passed(guess)
        return count

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
        """Return the most tokens expected in the time of a step of one row, and how many tokens of `guess` give them.
        The arguments are those of `count`."""
        expected, before = 0.0, self.costs.of(rows) + spent
        best, found = LEAST_GAIN * tokens / before, 0
        for count, chance in enumerate(self.acceptance.hold(guess)[unread : unread + MOST_ROWS - rows], 1):
            expected += chance
            cost = self.costs.of(rows + count) + spent
            gain = (tokens + expected) / cost
            if gain > best and balance.allows(cost - before, said):
                best, found = gain, count
        return best, found

    def drafts_more(
        self, guess: Guess, rows: int, tokens: float, most: int, texts: int, least: float
    ) -> bool:
        """Return whether a draft model should guess one more token after `guess`, up to `most` in all, for one of
        `texts` texts that it guesses for at once. The step has `rows` other rows, which yield `tokens`; drafts must
        yield more than `least` tokens in the time of a step of one row."""
        costs, most = self.costs, min(most, MOST_ROWS - rows)
        if len(guess.tokens) >= most:
            return False
        hold, count = self.acceptance.hold(guess), len(guess.tokens)
        each, start = costs.of_draft(texts) / texts, costs.of_chain / texts
        more_rows = costs.of_draft(2 * texts) / texts - each

        def cost(drafted: int, all_hold: float) -> float:
            """Return the cost with the whole chain: if all of it holds, the next chain begins with one row more."""
            return costs.of(rows + drafted) + start + drafted * each + all_hold * more_rows

        if not count and not self.drafts.allows(cost(1, 0.0) - costs.of(rows), 0):
            return False
        chance, expected = hold[-1] if hold else 1.0, tokens + sum(hold)
        if count:
            least = expected / cost(count, chance)
        for more in range(count + 1, most + 1):
            chance *= self.acceptance.drafted.hoped
            expected += chance
            if expected / cost(more, chance) > least:
                return True
        return False

    def relax(self) -> None:
        """Record that drafts were not worth making for a token, or were too expensive: in time they are tried again."""
        self.acceptance.relax()
        self.drafts.saw(SHARE)
