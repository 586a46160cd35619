"""MCP servers over HTTP that lie, flood, hang and send people elsewhere: one line each, and little memory."""

import gzip
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chatterm.tools.mcp import client, http_transport
from chatterm.tools.mcp.client import Servers
from chatterm.tools.mcp.config import Server
from chatterm.tools.tool import ToolError, ToolRun
from tests.chatterm.remote.rough_server import (
    Handler,
    Request,
    RoughServer,
    breaks,
    document,
    reply,
    rough,
    status,
    stream,
)
from tests.counting import PATIENCE

pytest.importorskip("mcp")
MOST = 1 << 20
LONG = b"x" * 65_536
NOTE = {"jsonrpc": "2.0", "method": "notifications/x", "params": {"x": "x" * 9_000}}
HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "x", "version": "1"},
}


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path))
    monkeypatch.setattr(http_transport, "MOST_BODY", MOST)
    monkeypatch.setattr(http_transport, "PACE_S", 0.01)


def serving(call: Handler, listen: Handler | None = None, method: str = "tools/call") -> Handler:
    """A server that is as it should be, but for its answers to `method`, and to who listens to it."""

    def handle(request: Request, sock: socket.socket) -> bool | None:
        if request.method != "POST":
            return (listen or status(405))(request, sock)
        message = request.json
        if "id" not in message:
            return reply(b"", 202)(request, sock)
        if message["method"] == method:
            return call(request, sock)
        if message["method"] == "initialize":
            return answer(HELLO, Mcp_Session_Id="s")(request, sock)
        if message["method"] == "tools/list":
            return answer({"tools": []})(request, sock)
        if message["method"] == "tools/call":
            return answer(said("fine"))(request, sock)
        return status(404)(request, sock)

    return handle


def answer(result: Any, **headers: str) -> Handler:
    def handle(request: Request, sock: socket.socket) -> bool | None:
        told = {"jsonrpc": "2.0", "id": request.json["id"], "result": result}
        return document(told, **headers)(request, sock)

    return handle


def said(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}


def endless(kind: str, part: bytes, length: str = "") -> Handler:
    """A body without an end, with the length it claims to have."""

    def handle(request: Request, sock: socket.socket) -> None:
        how = f"Content-Length: {length}" if length else "Connection: close"
        sock.sendall(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{how}\r\n\r\n".encode())
        while True:
            sock.sendall(part)

    return handle


@contextmanager
def asked(*handlers: Handler, **headers: str) -> Iterator[tuple[Servers, RoughServer]]:
    with rough(*handlers) as server:
        servers = Servers([Server("web", url=f"http://{server.place}/mcp", headers=headers)])
        try:
            yield servers, server
        finally:
            servers.close()


def why(servers: Servers) -> str:
    with pytest.raises(ToolError) as error:
        servers.call("web", "any", {}, ToolRun())
    (line,) = str(error.value).splitlines()
    assert line.startswith("web")
    return line


TOO_MUCH = "web sent an answer of more than 1 MB; it was stopped."


@pytest.mark.parametrize(
    "handler",
    [
        endless("application/json", LONG),
        endless("application/json", LONG, str(1 << 60)),
        endless("text/event-stream", b"data: " + LONG),
        endless("text/event-stream", b"data: x\n" * 4_096),
        endless("text/event-stream", b": a comment\n\n" * 4_096),
        endless("text/event-stream", b"data: " + json.dumps(NOTE).encode() + b"\n\n"),
    ],
    ids=["body", "length", "line", "event", "comments", "events"],
)  # fmt: skip
def test_an_answer_without_an_end_is_given_up(handler: Handler) -> None:
    with asked(serving(handler)) as (servers, _):
        assert why(servers) == TOO_MUCH
        assert why(servers) == TOO_MUCH, "it is connected to again"
    with asked(serving(handler, method="initialize")) as (servers, _):
        assert why(servers) == f"web could not be started: {TOO_MUCH.removesuffix('; it was stopped.')}."


def test_an_error_without_an_end_is_given_up() -> None:
    def wrong(request: Request, sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 500 X\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
        while True:
            sock.sendall(LONG)

    with asked(serving(wrong)) as (servers, _):
        assert why(servers) == TOO_MUCH


def test_what_is_small_only_while_it_is_packed_is_not_unpacked() -> None:
    packed = reply(gzip.compress(b" " * (64 << 20)), content_type="application/json", Content_Encoding="gzip")
    with asked(serving(packed)) as (servers, server):
        assert why(servers) == "web compresses its answers, although it was asked not to; it was stopped."
        assert {request.headers["accept-encoding"] for request in server.requests} == {"identity"}


def test_who_is_listened_to_may_say_much_but_no_event_is_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is heard there belongs to no call: calls go on."""
    heard, long = threading.Event(), threading.Event()

    def listen(request: Request, sock: socket.socket) -> bool | None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        if not heard.is_set():
            for _ in range(40):
                sock.sendall(b": " + LONG + b"\n\n")
            heard.set()
            return None
        try:
            while True:
                sock.sendall(b"data: " + LONG)
        finally:
            long.set()

    with asked(serving(answer(said("fine")), listen)) as (servers, _):
        for event in (heard, long):
            assert servers.call("web", "any", {}, ToolRun()) == "fine"
            assert event.wait(PATIENCE)
        assert servers.call("web", "any", {}, ToolRun()) == "fine"


@pytest.mark.parametrize(
    "handler",
    [
        breaks,
        stream(b'{"jsonrpc": "2.0"', ends=False, content_type="application/json"),
        stream(b"data: {", ends=False),
        stream(b"data: {\n\n"),
        stream(),
        reply(b"{" * 100_000, content_type="application/json"),
        reply(b"\x1b]0;x\x07<html>", content_type="text/html\x7f"),
        reply(b"", 202),
        status(500),
        status(404),
        reply(b"", 307, Location="http://other/\x1b[2J"),
        endless("application/json", b"{}", "1"),
        lambda request, sock: sock.sendall(b"\x1b[2J no HTTP \r\n\r\n"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_one_line(handler: Handler, capfd: pytest.CaptureFixture[str]) -> None:
    for method in ("tools/call", "initialize"):
        with asked(serving(handler, method=method)) as (servers, _):
            line = why(servers)
            assert line.isprintable()
            assert ".log" not in line, "there is none"
            assert "pydantic" not in line
    assert capfd.readouterr() == ("", ""), "nothing is written over the screen"


def test_one_that_refuses_says_what_it_needs() -> None:
    with asked(status(401)) as (servers, _):
        without = "requests without a key (mcp add --header sends one): 401"
        assert why(servers) == f"web could not be started: web refuses {without}."
    with asked(serving(status(403)), Authorization="hush") as (servers, _):
        assert why(servers) == "web refuses the key in its headers: 403; it was stopped."


@pytest.mark.parametrize(
    ("handler", "line"),
    [
        (status(500), "it answered 500 Internal Server Error"),
        (document({"detail": "slow down"}, 429), "it answered 429 Too Many Requests"),
        (reply(b"<html>", 503, content_type="text/html"), "it answered 503 Service Unavailable"),
        (document({"error": "gone"}, 599), "it answered 599"),
        (document([{"error": {}}], 400), "it answered 400 Bad Request"),
        (
            document({"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "no city"}}, 400),
            "no city",
        ),
    ],
)
def test_an_error_of_http_is_told_with_its_number(handler: Handler, line: str) -> None:
    with asked(serving(handler)) as (servers, _):
        assert why(servers) == f"web: {line}."
    with asked(serving(handler, method="initialize")) as (servers, _):
        assert why(servers) == f"web could not be started: {line}."


def test_a_place_where_nothing_is_says_so() -> None:
    with asked(status(404)) as (servers, _):
        assert why(servers) == "web could not be started: it answered 404 Not Found."


def test_one_that_trickles_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def trickle(request: Request, sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        while not over.wait(0.01):
            sock.sendall(b": well\n\n")

    monkeypatch.setattr(client, "START_S", 0.5)
    monkeypatch.setattr(client, "CALL_S", 0.5)
    with asked(serving(trickle)) as (servers, server):
        assert re.fullmatch(r"web did not (start|answer) within 0 s\.", why(servers)), (
            "whichever limit comes first"
        )
        assert server.closed.wait(PATIENCE), "nobody reads it any more"
        over.set()


def test_one_that_has_forgotten_the_session_is_connected_to_again() -> None:
    answers = [answer(said("one")), status(404), answer(said("two")), status(404), status(404)]
    with asked(serving(lambda request, sock: answers.pop(0)(request, sock))) as (servers, _):
        assert servers.call("web", "any", {}, ToolRun()) == "one"
        assert servers.call("web", "any", {}, ToolRun()) == "two"
        assert why(servers) == "web: Session terminated."
        assert not answers


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["initialize", "tools/call", ""])
def test_nobody_is_sent_elsewhere_with_the_keys(code: int, method: str) -> None:
    """Neither with a call nor as one that listens (`method` is empty)."""
    with rough(document({})) as elsewhere:
        away = reply(b"", code, Location=f"http://localhost:{elsewhere.port}/x?y")
        with asked(serving(away, None if method else away, method), Authorization="hush", X_Key="k") as (
            servers,
            server,
        ):
            if method:
                assert "localhost" in why(servers)
            else:
                assert servers.call("web", "any", {}, ToolRun()) == "fine"
            assert {request.headers["authorization"] for request in server.requests} == {"hush"}
        assert not elsewhere.connections


def test_a_way_within_its_own_place_is_followed() -> None:
    def handle(request: Request, sock: socket.socket) -> bool | None:
        if request.path == "/mcp":
            return reply(LONG, 307, Location="/mcp/")(request, sock)
        return serving(answer(said("fine")))(request, sock)

    with asked(handle, Authorization="hush") as (servers, server):
        assert servers.call("web", "any", {}, ToolRun()) == "fine"
        assert {request.headers["authorization"] for request in server.requests} == {"hush"}


def test_how_often_it_is_listened_to_again_is_not_for_it_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "PACE_S", 1e6)
    first = threading.Event()

    def listen(request: Request, sock: socket.socket) -> bool | None:
        first.set()
        return stream(b"retry: 0\nid: 1\n\n")(request, sock)

    with asked(serving(answer(said("fine")), listen)) as (servers, server):
        assert servers.call("web", "any", {}, ToolRun()) == "fine"
        assert first.wait(PATIENCE)
        for _ in range(20):
            assert servers.call("web", "any", {}, ToolRun()) == "fine"
        assert [request.method for request in server.requests].count("GET") == 1


def test_a_large_result_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One event may be as long as an answer: there may be a picture in it."""
    monkeypatch.setattr(http_transport, "MOST_BODY", 8 << 20)

    def handle(request: Request, sock: socket.socket) -> bool | None:
        told = {"jsonrpc": "2.0", "id": request.json["id"], "result": said("x" * (4 << 20))}
        return stream(b"data: " + json.dumps(told).encode() + b"\n\n")(request, sock)

    with asked(serving(handle)) as (servers, _):
        assert servers.call("web", "any", {}, ToolRun()).startswith("xxx")
