"""How many tokens are guessed: as many as pay, by what steps of several rows take here and how often guesses hold."""

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt
from operator import mul
from statistics import median

from engine.speculation.sources import Guess

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
_SURE = (0.3, 0.5, 0.7, 0.9)
"""Chances that a draft model gives its token: from each on it holds more often."""
_BELIEVED_DRAFTS = (0.2, 0.35, 0.5, 0.7, 0.9)
"""How often such a token is right before anything was measured,"""
DRAFTED = 0.75
"""and one that is yet to be drafted: more is hoped for than is likely, or it would not be found out."""
_BELIEFS, _REMEMBERED = 12, 60
"""How many times a belief counts as, and how many are remembered."""
_HOPE = 0.5
"""So many deviations more than is known are hoped for: of what failed a few times by chance nothing more would be
seen. What hopes may cost is bounded (see `Balance`)."""
RELAX = 1 / 256
"""So much nearer to what was believed at first comes what is known of guesses, for each token that they were not worth
checking or making for: a text that they never hold in says little of the next one."""
DRAFT_CREDIT, DRAFT_SAVED = 4.0, 8.0
"""As CREDIT and SAVED: of all answers together, as how often drafts hold says little of a single one."""
_DIVIDED = 0.7
"""So much less often where they do not."""
_ROW = 0.15
"""Of a step: what another row is believed to cost."""
_DRAFT_ROW = 0.35
"""Of a draft model's step: the same."""
ENOUGH = 3
"""Steps of one row that have to be seen before others are compared with them."""
LATEST = 9
"""Steps that medians are of."""
DOUBT = 2
"""Measurements that what was believed before counts as: one slow step changes nothing yet."""
FADES = 64
"""After so many steps without guesses in a row a measurement of others is forgotten."""
AGAIN = 32
"""After so many steps with guesses there is one without: what it takes now is what they are to gain upon."""
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
    """Steps since one without guesses was seen."""
    _units: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Seconds of the latest steps of one row."""
    _seen: dict[int, deque[float]] = field(default_factory=dict)
    """By rows what the latest steps of several took."""
    _plain: int = 0
    """Steps without guesses, one after the other."""
    _apart: int = 0
    """Steps since one of one row was seen."""
    draft: float = 0.0
    """What a step of a draft model is believed to take, in steps of one row, before it was measured."""
    _drafts: dict[int, deque[float]] = field(default_factory=dict)
    """By rows what its latest steps took, in seconds."""

    _sized: list[int] = field(default_factory=list)
    """How many rows are computed for so many."""

    def __post_init__(self) -> None:
        self.ratios = list(self.believed)
        rows = range(MOST_ROWS + 1)
        self._sized = [next(size for size in self.sizes if size >= count) for count in rows]

    def of(self, rows: int) -> float:
        """Of a step of so many rows."""
        return self.ratios[self._sized[rows] - 1]

    def saw(self, rows: int, seconds: float, texts: int = 1) -> None:
        """A step of `rows` rows took so long: the newest one of each of so many texts, and guesses.

        Where several texts are answered for long, no step has one row: what it would take follows from theirs.
        """
        if not 1 <= texts <= rows <= MOST_ROWS:
            return
        is_plain, rows = rows == texts, self._sized[rows]
        self.since, self._plain = (0, self._plain + 1) if is_plain else (self.since + 1, 0)
        self._apart = 0 if rows == 1 else self._apart + 1
        if rows == 1 or (is_plain and (not self.unit_s or self._apart > FADES)):
            self._units.append(seconds / self.of(rows))
            self.unit_s = median(self._units) if len(self._units) >= ENOUGH else 0.0
        elif self.unit_s:
            latest = self._seen.setdefault(rows, deque(maxlen=LATEST))
            latest.append(min(max(seconds / self.unit_s, 1.0), float(rows)))
            self._judge()
        if is_plain and self._plain % FADES == 0:
            self._fade()

    def drafted(self, rows: int, seconds: float) -> None:
        """A step of so many rows took a draft model so long."""
        self._drafts.setdefault(rows, deque(maxlen=LATEST)).append(seconds)

    def of_draft(self, rows: int) -> float:
        """Of a draft model's step of so many rows; by the nearest number where it has not been seen."""
        near = min(self._drafts, key=lambda other: abs(other - rows), default=None)
        if near is None or not self.unit_s:
            return self.draft * (1 + _DRAFT_ROW * (rows - 1))
        seen = median(self._drafts[near]) / self.unit_s
        return seen * (1 + _DRAFT_ROW * (rows - 1)) / (1 + _DRAFT_ROW * (near - 1))

    def _fade(self) -> None:
        """What guesses cost was not seen for long: it may be otherwise by now, and is to be tried again."""
        _drop_one(self._seen)
        _drop_one(self._drafts)
        self._judge()

    def _judge(self) -> None:
        """Of numbers of rows that were hardly seen it is believed that each row more costs as much as with the nearest
        that was; and that more rows take no less: of two that say otherwise the one that was seen more often is right.
        """
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
        """What was seen of so many rows, and what is believed of them."""
        return float(median([*[believed] * DOUBT, *self._seen.get(rows, ())]))


def _drop_one(seen: dict[int, deque[float]]) -> None:
    """Forget the oldest of each."""
    for key, latest in list(seen.items()):
        latest.popleft()
        if not latest:
            del seen[key]


Kind = tuple[int, bool]
"""Of guesses from a text that hold about as often: by how long the match was."""


@dataclass(slots=True)
class Rate:
    """How often something held, of the latest times; what was believed before counts as some of them."""

    belief: float
    seen: float = 0.0
    now: float = -1.0

    def __post_init__(self) -> None:
        self.now = self.belief

    @property
    def hoped(self) -> float:
        """How often it may hold, as far as is known."""
        return min(self.now + _HOPE * sqrt(self.now * (1 - self.now) / (self.seen + _BELIEFS)), 1.0)

    def saw(self, right: bool) -> None:
        self.seen = min(self.seen + 1, _REMEMBERED)
        self.now += (right - self.now) / (self.seen + _BELIEFS)

    def relax(self) -> None:
        """What was seen counts less, and the belief more."""
        self.now += (self.belief - self.now) * RELAX
        self.seen -= self.seen * RELAX


@dataclass(slots=True)
class Acceptance:
    """How often a guessed token was right where all before it were."""

    rates: dict[Kind, float] = field(default_factory=dict)
    """Of what is from texts."""
    drafts: list[Rate] = field(default_factory=lambda: [Rate(chance) for chance in _BELIEVED_DRAFTS])
    """Of what a draft model guessed, by how sure it was,"""
    drafted: Rate = field(default_factory=lambda: Rate(DRAFTED))
    """and of what it is yet to guess."""

    def of(self, guess: Guess, at: int = 0) -> float:
        """For token number `at` of this guess."""
        if guess.chances:
            return self.drafts[_sureness(guess, at)].hoped
        return self.rates.get(_kind(guess), _believed(guess))

    def hold(self, guess: Guess) -> list[float]:
        """For each of its tokens, how likely it and all before it are right."""
        count = len(guess.tokens)
        each = [self.of(guess, at) for at in range(count)] if guess.chances else [self.of(guess)] * count
        return list(accumulate(each, mul))

    def saw(self, guess: Guess, offered: int, held: int) -> None:
        """Of `offered` tokens of a guess the first `held` were right."""
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
        """A guess from a text was not worth checking."""
        rate = self.of(guess)
        self.rates[_kind(guess)] = rate + (_believed(guess) - rate) * RELAX

    def relax(self) -> None:
        """No drafts were worth making."""
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
    """Whether guesses pay in one answer, in steps of one row: what they cost at most is a share of the answer."""

    saved: float = 0.0
    credit: float = CREDIT
    most: float = SAVED

    def allows(self, cost: float, tokens: int) -> bool:
        """Whether a guess that costs so much, should it fail, may be made after so many tokens of the answer."""
        return self.saved - cost >= -(self.credit + SHARE * tokens)

    def saw(self, saved: float) -> None:
        """A step with guesses saved so many steps; below 0 it cost them."""
        self.saved = min(self.saved + saved, self.most)


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
    drafts: Balance = field(default_factory=lambda: Balance(credit=DRAFT_CREDIT, most=DRAFT_SAVED))
    """Of the draft model, in all answers."""
    draft: float = 0.0
    """What a step of it is believed to take, in steps of one row."""

    def turn_to(self, context: int) -> None:
        """The next step attends to so many rows in all."""
        size = max(context, SHORT).bit_length()
        if size not in self._known:
            near = min(self._known, key=lambda other: abs(other - size), default=None)
            known = Costs(draft=self.draft) if near is None else self._known[near]
            self._known[size] = Costs(believed=list(known.ratios), sizes=self.sizes, draft=known.of_draft(1))
        self.costs = self._known[size]

    @property
    def measures(self) -> bool:
        """Whether the next step has no guesses, so that it is known what they are to gain upon."""
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
        """How many tokens of `guess` to check in a step of `rows` rows so far, that gives so many tokens.

        `said` tokens has the answer, and `balance` is its own. The first `unread` of the guess have been drawn, nobody
        knows yet as what; they are not counted. What drafts took for it is `spent` whatever is checked.
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
        """So many tokens in the time of a step of one row, with so many of `guess`; the arguments are those of
        `count`."""
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
        """Whether a draft model shall guess one more token after `guess`, and up to `most` in all, for one of so many
        texts that it guesses for at once. The step has `rows` rows besides, which give `tokens`; drafts have to
        give more than `least` tokens in the time of a step of one row."""
        costs, most = self.costs, min(most, MOST_ROWS - rows)
        if len(guess.tokens) >= most:
            return False
        hold, count = self.acceptance.hold(guess), len(guess.tokens)
        each = costs.of_draft(texts) / texts
        more_rows = costs.of_draft(2 * texts) / texts - each

        def cost(drafted: int, all_hold: float) -> float:
            """With all that a chain takes: the next one has a row more to begin with where all of this one holds."""
            return costs.of(rows + drafted) + drafted * each + all_hold * more_rows

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
        """Drafts were not worth making for a token, or too dear: in time they are tried again."""
        self.acceptance.relax()
        self.drafts.saw(SHARE)
