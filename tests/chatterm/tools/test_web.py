"""Fetching: public addresses, readable text, and servers that lie."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.conversation.web_page import readable
from chatterm.tools.builtin.web import MOST_BYTES, FetchUrl, _is_public, _text
from chatterm.tools.output import MOST_CHARACTERS
from chatterm.tools.tool import ToolError, ToolRun
from tests.chatterm.dripping import dripping

Serve = Callable[[bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answers every request with these bytes, and closes the connection."""
    sockets: list[socket.socket] = []

    def serve(data: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        connection.recv(65_536)
                        connection.sendall(data)
                    except OSError:
                        continue

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for listener in sockets:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def fetched(url: str, **options: bool) -> str:
    return FetchUrl(**options).plan({"url": url}).run(ToolRun())


def page(body: bytes, kind: str = "text/html", status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}\r\n".encode() + body


def test_the_readable_text_of_a_page(serve: Serve) -> None:
    body = b"<html><head><title>T</title></head><script>evil()</script><h1>Hello</h1><p>A &amp; B</p></html>"
    assert fetched(serve(page(body)), may_be_local=True) == "Hello\n\nA & B"


def test_a_page_that_steers_terminals_steers_none(serve: Serve) -> None:
    assert fetched(serve(page(b"a\x1b]0;x\x07b", "text/plain")), may_be_local=True) == "ab"


def test_this_machine_and_its_network_are_not_asked(serve: Serve) -> None:
    url = serve(page(b"secret"))
    with pytest.raises(ToolError, match="only public ones"):
        fetched(url)
    tool = FetchUrl(lambda host, port: ["93.184.216.34", "127.0.0.1"])
    with pytest.raises(ToolError, match="only public ones"):
        tool.plan({"url": url.replace("127.0.0.1", "example.org")}).run(ToolRun())


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1%eth0", "fd00::1",
     "::ffff:127.0.0.1", "2002:7f00:1::", "100.64.0.1", "224.0.0.1", "x"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not _is_public(address)
    assert _is_public("93.184.216.34")


def test_another_host_is_asked_for_anew(serve: Serve) -> None:
    target = serve(page(b"secret"))
    url = serve(page(b"", status="302 Found", more=f"Location: {target}/x\r\n"))
    with pytest.raises(ToolError, match="fetch that instead"):
        fetched(url, may_be_local=True)


def test_a_page_that_leads_to_itself_ends(serve: Serve) -> None:
    with pytest.raises(ToolError, match="too often"):
        fetched(serve(page(b"", status="302 Found", more="Location: /again\r\n")), may_be_local=True)


@pytest.mark.parametrize(
    "data",
    [
        page(b"short", more="Content-Length: 100000000\r\n"),
        page(b"x" * 100_000, more="Content-Length: 5\r\n"),
        page(b"y" * (MOST_BYTES + 5_000), "text/plain"),
        page(b"ffffffffffff\r\nxx", more="Transfer-Encoding: chunked\r\n"),
        page(b"zz\r\nxx", more="Transfer-Encoding: chunked\r\n"),
        page(b"-5\r\nxx", more="Transfer-Encoding: chunked\r\n"),
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 10_000,
        b"nonsense",
        b"",
        page(b"\x1f\x8b\x08", more="Content-Encoding: gzip\r\n"),
        page(b"x", "text/plain; charset=no-such-charset"),
        page(b"x", "image/png"),
        page(b"<" * 50_000),
        page(b"", status="302 Found", more="Location: http://[::1\r\n"),
    ],
)
def test_a_server_that_lies_gives_bounded_text_or_one_line(serve: Serve, data: bytes) -> None:
    try:
        said = fetched(serve(data), may_be_local=True)
    except ToolError as error:
        said = str(error).replace("\n", "x" * 2 * MOST_CHARACTERS)
    assert len(said) <= MOST_CHARACTERS + 100


@pytest.mark.parametrize("begins", [b"", page(b"begun")], ids=["head", "body"])
@pytest.mark.parametrize("why", ["Stopped.", "It took longer than 0 s."])
def test_a_server_that_gives_a_byte_now_and_then_is_left(
    begins: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, is_stopped = ToolRun(), why == "Stopped."
    monkeypatch.setattr("chatterm.tools.builtin.web._LIMIT", 3600 if is_stopped else 0.2)
    begun = running.stopped.set if is_stopped else lambda: None
    with dripping(begins or b"HTTP/1.1 200 OK\r\nX: ", begun) as url, pytest.raises(ToolError, match=why):
        FetchUrl(may_be_local=True).plan({"url": url}).run(running)


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://x", "gopher://x", "https://", "x", "https://a b", "https://user:pw@x/", "https://x\\@y",
     "https://x:99999/", "https://ex\u0430mple.org", "https://x/\x1b[0m", "javascript:1", "//x", " https://x"],
)  # fmt: skip
def test_what_is_no_address_of_a_page_is_refused(url: str) -> None:
    with pytest.raises(ToolError):
        FetchUrl().plan({"url": url})


def test_what_needs_a_second_look() -> None:
    assert FetchUrl().plan({"url": "https://example.org/a"}).dangers == ()
    for url in (
        "http://example.org/",
        "https://example.org/?q=secret",
        "https://xn--e1awd7f.com/",
        "https://x.org/" + "a" * 300,
    ):
        assert FetchUrl().plan({"url": url}).dangers


@given(st.binary(max_size=300))
def test_any_bytes_of_a_page_are_text(data: bytes) -> None:
    assert isinstance(_text("text/html", b"<html>" + data), str)


@pytest.mark.parametrize(
    "rest",
    ["<![ x", "<![foo[x]]>", "<![x>", "<a " * 2000, "<a b='" * 2000, "<!--" * 2000, "<![CDATA[" * 2000],
)
def test_markup_that_is_wrong_or_has_no_end_is_left_out(rest: str) -> None:
    page = f"<html><p>Rain</p>{rest}"
    assert _text("text/html", page.encode()) == "Rain"
    assert readable(page) == "Rain"


@pytest.mark.parametrize("charset", ["idna", "undefined", "punycode", "hex", "nonsense"])
def test_a_charset_that_is_none_is_utf8(charset: str) -> None:
    assert _text(f"text/plain; charset={charset}", "é".encode()) == "é"
