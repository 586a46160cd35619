"""Quitting: also by a signal, and on a disk that stalls, where it is said what is waited for and what is not saved."""

import os
import signal
import sqlite3
import sys
import textwrap
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.counting import PATIENCE

if sys.platform != "win32":
    import pexpect

PROGRAM = """
import os, sys
from threading import Event
sys.path.insert(0, {root!r})
from chatterm import app
from chatterm.backends import threads
from chatterm.sessions import export
from chatterm.sessions.store import SessionStore
from chatterm.sessions.fallback_database import FallbackDatabase
from chatterm.tools import keypress_guard
from tests.chatterm.scripted import Script, ScriptedBackend

keypress_guard.QUIET = keypress_guard.FAST = 0.0
write, close = FallbackDatabase.write, SessionStore.close

def stalled(database, ops, *, retry=False):
    if any(op.session for op in ops):
        Event().wait()
    write(database, ops, retry=retry)

if {early}:
    app.ChatApp.compose = lambda chat: os.kill(os.getpid(), {early}) or ()
if {hangs!r}:
    export.write_export, threads.PATIENCE_S = (lambda *_: Event().wait()), 0.1
if {stalls!r}:
    FallbackDatabase.write = stalled
    SessionStore.close = lambda store: close(store, 1.0)
    app._MOMENT_S = app._DISK_S = 0.1
sys.exit(app.run_app(ScriptedBackend([Script({says!r})]), theme="dusk"))
"""


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


def started(
    home: Path,
    stalls: bool = False,
    says: str = "Said.",
    ignores: int | None = None,
    early: int = 0,
    hangs: bool = False,
) -> "pexpect.spawn[bytes]":
    """A chat. It ignores only this signal, whatever the tests ignore; it gets `early` before its screen stands.

    With `hangs`, what it exports is never written.
    """

    def begin() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN if number == ignores else signal.SIG_DFL)

    root = str(Path(__file__).parents[2])
    return pexpect.spawn(
        sys.executable,
        [
            "-c",
            textwrap.dedent(PROGRAM).format(root=root, stalls=stalls, says=says, early=early, hangs=hangs),
        ],
        env={
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            "TERM": "xterm",
            "HOME": str(home),
            "VISUAL": str(home / "editor"),
        },
        dimensions=(16, 80),
        timeout=PATIENCE,
        preexec_fn=begin,
    )


def chatting(
    home: Path, stalls: bool = False, says: str = "Said.", ignores: int | None = None, hangs: bool = False
) -> "pexpect.spawn[bytes]":
    """A chat in which one message was answered."""
    child = started(home, stalls, says, ignores, hangs=hangs)
    child.expect(b"ready")
    child.send(b"question\r")
    child.expect(b"Said")
    return child


def editing(home: Path, script: str) -> "pexpect.spawn[bytes]":
    """Such a chat, and its message in this editor."""
    editor = home / "editor"
    editor.write_text(f"#!/bin/sh\n{script}")
    editor.chmod(0o755)
    child = chatting(home)
    child.send(b"\x07")
    return child


def quit_by_hand(child: "pexpect.spawn[bytes]") -> None:
    """Leave the chat, whatever is in the composer."""
    child.send(b"\x15/quit\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def draft_in(home: Path) -> str:
    (path,) = home.rglob("*.db")
    with closing(sqlite3.connect(path)) as database:
        return str(database.execute("SELECT text FROM drafts").fetchall()[-1][0])


def running_in(home: Path) -> list[str]:
    """The processes with this home, where the system tells."""
    wanted, found = f"HOME={home}".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in environment.read_bytes().split(b"\0"):
                found.append(environment.parent.name)
    return found


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT", "SIGINT"])
def test_a_signal_to_end_leaves_the_terminal_as_it_was_and_the_draft_saved(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    child = chatting(tmp_path)
    child.send(b"half a thought")
    child.expect(b"thought")
    child.kill(number)
    child.expect(pexpect.EOF)
    left = child.before
    child.close()
    assert child.exitstatus == 128 + number
    assert b"\x1b[?1049l" in left, "the screen of before is back"
    assert b"To continue: chatterm run" in left
    assert draft_in(tmp_path) == "half a thought"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])  # only SIGINT has a handler of its own
def test_a_signal_to_end_before_the_screen_stands_leaves_the_terminal_as_it_was(
    name: str, tmp_path: Path
) -> None:
    number = getattr(signal, name)
    child = started(tmp_path, early=number)
    child.expect(pexpect.EOF)
    left = child.before
    child.close()
    assert child.exitstatus == 128 + number
    assert left.rindex(b"\x1b[?1049l") > left.rindex(b"\x1b[?1049h"), "the screen of before is back"


def test_a_closed_terminal_ends_the_chat_and_the_command_of_a_code_block(tmp_path: Path) -> None:
    child = chatting(tmp_path, says="Said:\n```sh\necho be''gun; sleep 60\n```\n")
    child.send(b"/select\r")
    child.expect(b"x run")
    child.send(b"x")
    child.expect(b"No, do not run it")
    child.send(b"\x1b[F")  # all of it was seen
    child.expect(b"Enter answers")
    child.send(b"\x1b[B")
    child.expect("❯ Yes, this once".encode())
    child.send(b"\r")
    child.expect(b"begun")
    child.send(b"half a thought")
    child.expect(b"thought")
    os.close(child.fileno())
    child.wait()
    assert child.signalstatus is None, "it ended of itself"
    assert not running_in(tmp_path)
    assert not [*tmp_path.rglob("errors.log")]
    assert draft_in(tmp_path) == "half a thought"


def test_ctrl_c_in_the_editor_is_for_the_editor_alone(tmp_path: Path) -> None:
    child = editing(
        tmp_path, "trap 'echo by hand >\"$1\"; exit 0' INT\necho editing\nwhile :; do sleep 0.05; done\n"
    )
    child.expect(b"editing")
    child.send(b"\x03")
    child.expect(b"by hand")
    quit_by_hand(child)


def test_the_chat_comes_back_from_an_editor_that_fails(tmp_path: Path) -> None:
    child = editing(tmp_path, "exit 3\n")
    child.expect(b"ended with status 3")
    quit_by_hand(child)


def test_a_chat_under_nohup_outlives_a_hangup(tmp_path: Path) -> None:
    child = chatting(tmp_path, ignores=signal.SIGHUP)
    child.kill(signal.SIGHUP)
    quit_by_hand(child)


def test_a_file_system_that_does_not_answer_is_left(tmp_path: Path) -> None:
    child = chatting(tmp_path, hangs=True)
    child.send(b"/export there.md\r")
    child.expect(b"Write a message")
    child.send(b"/quit\r")
    child.expect(b"does not answer; what was being read or written there is left")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.mark.parametrize("stalls", [False, True])
def test_a_disk_that_stalls_is_told_of_and_left(stalls: bool, tmp_path: Path) -> None:
    child = chatting(tmp_path, stalls)
    child.send(b"/quit\r")
    child.expect(pexpect.EOF)
    left = child.before
    child.close()
    assert child.exitstatus == 0
    assert (b"Saving the conversation" in left) is stalls
    assert (b"the last messages are not saved" in left) is stalls
    assert (b"To continue: chatterm run" in left) is not stalls
    assert b"Traceback" not in left
