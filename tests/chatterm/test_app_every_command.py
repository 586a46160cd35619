"""Every command by its name and by its keys: both do the same, and neither ends in an error nobody foresaw."""

from pathlib import Path
from typing import Any

import pytest

from chatterm.commands.registry import Command
from chatterm.screens.chat.commands import COMMANDS
from chatterm.sessions.store import SessionStore
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend

LEAVING = ("quit",)
ELSEWHERE = (
    "editor",
    "stop",
)  # one suspends the application; Esc says nothing where there is nothing to stop
QUIET = {("select", "next"), ("paste", "")}
"""Nothing is below what is in view, and nothing was pasted."""
CASES = [
    (command, key, argument)
    for command in COMMANDS
    for key, argument in command.keys.items()
    if command.name not in (*LEAVING, *ELSEWHERE)
]
CASES.sort(key=lambda case: case[0].name == "reset")  # after it, others have nothing to do
SHARES = 3
"""Applications for each way: starting one takes longer than a command. Neighbours are in different ones."""


def a_backend() -> ScriptedBackend:
    text = "Answer {} with `code`.\n\n```python\nprint({})\n```\n"
    return ScriptedBackend([Script(text.format(n, n), "Let me think.") for n in range(9)], thinks=True)


async def talk(driver: Driver) -> None:
    """Two exchanges, the second with three answers, the second of them in view."""
    await driver.send("one")
    await driver.send("two")
    await driver.send("/retry")
    await driver.send("/retry")
    await driver.send("/branch prev")


def seen(driver: Driver) -> dict[str, Any]:
    """What a person could tell."""
    app, entries = driver.app, driver.transcript.entries
    selected = driver.transcript.selected
    return {
        "screen": type(app.screen).__name__,
        "composer": driver.composer.text,
        "questions": driver.questions,
        "answers": driver.answers,
        "notices": [notice.split(" · ")[0][:60] for notice in driver.notices],
        "entries": [type(entry).__name__ for entry in entries],
        "height": driver.transcript.virtual_size.height,
        "selected": None if selected is None else entries.index(selected),
        "panel": app.chat.query_one("#panel").display,
        "theme": app.theme,
        "clipboard": app.clipboard,
        "focused": None if app.focused is None else app.focused.id or type(app.focused).__name__,
    }


async def back(driver: Driver) -> None:
    """Return to the conversation, with an empty composer, nothing selected and nothing edited."""
    for _ in range(5):
        await driver.pilot.press("escape")
        await driver.done()
        if driver.app.screen is driver.app.chat and driver.transcript.selected is None:
            break
    assert driver.app.screen is driver.app.chat
    driver.composer.put("")
    await driver.done()


async def after_each(
    path: Path, cases: list[tuple[Command, str, str | None]], *, by_key: bool
) -> list[dict[str, Any]]:
    """What can be seen after each command of `cases` in a conversation, all in one application."""
    found = []
    store = SessionStore.open(path)
    try:
        async with driven(a_backend(), size=(120, 40), store=store) as driver:
            await talk(driver)
            for command, key, argument in cases:
                before = seen(driver)
                if by_key:
                    await driver.pilot.press(key)
                elif argument is None:  # the key begins the line, for the person to go on
                    driver.composer.put(f"/{command.name} ")
                else:
                    await driver.send(f"/{command.name} {argument}".strip(), wait=False)
                await driver.done()
                assert not [error for error in driver.errors if "unexpected" in error.lower()], command.name
                found.append({"command": command.name, "key": key, **seen(driver)})
                assert seen(driver) != before or (command.name, argument) in QUIET
                await back(driver)
    finally:
        store.close()
    return found


@pytest.mark.parametrize("share", range(SHARES))
async def test_a_key_does_what_its_command_does(tmp_path: Path, share: int) -> None:
    cases = CASES[share::SHARES]
    by_key = await after_each(tmp_path / "key.db", cases, by_key=True)
    by_name = await after_each(tmp_path / "name.db", cases, by_key=False)
    assert by_key == by_name


@pytest.mark.parametrize("way", ["ctrl+q", "/quit"])
async def test_both_ways_out(way: str) -> None:
    async with driven(a_backend()) as driver:
        if way.startswith("/"):
            await driver.send(way, wait=False)
        else:
            await driver.pilot.press(way)
        await driver.pilot.pause()
        assert driver.app.return_code == 0
