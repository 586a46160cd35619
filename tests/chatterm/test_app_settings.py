"""The theme picker and the settings screen: previewed, checked, written to the file, effective where they can be."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from chatterm.screens.settings import Detail, SettingsList, SettingsScreen
from chatterm.screens.theme import ThemePicker
from chatterm.settings.paths import config_path
from chatterm.settings.reading import load_settings
from chatterm.settings.text import known_settings
from chatterm.settings.themes import theme_names
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import ScriptedBackend


def written() -> dict[str, Any]:
    return tomllib.loads(config_path().read_text(encoding="utf-8")) if config_path().exists() else {}


async def test_a_theme_is_previewed_and_kept() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.send("hello")
        await driver.pilot.press("f7")
        await driver.shows("● graphite")
        names = theme_names()
        following = names[names.index("graphite") + 1]
        await driver.pilot.press("down")
        await driver.until(lambda: driver.app.theme == following)
        assert "hello" in driver.text()  # what it looks like can be seen
        await driver.pilot.press("escape")
        assert (driver.app.theme, written()) == ("graphite", {})
        await driver.pilot.press("f7", "down", "enter")
        await driver.until(lambda: written() == {"screen": {"theme": following}})
        await driver.until(
            lambda: f"The theme is {following}, also for new chats" in "".join(driver.notices[-1:])
        )
        await driver.send("/theme paper")
        await driver.until(lambda: written() == {"screen": {"theme": "paper"}})
        assert driver.app.theme == "paper"


async def test_a_theme_whose_file_is_wrong_is_said_and_cannot_be_taken(own_folders: Path) -> None:
    (own_folders / "themes").mkdir()
    (own_folders / "themes" / "d.toml").write_text("colors = 3\n", encoding="utf-8")
    async with driven(ScriptedBackend(), theme="dusk") as driver:
        await driver.send("/theme")
        await driver.pilot.press("up", "enter")
        await driver.shows("colors must be a")
        assert isinstance(driver.app.screen, ThemePicker)
        await driver.pilot.press("escape")
        assert driver.app.theme == "dusk"


@pytest.mark.parametrize("size", [(80, 24), (60, 14)])
async def test_what_is_wrong_in_a_theme_is_said_to_its_end_below_a_long_list(
    own_folders: Path, size: tuple[int, int]
) -> None:
    (own_folders / "themes").mkdir()
    for number in range(12):
        (own_folders / "themes" / f"d{number:02}.toml").write_text("colors = 3\n", encoding="utf-8")
    async with driven(ScriptedBackend(), size, theme="dusk") as driver:
        await driver.send("/theme")
        await driver.pilot.press("up")
        await driver.shows("colors must be a")
        await driver.shows("it.")  # its last word
        await driver.pilot.press(*["down"] * 3)
        await driver.shows("Enter selects · Esc goes back")
        assert "it." not in driver.text()


async def opened(driver: Driver) -> SettingsList:
    await driver.pilot.press("f8")
    await driver.until(lambda: isinstance(driver.app.screen, SettingsScreen))
    await driver.pilot.pause()
    return driver.app.screen.query_one(SettingsList)


async def choose(driver: Driver, name: str) -> None:
    found = driver.app.screen.query_one(SettingsList)
    await driver.pilot.press("pageup", "pageup", "pageup", "pageup")
    while found.chosen.name != name:
        row = found.row
        await driver.pilot.press("down")
        assert found.row > row, f"unknown setting {name}"


async def test_every_setting_is_there_once_and_can_be_reached() -> None:
    async with driven(ScriptedBackend()) as driver:
        found = await opened(driver)
        seen = [found.chosen]
        for _ in range(100):
            await driver.pilot.press("down")
            if found.chosen == seen[-1]:
                break
            seen.append(found.chosen)
        assert seen == known_settings()
        assert all(known.doc for known in seen)


async def test_a_setting_is_changed_in_place() -> None:
    config_path().write_text("# mine\n[sampling]\ntop_k = 9  # few\n", encoding="utf-8")
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await opened(driver)
        await choose(driver, "temperature")
        await driver.pilot.press("enter", *"hot", "enter")
        await driver.shows("temperature is 'hot'; it must be a number.")
        await driver.pilot.press("backspace", "backspace", "backspace", *"0.2", "enter")
        await driver.shows("Saved; it applies at once.")
        await driver.until(lambda: backend.sampling == {"top_k": 9, "temperature": 0.2})
        assert written() == {"sampling": {"top_k": 9, "temperature": 0.2}}
        assert config_path().read_text(encoding="utf-8").startswith("# mine\n")
        assert "top_k = 9  # few" in config_path().read_text(encoding="utf-8")
        await choose(driver, "top_k")
        await driver.pilot.press("delete")
        await driver.shows("Reset to the default; it applies at once.")
        await driver.until(lambda: backend.sampling == {"temperature": 0.2})
        await choose(driver, "device")
        await driver.pilot.press("right")
        await driver.shows("Saved; it applies from the next start on.")
        assert written()["model"] == {"device": "cpu"}
        await choose(driver, "threads")
        await driver.pilot.press("enter", "4", "escape")  # it stays as it was
        assert isinstance(driver.app.screen, SettingsScreen)
        await driver.pilot.press("escape")
        assert driver.app.screen is driver.app.chat
        assert "threads" not in written()["model"]


async def test_what_can_holds_at_once() -> None:
    async with driven(ScriptedBackend(), size=(140, 45)) as driver:
        chat = driver.app.chat
        await opened(driver)
        await driver.pilot.press("right")
        await driver.until(lambda: driver.app.theme != "graphite")
        assert written()["screen"]["theme"] == driver.app.theme
        await choose(driver, "panel")
        await driver.pilot.press("left")
        await driver.until(lambda: not chat.panel.display)
        await choose(driver, "thinking")
        await driver.pilot.press("enter")
        await driver.until(lambda: chat.conversation.show_thinking is True)
        await choose(driver, "prepare_drafts")
        await driver.pilot.press("space")
        await driver.until(lambda: not chat.settings.composer.prepare_drafts)
        assert chat.settings == load_settings(config_path())


async def test_a_file_that_is_wrong_is_said_and_stays_as_it_is() -> None:
    async with driven(ScriptedBackend()) as driver:
        await opened(driver)
        config_path().write_text("not toml", encoding="utf-8")
        await driver.pilot.press("right")
        await driver.until(lambda: "this is not TOML" in " ".join(driver.text().split()))
        await driver.pilot.press("escape")
        await driver.send("/settings", wait=False)
        await driver.until(lambda: driver.errors)
        assert "this is not TOML" in driver.errors[0]
        assert config_path().read_text(encoding="utf-8") == "not toml"


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (140, 45)])
async def test_the_chosen_setting_and_its_meaning_can_be_seen(size: tuple[int, int]) -> None:
    async with driven(ScriptedBackend(), size=size) as driver:
        found = await opened(driver)
        for known in known_settings()[::4]:
            await choose(driver, known.name)
            await driver.pilot.pause()
            assert f" {known.name} " in driver.text()
            assert found.size.height >= 5
            assert driver.app.screen.query_one(Detail).region.bottom <= size[1]
            assert known.doc.split()[0] in driver.text()
