"""Errors that nobody foresaw, injected where they may come from: one line, nothing lost, and the chat goes on."""

import asyncio
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pexpect
import pytest
from textual import events
from textual.widgets import Input

from chatterm.screens.cache import CacheScreen
from chatterm.screens.chat.screen import ChatScreen
from chatterm.screens.models import ModelPicker
from chatterm.screens.sessions import SessionPicker
from chatterm.screens.tools import ToolsScreen
from chatterm.sessions.store import SessionStore
from chatterm.terminal.error_log import log_path, write_down
from chatterm.tools.box import ToolRegistry
from chatterm.widgets.completion import Completion
from chatterm.widgets.composer import Composer
from chatterm.widgets.status_line import StatusLine
from chatterm.widgets.transcript import Transcript
from tests.chatterm.driving import LOOKS, Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.counting import PATIENCE

LINE = "An unexpected error: ZeroDivisionError: unlucky. Your conversation and your draft are saved."


def unlucky(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("unlucky")


class Once:
    """A method that fails when it is armed, once, and is itself otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        original = getattr(owner, name)
        self.armed = False

        def method(*arguments: Any, **named: Any) -> Any:
            if self.armed:
                self.armed = False
                unlucky()
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, method)


@asynccontextmanager
async def chatting(folder: Path) -> AsyncIterator[Driver]:
    """A conversation with a draft. What is there at the end is on the disk, and can be gone on with."""
    store = SessionStore.open(folder / "sessions.db")
    async with driven(ScriptedBackend([Script("one"), Script("two")]), store=store, failing=True) as driver:
        await driver.send("first")
        await driver.types("a draft")
        yield driver
        session = driver.app.chat.conversation.saved.session
    assert session is not None
    store.flush()
    _, tree, draft = store.load(session)
    assert [exchange.text for exchange in tree.exchanges][:1] == ["one"]
    assert draft == "a draft"
    store.close()


async def told(driver: Driver, times: int = 1) -> None:
    """Without the pilot: what it waits with draws the screen, and would get the error itself."""
    for _ in range(LOOKS):
        if len(driver.app.unforeseen) >= times or driver.app.return_code:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was told")


async def goes_on(driver: Driver) -> None:
    """It was told in one line, and everything works."""
    await told(driver)
    await driver.until(lambda: driver.errors)
    assert driver.errors == [f"{LINE} Details are in {log_path()}."]
    assert driver.app.return_value is None
    assert isinstance(driver.app.screen, ChatScreen)
    assert driver.composer.text == "a draft"
    log = log_path().read_text(encoding="utf-8")
    assert "ZeroDivisionError: unlucky" in log
    assert "in unlucky" in log
    await driver.send("second")
    assert driver.answers == ["one", "two"]
    await driver.types("a draft")
    await driver.until(lambda: driver.composer.text == "a draft")


PLACES: dict[str, tuple[type, str, Callable[[Driver], Any]]] = {
    "drawing": (Transcript, "render_lines", lambda driver: driver.transcript.refresh()),
    "drawing the status": (
        StatusLine,
        "build",
        lambda driver: driver.app.chat.query_one(StatusLine).refresh(),
    ),
    "layout": (Composer, "get_content_height", lambda driver: driver.composer.refresh(layout=True)),
    "a key": (Composer, "_used", lambda driver: driver.pilot.press("left")),
    "a command's key": (ChatScreen, "choose", lambda driver: driver.pilot.press("f4")),
    "a timer": (ChatScreen, "_frame", lambda driver: None),
    "a resize": (ChatScreen, "on_resize", lambda driver: driver.pilot.resize_terminal(90, 30)),
    "a message": (
        Completion,
        "look",
        lambda driver: driver.composer.post_message(Composer.Changed(driver.composer)),
    ),
}


@pytest.mark.parametrize("place", PLACES)
async def test_the_chat_goes_on(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, provoke = PLACES[place]
    failure = Once(monkeypatch, owner, name)
    async with chatting(tmp_path) as driver:
        failure.armed = True
        if (waiting := provoke(driver)) is not None and hasattr(waiting, "__await__"):
            await waiting
        await goes_on(driver)


@pytest.mark.parametrize(
    ("screen", "name", "key"),
    [(CacheScreen, "on_mount", "f3"), (CacheScreen, "compose", "f3"), (SessionPicker, "on_mount", "f6")],
)
async def test_a_screen_that_fails_is_closed(
    screen: type, name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Once(monkeypatch, screen, name)
    async with chatting(tmp_path) as driver:
        failure.armed = True
        await driver.pilot.press(key)
        await goes_on(driver)


async def test_who_asks_for_the_screen_after_the_end_is_no_error() -> None:
    async with driven(ScriptedBackend()) as driver:
        app, asked = driver.app, asyncio.Event()

        async def asks() -> None:
            while app.screen_stack:
                await asyncio.sleep(0)
            asked.set()
            app.screen.refresh()

        app.run_worker(asks())
    assert asked.is_set()


async def test_a_worker_and_a_thread(tmp_path: Path) -> None:
    async def fails() -> None:
        unlucky()

    async with chatting(tmp_path) as driver:
        driver.app.chat.run_worker(fails())
        await goes_on(driver)
    async with chatting(tmp_path / "thread") as driver:
        monkeypatched, threading.excepthook = threading.excepthook, driver.app.thread_failed
        try:
            thread = threading.Thread(target=unlucky)
            thread.start()
            thread.join()
        finally:
            threading.excepthook = monkeypatched
        await goes_on(driver)


@pytest.mark.parametrize("keys", [("enter",), ("down", "enter"), ("pagedown", "delete", "up", "enter")])
async def test_keys_that_come_before_a_screen_stands_wait_for_it(keys: tuple[str, ...]) -> None:
    async with driven(ScriptedBackend()) as driver:
        app, session = driver.app, driver.app.chat.tooling.session
        app.push_screen(ToolsScreen(session, "", [], lambda: None))
        for key in keys:
            app.post_message(events.Key(key, None))
        await driver.until(lambda: session.box.on)
        assert (session.box.on == {"list_folder"}) == (keys == ("down", "enter"))


async def test_a_list_of_tools_without_a_choice_can_be_opened_and_left() -> None:
    async with driven(ScriptedBackend()) as driver:
        app = driver.app
        session = replace(app.chat.tooling.session, box=ToolRegistry())
        app.push_screen(ToolsScreen(session, "", [], lambda: None))
        await driver.pilot.press("down", "up", "pagedown", "enter", "delete")
        await driver.shows("Nothing is allowed without asking.")
        await driver.pilot.press("escape")
        await driver.until(lambda: app.screen is app.chat)


@pytest.mark.parametrize("opens", [[*"/model", "enter"], ["f5"]])
async def test_keys_that_come_with_those_that_open_a_list_are_typed_there(opens: list[str]) -> None:
    """However fast they come: a key is dealt with before the next one is given away."""
    async with driven(ScriptedBackend()) as driver:
        app = driver.app
        for key in [*opens, *"other"]:
            app.post_message(events.Key({"/": "slash"}.get(key, key), key if len(key) == 1 else None))
        await driver.until(lambda: isinstance(app.screen, ModelPicker))
        await driver.until(lambda: app.screen.query_one(Input).value == "other")
        assert driver.app.chat.composer.text == ""


@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_thread_finds_when_the_program_ends_is_nothing_to_say(fails: bool) -> None:
    gate = threading.Event()
    async with driven(ScriptedBackend()) as driver:
        chat = driver.app.chat

        def work() -> None:
            gate.wait()
            if fails:
                unlucky()

        chat.in_thread(work, lambda _: chat.say("found"))
        await driver.until(lambda: any(worker.is_running for worker in driver.app.workers))
        (worker,) = [worker for worker in driver.app.workers if worker.is_running]
        await chat.remarks.remove()  # as it is when the program ends
        gate.set()
        await worker.wait()


async def test_an_error_that_comes_again_and_again_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chatting(tmp_path) as driver:
        monkeypatch.setattr(Transcript, "render_lines", unlucky)
        driver.transcript.refresh()
        await told(driver, 100)
        assert driver.app.return_code == 1
        assert driver.app.last_words.startswith(
            "chatterm: An unexpected error: ZeroDivisionError: unlucky. chatt"
        )
        assert driver.app._exception is None  # Textual prints no traceback of its own


async def test_no_size_of_the_terminal_breaks_it() -> None:
    table = "`x` two\n\n|a|b|\n|-|-|\n|c|d|"
    async with driven(ScriptedBackend([Script(table)] * 9)) as driver:
        await driver.send("first")
        for size in ((1, 1), (12, 12), (80, 24)):
            await driver.pilot.resize_terminal(*size)
            for key in (
                "f1",
                "f3",
                "escape",
                "alt+up",
                "escape",
                "alt+u",
                "alt+z",
                "slash",
                "backspace",
                "pageup",
            ):
                await driver.pilot.press(key)
        assert driver.errors == []
    assert not log_path().exists()


def test_the_log_stays_small_and_private() -> None:
    def fails(secret: str) -> None:
        raise ValueError("x" * 3000)

    with pytest.raises(ValueError, match="x") as caught:
        fails("what somebody" + " wrote")
    for _ in range(150):
        assert write_down(caught.value) == f"Details are in {log_path()}."
    path = log_path()
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size <= 200_000
    assert path.stat().st_mode & 0o077 == 0
    assert text.startswith("--- ")
    assert text.rstrip().endswith("x")
    assert "what somebody wrote" not in text


def test_a_log_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path / "file"))
    assert write_down(ValueError()).startswith("Details could not be written to ")


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from chatterm.app import run_app
from chatterm.widgets.transcript import Transcript
from chatterm.screens.chat.screen import ChatScreen
from tests.chatterm.scripted import Script, ScriptedBackend
def unlucky(*_):
    secret = "of the locals"
    raise ZeroDivisionError("unlucky")
{owner}.{name} = unlucky
sys.exit(run_app(ScriptedBackend([Script("one")]), theme=None))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("owner", "name"), [("ChatScreen", "on_mount"), ("Transcript", "render_lines")])
def test_a_real_terminal_is_left_with_one_line(owner: str, name: str) -> None:
    root = str(Path(__file__).parents[2])
    child = pexpect.spawn(
        sys.executable,
        ["-c", textwrap.dedent(PROGRAM).format(root=root, owner=owner, name=name)],
        dimensions=(24, 80),
        timeout=PATIENCE,
    )
    if name == "render_lines":
        child.expect(b"ready")
        child.send(b"hello\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1
    _, _, after = child.before.rpartition(b"\x1b[?1049l")
    assert b"chatterm: An unexpected error: ZeroDivisionError: unlucky. chatterm has to close" in after
    assert after.count(b"chatterm: ") == 1
    assert b"secret" not in child.before
    assert b"Traceback" not in child.before


async def test_others_get_their_turn_after_a_long_message() -> None:
    order = list[str]()

    def long() -> None:
        sleep(0.01)
        order.append("message")
        asyncio.get_running_loop().call_soon(order.append, "others")

    async with driven(ScriptedBackend()) as driver:
        line = driver.app.chat.query_one(StatusLine)
        line.call_later(long)
        line.call_later(long)
        await driver.until(lambda: len(order) == 4)
    assert order == ["message", "others"] * 2
