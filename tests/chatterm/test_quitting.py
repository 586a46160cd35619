"""Quitting: also by a signal, and on a disk that stalls, where it is said what is waited for and what is not saved."""

import signal
import sqlite3
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest

from tests.counting import PATIENCE

if sys.platform != "win32":
    import pexpect

PROGRAM = """
import sys
from threading import Event
sys.path.insert(0, {root!r})
from chatterm import app
from chatterm.sessions.store import Store
from chatterm.sessions.vault import Vault
from tests.chatterm.scripted import Script, ScriptedBackend

write, close = Vault.write, Store.close

def stalled(vault, ops, *, retry=False):
    if any(op.session for op in ops):
        Event().wait()
    write(vault, ops, retry=retry)

if {stalls!r}:
    Vault.write = stalled
    Store.close = lambda store: close(store, 1.0)
    app._MOMENT_S = app._DISK_S = 0.1
sys.exit(app.run_app(ScriptedBackend([Script("Said.")]), theme="dusk"))
"""


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


def chatting(home: Path, stalls: bool = False) -> "pexpect.spawn[bytes]":
    """A chat in which one message was answered."""
    root = str(Path(__file__).parents[2])
    child = pexpect.spawn(
        sys.executable,
        ["-c", textwrap.dedent(PROGRAM).format(root=root, stalls=stalls)],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TERM": "xterm", "HOME": str(home)},
        dimensions=(16, 80),
        timeout=PATIENCE,
    )
    child.expect(b"ready")
    child.send(b"question\r")
    child.expect(b"Said")
    return child


def test_a_signal_to_end_leaves_the_terminal_as_it_was_and_the_draft_saved(tmp_path: Path) -> None:
    child = chatting(tmp_path)
    child.send(b"half a thought")
    child.expect(b"thought")
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF)
    left = child.before
    child.close()
    assert child.exitstatus == 128 + signal.SIGTERM
    assert b"\x1b[?1049l" in left, "the screen of before is back"
    assert b"To continue: chatterm run" in left
    (path,) = tmp_path.rglob("*.db")
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT text FROM drafts").fetchall()[-1] == ("half a thought",)


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
