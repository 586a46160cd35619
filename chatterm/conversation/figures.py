"""Figures shown to the user: how they are measured during an answer, and how they are formatted."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chatterm.backends.arrivals import Arrivals, rate
from chatterm.backends.backend import CachedChunk, Figures, ModelInfo, Progress, TurnStats
from chatterm.markdown.lines import Line
from models.units import bytes_text

_BARS = "▁▂▃▄▅▆▇"
_WINDOW = 1.0
"""Seconds over which "tokens/s now" is measured; more if tokens come slowly."""
_STOPPED = 30.0
"""Seconds without a token after which the current speed is unknown."""
_QUIET = 0.8
"""Seconds of warming that are too few to be shown."""
_GAIN = 0.05
"""Time that guesses must save, as a share of the decoding time, to be shown."""
_ENOUGH = 32
"""Fewest tokens of a prefill whose rate predicts how long more of them will take."""

OF_ANSWER = (
    *("generated_tokens", "reasoning_tokens", "decode_s", "first_tokens", "guessed_tokens"),
    *("accepted_tokens", "drafted_tokens", "accepted_drafts", "saved_s"),
)
"""Figures that add up when an answer is continued; the others are those of its first run."""


class Speedometer(Arrivals):
    """Tokens/s now and over the whole answer, from the times at which tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: list[int] = []
        self._bucket = 0.1
        """Seconds that one entry of `_counts` covers; doubles when there are too many."""

    def add(self, time: float, count: int = 1) -> None:
        super().add(time, count)
        first = time if self.first is None else self.first
        index = int((time - first) / self._bucket)
        while index >= 64:
            self._bucket *= 2
            pairs = zip(self._counts[::2], [*self._counts[1::2], 0], strict=False)
            self._counts = [a + b for a, b in pairs]
            index = int((time - first) / self._bucket)
        self._counts += [0] * (index + 1 - len(self._counts))
        self._counts[index] += count

    def now(self, time: float) -> float:
        """Return tokens/s over the last second, or since the previous burst; 0.0 while unknown."""
        bursts = list(self.bursts)
        if not bursts or time - bursts[-1].latest > _STOPPED:
            return 0.0
        recent = sum(burst.latest >= time - _WINDOW for burst in bursts) or 1
        base, *bursts = bursts[-recent - 1 :]
        latest = bursts[-1].latest if bursts else base.latest
        return rate(sum(burst.count for burst in bursts), max(latest, time - 0.2) - base.latest)

    @property
    def average(self) -> float:
        """Tokens/s after the first tokens came; 0.0 while unknown."""
        return rate(*self.measured())

    def history(self) -> tuple[float, ...]:
        """Return the tokens/s of each stretch of the answer, without the unfinished last one."""
        return tuple(count / self._bucket for count in self._counts[:-1])


@dataclass(slots=True)
class SessionStats:
    """Sums over the turns since the last reset."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    split_tokens: int = 0
    """Prompt tokens of which it is known whether they were cached or computed."""
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decoded_tokens: int = 0
    """The generated tokens that took `decode_s`."""
    timed_tokens: int = 0
    """The prefilled tokens that took `prefill_s`."""
    ttfts: list[float] = field(default_factory=list)
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    """The same two counts for guesses of a draft model."""
    saved_s: float = 0.0
    """Seconds of `decode_s` that the accepted guesses saved."""
    warmed_tokens: int = 0
    """Cached tokens that were computed in idle time."""
    retries: int = 0
    """Turns that answered an earlier message again; the next two fields count tokens of their prompts."""
    retried_tokens: int = 0
    reused_tokens: int = 0

    def add(self, stats: TurnStats, *, retry: bool = False, resumed: bool = False) -> None:
        """Add the figures of an answer; if it was `resumed`, only those in `OF_ANSWER`."""
        if resumed:
            stats = TurnStats(**{name: getattr(stats, name) for name in OF_ANSWER})
        self.turns += not resumed
        if retry:
            self.retries += 1
            self.retried_tokens += stats.split_tokens
            self.reused_tokens += stats.cached_tokens
        self.prompt_tokens += stats.prompt_tokens
        self.cached_tokens += stats.cached_tokens
        self.prefilled_tokens += stats.prefilled_tokens
        self.split_tokens += stats.split_tokens
        self.generated_tokens += stats.generated_tokens
        self.reasoning_tokens += stats.reasoning_tokens
        self.warmed_tokens += stats.warmed_tokens
        if stats.prefill_tokens_per_s:
            self.timed_tokens += stats.prefilled_tokens
            self.prefill_s += stats.prefill_s
        if stats.decode_tokens_per_s:
            self.decoded_tokens += stats.decoded_tokens
            self.decode_s += stats.decode_s
        if stats.ttft_s:  # else no token came
            self.ttfts.append(stats.ttft_s)
        self.guessed_tokens += stats.guessed_tokens
        self.accepted_tokens += stats.accepted_tokens
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_drafts += stats.accepted_drafts
        self.saved_s += stats.saved_s

    @classmethod
    def of(cls, turns: Iterable[Mapping[str, float]]) -> "SessionStats":
        """Return the sums over turns as stored by `TurnStats.to_dict`; {} is a turn without figures."""
        session = cls()
        for turn in turns:
            if turn:
                session.add(TurnStats.of(turn))
        return session

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
    """Tokens/s now; the average once the answer has ended. Both are 0.0 while unknown."""
    average: float = 0.0
    history: tuple[float, ...] = ()
    ttft_s: float | None = None
    waited_s: float = 0.0
    """Seconds since the request, while no token has come."""
    cached: int | None = None
    computed: int | None = None
    generated: int = 0
    used: int = 0
    """Context tokens that are taken."""
    present: int | None = None
    """How many of them need not be computed for the next answer; None: unknown."""
    context: int = 0
    figures: Figures | None = None
    prefill_rate: float | None = None
    """Tokens/s of the prefill, running or finished."""
    progress_rate: float | None = None
    """Bytes/s of the running download or load."""
    is_saved: bool = False
    """Whether the figures were saved with an answer, which another machine may have computed."""
    title: str = ""
    """The title of the conversation; "" before it begins."""
    left_s: float | None = None
    """Estimated seconds until the download, load, prefill or warming is done."""
    guessed: int = 0
    """Tokens of the answer that were guessed, and below those that were right."""
    accepted: int = 0
    drafted: int = 0
    accepted_drafts: int = 0
    """The same two counts for guesses of a draft model."""
    documents: tuple[str, ...] = ()
    """Names of the documents at the start of the conversation."""

    @property
    def read(self) -> CachedChunk | None:
        """The document that is being read in idle time for later conversations."""
        chunks = self.figures.chunks if self.figures is not None and self.phase == "ready" else ()
        return next((one for one in chunks if not one.is_read and one.present < one.tokens), None)

    @property
    def begun_on(self) -> CachedChunk | None:
        """The cached chunk of the documents at the start of the conversation."""
        chunks = self.figures.chunks if self.figures is not None and self.documents else ()
        return next((one for one in chunks if one.name == ", ".join(self.documents)), None)

    @property
    def is_warming(self) -> bool:
        """Whether idle work still has a part of the history to compute."""
        return self.phase == "ready" and self.present is not None and self.present < self.used

    @property
    def bandwidth_share(self) -> float | None:
        """The fraction of the memory bandwidth that decoding uses: each step reads the weights and the KV of all
        earlier tokens. None while unknown, and if it would exceed 1: then the data comes from somewhere faster,
        such as the caches of a CPU.
        """
        figures, speed = self.figures, self.average or self.speed
        if self.is_saved or figures is None or not figures.bandwidth or not speed:
            return None
        blocks = figures.blocks_free + figures.blocks_cached + figures.blocks_held
        per_token = figures.kv_bytes / (blocks * figures.block_size) if blocks else 0.0
        steps = speed / tokens_a_step(self.generated, self.accepted)
        before = max(self.used - self.generated / 2, 0)  # on average over the answer
        read = figures.read_bytes or figures.weight_bytes
        share = steps * (read + before * per_token) / figures.bandwidth
        return share if share <= 1 else None


def decode_rate(stats: TurnStats | SessionStats) -> float:
    """Return tokens/s of decoding; 0.0 if it was too short to tell."""
    return rate(stats.decoded_tokens, stats.decode_s)


def has_gained(stats: TurnStats | SessionStats) -> bool:
    """Return whether guesses saved enough time to be shown."""
    return stats.accepted_tokens > 0 and stats.saved_s >= max(0.0005, _GAIN * stats.decode_s)


def tokens_a_step(generated: int, accepted: int) -> float:
    """Return the average tokens per step: one of its own, plus the guesses that were right."""
    return generated / (generated - accepted) if 0 < accepted < generated else 1.0


def guesses_text(guessed: int, accepted: int) -> str:
    """Say how many guesses were right; "" if nothing was guessed."""
    return f"{accepted:,} of {guessed:,} ({accepted / guessed:.0%})" if guessed else ""


class ProgressRate:
    """Measures how fast something grew over the last few seconds, and when it will be done."""

    def __init__(self, window: float = 4.0) -> None:
        self._window = window
        self._points: deque[tuple[float, float]] = deque()

    def add(self, time: float, done: float) -> None:
        """Note the amount `done` so far; less than before means that something else has begun."""
        points = self._points
        if points and done < points[-1][1]:
            points.clear()
        if points and done == points[-1][1]:
            return
        points.append((time, done))
        while len(points) > 2 and points[1][0] < time - self._window:
            points.popleft()

    def rate(self, time: float) -> float | None:
        """Return the rate per second; None while it is unknown."""
        if len(self._points) < 2:
            return None
        begun, first = self._points[0]
        return (self._points[-1][1] - first) / max(time - begun, 1e-9)

    def left(self, time: float, total: float | None) -> float | None:
        """Return the seconds until `total` is reached; None while they are unknown."""
        rate = self.rate(time)
        if not total or not rate:
            return None
        return max(total - self._points[-1][1], 0.0) / rate


class Watch:
    """Sees every Live in turn, and adds the figures that only a series of them can give."""

    def __init__(self) -> None:
        self._what: object = None
        self._pace = ProgressRate()
        self._warming_since: float | None = None
        self._prefill_rate: float | None = None
        """The latest meaningful rate."""

    def see(self, live: Live, now: float) -> Live:
        """Return `live` with its rates and the time that is left; `now` is by `time.monotonic()`."""
        progress, figures = live.progress, live.figures
        if live.phase == "loading" and progress is not None:
            self._follow((progress.stage, progress.what), progress.done, now)
            rate, left = self._pace.rate(now), self._pace.left(now, progress.total)
            return replace(live, progress_rate=rate, left_s=left)
        if live.phase == "reading" and figures is not None and figures.prefill_total:
            self._follow("prefill", figures.prefill_done, now)
            rate, left = self._pace.rate(now), self._pace.left(now, figures.prefill_total)
            self._prefill_rate = rate or self._prefill_rate
            return replace(live, prefill_rate=rate, left_s=left)
        if live.prefill_rate and (live.computed or 0) >= _ENOUGH:
            self._prefill_rate = live.prefill_rate
        live = replace(live, prefill_rate=self._prefill_rate)
        if figures is not None and live.present is None:
            live = self._warming(live, live.used if figures.warmed is None else figures.warmed, now)
            if live.is_warming or (chunk := live.read) is None:
                return live
            self._follow(("reading", chunk.name), chunk.present, now)
            return replace(live, left_s=self._pace.left(now, chunk.tokens))
        self._what = self._warming_since = None
        return live

    def _warming(self, live: Live, warmed: int, now: float) -> Live:
        """Add the progress of warming. A short one counts as done, so that nothing flickers."""
        if warmed >= live.used:
            self._what = self._warming_since = None
            return replace(live, present=live.used)
        if self._warming_since is None:
            self._warming_since = now
        self._follow("warming", warmed, now)
        if now - self._warming_since < _QUIET:
            return replace(live, present=live.used)
        return replace(live, present=warmed, left_s=self._pace.left(now, live.used))

    def _follow(self, what: object, done: float, now: float) -> None:
        if what != self._what:
            self._what, self._pace = what, ProgressRate()
        self._pace.add(now, done)


def new_notes(told: Iterable[str], said: set[str]) -> list[str]:
    """Return the notes that are not in `said` yet, and add them to it."""
    notes = [note for note in told if note not in said]
    said.update(notes)
    return notes


def weights_text(figures: Figures) -> str:
    """Say where the weights are: "63 GB, 40 GB of them in host memory"."""
    whole = bytes_text(figures.weight_bytes)
    return (
        f"{whole}, {bytes_text(figures.host_bytes)} of them in host memory" if figures.host_bytes else whole
    )


def count_text(count: int) -> str:
    """Format a count briefly: "812", "4.1k", "131k"."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 99_950 else f"{count / 1000:.0f}k"


def seconds_text(seconds: float) -> str:
    """Format a duration with two or three digits: "<1 ms", "38 ms", "0.42 s", "12.5 s", "3 min 5 s"."""
    if 0 < seconds < 0.0005:
        return "<1 ms"
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


def left_text(seconds: float) -> str:
    """Say how long it will still take, as precisely as can be known: "8 s left", "3 min left"."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s left"
    if seconds < 5400:
        return f"{round(seconds / 60)} min left"
    return f"{seconds / 3600:.1f} h left"


def progress_parts(live: Live) -> list[str]:
    """Say what is being done, how far, how fast, and how long it will take: the most important first."""
    progress = live.progress
    if progress is None:
        return []
    parts = [progress_text(progress)]
    if live.progress_rate and progress.stage == "download":
        parts.append(f"{bytes_text(round(live.progress_rate))}/s")
    if live.left_s is not None and progress.total and progress.done < progress.total:
        parts.append(left_text(live.left_s))
    return parts


def progress_text(progress: Progress) -> str:
    """Say how far something is: "weights 61 of 98 MB", or how much is done while the total is unknown."""
    if progress.total is None:
        return f"{progress.what} {bytes_text(progress.done)}" if progress.done else progress.what
    done, total = bytes_text(progress.done), bytes_text(progress.total)
    if done.split()[-1] == total.split()[-1]:
        done = done.split()[0]
    return f"{progress.what} {done} of {total}"


def sparkline(values: tuple[float, ...], width: int) -> str:
    """Draw `values`, squeezed into at most `width` bars and scaled to the largest."""
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


def bar(parts: Sequence[tuple[float, str]], width: int) -> Line:
    """Draw a bar of stretches of (share of the whole, style), the rest of it empty. A share above 0 is always visible,
    and a total below 1 leaves some of the rest.
    """
    sizes = [round(share * width) for share, _ in parts]
    sizes = [max(size, 1 if share > 0 else 0) for size, (share, _) in zip(sizes, parts, strict=True)]
    whole = sum(share for share, _ in parts)
    room = width - 1 if whole < 1 and width > len(parts) else width
    while sum(sizes) > room:
        largest = max(range(len(sizes)), key=lambda index: sizes[index])
        sizes[largest] -= 1
    line = [("━" * size, style) for size, (_, style) in zip(sizes, parts, strict=True) if size]
    rest = width - sum(sizes)
    return [*line, ("─" * rest, "rule")] if rest else line


def meter(done: float, width: int) -> Line:
    """Return a bar that is filled to the share `done`; something is filled as soon as that is above 0."""
    filled = min(max(round(done * width), 1 if done > 0 else 0), width)
    return [("━" * filled, "primary"), ("─" * (width - filled), "rule")]
