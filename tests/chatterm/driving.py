"""Helpers that drive the application without a terminal."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import textual.app
import textual.pilot
from rich.segment import Segment
from textual._context import active_app
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.pilot import Pilot

from chatterm.app import ChatApp
from chatterm.backends.worker import JobDone, JobFailed, Report
from chatterm.conversation.entries import AnswerEntry, NoticeEntry, UserEntry
from chatterm.markdown.highlight import highlight
from chatterm.screens.chat.base import IN_THREAD
from chatterm.screens.chat.screen import ChatScreen
from chatterm.screens.themed_app import Terminal
from chatterm.sessions.store import SessionStore
from chatterm.settings.settings import Settings
from chatterm.widgets.composer import Composer
from chatterm.widgets.transcript import Transcript
from tests.chatterm.scripted import ScriptedBackend

LOOKS = 6000
"""Looks, a hundredth of a second apart, after which something counts as not happening. Looks rather than seconds:
a machine that is held up for a while must not fail a test."""


async def at_rest(*_: float) -> None:
    """Until all that follows from what was done is done and laid out; timers and other threads are not waited for.

    Textual looks for stretches of 20 ms in which the process computes next to nothing: that takes long, and where
    another thread is busy a second for each key.
    """
    loop = asyncio.get_running_loop()
    app = active_app.get(None)
    for _ in range(4):  # a layout may ask for another one
        await asyncio.sleep(0)
        while loop._ready:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        if app is None or not app.screen_stack:
            return
        app.screen._on_timer_update()


textual.app.wait_for_idle = textual.pilot.wait_for_idle = at_rest  # type: ignore[attr-defined]


PARSE_RULES, _PARSED = Stylesheet._parse_rules, dict[Any, list[RuleSet]]()


def parsed_once(self: Stylesheet, *given: Any, **named: Any) -> list[RuleSet]:
    """What any application has parsed with the same variables: that takes a tenth of the time of a short test."""
    key = tuple(self._variables.items()), given, tuple(named.items())
    if key not in _PARSED:
        _PARSED[key] = PARSE_RULES(self, *given, **named)
    return _PARSED[key]


Stylesheet._parse_rules = parsed_once  # type: ignore[method-assign]


def count_jobs(screen: ChatScreen) -> Callable[[], int]:
    """Count from now on. Returns a function that tells of how many jobs the screen has not taken the end."""
    left, submit, take = 0, screen.submit, screen.worker_thread.take

    def counted(*given: Any, **named: Any) -> None:
        nonlocal left
        left += 1
        submit(*given, **named)

    def taken(limit: int = 10_000) -> list[Report]:
        nonlocal left
        reports = take(limit)
        left -= sum(isinstance(report, JobDone | JobFailed) for report in reports)
        return reports

    screen.submit = screen.worker_thread.submit = screen.conversation._submit = counted  # type: ignore[method-assign]
    screen.worker_thread.take = taken  # type: ignore[method-assign]
    return lambda: left


class Driver:
    """One running application."""

    def __init__(self, app: ChatApp, pilot: Pilot[int], jobs_left: Callable[[], int] = lambda: 0) -> None:
        self.app = app
        self.pilot = pilot
        self._jobs_left = jobs_left
        self.said: list[tuple[str, str]] = []
        """Everything that was said at the composer: text and kind."""
        say = app.chat.say

        def noted(text: str, kind: str = "notice") -> None:
            self.said.append((text, kind))
            say(text, kind)

        app.chat.say = noted  # type: ignore[method-assign]

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(LOOKS):
            if condition():
                return
            await self.pilot.pause(0.01)
        raise AssertionError(f"not in time; the screen shows:\n{self.text()}")

    async def shows(self, text: str) -> None:
        await self.until(lambda: text in self.text())

    async def idle(self) -> None:
        """Loaded, nothing is read in a thread, being answered or waiting, and it has been painted."""
        await self.until(
            lambda: self.app.chat.is_idle and not self._is_reading and not self.transcript._stale_in_view()
        )
        await self.pilot.pause()

    async def done(self) -> None:
        """All jobs of the worker and all threads have ended, and what they told is painted."""
        await self.until(
            lambda: not self._jobs_left() and not any(each.is_running for each in self.app.workers)
        )
        await self.idle()

    @property
    def _is_reading(self) -> bool:
        return any(each.name == IN_THREAD and not each.is_finished for each in self.app.workers)

    async def types(self, text: str) -> None:
        await self.pilot.press(*("space" if character == " " else character for character in text))

    async def send(self, text: str, *, wait: bool = True) -> None:
        self.composer.put(text)
        await self.pilot.press("enter")
        if wait:
            await self.idle()

    @property
    def composer(self) -> Composer:
        return self.app.chat.query_one(Composer)

    @property
    def transcript(self) -> Transcript:
        return self.app.chat.query_one(Transcript)

    @property
    def questions(self) -> list[str]:
        return [entry.text for entry in self.transcript.entries if isinstance(entry, UserEntry)]

    @property
    def answers(self) -> list[str]:
        return ["".join(e.source) for e in self.transcript.entries if isinstance(e, AnswerEntry)]

    @property
    def told(self) -> list[str]:
        """What the transcript says besides the messages."""
        return [entry.text for entry in self.transcript.entries if isinstance(entry, NoticeEntry)]

    @property
    def notices(self) -> list[str]:
        """What was said at the composer, and what the transcript says."""
        return [text for text, _ in self.said] + self.told

    @property
    def errors(self) -> list[str]:
        return [text for text, kind in self.said if kind == "error"]

    def segments(self) -> list[Segment]:
        """What the terminal is given, before it is encoded."""
        strips = self.app.screen._compositor.render_strips()
        return [segment for strip in strips for segment in strip]

    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)


@asynccontextmanager
async def driven(
    backend: ScriptedBackend,
    size: tuple[int, int] = (80, 24),
    theme: str = "graphite",
    *,
    ready: bool = True,
    terminal: Terminal | None = None,
    store: SessionStore | None = None,
    session: str | None = None,
    failing: bool = False,
    settings: Settings | None = None,
) -> AsyncIterator[Driver]:
    """The application around `backend`; `ready` waits for the model. The store stays open.

    Where the application is not `failing` on purpose, an error that nobody foresaw fails the test.
    """
    app = ChatApp(backend, theme=theme, terminal=terminal, store=store, session=session, settings=settings)
    app.chat.looks = ()  # nobody knows what listens on the ports of this machine
    app.chat.check_model = lambda name: None  # what a script calls its models is known to nobody else
    highlight(
        "", "python"
    )  # made elsewhere while the first code block waits, it would come at any moment of the test
    jobs_left = count_jobs(app.chat)
    try:
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot, jobs_left)
            await pilot.pause()
            if ready:
                await driver.idle()
            yield driver
    finally:
        if backend.load_gate is not None:
            backend.load_gate.set()
        assert app.worker.close(), "the worker did not end"
    if not failing:
        assert app.unforeseen == [], app.unforeseen
