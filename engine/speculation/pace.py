"""How many tokens are guessed: as many as pay, by what steps of several rows take here and how often guesses hold."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from engine.speculation.suffixes import Guess

MOST_ROWS = 8
"""Of a step: up to so many have the bits of rows that are computed one by one, and none costs as much as a step."""
LEAST_GAIN = 1.05
"""So many times as many tokens a second have to be expected."""
CREDIT = 1.0
"""Steps that guesses may cost an answer before any of them held."""
SAVED = 2.0
"""Steps saved that are remembered: what held long ago pays for no more than these."""
SHARE = 0.01
"""Of an answer's steps that guesses may cost besides."""
_LENGTHS = (4, 6, 10, 20)
"""Of matches: from each on they hold more often."""
_BELIEVED = (0.4, 0.5, 0.6, 0.75, 0.85)
"""How often a guessed token is right before anything was measured, where all places agree."""
_DIVIDED = 0.7
"""So much less often where they do not."""
_ROW = 0.15
"""Of a step: what another row is believed to cost."""
ENOUGH = 3
"""Steps of one row that have to be seen before others are compared with them."""
LATEST = 9
"""Steps that medians are of."""
DOUBT = 2
"""Measurements that what was believed before counts as: one slow step changes nothing yet."""
FADES = 64
"""After so many steps of one row in a row a measurement of others is forgotten."""
AGAIN = 32
"""After so many steps without one of one row there is one: what it takes now is what guesses are to gain upon."""
SHORT = 512
"""Contexts up to so many rows are alike; others are up to twice as many."""


EVERY_SIZE = tuple(range(1, MOST_ROWS + 1))


def _believed_costs() -> list[float]:
    return [1 + _ROW * more for more in range(MOST_ROWS)]


@dataclass(slots=True)
class Costs:
    """What a step of 1 to 8 rows takes, in steps of one row: medians, as a step that was interrupted says nothing."""

    unit_s: float = 0.0
    """Seconds of a step of one row; 0.0 while too few have been seen."""
    believed: list[float] = field(default_factory=_believed_costs)
    """Before anything was measured."""
    sizes: tuple[int, ...] = EVERY_SIZE
    """Rows that are computed: a step of others takes as long as one of the next size."""
    ratios: list[float] = field(default_factory=list)
    """As they are known by now."""
    since: int = 0
    """Steps since one of one row was seen."""
    _units: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Seconds of the latest steps of one row."""
    _seen: dict[int, deque[float]] = field(default_factory=dict)
    """By rows what the latest steps of several took."""
    _plain: int = 0
    """Steps of one row, one after the other."""

    def __post_init__(self) -> None:
        self.ratios = list(self.believed)

    def of(self, rows: int) -> float:
        """Of a step of so many rows."""
        return self.ratios[self._size(rows) - 1]

    def saw(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long."""
        if not 1 <= rows <= MOST_ROWS:
            return
        rows = self._size(rows)
        if rows == 1:
            self.since, self._plain = 0, self._plain + 1
            self._units.append(seconds)
            self.unit_s = median(self._units) if len(self._units) >= ENOUGH else 0.0
            if self._plain % FADES == 0:
                self._fade()
        elif self.unit_s:
            self.since, self._plain = self.since + 1, 0
            latest = self._seen.setdefault(rows, deque(maxlen=LATEST))
            latest.append(min(max(seconds / self.unit_s, 1.0), float(rows)))
            self._judge()

    def _size(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)

    def _fade(self) -> None:
        """What guesses cost was not seen for long: it may be otherwise by now, and is to be tried again."""
        for rows, latest in list(self._seen.items()):
            latest.popleft()
            if not latest:
                del self._seen[rows]
        self._judge()

    def _judge(self) -> None:
        """Of numbers of rows that have not been seen it is believed that each row more costs as much as with the
        nearest; and that more rows take no less."""
        known = {
            rows: median([*[self.believed[rows - 1]] * DOUBT, *latest]) for rows, latest in self._seen.items()
        }
        for rows in range(2, MOST_ROWS + 1):
            near = min(known, key=lambda other: abs(other - rows), default=None)
            cost = self.believed[rows - 1]
            if near is not None:
                cost = 1 + (known[near] - 1) * (rows - 1) / (near - 1)
            self.ratios[rows - 1] = max(cost, self.ratios[rows - 2])


@dataclass(slots=True)
class Acceptance:
    """How often a guessed token was right where all before it were, by how long the match was."""

    rates: dict[tuple[int, bool], float] = field(default_factory=dict)

    def of(self, guess: Guess) -> float:
        """For a token of this guess."""
        return self.rates.get(_kind(guess), _believed(guess))

    def saw(self, guess: Guess, offered: int, held: int) -> None:
        """Of `offered` tokens of a guess the first `held` were right."""
        kind, rate = _kind(guess), self.of(guess)
        for right in [1.0] * held + [0.0] * (held < offered):
            rate += (right - rate) / 16
        self.rates[kind] = rate


def _kind(guess: Guess) -> tuple[int, bool]:
    return sum(guess.length >= length for length in _LENGTHS), guess.agreed


def _believed(guess: Guess) -> float:
    at, agreed = _kind(guess)
    return _BELIEVED[at] if agreed else _DIVIDED * _BELIEVED[at]


@dataclass(slots=True)
class Balance:
    """Whether guesses pay in one answer, in steps of one row: what they cost at most is a share of the answer."""

    saved: float = 0.0

    def allows(self, cost: float, tokens: int) -> bool:
        """Whether a guess that costs so much, should it fail, may be made after so many tokens of the answer."""
        return self.saved - cost >= -(CREDIT + SHARE * tokens)

    def saw(self, saved: float) -> None:
        """A step with guesses saved so many steps; below 0 it cost them."""
        self.saved = min(self.saved + saved, SAVED)


@dataclass(slots=True)
class Pace:
    """Decides for each step, of all answers together. It belongs to the loop thread."""

    costs: Costs = field(default_factory=Costs)
    """Those of the context that is decoded at."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    sizes: tuple[int, ...] = EVERY_SIZE
    """Of steps, see `Costs`."""
    again: int = AGAIN
    _known: dict[int, Costs] = field(default_factory=dict)
    """By context: the longer it is, the more of a step is attention, which each row pays for alone."""

    def turn_to(self, context: int) -> None:
        """The next step attends to so many rows in all."""
        size = max(context, SHORT).bit_length()
        if size not in self._known:
            near = min(self._known, key=lambda other: abs(other - size), default=None)
            believed = _believed_costs() if near is None else list(self._known[near].ratios)
            self._known[size] = Costs(believed=believed, sizes=self.sizes)
        self.costs = self._known[size]

    def count(
        self, guess: Guess, rows: int, tokens: float, balance: Balance, said: int, unread: int = 0
    ) -> int:
        """How many tokens of `guess` to check in a step of `rows` rows so far, that gives so many tokens.

        `said` tokens has the answer, and `balance` is its own. The first `unread` of the guess have been drawn, nobody
        knows yet as what; they are not counted.
        """
        if not self.costs.unit_s or self.costs.since >= self.again:
            return 0
        right, expected = self.acceptance.of(guess), 0.0
        best, found = LEAST_GAIN * tokens / self.costs.of(rows), 0
        for count in range(1, min(len(guess.tokens) - unread, MOST_ROWS - rows) + 1):
            expected += right ** (unread + count)
            cost = self.costs.of(rows + count)
            gain = (tokens + expected) / cost
            if gain > best and balance.allows(cost - self.costs.of(rows), said):
                best, found = gain, count
        return found
