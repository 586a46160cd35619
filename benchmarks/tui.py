"""The chat screen in a real pseudo-terminal, under load: goals and verdicts.

    python benchmarks/tui.py                        about two minutes
    python benchmarks/tui.py --tokens 10000         a quick look
    python benchmarks/tui.py --json benchmarks/results/tui.json

The program runs in a process of its own with a scripted engine: a thread, paced as if by a GPU, that writes 1,000
tokens/s of Markdown into a session which already has 2,000 messages. This process is the terminal and the user: it
types a letter that occurs nowhere else, and looks for it in the program's output. So the time of a keystroke runs
from the byte written to the terminal until the frame with that letter has come out of it.
"""

import argparse
import asyncio
import fcntl
import json
import math
import os
import platform
import pty
import random
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rivers import prose, section
from benchmarks.stream import Pace, sharp_timers
from engine.events import TurnStats

SIZE = (120, 40)
LETTERS = "αβγδεζηθικλμνξοπρστυφχψωабвгдежзийклмнпрстуфхцчшщъыьэюя"
"""The letters to type; none of them occurs in the engine's text."""
MARK = "the-last-message"
"""Occurs in the last message of the session, and nowhere else."""
MEMORY = 20.0
"""MB that 80,000 tokens may add: their text and its layout are kept; nothing else may grow with them."""
PATIENCE = 3.0
"""Seconds after which a keystroke is given up and counts as this slow."""


# --- the program: a process of its own ---


def pieces(rng: random.Random, count: int) -> list[str]:
    """Return Markdown in `count` pieces of four characters, about the size of a token."""
    text = ""
    number = 0
    while len(text) < 4 * count:
        number += 1
        text += section(rng, number) + "\n\n"
    return [text[start : start + 4] for start in range(0, 4 * count, 4)]


class PacedEngine:
    """A thread that writes tokens at a fixed rate, and records the rate that it reaches."""

    def __init__(self, rate: float) -> None:
        self.step_s = 1 / rate
        self.rates: list[float] = []

    def say(self, texts: list[str]) -> "SimpleQueue[str | None]":
        """Put the pieces into a queue as they come, then None."""
        queue: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=self._run, args=(texts, queue), daemon=True).start()
        return queue

    def _run(self, texts: list[str], queue: "SimpleQueue[str | None]") -> None:
        sharp_timers()
        pace = Pace(self.step_s)
        pending = pace.launch()
        began = time.perf_counter()
        for text in texts:
            following = pace.launch()
            pace.wait(pending)
            pending = following
            queue.put(text)
        self.rates.append(len(texts) / (time.perf_counter() - began))
        queue.put(None)

    def bare(self, texts: list[str]) -> float:
        """Return tokens/s when no screen shows them."""
        queue = self.say(texts)
        while queue.get() is not None:
            pass
        return self.rates.pop()


def paced_backend(engine: PacedEngine, answer: int) -> Any:
    """Return a Backend whose answers have `answer` tokens and come from `engine`."""
    from chatterm.backends.backend import FinishReason, Outcome, TokenEvent, TurnStats
    from tests.chatterm.scripted import ScriptedBackend

    class PacedBackend(ScriptedBackend):
        text = ""
        ids: ClassVar[list[int]] = []
        began = latest = 0.0
        reason: FinishReason | None = None

        @property  # type: ignore[override]
        def last(self) -> Outcome | None:
            if not self.ids:
                return None
            count = len(self.ids)
            stats = TurnStats(90_000, 89_990, 10, count, 0, 0.01, 0.01, self.latest - self.began)
            return Outcome(self.text, "", self.reason, stats, self.ids, (0, count))

        @last.setter
        def last(self, _: object) -> None:
            """Ignore the answer of the scripted backend."""

        @property
        def used_tokens(self) -> int:
            return 90_000

        def _answer(self, question: str, before: object = None) -> Iterator[TokenEvent]:
            texts = pieces(random.Random(self._turns), answer)
            self._turns += 1
            self.text, self.ids, self.reason = "", [], None
            queue, self.began = engine.say(texts), time.monotonic()
            while (text := queue.get()) is not None:
                self.text += text
                self.ids.append(len(self.ids))
                self.latest = time.monotonic()
                yield TokenEvent(text, len(self.ids), "answer")
            self.reason = FinishReason.EOS
            self.history.append((question, self.text))

    return PacedBackend(context_length=131_072)


def make_session(messages: int) -> str:
    """Store a session with questions and answers of every kind and length; return its id."""
    from chatterm.backends.backend import Exchange
    from chatterm.sessions.records import SessionInfo
    from chatterm.sessions.store import SessionStore

    rng = random.Random(1)
    made = []
    for number in range(messages // 2):
        kind = number % 10
        answer = section(rng, number) if kind == 0 else prose(rng, 1 + kind * 2)
        ids = list(range(len(answer) // 4))
        stats = TurnStats(90_000, 89_990, 10, len(ids), 0, 0.01, 0.01, len(ids) / 1000).to_dict()
        made.append(
            Exchange(
                id=number + 1,
                parent=number or None,
                user=prose(rng, 1 + number % 3),
                text=answer,
                token_ids=ids,
                shown=(0, len(ids)),
                finish_reason="eos",
                stats={name: float(value) for name, value in stats.items()},
                model="scripted",
                created=1.7e9 + number,
            )
        )
    made[-1].text += f"\n\nThis is {MARK}."
    store = SessionStore.open()
    session = store.add(SessionInfo(title="Rivers", model="scripted"), made, len(made))
    if not store.close(60):
        raise SystemExit(f"The session could not be written: {store.problem}")
    return session


def resident_bytes() -> int:
    """Return the current memory of this process; 0 if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclass
class Measured:
    """The program's measurements of itself while answers come."""

    frames: int = 0
    """Frames since the last look."""
    frames_per_s: list[float] = field(default_factory=list)
    """One number per answer."""
    ui_share: list[float] = field(default_factory=list)
    """CPU seconds of the screen's thread per second."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """(tokens so far, bytes)"""
    loaded: list[float] = field(default_factory=list)
    """Tokens/s of the engine with the screen running, and right afterwards while the screen rests."""
    bare: list[float] = field(default_factory=list)


async def program(arguments: argparse.Namespace) -> None:
    """Run the application on this process's terminal; report events to the other process."""
    out = os.fdopen(arguments.report_to, "w", buffering=1)

    def tell(event: str, **more: Any) -> None:
        out.write(json.dumps({"event": event, "at": time.monotonic(), **more}) + "\n")

    engine = PacedEngine(arguments.rate)
    texts = pieces(random.Random(0), 1500)
    backend = paced_backend(engine, arguments.answer)
    from chatterm.app import ChatApp  # the import is not measured here
    from chatterm.sessions.store import SessionStore

    tell("opening")
    store = SessionStore.open()
    app = ChatApp(backend, theme="graphite", store=store, session=arguments.session)
    found = Measured()

    def displayed() -> None:
        found.frames += 1

    app.post_display_hook = displayed  # type: ignore[method-assign]
    running = asyncio.create_task(app.run_async())
    while not running.done() and not app.chat.is_idle:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)  # for layout in idle time
    said = 0
    found.memory.append((0, resident_bytes()))
    tell("ready")
    while said < arguments.tokens and not running.done():
        while app.chat.is_idle and not running.done():
            await asyncio.sleep(0.005)
        found.frames, began, busy = 0, time.monotonic(), time.thread_time()
        while not app.chat.is_idle:
            await asyncio.sleep(0.05)
        took = time.monotonic() - began
        found.frames_per_s.append(found.frames / took)
        found.ui_share.append((time.thread_time() - busy) / took)
        said += arguments.answer
        found.memory.append((said, resident_bytes()))
        found.loaded.append(engine.rates[-1])
        found.bare.append(
            await asyncio.to_thread(engine.bare, texts)
        )  # the screen rests, the machine is the same
        tell("answered")
    tell("done", **vars(found))
    app.exit(0)
    await running
    app.worker.close()
    store.close()


# --- the terminal and the user ---


@dataclass
class Terminal:
    """A pseudo-terminal with the program behind it."""

    pid: int
    master: int
    reports: int
    shown: bytes = b""
    """The end of the program's output."""
    told: list[dict[str, Any]] = field(default_factory=list)
    _half_line: bytes = b""

    def read(self, timeout: float) -> bool:
        """Read what arrives within `timeout` seconds; return False if the program has ended."""
        ready, _, _ = select.select([self.master, self.reports], [], [], max(timeout, 0))
        for source in ready:
            try:
                data = os.read(source, 1 << 16)
            except OSError:  # the terminal is closed
                return False
            if source == self.master:
                self.shown = self.shown[-16:] + data
            elif not data:
                return False
            else:
                *lines, self._half_line = (self._half_line + data).split(b"\n")
                self.told += [json.loads(line) for line in lines]
        return True

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self.read(left):
                return False
        return True

    def latest(self, event: str) -> dict[str, Any] | None:
        return next((told for told in reversed(self.told) if told["event"] == event), None)

    def count(self, event: str) -> int:
        return sum(told["event"] == event for told in self.told)

    def until(self, event: str, seconds: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while (told := self.latest(event)) is None:
            if time.monotonic() > deadline or not self.read(0.1):
                raise SystemExit(f"The program did not get to {event!r}; run it by hand:\n{self.shown!r}")
        return told

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())


def start(arguments: argparse.Namespace, session: str, program: str = __file__) -> Terminal:
    """Start the program in a process of its own, with a terminal of SIZE."""
    reports, report_to = os.pipe()
    os.set_inheritable(report_to, True)
    command = [sys.executable, program, "--report-to", str(report_to), "--session", session]
    for name in ("rate", "tokens", "messages", "answer"):
        command += [f"--{name}", str(getattr(arguments, name))]
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    pid, master = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, environment)
    os.close(report_to)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    return Terminal(pid, master, reports)


def first_frame(terminal: Terminal) -> float:
    """Return seconds from opening the session until its last message can be read."""
    began = terminal.until("opening")["at"]
    mark = MARK.encode()
    while mark not in terminal.shown:
        if time.monotonic() > began + 60 or not terminal.read(0.5):
            raise SystemExit("The session never appeared.")
    return time.monotonic() - float(began)


def type_letters(terminal: Terminal, pause: float) -> list[float]:
    """Type and delete letters until the program is done, and ask for a new answer whenever one has ended.

    Return the seconds from each letter to its frame.
    """
    rng, taken = random.Random(2), []
    asked = 0
    number = 0
    while terminal.latest("done") is None:
        if terminal.count("answered") == asked:
            terminal.write("go on\r")
            asked += 1
            if not terminal.wait(0.3):
                break
        letter = LETTERS[number % len(LETTERS)]
        number += 1
        terminal.shown = b""
        began = time.monotonic()
        terminal.write(letter)
        while letter.encode() not in terminal.shown and time.monotonic() < began + PATIENCE:
            if not terminal.read(began + PATIENCE - time.monotonic()):
                return taken
        answered = terminal.count("answered")
        if answered < asked:  # else the answer ended meanwhile, and nothing was streaming
            taken.append(time.monotonic() - began)
        if not terminal.wait(rng.uniform(0.2, 1.0) * pause):
            break
        terminal.write("\x7f")
        if not terminal.wait(rng.uniform(0.2, 1.0) * pause):
            break
    return taken


# --- verdicts ---


@dataclass(frozen=True)
class Row:
    """One line of the table: `at_most`, or `at_least`, is the goal."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def goal(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g} {self.unit}"
        return f">= {self.at_least:g} {self.unit}" if self.at_least is not None else ""

    @property
    def verdict(self) -> str:
        if self.at_most is not None:
            return "met" if self.value <= self.at_most else "MISSED"
        if self.at_least is not None:
            return "met" if self.value >= self.at_least else "MISSED"
        return ""


def quantile(values: list[float], share: float) -> float:
    """Return the smallest value that the given share of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def growth(memory: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the MB added during the last four fifths of the tokens, and the bytes per token."""
    tokens = memory[-1][0]
    base = next(((said, held) for said, held in memory if said >= tokens / 5), memory[0])
    added = memory[-1][1] - base[1]
    return added / 1e6, added / max(tokens - base[0], 1)


def table(keys: list[float], opened: float, done: dict[str, Any]) -> list[Row]:
    megabytes, per_token = growth(done["memory"])
    shares = [loaded / bare for loaded, bare in zip(done["loaded"], done["bare"], strict=True)]
    return [
        Row("keystroke to frame, median", 1e3 * statistics.median(keys), "ms", at_most=16),
        Row("keystroke to frame, 99th percentile", 1e3 * quantile(keys, 0.99), "ms", at_most=50),
        Row("keystroke to frame, slowest", 1e3 * max(keys), "ms"),
        Row("frames", min(done["frames_per_s"]), "/s", at_least=20),
        Row("CPU of the screen's thread", statistics.median(done["ui_share"]), "cores", at_most=1),
        Row("memory added by the last 80% of the tokens", megabytes, "MB", at_most=MEMORY),
        Row("  that is, by a token", per_token, "bytes"),
        Row("first frame of the session", opened, "s", at_most=0.5),
        Row("engine beside the screen", statistics.median(done["loaded"]), "tokens/s"),
        Row("  of its rate while the screen rests", 100 * statistics.median(shares), "%", at_least=90),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens that are said in all")
    parser.add_argument("--rate", type=float, default=1000.0, help="tokens/s of the engine")
    parser.add_argument("--messages", type=int, default=2000, help="messages that the session has")
    parser.add_argument("--answer", type=int, default=5000, help="tokens of one answer")
    parser.add_argument("--pause", type=float, default=0.15, help="most seconds between two keys")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--report-to", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--session", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report_to is not None:
        asyncio.run(program(arguments))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CHATTERM_DATA"] = folder
        terminal = start(arguments, make_session(arguments.messages))
        try:
            opened = first_frame(terminal)
            terminal.until("ready")
            keys = type_letters(terminal, arguments.pause)
            done = terminal.until("done")
        finally:
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
    rows = table(keys, opened, done)
    load = os.getloadavg()[0]
    print(
        f"{arguments.messages:,} messages, {arguments.tokens:,} tokens at {arguments.rate:,.0f} tokens/s,"
        f" {len(keys):,} keystrokes, {SIZE[0]}x{SIZE[1]}, {os.cpu_count()} cores (load {load:.1f})"
    )
    for row in rows:
        print(f"{row.name:<46}{row.value:>10,.2f} {row.unit:<9}{row.goal:>18}  {row.verdict}")
    if arguments.json:
        figures = {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load": load,
            "versions": {name: version(name) for name in ("textual", "rich")},
            "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
            "rows": {row.name.strip(): [row.value, row.unit, row.goal, row.verdict] for row in rows},
            "keystrokes_ms": [round(1e3 * key, 2) for key in keys],
            "program": done,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(any(row.verdict == "MISSED" for row in rows))


if __name__ == "__main__":
    main()
