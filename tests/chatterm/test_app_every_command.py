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
CASES = [
    pytest.param(command, key, argument, id=f"{command.name}-{key}")
    for command in COMMANDS
    for key, argument in command.keys.items()
    if command.name not in (*LEAVING, *ELSEWHERE)
]


def a_backend() -> ScriptedBackend:
    script = Script("An answer with `code`.\n\n```python\nprint(1)\n```\n", "Let me think.")
    return ScriptedBackend([script] * 6, thinks=True)


async def talk(driver: Driver) -> None:
    """Two exchanges, the second with two answers, the first of them in view."""
    await driver.send("one")
    await driver.send("two")
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
        "selected": None if selected is None else entries.index(selected),
        "panel": app.chat.query_one("#panel").display,
        "theme": app.theme,
    }


async def after(path: Path, command: Command, key: str | None, argument: str | None) -> dict[str, Any]:
    store = SessionStore.open(path)
    try:
        async with driven(a_backend(), size=(120, 40), store=store) as driver:
            await talk(driver)
            if key is not None:
                await driver.pilot.press(key)
            elif argument is None:  # the key begins the line, for the person to go on
                driver.composer.put(f"/{command.name} ")
            else:
                await driver.send(f"/{command.name} {argument}".strip(), wait=False)
            await driver.done()
            assert not [error for error in driver.errors if "unexpected" in error.lower()]
            return seen(driver)
    finally:
        store.close()


@pytest.mark.parametrize(("command", "key", "argument"), CASES)
async def test_a_key_does_what_its_command_does(
    tmp_path: Path, command: Command, key: str, argument: str | None
) -> None:
    by_key = await after(tmp_path / "key.db", command, key, argument)
    by_name = await after(tmp_path / "name.db", command, None, argument)
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
