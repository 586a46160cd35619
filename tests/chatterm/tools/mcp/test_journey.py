"""A person in a real terminal, a model that calls something, and a server in a process of its own."""

import json
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.counting import PATIENCE

pexpect = pytest.importorskip("pexpect")
pytest.importorskip("mcp")
ROOT = Path(__file__).parents[4]
SERVER = str(Path(__file__).with_name("bare_server.py"))


def until(child: Any, key: str, text: str) -> None:
    """Press a key now and then, as somebody does who waits, until this is shown."""
    for _ in range(60):
        child.send(key)
        if child.expect([text, pexpect.TIMEOUT], timeout=2) == 0:
            return
    raise AssertionError(f"{text} was never shown")


def test_what_was_typed_ahead_says_no_and_two_keys_on_purpose_say_yes(tmp_path: Path) -> None:
    (tmp_path / "mcp.json").write_text(
        json.dumps({"mcpServers": {"here": {"command": sys.executable, "args": [SERVER]}}})
    )
    environment = {
        **os.environ,
        "CHATTERM_CONFIG": str(tmp_path / "config.toml"),
        "CHATTERM_DATA": str(tmp_path / "data"),
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
    }
    child = pexpect.spawn(
        sys.executable, ["-m", "tests.chatterm.tools.mcp.journey"], cwd=str(ROOT), env=environment,
        encoding="utf-8", timeout=PATIENCE, dimensions=(40, 120),
    )  # fmt: skip
    child.delaybeforesend = 0.3  # keys that come faster are none of a person's
    try:
        child.expect("Write a message")
        child.send("/tools here\r")
        child.expect("here \\(6 tools")
        child.send("What is 20 + 22?\r")
        child.expect("asks to use here__add")
        child.send("yes\r1\r\x1b[B\r\r\r")  # in one go, as a paste or somebody who types on
        child.expect("choose, Enter answers")
        until(child, "\r", "That was no")
        child.send("Please do.\r")
        child.expect("asks to use here__add")
        child.expect("choose, Enter answers")
        until(child, "\x1b[B", "❯ Yes, this once")
        until(child, "\r", "That was yes")
        child.sendcontrol("q")
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    assert child.exitstatus == 0
    with sqlite3.connect(tmp_path / "data" / "sessions.db") as saved:
        called = [row[0] for row in saved.execute("SELECT called FROM exchanges ORDER BY id")]
    found = [json.loads(text)["results"] for text in called if text]
    states = [(result[3], result[2][:40]) for results in found for result in results]
    assert states == [("refused", "The user did not allow this. Do not try it"[:40]), ("done", "42")]
