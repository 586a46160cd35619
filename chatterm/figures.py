"""The figures a person sees: measured while an answer comes, and how they are written."""

from collections import deque
from dataclasses import dataclass, field, replace

from chatterm.backend import Figures, ModelInfo, Progress, TurnStats
from models.units import bytes_text

_BARS = "▁▂▃▄▅▆▇"
_WINDOW = 1.0
"""Seconds that "tokens/s now" looks back."""


class Speedometer:
    """Tokens/s now and over the whole answer, from the times at which tokens came."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._counts: list[int] = []
        self._bucket = 0.1
        """Seconds that one entry of `_counts` covers; doubles when there are too many."""
        self.first: float | None = None
        self.latest = 0.0
        self.count = 0

    def add(self, time: float) -> None:
        if self.first is None:
            self.first = time
        self.latest = time
        self.count += 1
        self._recent.append(time)
        while self._recent[0] < time - _WINDOW:
            self._recent.popleft()
        index = int((time - self.first) / self._bucket)
        while index >= 64:
            self._bucket *= 2
            pairs = zip(self._counts[::2], [*self._counts[1::2], 0], strict=False)
            self._counts = [a + b for a, b in pairs]
            index = int((time - self.first) / self._bucket)
        self._counts += [0] * (index + 1 - len(self._counts))
        self._counts[index] += 1

    def now(self, time: float) -> float:
        """Tokens/s over the last second; 0.0 when nothing came in it."""
        recent = [t for t in self._recent if t >= time - _WINDOW]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return 0.0
        return (len(recent) - 1) / (max(recent[-1], time - 0.2) - recent[0])

    @property
    def average(self) -> float:
        """Tokens/s from the first token to the latest; 0.0 for fewer than two."""
        if self.first is None or self.count < 2 or self.latest <= self.first:
            return 0.0
        return (self.count - 1) / (self.latest - self.first)

    def history(self) -> tuple[float, ...]:
        """Tokens/s along the answer, the unfinished last stretch left out."""
        return tuple(count / self._bucket for count in self._counts[:-1])


@dataclass(slots=True)
class SessionStats:
    """Sums over the turns since the last reset."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttfts: list[float] = field(default_factory=list)

    def add(self, stats: TurnStats) -> None:
        self.turns += 1
        self.prompt_tokens += stats.prompt_tokens
        self.cached_tokens += stats.cached_tokens
        self.prefilled_tokens += stats.prefilled_tokens
        self.generated_tokens += stats.generated_tokens
        self.reasoning_tokens += stats.reasoning_tokens
        self.prefill_s += stats.prefill_s
        self.decode_s += stats.decode_s
        self.ttfts.append(stats.ttft_s)

    def copy(self) -> "SessionStats":
        return replace(self, ttfts=self.ttfts.copy())


@dataclass(frozen=True, slots=True)
class Live:
    """Everything that the status line and the side panel show, at one moment."""

    phase: str
    """loading, absent (no model), ready, reading (prefill), thinking, answering."""
    model: str
    info: ModelInfo | None = None
    progress: Progress | None = None
    speed: float = 0.0
    """Tokens/s now; the average once the answer has ended."""
    average: float = 0.0
    history: tuple[float, ...] = ()
    ttft_s: float | None = None
    waited_s: float = 0.0
    """Since the request, while no token has come."""
    cached: int | None = None
    computed: int | None = None
    generated: int = 0
    used: int = 0
    context: int = 0
    figures: Figures | None = None


def new_notes(figures: Figures | None, said: set[str]) -> list[str]:
    """What the engine wants told and was not yet; it joins `said`."""
    notes = [note for note in (figures.notes if figures is not None else ()) if note not in said]
    said.update(notes)
    return notes


def count_text(count: int) -> str:
    """A short count: "812", "4.1k", "131k"."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 99_950 else f"{count / 1000:.0f}k"


def seconds_text(seconds: float) -> str:
    """A duration with two or three figures: "38 ms", "0.42 s", "12.5 s", "3 min 5 s"."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def rate_text(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f} tok/s" if tokens_per_s < 99.95 else f"{tokens_per_s:,.0f} tok/s"


def progress_text(progress: Progress) -> str:
    """ "weights 61 of 98 MB", or how much there is so far while the total is unknown."""
    if progress.total is None:
        return f"{progress.what} {bytes_text(progress.done)}" if progress.done else progress.what
    done, total = bytes_text(progress.done), bytes_text(progress.total)
    if done.split()[-1] == total.split()[-1]:
        done = done.split()[0]
    return f"{progress.what} {done} of {total}"


def sparkline(values: tuple[float, ...], width: int) -> str:
    """The last part of `values` squeezed into at most `width` bars, scaled to the largest."""
    if not values or width < 1:
        return ""
    if len(values) > width:
        step = len(values) / width
        groups = [values[int(i * step) : max(int((i + 1) * step), int(i * step) + 1)] for i in range(width)]
        values = tuple(sum(group) / len(group) for group in groups)
    top = max(values)
    if top <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(int(value / top * 6.999), 6)] for value in values)


def meter(done: float, width: int) -> tuple[str, str]:
    """The filled and the empty part of a bar; something is filled as soon as `done` is above 0."""
    filled = min(max(round(done * width), 1 if done > 0 else 0), width)
    return "━" * filled, "─" * (width - filled)
