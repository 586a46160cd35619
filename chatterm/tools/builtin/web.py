"""Fetching a page: its readable text, from public addresses only."""

import http.client
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from chatterm.backends.backend import Tool
from chatterm.terminal.sanitize import is_safe, one_line
from chatterm.tools.arguments import check_arguments, flat_schema
from chatterm.tools.deadline import ended_in_time
from chatterm.tools.output import bounded
from chatterm.tools.page import HtmlParser, decoded
from chatterm.tools.tool import Effect, Tone, ToolError, ToolPlan, ToolRun

MOST_BYTES = 2_000_000
_LIMIT = 30.0
"""Seconds for the whole fetch."""
_STEP = 10.0
"""Seconds that one read may take."""
_REDIRECTS = 5
_SKIPPED = frozenset({"script", "style", "noscript", "template", "svg", "head", "iframe", "object"})
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_BLOCKS = frozenset(
    {"p", "div", "br", "li", "tr", *_HEADINGS, "pre", "section", "article", "table", "ul", "ol"}
)
_HEADERS = {"User-Agent": "chatterm", "Accept": "text/html, text/*", "Accept-Encoding": "identity"}

Find = Callable[[str, int], list[str]]
"""The addresses of a host. Raises OSError."""


class FetchUrl:
    effect: Effect = "fetch"
    tool = Tool(
        "fetch_url",
        "Fetch a page from the web and give its readable text.",
        flat_schema(["url"], url=("string", "The address: https://...")),
    )

    def __init__(self, find: Find | None = None, may_be_local: bool = False) -> None:
        """Resolve hosts with `find`; `may_be_local` also allows addresses that are not public."""
        self._find = find or _addresses
        self._may_be_local = may_be_local

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        url = check_arguments(self.tool, arguments)["url"]
        parts = _parts(url)
        lines: list[tuple[str, Tone]] = [(f"url: {url}", "text")]
        found = [] if parts.scheme == "https" else ["not encrypted: others may read and change it"]
        if parts.query or len(parts.path) > 200:
            found.append("sends what is in the address to this host")
        if not (parts.hostname or "").isascii() or "xn--" in (parts.hostname or ""):
            found.append("the host's name may look like another one")

        def run(running: ToolRun) -> str:
            return self._fetched(url, running)

        return ToolPlan("fetch_url", "fetch", url, tuple(lines), run, tuple(found))

    def _fetched(self, url: str, running: ToolRun) -> str:
        until = time.monotonic() + _LIMIT
        origin = _origin(_parts(url))
        for _ in range(_REDIRECTS):
            status, where, kind, data = self._once(_parts(url), until, running)
            if where is None:
                text = _text(kind, data)
                said = "" if status == 200 else f"[HTTP status {status}]\n"
                return bounded(said + text) or "The page has no text."
            try:
                url = urljoin(url, where)
            except ValueError:
                raise ToolError("It redirects to something that is not an address.") from None
            if _origin(_parts(url)) != origin:
                # The approval was for one host: another one needs its own.
                raise ToolError(f"It redirects to {one_line(url, 300)}; fetch that instead.")
        raise ToolError("It redirects too often.")

    def _once(self, parts: SplitResult, until: float, running: ToolRun) -> tuple[int, str | None, str, bytes]:
        """Send one request and return its status, the redirect's target or None, the content type, and the body."""
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        connection = http.client.HTTPConnection(host, port, timeout=_STEP)
        try:
            connection.sock = self._connected(host, port, parts.scheme == "https")
            with ended_in_time(connection.sock, until, running.stopped):
                if isinstance(connection.sock, ssl.SSLSocket):
                    connection.sock.do_handshake()
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", target, headers=_HEADERS)
                answer = connection.getresponse()
                where = answer.getheader("Location") if answer.status in (301, 302, 303, 307, 308) else None
                data = b""
                while where is None and len(data) <= MOST_BYTES:
                    piece = answer.read1(65_536)  # whatever its reported length
                    if not piece:
                        break
                    data += piece
            return answer.status, where, answer.getheader("Content-Type") or "", data[:MOST_BYTES]
        except (OSError, http.client.HTTPException, ValueError) as error:
            if running.stopped.is_set():
                raise ToolError("Stopped.") from None
            if time.monotonic() > until:
                raise ToolError(f"It took longer than {_LIMIT:.0f} s.") from None
            said = getattr(error, "strerror", None) or str(error)  # without the system's number
            raise ToolError(
                f"{one_line(host, 100)}: {one_line(said, 200) or type(error).__name__}."
            ) from None
        finally:
            connection.close()

    def _connected(self, host: str, port: int, is_encrypted: bool) -> socket.socket:
        """Connect to the address that was checked: resolving the name again may give another one."""
        addresses = self._find(host, port)
        if not addresses:
            raise OSError("no address is known")
        if not self._may_be_local and not all(_is_public(address) for address in addresses):
            raise ToolError(
                f"{one_line(host, 100)} is an address of this machine or network; only public ones are fetched."
            )
        plain = socket.create_connection((addresses[0], port), timeout=_STEP)
        if not is_encrypted:
            return plain
        try:
            context = ssl.create_default_context()
            return context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise


def _parts(url: str) -> SplitResult:
    """Split a page's URL into its parts. Raises ToolError for one that cannot be fetched."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not is_safe(url)
        or re.search(r"\s", url)
    ):
        raise ToolError("url must begin with https:// or http:// and name a host.")
    if parts.username is not None or parts.password is not None or "\\" in url:
        raise ToolError("url must have no user, no password and no backslash.")
    if not url.isascii():
        raise ToolError("url must be written in ASCII; escape other characters.")
    return parts


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def _is_public(address: str) -> bool:
    try:
        known = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    if isinstance(known, ipaddress.IPv6Address):
        inner = known.ipv4_mapped or known.sixtofour or (known.teredo[1] if known.teredo else None)
        if inner is not None:
            known = inner
    return known.is_global and not known.is_multicast


def _text(kind: str, data: bytes) -> str:
    """Return the readable text of a body. Raises ToolError if it is not text."""
    name = kind.split(";")[0].strip().lower()
    if not (
        name.startswith("text/")
        or name in ("", "application/json", "application/xml", "application/xhtml+xml")
    ):
        raise ToolError(f"It is not text but {one_line(name, 60)}.")
    charset = re.search(r"charset=[\"']?([\w-]{1,40})", kind, re.IGNORECASE)
    text = decoded(data, charset[1] if charset else "utf-8")
    if "html" not in name and not text.lstrip()[:15].lower().startswith(("<!doctype html", "<html")):
        return text
    reader = _Reader()
    reader.read(text)
    rows = (" ".join(row.split()) for row in "".join(reader.said).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(rows)).strip()


class _Reader(HtmlParser):
    """Collects the text of a page that a person would read."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self._within = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIPPED:
            self._within += 1
        elif tag in _BLOCKS:
            self.said.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _SKIPPED:
            self._within = max(self._within - 1, 0)
        elif tag in _BLOCKS:
            self.said.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._within:
            self.said.append(data)
