"""Keys: none of them takes one from the composer, and each works on a terminal that keeps some keys for itself."""

import re
from pathlib import Path

import pytest
from textual import events
from textual.binding import Binding, BindingType

from chatterm.app import ChatApp
from chatterm.commands.registry import LEADER, second_key
from chatterm.screens.chat.commands import COMMANDS
from chatterm.screens.chat.keys import LeaderScreen, shortcuts
from chatterm.screens.chat.screen import ChatScreen
from chatterm.widgets.composer import _NEWLINE_KEYS, Composer
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend

GIVEN_AWAY = {
    "pageup": "scrolls the conversation",
    "pagedown": "scrolls the conversation",
    "end": "shows the latest text where nothing stands behind the cursor",
    "ctrl+c": "copies what is selected in the composer first",
    "f6": "an editing key of Textual alone",
    "f7": "an editing key of Textual alone",
    "ctrl+g": "the composer's own way to the same command",
    "ctrl+o": "the composer's own way to the same command",
}
"""Keys of the composer that the screen takes, and why."""
DEAD = re.compile(r"alt\+.+|f(1|10|11)|ctrl\+(home|end|up|down|left|right)|page(up|down)")
"""Keys that the terminal of a Mac, GNOME's, or the desktop around them keep for themselves, or keyboards lack."""


def keys_of(bindings: list[BindingType]) -> list[str]:
    return [key for b in bindings if isinstance(b, Binding) for key in b.key.split(",")]


SCREEN_KEYS = keys_of([*ChatScreen.BINDINGS, *ChatApp.BINDINGS])


def test_no_key_takes_one_from_the_composer() -> None:
    editing = {*Composer()._bindings.key_to_bindings, *_NEWLINE_KEYS, "enter", "tab", "backspace"}
    assert editing.intersection(SCREEN_KEYS) == set(GIVEN_AWAY)
    assert len(set(SCREEN_KEYS)) == len(SCREEN_KEYS)


def test_the_leader_is_alive_everywhere_and_nothing_else() -> None:
    assert SCREEN_KEYS.count(LEADER) == 1
    assert re.fullmatch(r"ctrl\+[a-z]", LEADER)
    # Tab, Enter, Backspace and Escape on a terminal; the prefixes of tmux and screen; flow control.
    assert LEADER[-1] not in "imhjabsqcdz"
    assert LEADER not in Composer()._bindings.key_to_bindings


def test_every_key_that_may_be_dead_has_a_second_one() -> None:
    dead = [key for key in SCREEN_KEYS if DEAD.fullmatch(key)]
    assert len(dead) > 15
    behind = shortcuts(ChatScreen.BINDINGS)  # it finds two that are the same
    for key in dead:
        second = second_key(key)
        assert second is not None, key
        assert not DEAD.fullmatch(second), key
        assert second in behind, key
    assert all(second_key(key) is None for key in ("ctrl+t", "escape", "enter", LEADER))


def test_a_second_key_does_what_the_first_does() -> None:
    behind = shortcuts(ChatScreen.BINDINGS)
    for command in COMMANDS:
        for key, argument in command.keys.items():
            if second := second_key(key):
                assert behind[second].action == f"run_command({command.name!r}, {argument!r})"


async def test_the_leader_and_a_key() -> None:
    async with driven(ScriptedBackend([Script("Hello.")])) as driver:
        await driver.send("first")
        await driver.types("a draft")
        await driver.pilot.press("ctrl+l")
        await driver.shows("/continue")
        await driver.pilot.press("E")
        await driver.until(lambda: driver.composer.text == "first")
        await driver.pilot.press("escape")
        await driver.until(lambda: driver.composer.text == "a draft")
        await driver.pilot.press("ctrl+l", "up")
        await driver.until(lambda: driver.transcript.selected is not None)


@pytest.mark.parametrize("key", ["escape", "z", "ctrl+l", "ctrl+c", "enter"])
async def test_a_key_that_means_nothing_there_changes_nothing(key: str) -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.types("a draft")
        await driver.pilot.press("ctrl+l", key)
        await driver.until(lambda: not isinstance(driver.app.screen, LeaderScreen))
        assert driver.composer.text == "a draft"
        await driver.types("!")
        assert driver.composer.text == "a draft!"


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (200, 60)])
async def test_the_list_of_second_keys_fits(size: tuple[int, int]) -> None:
    async with driven(ScriptedBackend(), size) as driver:
        await driver.pilot.press("ctrl+l")
        await driver.shows("then a key")
        await driver.shows("/answer")


# --- files for /import and /export ---


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "a talk.json").write_text('[{"role": "user", "content": "hello from a file"}]')
    (tmp_path / "notes-old.md").write_text("old")
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_a_file_to_import_is_completed(files: Path) -> None:
    async with driven(ScriptedBackend()) as driver:
        driver.composer.put("/import ")
        await driver.shows("notes-old.md")
        driver.composer.put("/import ta")
        await driver.pilot.press("tab")  # at once: the list is never that of another text
        assert driver.composer.text == "/import talks/"
        await driver.shows("a talk.json")
        await driver.pilot.press("tab")
        assert driver.composer.text == "/import talks/a talk.json"
        await driver.pilot.press("enter")
        await driver.until(lambda: driver.questions == ["hello from a file"])


async def test_a_new_name_for_an_export_is_not_replaced_by_one_that_is_there(files: Path) -> None:
    async with driven(ScriptedBackend([Script("Hello.")])) as driver:
        await driver.send("q")
        driver.composer.put("/export md notes")
        await driver.shows("notes-old.md")
        await driver.pilot.press("enter")
        await driver.until(lambda: (files / "notes").exists())
        assert (files / "notes-old.md").read_text() == "old"


async def test_what_is_typed_in_one_go_with_a_message_selected_goes_on_in_the_composer() -> None:
    async with driven(ScriptedBackend([Script("one"), Script("two")])) as driver:
        await driver.send("first")
        await driver.pilot.press("alt+up")
        assert driver.app.focused is driver.transcript
        for character in "oh yes, retry":
            driver.app.post_message(events.Key("space" if character == " " else character, character))
        await driver.until(lambda: driver.composer.text == "oh yes, retry")
        assert driver.answers == ["one"]
