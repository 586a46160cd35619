"""A client against a real server of the SDK: what is offered, what comes back, and servers that misbehave."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from chatterm.backends.backend import ToolCall
from chatterm.tools.box import ToolRegistry
from chatterm.tools.mcp import client, stdio_transport
from chatterm.tools.mcp.client import RESTARTS, Servers, log_path
from chatterm.tools.mcp.config import Server
from chatterm.tools.mcp.planner import planners
from chatterm.tools.output import MOST_CHARACTERS
from chatterm.tools.session import performed
from chatterm.tools.tool import ToolError, ToolRun
from tests.counting import until

pytest.importorskip("mcp")
PROGRAM = str(Path(__file__).with_name("bare_server.py"))
SDK = str(Path(__file__).with_name("sdk_server.py"))


def stdio(program: str = PROGRAM, **more: object) -> Server:
    return Server("test", sys.executable, (program,), **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path))


@pytest.fixture
def servers() -> Iterator[Servers]:
    found = Servers([stdio()])
    yield found
    found.close()
    found.close()


@pytest.fixture
def sdk() -> Iterator[Servers]:
    found = Servers([stdio(SDK)])
    yield found
    found.close()


def test_tools_are_listed_and_called_and_what_they_say_is_harmless(sdk: Servers) -> None:
    tools = {tool.tool.name: tool for tool in planners(sdk, "test")}
    assert set(tools) == {f"test__{name}" for name in ("add", "say", "large", "fail")}
    assert tools["test__add"].tool.parameters["required"] == ["a", "b"]
    assert "\x1b" not in tools["test__large"].tool.description
    assert "\U000e0061" not in f"{tools['test__large'].tool.description}{tools['test__say'].tool.parameters}"
    plan = tools["test__add"].plan({"a": 2, "b": 3})
    assert (plan.effect, plan.subject) == ("server", '{"a": 2, "b": 3}')
    assert plan.run(ToolRun()) == "5"
    assert tools["test__say"].plan({"text": "a\x1b]0;x\x07b"}).run(ToolRun()) == "ab"
    large = tools["test__large"].plan({}).run(ToolRun())
    assert len(large) < MOST_CHARACTERS + 100
    assert "\x1b" not in large
    with pytest.raises(ToolError) as failed:
        tools["test__fail"].plan({}).run(ToolRun())
    assert "\n" not in str(failed.value)
    assert "\x1b" not in str(failed.value)
    with pytest.raises(ToolError):
        tools["test__add"].plan({"a": "x"}).run(ToolRun())
    assert "started" in log_path("test").read_text()


def test_a_server_gets_its_own_variables_and_not_the_persons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hush")
    servers = Servers([stdio(env={"GIVEN": "yes"})])
    try:
        assert servers.call("test", "secret", {"name": "GIVEN"}, ToolRun()) == "yes"
        assert servers.call("test", "secret", {"name": "MY_SECRET"}, ToolRun()) == "nothing"
    finally:
        servers.close()


def test_a_server_that_dies_is_started_again_so_many_times(servers: Servers) -> None:
    for _ in range(RESTARTS + 1):
        with pytest.raises(ToolError, match="has ended"):
            servers.call("test", "die", {}, ToolRun())
    with pytest.raises(ToolError, match="not started again"):
        servers.call("test", "add", {"a": 1, "b": 2}, ToolRun())


def test_a_server_that_died_while_nobody_asked_it_is_started_for_the_next_call(servers: Servers) -> None:
    servers.tools("test")
    link = servers._links["test"]
    pid = int(servers.call("test", "pid", {}, ToolRun()))
    os.kill(pid, signal.SIGKILL)
    until(lambda: link._is_dead)
    assert servers.call("test", "add", {"a": 1, "b": 2}, ToolRun()) == "3"
    assert int(servers.call("test", "pid", {}, ToolRun())) != pid


def test_a_server_that_sends_a_line_without_an_end_is_ended(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio_transport, "MOST_LINE", 8 << 20)
    assert servers.call("test", "add", {"a": 1, "b": 2}, ToolRun()) == "3"
    with pytest.raises(ToolError, match=r"^test sent a message of more than 8 MB; it was stopped\.$"):
        servers.call("test", "pour", {}, ToolRun())
    assert servers.call("test", "add", {"a": 1, "b": 2}, ToolRun()) == "3", "it is started again"
    assert log_path("test").stat().st_size < 2_500_000


def test_a_call_is_stopped_by_the_person(servers: Servers) -> None:
    running = ToolRun()
    servers.tools("test")
    threading.Timer(0.3, running.stopped.set).start()
    with pytest.raises(ToolError, match="Stopped"):
        servers.call("test", "wait", {}, running)


def test_servers_that_never_start_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "START_S", 1.0)
    wrong = [Server("none", "/no/such/program"), Server("gone", url="http://127.0.0.1:9/mcp")]
    servers = Servers(
        [
            *wrong,
            Server("dead", sys.executable, (PROGRAM, "dead")),
            Server("silent", sys.executable, (PROGRAM, "silent")),
            Server("flood", sys.executable, (PROGRAM, "flood", str(tmp_path))),
        ]
    )
    try:
        for name in ("none", "gone", "dead", "silent", "flood", "unknown"):
            with pytest.raises(ToolError) as error:
                servers.tools(name)
            assert "\n" not in str(error.value)
        assert not is_running(tmp_path)
    finally:
        servers.close()


LIAR = """
import json, sys
begun = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
results = {"initialize": begun, "tools/list": {"tools": []}, **json.loads(sys.argv[1])}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = results.get(asked["method"], {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


@pytest.mark.parametrize(
    ("results", "line"),
    [
        (
            {"initialize": {}},
            "test could not be started: what it sent is not a valid InitializeResult of MCP.",
        ),
        ({"tools/list": {"tools": "no"}}, "test: what it sent is not a valid ListToolsResult of MCP."),
        (
            {"tools/list": {"tools": [{"name": "t", "inputSchema": {"properties": 1, "required": 2}}]}},
            "test: what it sent is not a valid ListToolsResult of MCP.",
        ),
    ],
)
def test_wrong_types_are_told_of_in_our_words(results: dict[str, object], line: str) -> None:
    servers = Servers([Server("test", sys.executable, ("-c", LIAR, json.dumps(results)))])
    try:
        with pytest.raises(ToolError) as error:
            servers.tools("test")
        assert str(error.value) == line
    finally:
        servers.close()


def test_one_that_ends_at_once_names_its_log() -> None:
    servers = Servers([Server("test", sys.executable, ("-c", "import sys; sys.stdin.readline()"))])
    try:
        with pytest.raises(ToolError) as error:
            servers.tools("test")
        assert str(error.value) == f"test could not be started: it has ended; its log is {log_path('test')}."
    finally:
        servers.close()


def test_one_that_ends_quotes_the_last_line_of_its_log_of_this_start() -> None:
    dies = "import sys; sys.exit('not for you\\n\\x1b[2J no \\x07key\\n')"
    for program, said in ((dies, " with “no key”"), ("pass", "")):
        servers = Servers([Server("test", sys.executable, ("-c", program))])
        try:
            with pytest.raises(ToolError) as error:
                servers.tools("test")
            ended = f"test could not be started: it has ended{said}; its log is {log_path('test')}."
            assert str(error.value) == ended
        finally:
            servers.close()


def is_running(mark: Path) -> bool:
    """Whether some process has this among its arguments."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(mark).encode() in line.read_bytes():
                return True
    return False


async def test_a_process_is_ended_although_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), stdio_transport._ended

    async def noted(process: asyncio.subprocess.Process) -> None:
        begun.set()
        await ended(process)

    monkeypatch.setattr(stdio_transport, "_ended", noted)
    monkeypatch.setattr(stdio_transport, "_PATIENCE_S", 600.0)
    server = Server("test", sys.executable, ("-c", "import time; time.sleep(600)", str(tmp_path)))

    async def hold() -> None:
        with (tmp_path / "log").open("wb") as log:
            async with stdio_transport.open_stdio(server, log, lambda: None):
                assert is_running(tmp_path)

    held = asyncio.create_task(hold())
    await begun.wait()
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert not is_running(tmp_path)


def test_closing_ends_the_process(tmp_path: Path) -> None:
    servers = Servers([Server("test", sys.executable, (PROGRAM, "good", str(tmp_path)))])
    servers.tools("test")
    servers.close()
    assert not is_running(tmp_path)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return not client.connect_ex(("127.0.0.1", port))


def test_a_server_over_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SDK, str(port)], stderr=subprocess.DEVNULL)
    servers = Servers([Server("web", url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "k"})])
    try:
        until(lambda: listens(port))
        assert servers.call("web", "add", {"a": 2, "b": 3}, ToolRun()) == "5"
    finally:
        servers.close()
        process.kill()
        process.wait()


def test_all_tools_of_a_server_are_named_in_a_word_and_a_stopped_call_is_no_failure(servers: Servers) -> None:
    box = ToolRegistry(planners(servers, "test"))
    count = len(box.names)
    assert (
        box.switch("test")
        == f"The model may ask to use: test ({count} tools). You are asked before each call."
    )
    assert "test__add" in box.switch("off test__die")
    running = ToolRun()
    threading.Timer(0.3, running.stopped.set).start()
    call = ToolCall("test__wait", "{}")
    assert performed(call, box.planner("test__wait").plan({}), running).state == "stopped"
