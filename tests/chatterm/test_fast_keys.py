"""Keys that come as fast as a program can send them: none is lost, and each is for what it was typed for."""

import asyncio

import pytest
from textual import events
from textual.command import CommandList
from textual.content import Content
from textual.dom import DOMNode
from textual.keys import _character_to_key
from textual.widgets.option_list import Option

from chatterm.app import ChatApp
from chatterm.screens.chat.commands import COMMANDS
from chatterm.screens.chat.palette import SlashCommands
from chatterm.screens.report import ReportScreen
from chatterm.screens.settings import SettingsScreen
from chatterm.screens.themed_app import ParsedOnce
from tests.chatterm.driving import LOOKS, driven
from tests.chatterm.scripted import ScriptedBackend


def send(app: ChatApp, *keys: str) -> None:
    """Give the application all of these keys before it has done anything about the first."""
    assert app._driver is not None
    for key in keys:
        if len(key) == 1:
            event = events.Key(_character_to_key(key), key)
        else:
            event = events.Key(key, "\r" if key == "enter" else None)
        event.set_sender(app)
        app._driver.send_message(event)


@pytest.mark.parametrize(
    ("keys", "question", "left"),
    [(("a", "b", "enter", "c"), "ab", "c"), (("a", "ctrl+j", "b", "enter"), "a\nb", "")],
)
async def test_a_message_typed_before_the_first_frame_is_sent(
    keys: tuple[str, ...], question: str, left: str
) -> None:
    backend = ScriptedBackend()
    app = ChatApp(backend, theme="graphite")
    app.chat.looks = ()
    running = asyncio.create_task(app.run_async(headless=True, size=(80, 24)))
    try:
        while app._driver is None:
            await asyncio.sleep(0)
        assert app.main_screen is None
        send(app, *keys)
        for _ in range(LOOKS):
            if ("send", question) in backend.calls and app.chat.is_idle and app.chat.composer.text == left:
                break
            assert not running.done()
            await asyncio.sleep(0.01)
        assert ("send", question) in backend.calls
        assert (app.chat.is_idle, app.chat.composer.text) == (True, left)
    finally:
        app.exit(0)
        await running
        assert app.worker.close()


async def test_the_palette_runs_what_was_typed_while_it_opened() -> None:
    async with driven(ScriptedBackend()) as driver:
        send(driver.app, "ctrl+p", *"settings", "enter")
        await driver.until(lambda: isinstance(driver.app.screen, SettingsScreen))
        send(driver.app, "escape", *"ab", "ctrl+p", *"stats", "enter")
        await driver.until(lambda: isinstance(driver.app.screen, ReportScreen))
        await driver.shows("There are no answers yet.")
        assert driver.composer.text == "ab"
        send(driver.app, "escape", "c", "enter")
        await driver.until(lambda: driver.questions == ["abc"])
        await driver.idle()


async def test_keys_that_come_while_it_ends_are_left() -> None:
    async with driven(ScriptedBackend()) as driver:
        send(driver.app, "ctrl+p", *"model" * 4)


async def test_the_palette_finds_first_what_is_named() -> None:
    async with driven(ScriptedBackend()) as driver:
        provider = SlashCommands(driver.app.chat)
        for command in COMMANDS:
            for name in (command.name, f"/{command.name}", *command.aliases):
                hits = [hit async for hit in provider.search(name)]
                best = max(hits, key=lambda hit: hit.score)
                assert best.text == command.usage, name


async def test_the_palette_shows_what_a_command_takes() -> None:
    async with driven(ScriptedBackend(), (100, 60)) as driver:
        send(driver.app, "ctrl+p")
        await driver.shows("/retry [N]")
        send(driver.app, *"model")
        await driver.shows("/model [NAME]")
        provider = SlashCommands(driver.app.chat)
        for command in COMMANDS:
            hits = [hit async for hit in provider.search(command.usage)]
            (shown,) = [hit.match_display for hit in hits if hit.text == command.usage]
            assert isinstance(shown, Content)
            assert shown.plain == command.usage
            assert "".join(shown.plain[span.start : span.end] for span in shown.spans) == command.usage


async def test_the_palette_fills_its_list_and_styles_it_in_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = [list[str]()]
    run, fill, update = asyncio.Handle._run, CommandList.add_options, ParsedOnce.update_nodes

    def noted_run(self: asyncio.Handle) -> None:
        work.append([])
        run(self)

    def noted_fill(self: CommandList, options: list[Option]) -> CommandList:
        work[-1].append("filled" if options else "")
        fill(self, options)
        return self

    def noted_update(self: ParsedOnce, nodes: list[DOMNode], animate: bool = False) -> None:
        work[-1].append(f"styled {next(iter(nodes)).css_identifier}")
        update(self, nodes, animate)

    async with driven(ScriptedBackend(), (100, 40)) as driver:
        monkeypatch.setattr(asyncio.Handle, "_run", noted_run)
        monkeypatch.setattr(CommandList, "add_options", noted_fill)
        monkeypatch.setattr(ParsedOnce, "update_nodes", noted_update)
        send(driver.app, "ctrl+p")
        await driver.shows("/retry [N]")
    for alone in ("filled", "styled CommandList", "styled Horizontal#--input"):
        found = [did for did in work if alone in did]
        assert found
        assert all(did == [alone] for did in found), "a slow machine may fill the list twice, but alone"
