"""`chatterm mcp`, and a server's tools in a chat."""

import json
import os
import sys
from pathlib import Path

import pytest

from chatterm.backends.backend import ToolCall
from chatterm.cli.main import call
from tests.chatterm.approving import asked
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.counting import patience

pytest.importorskip("mcp")
PROGRAM = str(Path(__file__).with_name("bare_server.py"))


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHATTERM_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path / "data"))
    return tmp_path / "mcp.json"


def test_servers_are_added_listed_tested_and_removed(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["mcp", "add", "here", "--env", "A=b=c", "--", sys.executable, PROGRAM]) == 0
    assert json.loads(config.read_text())["mcpServers"]["here"] == {
        "command": sys.executable,
        "args": [PROGRAM],
        "env": {"A": "b=c"},
    }
    assert config.stat().st_mode & 0o077 == 0
    assert (
        call(["mcp", "add", "there", "--url", "https://example.org/mcp", "--header", "Authorization=hush"])
        == 0
    )
    capsys.readouterr()
    assert call(["mcp", "list"]) == 0
    listed = capsys.readouterr().out
    assert "example.org" in listed
    assert "hush" not in listed
    assert call(["mcp", "test", "here"]) == 0
    said = capsys.readouterr().out
    assert "here works: 6 tools, 0 prompts, 0 resources." in said
    assert "\x1b" not in said
    assert call(["mcp", "remove", "here"]) == 0
    assert list(json.loads(config.read_text())["mcpServers"]) == ["there"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:secret@host/", "https://***@host/"),
        ("https://user:se@cret@host:80/a@b", "https://***@host:80/a@b"),
        ("https://secret@host", "https://***@host"),
        ("http://[::1]:80/@me?a@b", "http://[::1]:80/@me?a@b"),
    ],
)
def test_a_password_in_an_address_is_not_shown(
    config: Path, url: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["mcp", "add", "there", "--url", url]) == 0
    assert json.loads(config.read_text())["mcpServers"]["there"]["url"] == url
    capsys.readouterr()
    assert call(["mcp", "list"]) == 0
    assert capsys.readouterr().out == f"there  {shown}\n"


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    from chatterm.cli.mcp import mcp_app

    about = mcp_app.info.help
    assert isinstance(about, str)
    assert [
        command.name for command in mcp_app.registered_commands if command.name not in about.lower()
    ] == []


@pytest.mark.parametrize(
    "arguments",
    [["add", "a b", "--", "x"], ["add", "a__b", "--", "x"], ["add", "x"], ["add", "x", "--url", "ftp://x"],
     ["add", "x", "--url", "https://x", "--", "y"], ["add", "x", "--env", "nonsense", "--", "y"], ["remove", "x"],
     ["test", "x"], ["import", "/no/such/file"]],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["mcp", *arguments]) in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"mcpServers": []}',
        '{"mcpServers": {"a": {}}}',
        '{"mcpServers": {"a": {"command": 1}}}',
        "[" * 9000,
    ],
)
def test_a_file_that_is_none_is_one_line(config: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(text)
    assert call(["mcp", "list"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_servers_of_other_programs_are_imported(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    servers = {
        "a": {"command": "x", "args": ["y"], "type": "stdio", "disabled": True},
        "b": {"url": "https://b/mcp"},
    }
    other.write_text(json.dumps({"mcpServers": servers, "more": 1}))
    assert call(["mcp", "import", str(other)]) == 0
    assert call(["mcp", "import", str(other)]) == 0
    assert list(json.loads(config.read_text())["mcpServers"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"command": "x", "args": ["\ud800"]}, "args of a must be a list of strings"),
        ({"command": "x", "env": {"A": "\ud800"}}, "env of a must be an object of strings"),
        ({"command": "x", "env": {"A=B": "1"}}, "env of a has the invalid name 'A=B'"),
        ({"command": "x", "env": {"": "1"}}, "env of a has the invalid name ''"),
        (
            {"url": "https://b/mcp", "headers": {"A\nB": "1"}},
            "headers of a has the invalid name 'A B'",
        ),
        (
            {"url": "https://b/mcp", "headers": {"A": "1\r\nB: 2"}},
            "headers of a must be an object of strings",
        ),
        ({"url": "http://[x"}, "url of a must be an address that begins with https:// or http://"),
        ({"url": "http://b:99999/"}, "url of a must be an address that begins with https:// or http://"),
    ],
)
def test_what_no_program_or_request_can_be_given_changes_nothing(
    config: Path, tmp_path: Path, server: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"mcpServers": {"a": server}}))
    assert call(["mcp", "import", str(other)]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not config.exists()


def test_a_file_with_a_mark_at_its_beginning_is_imported(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"mcpServers": {"a": {"command": "x"}}}), encoding="utf-8-sig")
    assert call(["mcp", "import", str(other)]) == 0
    assert config.exists()


def test_what_is_no_file_is_neither_waited_for_nor_read_without_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with patience():
        for name in (str(tmp_path / "pipe"), "/dev/zero"):
            assert call(["mcp", "import", name]) == 1
            assert f"{name} is not a regular file" in capsys.readouterr().err


def test_more_servers_than_can_be_read_again_are_not_written(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, code in ((40, 0), (80, 1)):
        other = tmp_path / "other.json"
        names = range(number - 40, number)
        other.write_text(json.dumps({"mcpServers": {f"s{n}": {"command": "x"} for n in names}}))
        assert call(["mcp", "import", str(other)]) == code
    assert "At most 64 MCP servers are kept" in capsys.readouterr().err
    assert call(["mcp", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 40


@pytest.mark.parametrize(
    "arguments", [["--url", "https://x", "--env", "A=B"], ["--header", "A=B", "--", "program"]]
)
def test_an_option_that_would_be_lost_is_refused(
    config: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["mcp", "add", "x", *arguments]) == 2
    assert "--env goes with a program and --header with --url" in capsys.readouterr().err
    assert not config.exists()


def test_a_program_that_is_not_there_is_told_without_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["mcp", "add", "x", "--", "/no/such/program"]) == 0
    assert call(["mcp", "test", "x"]) == 1
    error = capsys.readouterr().err
    assert error == "chatterm: x could not be started: No such file or directory: /no/such/program.\n"


def test_without_the_sdk_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert call(["mcp", "test", "x"]) == 1
    assert "pip install 'chatterm[mcp]'" in capsys.readouterr().err


async def test_a_servers_tools_in_a_chat(config: Path) -> None:
    config.write_text(json.dumps({"mcpServers": {"here": {"command": sys.executable, "args": [PROGRAM]}}}))
    calls = (ToolCall("here__add", '{"a": 2, "b": 3}'), ToolCall("here__pid", "{}"))
    model = ScriptedBackend([Script("I compute.", calls=calls), Script("Done.")])
    async with driven(model) as driver:
        await driver.send("/tools here")
        await driver.until(lambda: any("here (6 tools)" in text for text, _ in driver.said))
        await driver.send("What is 2 + 3?", wait=False)
        for keys in (("down", "enter"), ("enter",)):
            clock, screen = await asked(driver), driver.app.screen
            await clock.press(*keys)
            await driver.until(lambda screen=screen: driver.app.screen is not screen)  # type: ignore[misc]
        await driver.idle()
        told = [result for name, results in model.calls if name == "tell" for result in results]  # type: ignore[attr-defined]
        assert (told[0].text, told[0].state) == ("5", "done")
        assert told[1].state == "refused"
