"""Commands: what they give back, what ends them, and what a sandbox keeps from them."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from chatterm.tools.builtin import sandbox
from chatterm.tools.builtin.command import RunCommand, _marked
from chatterm.tools.output import MOST_CHARACTERS
from chatterm.tools.tool import ToolError, ToolRun

needs_sandbox = pytest.mark.skipif(sandbox.program() is None, reason="bubblewrap does not work here")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    def run(command: str, running: ToolRun | None = None, **arguments: object) -> str:
        plan = RunCommand(tmp_path, lambda: None).plan({"command": command, **arguments})
        return plan.run(running or ToolRun())

    return run


def test_output_and_exit_code_come_back(run: Callable[..., str]) -> None:
    assert run("echo out; echo err >&2; exit 3") == "out\nerr\n[exit code 3]"


def test_it_runs_in_the_working_folder_without_input_and_without_secrets(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "hush")
    monkeypatch.setenv("HARMLESS", "seen")
    said = run("pwd; cat; env")
    assert str(tmp_path.resolve()) in said
    assert "HARMLESS=seen" in said
    assert "hush" not in said


def test_output_is_bounded_and_has_nothing_that_a_terminal_obeys(run: Callable[..., str]) -> None:
    said = run(r"printf '\033]0;title\007\033[31mred\033[0m\r\n'; yes | head -c 3000000; echo end")
    assert "\x1b" not in said
    assert "title" not in said
    assert "red" in said
    assert "left out" in said
    assert said.endswith("end\n[exit code 0]")
    assert len(said) < MOST_CHARACTERS + 100


def test_output_streams_and_a_stop_ends_the_command_with_its_children(run: Callable[..., str]) -> None:
    running, said = ToolRun(), list[str]()

    def take(text: str) -> None:
        said.append(text)
        running.stopped.set()

    running.say = take
    result = run("sleep 1000 & (setsid sleep 1000 &) ; echo $CHATTERM_CALL; wait", running)
    assert result.endswith("[stopped by the user]")
    assert _marked(said[0].strip()) == []


def test_a_time_limit_ends_it(run: Callable[..., str]) -> None:
    assert run("echo begun; sleep 1000", seconds=1).endswith("begun\n\n[stopped after 1 s]")


def test_what_is_left_in_the_background_is_ended_with_it(run: Callable[..., str]) -> None:
    said = run("(setsid sh -c 'sleep 1000' >/dev/null 2>&1 &); sleep 1000 & echo $CHATTERM_CALL")
    assert said.endswith("[exit code 0]")
    assert _marked(said.split("\n")[0]) == []


@pytest.mark.parametrize(
    "arguments",
    [{"command": ""}, {"command": "a\0b"}, {"command": "ls", "seconds": 0}, {"command": "ls", "seconds": 10_000},
     {"command": "x" * 10_000}, {"command": ["ls"]}, {"command": "ls", "writes": "yes"}, {"command": "ls", "cwd": "/"}],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ToolError):
        RunCommand(tmp_path).plan(arguments)


def test_what_is_shown_says_whether_there_is_a_sandbox_and_so_does_what_rules_compare(tmp_path: Path) -> None:
    without = RunCommand(tmp_path, lambda: None).plan({"command": "ls"})
    within = RunCommand(tmp_path, lambda: "/usr/bin/bwrap").plan({"command": "ls"})
    writes = RunCommand(tmp_path, lambda: "/usr/bin/bwrap").plan({"command": "ls", "writes": True})
    assert any("No sandbox" in text and tone == "warning" for text, tone in without.shown)
    assert any("no network" in text for text, _ in within.shown)
    assert len({without.subject, within.subject, writes.subject}) == 3


@needs_sandbox
def test_a_sandbox_has_no_network_and_no_writing_unless_it_is_allowed(tmp_path: Path) -> None:
    tool = RunCommand(tmp_path)
    program = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    said = tool.plan({"command": f'python3 -c "{program}" 2>&1 | tail -1; cat /proc/net/route'}).run(
        ToolRun()
    )
    assert "refused" in said or "unreachable" in said
    assert "0003" not in said, "there is a route to somewhere"
    assert "Read-only" in tool.plan({"command": "echo x > new.txt"}).run(ToolRun())
    assert not (tmp_path / "new.txt").exists()
    assert "exit code 0" in tool.plan({"command": "echo x > new.txt", "writes": True}).run(ToolRun())
    assert (tmp_path / "new.txt").read_text() == "x\n"


@needs_sandbox
def test_a_sandbox_hides_secrets_of_the_home_folder_and_sockets_of_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path.home() / ".chatterm-test-home"
    work = home / "work"
    (home / ".ssh").mkdir(parents=True, exist_ok=True)
    work.mkdir(exist_ok=True)
    (home / ".ssh" / "id_rsa").write_text("hush")
    (home / ".netrc").write_text("hush")
    monkeypatch.setenv("HOME", str(home))
    try:
        said = (
            RunCommand(work)
            .plan({"command": f"cat {home}/.ssh/id_rsa {home}/.netrc; ls /run /tmp"})
            .run(ToolRun())
        )
        assert "hush" not in said
        outside = RunCommand(work).plan({"command": f"touch {home}/new", "writes": True}).run(ToolRun())
        assert "Read-only" in outside
    finally:
        for name in (home / ".ssh" / "id_rsa", home / ".netrc"):
            name.unlink()
        for folder in (home / ".ssh", work, home):
            folder.rmdir()


@needs_sandbox
def test_nothing_of_a_sandbox_is_left_once_it_was_stopped(tmp_path: Path) -> None:
    running = ToolRun()
    threading.Timer(0.5, running.stopped.set).start()
    RunCommand(tmp_path).plan({"command": "setsid sleep 4321.1 & sleep 4321.1"}).run(running)
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert b"4321.1" not in line.read_bytes()
