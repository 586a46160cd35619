"""Quitting on a disk that stalls: it is said what is waited for, and in the end what is not saved."""

import sys
import textwrap
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


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("stalls", [False, True])
def test_a_disk_that_stalls_is_told_of_and_left(stalls: bool, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    child = pexpect.spawn(
        sys.executable,
        ["-c", textwrap.dedent(PROGRAM).format(root=root, stalls=stalls)],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TERM": "xterm", "HOME": str(tmp_path)},
        dimensions=(16, 80),
        timeout=PATIENCE,
    )
    child.expect(b"ready")
    child.send(b"question\r")
    child.expect(b"Said")
    child.send(b"/quit\r")
    child.expect(pexpect.EOF)
    left = child.before
    child.close()
    assert child.exitstatus == 0
    assert (b"Saving the conversation" in left) is stalls
    assert (b"the last messages are not saved" in left) is stalls
    assert (b"To continue: chatterm run" in left) is not stalls
    assert b"Traceback" not in left
