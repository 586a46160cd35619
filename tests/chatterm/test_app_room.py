"""Small terminals: whatever stands around the conversation leaves room for it, and nothing is pushed off the screen."""

from pathlib import Path

import pytest
from textual.command import CommandList
from textual.geometry import Region
from textual.widget import Widget

from chatterm.screens.chat.keys import LeaderScreen
from chatterm.screens.picker import Picker
from chatterm.sessions.store import SessionStore
from chatterm.widgets.completion import Completion
from chatterm.widgets.find_bar import FindBar
from chatterm.widgets.meter import ContextNote
from chatterm.widgets.new_below import NewBelow
from chatterm.widgets.remarks import Remarks
from chatterm.widgets.status_line import StatusLine
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.covering import each_value_once

SIZES = [(40, 10), (40, 12), (60, 16), (80, 19), (80, 20), (80, 24), (80, 29), (140, 45)]
LONG = "Something is wrong, and there is much to be said about it. " * 6


def fits(driver: Driver, *around: type[Widget]) -> int:
    """Everything lies whole inside the screen and nothing over another; how many rows the conversation has."""
    screen = driver.app.chat
    shown = [screen.query_one(kind) for kind in (*around, StatusLine)] + [driver.composer, driver.transcript]
    inside = Region(0, 0, *screen.size)
    for widget in shown:
        assert widget.region.height > 0, widget
        assert inside.contains_region(widget.region), widget
    for index, widget in enumerate(shown):
        assert not any(widget.region.overlaps(other.region) for other in shown[index + 1 :]), widget
    return driver.transcript.region.height


@pytest.mark.parametrize("size", SIZES)
async def test_what_stands_around_it_leaves_room_for_the_conversation(size: tuple[int, int]) -> None:
    backend = ScriptedBackend([Script("word " * 300)], context_length=320)
    async with driven(backend, size) as driver:
        screen = driver.app.chat
        await driver.send("q")
        await driver.until(lambda: screen.query_one(ContextNote).display)
        await driver.pilot.pause()
        alone = fits(driver, ContextNote)
        assert alone >= size[1] // 3
        await driver.pilot.press("pageup")
        driver.transcript.has_news = True
        await driver.pilot.press("ctrl+f", "w")
        await driver.pilot.pause()
        assert fits(driver, ContextNote, NewBelow, FindBar) >= size[1] // 4
        for _ in range(3):
            screen.say(LONG, "error")
        await driver.pilot.pause()
        assert fits(driver, NewBelow, FindBar, Remarks) >= 2
        await driver.pilot.press("escape")
        driver.composer.put("\n".join("row" for _ in range(30)))
        await driver.pilot.pause()
        assert fits(driver, NewBelow, Remarks) >= 1
        driver.composer.put("/")
        await driver.pilot.pause()
        assert fits(driver, NewBelow, Completion) >= 2


async def test_the_first_screen_shows_every_key_and_cuts_no_word() -> None:
    whole = {"Write", "a", "message,", "/", "for", "commands,", "commands", "@", "files", "chatterm"}
    async with driven(ScriptedBackend()) as driver:
        for size in SIZES:
            await driver.pilot.resize_terminal(*size)
            await driver.pilot.pause()
            text = driver.text()
            assert driver.app.screen.size == size
            placeholder = next(line for line in text.splitlines() if "Write a" in line)
            assert {word.rstrip("…") for word in placeholder.split()} <= whole, size
            if size[1] >= 12:
                assert "F1 " in text, size
                assert "twice" in text, size


@each_value_once
@pytest.mark.parametrize(
    ("command", "row"), [("model", "● scripted"), ("tools", "read_file"), ("sessions", "● hello")]
)
@pytest.mark.parametrize("size", [(30, 8), (40, 12), (60, 16)])
async def test_a_picker_shows_what_is_chosen_however_low_the_terminal_is(
    command: str, row: str, size: tuple[int, int], tmp_path: Path
) -> None:
    store = SessionStore.open(tmp_path / "s.db")
    try:
        async with driven(ScriptedBackend(), size, store=store) as driver:
            await driver.send("hello")
            await driver.send(f"/{command}", wait=False)
            await driver.until(lambda: isinstance(driver.app.screen, Picker))
            await driver.until(lambda: row in driver.text())
    finally:
        store.close()


async def test_every_second_key_can_be_read() -> None:
    async with driven(ScriptedBackend()) as driver:
        for size in SIZES:
            await driver.pilot.resize_terminal(*size)
            await driver.pilot.press("ctrl+l")
            await driver.shows("then a key")
            keys = driver.app.screen
            assert isinstance(keys, LeaderScreen)
            assert keys.size == size
            seen = driver.text()
            before = ""
            while driver.text() != before:
                before = driver.text()
                await driver.pilot.press("pagedown")
                seen += driver.text()
            assert all(shortcut.label in seen for shortcut in keys._shortcuts.values()), size
            await driver.pilot.press("pageup", "x")
            await driver.until(lambda: driver.app.screen is driver.app.chat)


async def test_the_palette_opens_and_moves_in_any_window() -> None:
    async with driven(ScriptedBackend(), (1, 1)) as driver:
        for size in ((1, 1), (2, 2), (3, 2), (4, 3), (5, 1), (1, 60), (200, 1), (80, 24)):
            await driver.pilot.resize_terminal(*size)
            await driver.pilot.press("ctrl+p")
            await driver.until(lambda: driver.app.screen.query_one(CommandList).option_count > 9)
            assert driver.app.screen.size == size
            for keys in (("pagedown", "pageup"), ("ctrl+end", "pageup"), ("ctrl+home", "pagedown")):
                await driver.pilot.press(*keys)
            await driver.pilot.resize_terminal(1, 1)
            await driver.pilot.press("down", "up", "pagedown", "pageup", "escape")
            await driver.until(lambda: driver.app.screen is driver.app.chat)


@pytest.mark.parametrize(("size", "seen"), [((30, 1), "Search"), ((30, 4), "/help"), ((80, 24), "/help")])
async def test_the_palette_shows_what_it_is_asked_in_a_low_window(size: tuple[int, int], seen: str) -> None:
    async with driven(ScriptedBackend(), size) as driver:
        await driver.pilot.press("ctrl+p")
        await driver.shows(seen)
