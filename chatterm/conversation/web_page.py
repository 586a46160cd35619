"""Fetch a web page as text when the user attaches its address. Its size is limited, its content untrusted."""

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from chatterm.conversation.attachment_errors import AttachmentError, NeedsYesError
from chatterm.conversation.pdf import pdf_text
from chatterm.terminal.sanitize import cleaned, one_line
from chatterm.tools.deadline import ended_in_time
from chatterm.tools.page import HtmlParser, decoded
from models.units import bytes_text

LARGEST = 5_000_000
"""Largest size of a page, in bytes."""
_SECONDS = 15.0
"""Time limit for all requests of a page, in seconds."""
_REDIRECTS = 5
_AGENT = "chatterm (a person attached this address)"
_QUIET = frozenset("script style noscript template svg nav header footer aside form button iframe".split())  # noqa: SIM905
_DEEPEST = 100
"""Deepest nesting of quiet elements that is tracked: every end tag is searched for among them."""
_BREAKS = frozenset(
    "p div section article main li ul ol tr table h1 h2 h3 h4 h5 h6 br pre blockquote dt dd hr".split()  # noqa: SIM905
)


def page_text(address: str, *, may_be_private: bool = False) -> str:
    """Return the readable text of a page. Waits for the network, for some seconds at most.

    Raises NeedsYesError for an address of this machine or its network unless `may_be_private`, and AttachmentError (one
    line) for any other problem.
    """
    deadline = monotonic() + _SECONDS
    shown = one_line(address, 200)
    private = ""
    for hop in range(_REDIRECTS + 1):
        parts = _checked(address, shown)
        where = _resolved(parts, shown)
        if any(not ipaddress.ip_address(ip.split("%")[0]).is_global for ip in where):
            if hop and parts.netloc != private:
                there = one_line(parts.hostname or "", 100)
                raise AttachmentError(
                    f"{shown} redirects to {there}, on this machine or its network; attach that address if you mean it."
                )
            if not may_be_private:
                raise NeedsYesError(f"{shown} is on this machine or its network.")
            private = parts.netloc
        try:
            with _asked(parts, where[0], deadline) as answer:
                if answer.status in (301, 302, 303, 307, 308) and (target := answer.headers.get("Location")):
                    try:
                        address = urljoin(address, target)
                    except ValueError:
                        raise AttachmentError(
                            f"{shown} redirects to something that is not an address."
                        ) from None
                    continue
                if answer.status != 200:
                    raise AttachmentError(f"{shown} answered {answer.status} {one_line(answer.reason, 60)}.")
                kind = answer.headers.get_content_type()
                charset = answer.headers.get_content_charset() or "utf-8"
                body = _body(answer, shown)
            return _page_text(body, kind, charset, shown)
        except (OSError, http.client.HTTPException) as error:
            said = getattr(error, "strerror", None) or str(error)  # without the system's number
            why = "it takes too long" if isinstance(error, TimeoutError) else one_line(said, 120)
            raise AttachmentError(f"{shown} cannot be fetched: {why or type(error).__name__}.") from error
    raise AttachmentError(f"{shown} redirects more than {_REDIRECTS} times.")


def _checked(address: str, shown: str) -> SplitResult:
    try:
        parts = urlsplit(address)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_fine = False
    if not is_fine or parts.username or parts.password:
        raise AttachmentError(
            f"{shown} cannot be attached; an address begins with http or https and has no password."
        )
    return parts


def _resolved(parts: SplitResult, shown: str) -> list[str]:
    """Return the IP addresses of the host. Raises AttachmentError."""
    assert parts.hostname is not None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AttachmentError(f"{shown}: there is no host {one_line(parts.hostname, 100)}.") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@contextmanager
def _asked(parts: SplitResult, ip: str, deadline: float) -> Iterator[http.client.HTTPResponse]:
    """Yield the response to a GET. It goes to the address that was checked, whatever the name resolves to now."""
    assert parts.hostname is not None
    timeout = max(deadline - monotonic(), 0.1)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=timeout)
    try:
        plain = socket.create_connection((ip, port), timeout)
        connection.sock = plain
        if parts.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(
                plain, server_hostname=parts.hostname, do_handshake_on_connect=False
            )
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
            "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?") if parts.query else ""
        )
        with ended_in_time(connection.sock, deadline):
            if isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.do_handshake()
            connection.request(
                "GET", path, headers={"User-Agent": _AGENT, "Accept": "text/html, text/*, application/pdf"}
            )
            yield connection.getresponse()
    finally:
        connection.close()


def _body(answer: http.client.HTTPResponse, shown: str) -> bytes:
    parts, size = [], 0
    while chunk := answer.read1(1 << 16):
        size += len(chunk)
        if size > LARGEST:
            raise AttachmentError(f"{shown} has more than {bytes_text(LARGEST)}; it cannot be attached.")
        parts.append(chunk)
    return b"".join(parts)


def _page_text(data: bytes, kind: str, charset: str, shown: str) -> str:
    if kind == "application/pdf":
        return pdf_text(data, shown)
    if not (kind.startswith("text/") or kind.endswith(("json", "xml", "javascript"))):
        raise AttachmentError(f"{shown} is {one_line(kind, 60)}; only text and PDF can be attached.")
    text = decoded(data, charset)
    text = readable(text) if kind in ("text/html", "application/xhtml+xml") else text
    if not text.strip():
        raise AttachmentError(f"{shown} has no text that could be read; it may need a browser.")
    return cleaned(text)


def readable(page: str) -> str:
    """Return the text of an HTML page, of its <main> or <article> if it has one, without menus and scripts."""
    reader = _Reader()
    reader.read(page)
    main = _tidy(reader.main)
    return main if len(main) >= 200 else _tidy(reader.all)


def _tidy(parts: list[str]) -> str:
    lines = [" ".join(line.split()) for line in "".join(parts).split("\n")]
    text: list[str] = []
    for line in lines:
        if line or (text and text[-1]):
            text.append(line)
    return "\n".join(text).strip()


class _Reader(HtmlParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.all: list[str] = []
        self.main: list[str] = []
        self._quiet: list[str] = []
        self._inside = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _QUIET and len(self._quiet) < _DEEPEST:
            self._quiet.append(tag)
        self._inside += tag in ("main", "article")
        if tag in _BREAKS:
            mark = (
                "#" * int(tag[1]) + " "
                if tag[0] == "h" and tag[1:].isdigit()
                else "- "
                if tag == "li"
                else ""
            )
            self._say(f"\n{mark}")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._quiet:
            while self._quiet.pop() != tag:
                pass
        if tag in ("main", "article"):
            self._inside = max(self._inside - 1, 0)
        if tag in _BREAKS:
            self._say("\n")

    def handle_data(self, data: str) -> None:
        self._say(data)

    def _say(self, text: str) -> None:
        if not self._quiet:
            self.all.append(text)
            if self._inside:
                self.main.append(text)
