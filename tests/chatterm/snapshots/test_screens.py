"""What every screen looks like, in a dark and in a light theme, small and large.

After a change that is meant: `pytest tests/chatterm/snapshots --snapshot-update`, look at the pictures, commit them.
"""

import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input

from chatterm.app import ChatApp
from chatterm.backends.backend import (
    CachedChunk,
    Document,
    EngineError,
    Exchange,
    Figures,
    ModelChoice,
    Progress,
    TurnStats,
)
from chatterm.conversation.entries import AnswerEntry
from chatterm.conversation.figures import Live, Speedometer, Watch
from chatterm.conversation.stats import ProcessFigures
from chatterm.screens.candidates import Candidates
from chatterm.screens.chat.commands import views
from chatterm.sessions.library import LibraryEntry
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from engine.cache.block_map import BlockMap, BlockState
from engine.events import Cause, Parting
from tests.chatterm.driving import Driver
from tests.chatterm.scripted import Script, ScriptedBackend

pytest.importorskip("pytest_textual_snapshot")

NOW = 1_790_000_000.0
ANSWER = """\
Water moves sediment in **three ways**, and a gauge sees them differently:

- *bed load* rolls and hops along the bottom,
- *suspended load* travels with the current,
- *dissolved load* cannot be seen at all.

| Load | Share | Moves |
|---|---:|---|
| bed | 12% | in floods |
| suspended | 61% | most of the year |
| dissolved | 27% | always |

```python
def discharge(width: float, depths: list[float], speed: float) -> float:
    \"\"\"Cubic metres in a second.\"\"\"
    return width * sum(depths) / len(depths) * speed  # mean depth
```

Measure at `two thirds` of the depth.
"""
THOUGHT = "The question is about sediment. A list and a table will do, and a short function."


class Still(ScriptedBackend):
    """Measures nothing: every figure is always the same."""

    def _stats(self, *_: object) -> TurnStats:
        return TurnStats(1216, 1144, 72, 180, 20, 0.142, 0.088, 2.4)

    @property
    def used_tokens(self) -> int:
        return 1396 if self.history else 0

    def figures(self) -> Figures | None:
        figures = super().figures()
        return replace(figures, bandwidth=46e9) if figures is not None else None


class Steady(Speedometer):
    """A speed that does not depend on the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.count = 100.0, 180

    def now(self, time: float) -> float:
        return 75.3

    @property
    def average(self) -> float:
        return 74.1

    def history(self) -> tuple[float, ...]:
        return tuple(60 + (n * 7 % 20) for n in range(28))


class HalfWay(Watch):
    """A history that is being warmed, as far as it is when the picture is taken."""

    def see(self, live: Live, now: float) -> Live:
        return replace(live, present=520, left_s=9.0)


def blocks() -> BlockMap:
    free, cached, held, shared, _ = BlockState
    path = range(88)
    states = [shared] * 60 + [held] * 28 + [cached] * 9 + [free] * 14 + [cached] * 31 + [free] * 200
    return BlockMap(16, bytes(states), tuple(path), 1396, 1396, 960, 0, 2)


async def still(driver: Driver) -> None:
    """Take out what depends on when the picture is taken."""
    chat = driver.app.chat
    driver.composer.cursor_blink = False
    for entry in driver.transcript.entries:
        if isinstance(entry, AnswerEntry):
            entry.thinking_s = 1.2
            entry.changed()
    for turn in (chat.conversation.turn, chat.conversation.ended):
        if turn is not None and not turn.is_candidate:
            turn.speed, turn.started = Steady(), 99.8
    driver.transcript.update()
    driver.transcript._move_bar()  # it follows a frame later
    chat._show_live(time.monotonic())
    driver.app.screen.refresh()  # with what is seen of the conversation below it
    await driver.pilot.pause()


async def talk(driver: Driver) -> None:
    await driver.send("How does a river move sediment, and how is that measured?")


async def command(driver: Driver, text: str) -> None:
    await talk(driver)
    await driver.send(text)


async def welcome(driver: Driver) -> None:
    """Nothing has been said yet."""


async def loading(driver: Driver) -> None:
    await driver.until(lambda: driver.app.chat._progress is not None)
    await driver.shows("41 of 98 MB")


async def answering(driver: Driver) -> None:
    await driver.send("How does a river move sediment?", wait=False)
    await driver.shows("dissolved")


async def tinted(driver: Driver) -> None:
    """Switched on when the answer is there."""
    await talk(driver)
    settings = driver.app.chat.settings
    wanted = replace(settings, screen=replace(settings.screen, tint=True))
    views.apply(driver.app.chat, wanted, "screen", "tint")


async def completion(driver: Driver) -> None:
    await talk(driver)
    await driver.types("/")


async def selected(driver: Driver) -> None:
    await talk(driver)
    await driver.pilot.press("alt+up")


async def nearly_full(driver: Driver) -> None:
    await talk(driver)


async def cache(driver: Driver) -> None:
    await command(driver, "/cache")


async def cache_why(driver: Driver) -> None:
    """Three turns: the first, one after thinking, one whose draft was changed in a session that goes on."""
    messages = (
        "How does a river move sediment, and how is that measured?",
        "Which gauge is the best?",
        "Why?",
    )
    for message in messages:
        await driver.send(message)
    thinking = Parting(48, 1, True, 1, 2, Cause.THINKING)
    draft = Parting(1216, 3, False, 3, 4, Cause.DRAFT)
    figures = (
        TurnStats(48, 0, 48),
        TurnStats(263, 251, 12, warmed_tokens=203, parting=thinking),
        TurnStats(
            1241,
            1216,
            25,
            warmed_tokens=953,
            parting=replace(thinking, row=263, message=2),
            draft_parting=draft,
        ),
    )
    for exchange, stats in zip(driver.app.chat.conversation.path, figures, strict=True):
        exchange.stats = stats.to_dict()
    await driver.send("/cache why")


async def warming(driver: Driver) -> None:
    """A session that was just opened."""
    await talk(driver)
    chat = driver.app.chat
    chat.conversation.ended = None
    chat._watch = HalfWay()


async def models(driver: Driver) -> None:
    servers = [
        ModelChoice(
            "ollama://localhost/qwen3:8b",
            None,
            False,
            None,
            server="Ollama localhost:11434",
            label="qwen3:8b",
        ),
        ModelChoice(
            "work/big", None, False, None, server="work", label="Qwen/Qwen3-235B-A22B", context=262_144
        ),
    ]
    driver.app.chat.looks = (lambda: servers,)
    await command(driver, "/model")
    await driver.shows("qwen3:4b")
    await driver.shows("qwen3:8b")
    await driver.until(lambda: "looking for" not in driver.text())
    driver.app.screen.query_one(Input).cursor_blink = False


async def sessions(driver: Driver) -> None:
    await command(driver, "/sessions")
    await driver.shows("Tide tables")
    driver.app.screen.query_one(Input).cursor_blink = False


async def save_code(driver: Driver) -> None:
    await talk(driver)
    driver.app.chat.select(driver.app.chat.transcript.entries[-1])
    await driver.pilot.press("s")
    await driver.shows("Save a code block")
    driver.app.screen.query_one(Input).cursor_blink = False


async def paste(driver: Driver) -> None:
    text = "".join(f"{hour:02d}:00  {70 + hour * 3 % 11} m3/s\n" for hour in range(24))
    driver.composer.post_message(events.Paste(text))
    await driver.shows("[pasted 24 lines]")
    await driver.pilot.press("ctrl+o")
    await driver.shows("03:00")


async def candidates(driver: Driver) -> None:
    """One is long, one has thought, one failed in the middle and one before it said anything."""
    await talk(driver)
    short = "A river moves sediment as *bed load*, *suspended load* and *dissolved load*."
    full = EngineError("The context is full; /reset begins a new conversation.")
    driver.app.chat.backend.scripts[1:] = [
        Script(ANSWER * 4),
        Script(short, THOUGHT),
        Script(ANSWER, error=full, error_after=30),
        Script(error=full),
    ]
    await driver.send("/retry 4")
    await driver.shows("Answer 4 failed")
    view = driver.app.screen.query_one(Candidates)
    await driver.until(lambda: not view._is_running)


async def palette(driver: Driver) -> None:
    await driver.pilot.press("ctrl+p")
    await driver.shows("Show commands and keys")
    driver.app.screen.query_one(Input).cursor_blink = False


async def compared(driver: Driver) -> None:
    await talk(driver)
    driver.app.chat.backend.scripts[1:] = [
        Script(ANSWER),
        Script("A river is water that flows downhill.", THOUGHT),
    ]
    await driver.send("/compare work/Qwen/Qwen3-235B-A22B")
    view = driver.app.screen.query_one(Candidates)
    await driver.until(lambda: not view._is_running)


async def reading(driver: Driver) -> None:
    """A conversation on two documents, while a third one is read."""
    backend = driver.app.chat.backend
    assert isinstance(backend, ScriptedBackend)
    driver.app.chat.conversation.documents = (Document("sediment", "..."), Document("gauges", "..."))
    await talk(driver)
    backend.chunks = (
        CachedChunk("sediment, gauges", 1144, True, 1144, 0, 3, 46_080),
        CachedChunk("field-notes", 12_480, True, 4_608, 0, 0, 46_080, is_read=False),
    )
    await driver.shows("field-notes")
    await driver.pilot.pause()


async def library(driver: Driver) -> None:
    """What there is; one is being read, two conversations stand on another, two are chosen in an order."""
    entries = [
        LibraryEntry("field-notes", "/home/ada/rivers/notes", "", NOW - 90, 49_900, {}),
        LibraryEntry("gauges", "https://example.org/gauges.html", "", NOW - 7200, 2_600, {"scripted": 640}),
        LibraryEntry(
            "sediment", "/home/ada/papers/sediment.pdf", "", NOW - 260_000, 2_100, {"scripted": 504}
        ),
    ]
    driver.app.chat.conversation.documents = (Document("gauges", "..."),)
    await talk(driver)
    driver.app.chat.documents._library.entries = lambda: entries
    driver.app.chat.backend.chunks = (
        CachedChunk("gauges", 640, True, 640, 0, 3, 46_080, disk_bytes=30_000_000),
        CachedChunk("field-notes", 12_480, True, 4_608, 0, 0, 46_080, is_read=False),
    )
    await command(driver, "/library")
    await driver.shows("37%")
    await driver.pilot.press("down", "down", "tab", "up", "tab")
    await driver.shows("begins a conversation with sediment, gauges")
    driver.app.screen.query_one(Input).cursor_blink = False


async def picture(driver: Driver) -> None:
    """One that is attached for a remote model that sees."""
    info = driver.app.chat.info
    assert info is not None
    driver.app.chat.info = replace(info, is_remote=True)
    await driver.send("What stands on the @gauge.png?")
    await driver.shows("▀▀")
    await driver.shows("the level of the water")  # the answer begins when the picture has been read
    await driver.idle()


def gauge(path: Path) -> None:
    """A river under a sky, and a staff with marks."""
    image = pytest.importorskip("PIL.Image").new("RGB", (96, 64))
    draw = pytest.importorskip("PIL.ImageDraw").Draw(image)
    for row in range(64):
        sky, water = (90 + 2 * row, 150 + row, 235), (20, 110 - row, 160 - row)
        draw.line((0, row, 96, row), fill=sky if row < 36 else water)
    draw.ellipse((66, 6, 82, 22), fill=(255, 220, 90))
    draw.rectangle((24, 8, 36, 60), fill=(245, 245, 240))
    for row in range(10, 60, 6):
        draw.rectangle((24, row, 30 if row % 12 else 36, row + 2), fill=(190, 30, 30))
    image.save(path)


SCREENS: dict[str, Callable[[Driver], Awaitable[None]]] = {
    "welcome": welcome,
    "loading": loading,
    "conversation": talk,
    "answering": answering,
    "nearly_full": nearly_full,
    "tinted": tinted,
    "picture": picture,
    "completion": completion,
    "selected": selected,
    "help": lambda driver: command(driver, "/help"),
    "stats": lambda driver: command(driver, "/stats"),
    "warming": warming,
    "cache": cache,
    "reading": reading,
    "library": library,
    "cache_why": cache_why,
    "models": models,
    "sessions": sessions,
    "save_code": save_code,
    "paste": paste,
    "candidates": candidates,
    "compared": compared,
    "palette": palette,
}


def backend_for(name: str, gate: threading.Event) -> ScriptedBackend:
    stops = {"gate": gate, "gate_after": 100} if name == "answering" else {}
    answer = "A staff gauge: one reads the level of the water on it." if name == "picture" else ANSWER
    guessed = range(30, 140) if name == "tinted" else range(0)
    script = Script(answer, THOUGHT, cached=1144, prompt=1216, guessed=guessed, **stops)
    backend = Still(
        [script], thinks=True, map=blocks(), context_length=1480 if name == "nearly_full" else 8192
    )
    backend.choices = [
        ModelChoice("scripted", 98_362_432, True, True),
        ModelChoice("Qwen/Qwen3-0.6B", 1_503_300_328, True, True),
        ModelChoice("qwen3:1.7b", 3_440_000_000, False, True),
        ModelChoice("qwen3:4b", 8_040_000_000, False, None),
        ModelChoice("qwen3:32b", 65_500_000_000, False, False),
    ]
    if name == "loading":
        backend.load_gate = gate
        backend.load_progress = (Progress("download", "scripted.gguf", 41_000_000, 98_362_432),)
    return backend


def stored(path: Path, clock: list[float]) -> SessionStore:
    """A store with two sessions of the time before `clock`."""
    store = SessionStore.open(path)
    for hours, title, count in ((50, "Tide tables", 3), (2, "How a river moves sediment", 12)):
        clock[0] = NOW - 3600 * hours
        info = SessionInfo(title=title, model="Qwen/Qwen3-0.6B", created=clock[0])
        exchanges = [
            Exchange(n, n - 1 or None, f"question {n}", "answer", finish_reason="eos", created=info.created)
            for n in range(1, count + 1)
        ]
        store.load(store.add(info, exchanges, count))  # it is written by then
    clock[0] = NOW
    return store


@pytest.mark.parametrize(
    ("theme", "size"),
    [("graphite", (80, 24)), ("paper", (160, 45))],
    ids=["graphite-80x24", "paper-160x45"],
)
@pytest.mark.parametrize("name", SCREENS)
def test_screen(
    name: str,
    theme: str,
    size: tuple[int, int],
    snap_compare: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(
        "chatterm.conversation.stats.process_figures", lambda _: ProcessFigures(95.0, 12.5, 612_000_000)
    )
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    gate = threading.Event()
    store = None
    monkeypatch.setattr("chatterm.screens.search_picker.time", lambda: NOW)
    if name == "picture":
        gauge(tmp_path / "gauge.png")
        monkeypatch.chdir(tmp_path)
    if name == "sessions":
        clock = [NOW]
        for module in ("store", "database"):
            monkeypatch.setattr(f"chatterm.sessions.{module}.time", lambda: clock[0])
        store = stored(tmp_path / "sessions.db", clock)
    app = ChatApp(backend_for(name, gate), theme=theme, store=store)
    app.chat.looks = ()

    async def prepare(pilot: Pilot[int]) -> None:
        driver = Driver(app, pilot)
        await pilot.pause()
        if name != "loading":
            await driver.idle()
        await SCREENS[name](driver)
        await still(driver)

    try:
        assert snap_compare(app, terminal_size=size, run_before=prepare)
    finally:
        gate.set()
        assert app.worker.close()
        if store is not None:
            store.close()
