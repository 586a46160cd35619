"""What the screens about tools look like, in a dark and in a light theme, small and large; see test_screens.py."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from chatterm.app import ChatApp
from chatterm.backends.backend import ToolCall
from chatterm.conversation.tool_entry import ToolsEntry
from chatterm.tools.keypress_guard import QUIET
from chatterm.tools.rules import PermissionRule
from tests.chatterm.approving import asked
from tests.chatterm.driving import Driver
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.chatterm.snapshots.test_screens import Still, still

pytest.importorskip("pytest_textual_snapshot")

GAUGE = """\
def discharge(width, depths, speed):
    mean = sum(depths) / len(depths)
    return width * mean * speed


def report(gauge):
    print(gauge.name, discharge(gauge.width, gauge.depths, gauge.speed))
"""
PATCH = {
    "path": "gauge.py",
    "old": "    mean = sum(depths) / len(depths)\n    return width * mean * speed\n",
    "new": '    """Cubic metres in a second."""\n    if not depths:\n        return 0.0\n'
    "    mean = sum(depths) / len(depths)\n    return width * mean * speed\n",
}
COMMAND = {"command": "rm -rf build && git push --force origin main", "writes": True}
CALLS: dict[str, tuple[ToolCall, ...]] = {
    "approval": (ToolCall("patch_file", json.dumps(PATCH)),),
    "danger": (ToolCall("run_command", json.dumps(COMMAND)),),
    "tools": (),
    "called": (
        ToolCall("read_file", '{"path": "gauge.py"}'),
        ToolCall("search", '{"text": "discharge"}'),
        ToolCall("run_command", '{"command": "git push"}'),
        ToolCall("weather", '{"city": "Köln"}'),
    ),
}


async def question(driver: Driver) -> None:
    await driver.send("Make it safe for gauges without readings, please.", wait=False)
    (await asked(driver)).go_to(QUIET)


async def tools(driver: Driver) -> None:
    session = driver.app.chat.tooling.session
    session.policy.always += [
        PermissionRule("fetch_url", "https://www.pegelonline.wsv.de/*"),
        PermissionRule("run_command", "make test"),
    ]
    session.policy.session.append(PermissionRule("read_file", "*"))
    session.box.on |= {"read_file", "list_folder", "search"}
    session.folder = Path("/home/ada/rivers")
    await driver.send("/tools")
    await driver.shows("allowed below")


async def called(driver: Driver) -> None:
    session = driver.app.chat.tooling.session
    session.policy.session += [PermissionRule("read_file", "*"), PermissionRule("search", "*")]
    await driver.send("What does discharge do?", wait=False)
    (await asked(driver)).go_to(QUIET)
    await driver.pilot.press("enter")
    await driver.idle()
    entry = next(entry for entry in driver.transcript.entries if isinstance(entry, ToolsEntry))
    for number, shown in enumerate(entry.calls):
        shown.seconds = 0.1 * number
    entry.calls[1].is_open = True
    entry.changed()


SCREENS: dict[str, Callable[[Driver], Awaitable[None]]] = {
    "approval": question,
    "danger": question,
    "tools": tools,
    "called": called,
}


@pytest.mark.parametrize(
    ("theme", "size"),
    [("graphite", (80, 24)), ("paper", (140, 45))],
    ids=["graphite-80x24", "paper-140x45"],
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
    monkeypatch.setattr("chatterm.tools.builtin.sandbox.program", lambda: "/usr/bin/bwrap")
    monkeypatch.setenv("CHATTERM_CONFIG", str(tmp_path / "config.toml"))
    servers = {"files": {"command": "npx", "args": ["@modelcontextprotocol/server-filesystem", "/home/ada"]}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    work = tmp_path / "rivers"
    work.mkdir()
    (work / "gauge.py").write_text(GAUGE)
    monkeypatch.chdir(work)
    backend: ScriptedBackend = Still([Script("I look at it.", calls=CALLS[name]), Script("It multiplies.")])
    app = ChatApp(backend, theme=theme)
    app.chat.looks = ()

    async def prepare(pilot: Pilot[int]) -> None:
        driver = Driver(app, pilot)
        await pilot.pause()
        await driver.idle()
        if name != "tools":
            await driver.send("/tools read,search,write,run")
        await SCREENS[name](driver)
        await still(driver)

    try:
        assert snap_compare(app, terminal_size=size, run_before=prepare)
    finally:
        app.chat.tooling.stop()
        assert app.worker.close()
