"""What surrounds a command: closed streams, odd sizes of the terminal, places that cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatterm.cli.main import call
from chatterm.cli.shell_completion import model_names
from chatterm.settings.file import write
from chatterm.settings.reading import load_settings
from chatterm.settings.settings import Settings, SettingsError
from tests.counting import PATIENCE, patience


def run_in_shell(arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m chatterm {arguments}', sys.executable],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CHATTERM_DEBUG": "", **variables},
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
@pytest.mark.parametrize("arguments", ["list", "sessions", "library", "doctor"])
def test_what_is_only_printed_needs_an_output(arguments: str) -> None:
    ended = run_in_shell(f"{arguments} >&-")
    assert ended.returncode == 2
    assert ended.stderr == "chatterm: Standard output is closed; start again without >&-, or with > FILE.\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_without_standard_error_a_command_ends_as_with_it(tmp_path: Path) -> None:
    ended = run_in_shell("quantize ./none out <&- 2>&-", CHATTERM_CACHE=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (1, "")
    program = "from chatterm.cli.usage import put_in_order as p; p(); print(open('/dev/zero').fileno())"
    number = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert int(number.stdout) > 2  # or what is printed would go into that file


@pytest.mark.parametrize("size", ["0", "99999999", "-5", "²", "wide", "1"])
def test_any_size_of_the_terminal_shows_the_help(size: str) -> None:
    ended = run_in_shell("sessions --help", COLUMNS=size, LINES=size, TERMINAL_WIDTH=size)
    assert ended.returncode == 0
    assert len(ended.stdout) < 20_000
    assert size == "1" or "rename" in ended.stdout


@pytest.mark.parametrize("name", ["CHATTERM_CACHE", "CHATTERM_CONFIG", "CHATTERM_DATA", "CHATTERM_RUNTIME"])
def test_a_place_that_cannot_be_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "~nobody-of-this-name/x")
    assert call(["config", "path"]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"chatterm: {name} begins with ~nobody-of-this-name, and there is no such user; write it out.\n"
    )
    assert "smollm2" in model_names("smol")  # Tab offers what there is
    monkeypatch.setenv(name, "/" + "x" * 5000)
    assert call(["config", "path"]) == 2
    assert capsys.readouterr().err.startswith(f"chatterm: {name} has a name of too many characters")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_settings_that_are_no_file_are_neither_waited_for_nor_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    monkeypatch.setenv("CHATTERM_CONFIG", str(pipe))
    monkeypatch.setattr("sys.stdin", None)
    with patience():
        for words in (["config"], ["config", "set", "screen.theme", "moss"], ["run", "m", "-p", "hi"]):
            assert call(words) == 1
            assert capsys.readouterr().err == (
                f"chatterm: {pipe} is not a regular file; put a text file in its place.\n"
            )
        with pytest.raises(SettingsError, match="not a regular file"):
            write(pipe, "[screen]\n")
    assert pipe.is_fifo()
    assert load_settings(Path(os.devnull)) == Settings()  # how people ask for none


def test_a_settings_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SettingsError, match=r"is longer than .*; make it shorter"):
        load_settings(path)


def test_what_no_file_can_hold_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(SettingsError, match="cannot be written: it would contain what is no character"):
        write(path, "\ud800")
    assert [(file.name, file.read_text("utf-8")) for file in tmp_path.iterdir()] == [("mcp.json", "{}")]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_an_editor_that_fails_is_not_told_of_as_one_for_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHATTERM_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("VISUAL", "sh -c 'exit 3'")
    assert call(["config", "edit"]) == 1
    assert capsys.readouterr().err == "chatterm: sh ended with status 3; nothing was taken over from it.\n"
