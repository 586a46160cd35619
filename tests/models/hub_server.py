"""A Hub on the loopback interface: the protocol of huggingface.co, with the faults that tests ask for."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repo:
    """A repository: its files at every commit, and the commits that revisions stand for."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    access: str = "public"
    """"public", "private" (only with a token), "gated" (listed, files refused)."""

    def push(self, files: dict[str, bytes], revision: str = "main") -> str:
        """Make a commit of exactly these files; return its id."""
        seed = repr(sorted(files.items())) + revision + str(len(self.commits))
        commit = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[commit] = files
        self.revisions[revision] = commit
        return commit


@dataclass
class Request:
    """A client's request, and how many bytes of the body it received."""

    method: str
    path: str
    headers: dict[str, str]
    sent: int = 0


class HubServer:
    """Serves repositories while it is entered as a context manager; records every request.

    LFS files (weights) are redirected to `cdn`, another server, if there is one.
    """

    def __init__(self, cdn: "HubServer | None" = None) -> None:
        self.repos: dict[str, Repo] = {}
        self.cdn = cdn
        self.stored: dict[str, bytes] = {}
        """Contents that this server hands out as a CDN, by SHA-256."""
        self.token = "hf_good"
        """The one token that opens private and gated repositories."""
        self.requests: list[Request] = []
        self.cuts: dict[str, list[int]] = {}
        """Numbers of bytes after which the next responses for a file break off, by file name; used up one by one."""
        self.altered: set[str] = set()
        """Names of files whose content is altered in transit."""
        self.drips: Callable[[str], bool] = lambda path: False
        """Returns whether a body is sent byte by byte, 100 a second, by path."""
        self.drips_head: Callable[[str], bool] = lambda path: False
        """Returns whether the head of a response is sent so, and never ends, by path."""
        self.ranges = True
        self.moved: dict[str, str] = {}
        """New names of repositories, by their old names."""
        self.sizes = True
        """Whether the listing has sizes and ids (some mirrors have none)."""
        self.answer: Callable[[str], int | None] = lambda path: None
        """Returns a status to answer with instead, by path."""
        self.whole_answer: Callable[[str], tuple[bytes, dict[str, str]] | None] = lambda path: None
        """Returns a body and headers to answer with instead, by path."""
        self.before_file: Callable[[str], None] = lambda name: None
        """Called before the content of a file is sent; may block."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def repo(self, name: str, files: dict[str, bytes]) -> Repo:
        """Add a repository with one commit on main."""
        self.repos[name] = Repo()
        self.repos[name].push(files)
        return self.repos[name]

    def asked_for(self, name: str, method: str = "GET") -> list[Request]:
        """Return the requests for the content of the file `name`."""
        return [
            r
            for r in self.requests
            if r.method == method and r.path.endswith("/" + name) and "/api/" not in r.path
        ]


def is_lfs(path: str) -> bool:
    """Return whether the Hub would keep a file in large file storage."""
    return path.endswith((".safetensors", ".gguf", ".bin"))


@lru_cache(256)
def content_id(path: str, content: bytes) -> str:
    """Return the id of a file's content: SHA-256 in large file storage, git's blob id elsewhere."""
    return hashlib.sha256(content).hexdigest() if is_lfs(path) else git_id(content)


@lru_cache(256)
def git_id(content: bytes) -> str:
    """Return git's id of a blob."""
    return hashlib.sha1(b"blob %d\x00" % len(content) + content).hexdigest()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._serve()

        def do_GET(self) -> None:
            self._serve()

        def _serve(self) -> None:
            address = urlsplit(self.path)
            path = unquote(address.path)
            self.request_log = Request(self.command, path, {k.lower(): v for k, v in self.headers.items()})
            hub.requests.append(self.request_log)
            if (status := hub.answer(path)) is not None:
                self._reply(status, b"")
            elif (whole := hub.whole_answer(path)) is not None:
                self._reply(200, *whole)
            elif old := next((name for name in hub.moved if f"/{name}/" in path), None):
                self._reply(307, b"", {"Location": self.path.replace(old, hub.moved[old])})
            elif match := re.fullmatch(r"/cdn/([0-9a-f]{64})/(.+)", path):
                self._content(match[2], hub.stored[match[1]], {})
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path):
                # A branch with a slash comes quoted, so it is cut from the raw path.
                revision = unquote(address.path.rsplit("/", 1)[1])
                self._api(match[1], revision, match[2], "blobs" in parse_qs(address.query))
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(match[1], match[2], match[3])
            else:
                self._reply(404, b"")

        def _commit(self, name: str, revision: str, listing: bool) -> str | None:
            """Return the commit to serve, or None if an answer has been sent."""
            repo = hub.repos.get(name)
            token = self.headers.get("authorization") == f"Bearer {hub.token}"
            if repo is None or (repo.access == "private" and not token):
                anonymous = self.headers.get("authorization") is None
                self._reply(401 if anonymous else 404, b"", {"X-Error-Code": "RepoNotFound"})
            elif repo.access == "gated" and not token and not listing:
                anonymous = self.headers.get("authorization") is None
                self._reply(401 if anonymous else 403, b"", {"X-Error-Code": "GatedRepo"})
            elif (commit := repo.revisions.get(revision, revision)) not in repo.commits:
                self._reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                return commit
            return None

        def _api(self, name: str, revision: str, kind: str, blobs: bool) -> None:
            commit = self._commit(name, revision, True)
            if commit is None:
                return
            entries = []
            for path, content in hub.repos[name].commits[commit].items():
                blob = git_id(content)
                entry: dict[str, object] = {"rfilename": path}
                if kind == "tree":
                    entry = {"type": "file", "path": path, "oid": blob, "size": len(content)}
                elif hub.sizes and blobs:
                    entry |= {"blobId": blob, "size": len(content)}
                if is_lfs(path) and (kind == "tree" or (hub.sizes and blobs)):
                    sha = content_id(path, content)
                    entry["lfs"] = {"sha256": sha, "oid": sha, "size": len(content), "pointerSize": 134}
                entries.append(entry)
            answer = entries if kind == "tree" else {"id": name, "sha": commit, "siblings": entries}
            self._reply(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str, revision: str, path: str) -> None:
            commit = self._commit(name, revision, False)
            if commit is None:
                return
            content = hub.repos[name].commits[commit].get(path)
            if content is None:
                self._reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                return
            etag = content_id(path, content)
            headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
            if is_lfs(path):
                headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{etag}"'}
            if is_lfs(path) and hub.cdn is not None:
                hub.cdn.stored[etag] = content
                self._reply(302, b"", {**headers, "Location": f"{hub.cdn.url}/cdn/{etag}/{path}"})
            else:
                self._content(path, content, headers)

        def _content(self, path: str, content: bytes, headers: dict[str, str]) -> None:
            """Send a file from the byte at which the client resumes, with the requested faults."""
            name = path.rsplit("/", 1)[-1]
            status, start = 200, 0
            if hub.ranges and (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))):
                start = int(match[1])
                if start >= len(content):
                    self._reply(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                    return
                status = 206
                headers = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            if name in hub.altered:
                content = content[:-1] + bytes([content[-1] ^ 1])
            if self.command == "GET":
                hub.before_file(name)
            cuts = hub.cuts.get(name)
            cut = cuts.pop(0) if cuts and self.command == "GET" else None
            self._reply(status, content[start:], headers, cut)

        def _drip(self, begins: bytes) -> None:
            self.close_connection = True
            with suppress(OSError):  # the client goes away
                self.wfile.write(begins)
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.01)

        def _reply(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
        ) -> None:
            if hub.drips_head(urlsplit(self.path).path):
                self._drip(b"HTTP/1.1 200 OK\r\nX: ")
                return
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "GET":
                return
            part = body if cut is None else body[:cut]
            try:
                slow = len(part) if hub.drips(urlsplit(self.path).path) else 0
                for at in range(slow):
                    self.wfile.write(part[at : at + 1])
                    time.sleep(0.01)
                self.wfile.write(part[slow:])
                self.wfile.flush()
                self.request_log.sent = len(part)
            except OSError:  # the client went away
                self.close_connection = True
            if cut is not None:
                self.close_connection = True

    return Handler
