"""A person in a real terminal with MCP servers of other people, where they are there.

`npm install @modelcontextprotocol/server-filesystem` below CHATTERM_NODE, the SDK's `examples` folder as
CHATTERM_MCP_EXAMPLES: then these run.
"""

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chatterm.tools.mcp.client import Servers
from chatterm.tools.mcp.config import Server
from tests.chatterm.tools.mcp.test_journey import ROOT, until
from tests.counting import PATIENCE

pexpect = pytest.importorskip("pexpect")
pytest.importorskip("mcp")
FILES = (
    Path(os.environ.get("CHATTERM_NODE", "."))
    / "node_modules/@modelcontextprotocol/server-filesystem/dist/index.js"
)
EXAMPLES = Path(os.environ.get("CHATTERM_MCP_EXAMPLES", "/nowhere"))
needs_files = pytest.mark.skipif(
    not FILES.exists() or shutil.which("node") is None, reason="the server from npm is not there"
)
needs_examples = pytest.mark.skipif(
    not (EXAMPLES / "stories").is_dir(), reason="the SDK's examples are not there"
)


@contextmanager
def chatting(folder: Path, server: dict[str, Any], *call: str) -> Iterator[Any]:
    """The application in a terminal, with this server under the name `there`."""
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"there": server}}))
    environment = {
        **os.environ,
        "CHATTERM_CONFIG": str(folder / "config.toml"),
        "CHATTERM_DATA": str(folder / "data"),
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
    }
    arguments = ["-m", "tests.chatterm.tools.mcp.journey", *call]
    child = pexpect.spawn(
        sys.executable, arguments, cwd=str(ROOT), env=environment, encoding="utf-8", timeout=PATIENCE,
        dimensions=(40, 120),
    )  # fmt: skip
    child.delaybeforesend = 0.3
    try:
        child.expect("Write a message")
        yield child
        child.sendcontrol("q")
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    assert child.exitstatus == 0


def results(folder: Path) -> list[tuple[str, str]]:
    with sqlite3.connect(folder / "data" / "sessions.db") as saved:
        called = [row[0] for row in saved.execute("SELECT called FROM exchanges ORDER BY id")]
    return [(result[3], result[2]) for text in called if text for result in json.loads(text)["results"]]


@needs_files
@pytest.mark.parametrize(
    ("path", "state", "said"), [("a.txt", "done", "the Rhine"), ("../b.txt", "failed", "Access denied")]
)
def test_files_of_the_server_from_npm(tmp_path: Path, path: str, state: str, said: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "a.txt").write_text("the Rhine\n")
    (tmp_path / "b.txt").write_text("hush\n")
    call = json.dumps({"path": str(shared / path)})
    server = {"command": "node", "args": [str(FILES), str(shared)]}
    with chatting(tmp_path, server, "there__read_text_file", call) as child:
        child.send("/tools there\r")
        child.expect("there \\(14 tools")
        child.send("Which river is it?\r")
        child.expect("asks to use there__read_text_file")
        child.expect("choose, Enter answers")
        until(child, "\x1b[B", "❯ Yes, this once")
        until(child, "\r", "That was no")  # the first thing that the model says to any result
    ((found, text),) = results(tmp_path)
    assert found == state
    assert said in text
    assert "hush" not in text


@needs_examples
def test_prompts_of_the_sdks_own_example(tmp_path: Path) -> None:
    server = {
        "command": sys.executable,
        "args": ["-m", "stories.prompts.server"],
        "cwd": str(EXAMPLES),
        "env": {"PYTHONPATH": str(EXAMPLES)},
    }
    with chatting(tmp_path, server) as child:
        child.send("/tools there\r")
        child.expect("there has no tools")
        child.send("/there__gr")
        child.expect("Ask the model to greet someone")
        child.send("\t")
        child.expect("name=")
        child.send("name=Ada\r")
        child.expect("Write a one-line greeting for Ada")


@needs_examples
def test_resources_of_the_sdks_own_example() -> None:
    environment = {"PYTHONPATH": str(EXAMPLES)}
    server = Server("there", sys.executable, ("-m", "stories.resources.server"), environment, str(EXAMPLES))
    servers = Servers([server])
    try:
        offers = servers.offers("there")
        assert [resource.uri for resource in offers.resources] == ["config://app", "greeting://{name}"]
        assert servers.resource("there", "greeting://Ada") == "Hello, Ada!"
    finally:
        servers.close()
