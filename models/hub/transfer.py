"""The Hub's protocol: list the files of a repository, and download one of them, resuming where it stopped.

It is implemented here because huggingface_hub discards an interrupted file. The requests are the same.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from models.errors import ModelError
from models.hub.digests import content_id
from models.hub.download_common import Meter, file_size
from models.hub.response_head import limit_head
from models.units import bytes_text

RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each retry; the count starts again whenever data has arrived, unless it came too slowly."""
SLOWEST, PATIENCE_S = 1000, 30.0
"""The lowest rate in bytes/s, averaged over so many seconds; a slower transfer counts as broken off."""

_MOST_ANSWER = 64 << 20
"""The most bytes of a response that is kept in memory; the listing of 100,000 files takes a quarter of it."""
_LONGEST_NAME = 255
"""Bytes of the name of a file; file systems refuse longer ones."""
_IDENTITY = re.compile(r"\w[\w.-]{0,127}", re.ASCII)

_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class Unreachable(ModelError):
    """The Hub could not be reached at all."""


class _Cut(Exception):
    """A transfer broke off; the message says how."""


class _Slow(_Cut):
    """Data arrives too slowly."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository."""

    path: str
    size: int | None
    """Bytes; None while unknown."""
    id: str | None
    """The hash of its content: SHA-256 (64 hex digits) or git's blob id (40); None while unknown."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Every file of a repository at one commit, by path."""

    commit: str
    files: dict[str, RemoteFile]


def http_library() -> ModuleType:
    """Return the HTTP client that huggingface_hub installs: httpx2, or httpx for older versions."""
    try:
        import httpx2
    except ImportError:
        import httpx  # type: ignore[import-not-found, unused-ignore]

        return httpx  # type: ignore[no-any-return, unused-ignore]
    return httpx2


class HubConnection:
    """A connection to one Hub, as a context manager. `token` is sent to the Hub, never to the host of a redirect."""

    def __init__(self, endpoint: str, token: str | None, timeout_s: float) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.token = token
        self._http = http_library()
        # identity: a compressed response has no length and cannot be resumed.
        headers = {"user-agent": "chatterm", "accept-encoding": "identity"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        try:
            _ = urlsplit(self.endpoint).port  # the client's own error would not say what is wrong
        except ValueError:
            raise self._no_address() from None
        try:
            self._client = self._http.Client(
                headers=headers,
                timeout=timeout_s,
                follow_redirects=True,
                event_hooks={"request": [_limit_head]},
            )
        except (ValueError, OSError, ImportError) as error:
            raise ModelError(
                f"Cannot open a connection: {error}; check HF_TOKEN and the proxy settings."
            ) from error

    def __enter__(self) -> "HubConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def listing(self, repo: str, revision: str, meter: Meter) -> Listing:
        """Return the files of `repo` at `revision`. Raises Unreachable, or ModelError if there is no such revision."""
        url = f"{self.endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        response, body = self._ask("GET", url, meter)
        if response.status_code != 200:
            raise self._refusal(response, repo, revision)
        try:
            answer = json.loads(body)
            commit = str(answer["sha"])
            files = [_remote_file(entry) for entry in answer["siblings"]]
            if not re.fullmatch(r"[0-9a-f]{40}", commit):
                raise ValueError(commit)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._no_hub() from error
        return Listing(commit, {file.path: file for file in files if is_safe(file.path)})

    def has(self, repo: str) -> bool:
        """Return whether the Hub has this repository, from a single request; never raises."""
        try:
            response = self._client.get(f"{self.endpoint}/api/models/{repo}/revision/main")
        except (self._http.RequestError, self._http.InvalidURL):
            return False
        return bool(response.status_code == 200)

    def measured(self, repo: str, commit: str, file: RemoteFile, meter: Meter) -> RemoteFile:
        """Return `file` with its size and id, from a HEAD request if the listing had none (some mirrors)."""
        if file.size is not None and file.id is not None:
            return file
        url = self._url(repo, commit, file.path)
        for _ in range(5):
            response, _ = self._ask("HEAD", url, meter, follow_redirects=False)
            target = urljoin(url, response.headers.get("location", url))
            # The response that redirects away from the Hub is the one with the metadata.
            if urlsplit(target).netloc != urlsplit(url).netloc or not response.has_redirect_location:
                break
            url = target
        if response.status_code >= 400:
            raise self._refusal(response, repo, commit, file.path)
        headers = response.headers
        size = headers.get("x-linked-size") or headers.get("content-length")
        etag = (headers.get("x-linked-etag") or headers.get("etag") or "").removeprefix("W/").strip('"')
        if not re.fullmatch(r"[0-9]{1,18}", size or "") or not is_identity(etag):
            raise ModelError(
                f"{self.endpoint} does not say how large {file.path} of {repo} is; check HF_ENDPOINT."
            )
        return replace(file, size=int(size), id=etag)

    def head(self, repo: str, commit: str, file: RemoteFile, count: int) -> bytes:
        """Return the first `count` bytes of `file`, or all if it has fewer. Raises Unreachable, ModelError."""
        url, data = self._url(repo, commit, file.path), b""
        try:
            with self._client.stream("GET", url, headers={"range": f"bytes=0-{count - 1}"}) as response:
                if response.status_code not in (200, 206):
                    raise self._refusal(response, repo, commit, file.path)
                for chunk in _paced(response.iter_bytes()):
                    data += chunk
                    if len(data) >= count:
                        break
        except (self._http.RequestError, _Slow) as error:
            raise self._unreachable(error) from error
        return data[:count]

    def download(
        self, repo: str, commit: str, file: RemoteFile, target: Path, meter: Meter, base: int
    ) -> None:
        """Download `file` to `target`, whole and checked, or not at all; a partial file is resumed.

        Data that has arrived is in `<target>.incomplete`. `base` bytes of the model were there before this file.
        Raises ModelError if the transfer keeps breaking off or the checksum is wrong, OSError from the disk.
        """
        assert file.size is not None
        part = partial(target)
        failures = 0
        while True:
            before = file_size(part)
            try:
                self._receive(repo, commit, file, part, meter, base)
                break
            except (self._http.RequestError, _Cut) as error:
                came = file_size(part) > before and not isinstance(error, _Slow)
                failures = 1 if came else failures + 1
                if failures > len(RETRY_WAITS_S):
                    raise ModelError(
                        f"The download of {repo} stopped at {bytes_text(file_size(part))} of "
                        f"{bytes_text(file.size)} in {file.path} ({_reason(error)}); "
                        "run the same command again to continue."
                    ) from error
                meter.pause(RETRY_WAITS_S[failures - 1])
        if not _matches(part, file):
            part.unlink()
            raise ModelError(
                f"The checksum of {file.path} from {repo} is wrong, so that file was discarded; "
                "run the same command again to download it from the start."
            )
        part.replace(target)

    def _receive(self, repo: str, commit: str, file: RemoteFile, part: Path, meter: Meter, base: int) -> None:
        """Append the missing bytes to `part`. Raises _Cut or the client's RequestError if the transfer breaks off."""
        assert file.size is not None
        have = file_size(part)
        if have == file.size:
            return
        headers = {"range": f"bytes={have}-"} if have else {}
        with self._client.stream("GET", self._url(repo, commit, file.path), headers=headers) as response:
            if response.status_code == 416:
                part.unlink(missing_ok=True)
                raise _Cut("the server refused to continue")
            if response.status_code in _TRY_AGAIN:
                raise _Cut(f"the server answered {response.status_code}")
            if response.status_code not in (200, 206):
                raise self._refusal(response, repo, commit, file.path)
            continued = response.status_code == 206 and response.headers.get("content-range", "").startswith(
                f"bytes {have}-"
            )
            have = have if continued else 0
            with part.open("ab" if continued else "wb") as output:
                for chunk in _paced(response.iter_bytes()):
                    output.write(chunk)
                    have += len(chunk)
                    if have > file.size:
                        break
                    meter.at(base + have)
                output.flush()
                os.fsync(output.fileno())
        if have < file.size:
            raise _Cut("the connection ended early")

    def _ask(self, method: str, url: str, meter: Meter, **options: Any) -> tuple[Any, bytes]:
        """Send a small request, retrying while the server is busy; return response and body. Raises Unreachable."""
        for wait_s in (*RETRY_WAITS_S[:2], None):
            try:
                with self._client.stream(method, url, **options) as response:
                    body = bytearray()
                    for chunk in _paced(response.iter_bytes()):
                        meter.at(0)
                        body += chunk
                        if len(body) > _MOST_ANSWER:
                            raise self._no_hub()
            except (self._http.ConnectError, self._http.ConnectTimeout) as error:
                raise self._unreachable(error) from error
            except (self._http.RequestError, _Slow) as error:
                if wait_s is None:
                    raise self._unreachable(error) from error
            except self._http.InvalidURL as error:
                raise self._no_address() from error
            else:
                if response.status_code not in _TRY_AGAIN or wait_s is None:
                    return response, bytes(body)
            meter.pause(wait_s)
        raise AssertionError("unreachable")

    def _url(self, repo: str, commit: str, path: str) -> str:
        return f"{self.endpoint}/{repo}/resolve/{commit}/{quote(path)}"

    def _no_address(self) -> ModelError:
        return ModelError(f"{self.endpoint} is not an address; check HF_ENDPOINT.")

    def _no_hub(self) -> ModelError:
        return ModelError(
            f"{self.endpoint} does not answer like a Hub; check HF_ENDPOINT and the proxy settings."
        )

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"Cannot reach {self.endpoint} ({_reason(error)}); check the network and the proxy settings. "
            "Models that are already here run without it: chatterm list"
        )

    def _refusal(self, response: Any, repo: str, revision: str, path: str | None = None) -> ModelError:
        """Return the error for an unsuccessful response."""
        status, code = response.status_code, response.headers.get("x-error-code", "")
        page = f"{self.endpoint}/{repo}"
        login = "log in with `hf auth login` or set HF_TOKEN"
        if code == "GatedRepo":
            if self.token:
                return ModelError(
                    f"{repo} is gated and your account has no access yet: accept its licence on {page}, "
                    f"or {login} with an account that has."
                )
            return ModelError(f"{repo} is gated: accept its licence on {page}, then {login}.")
        if status in (401, 403):
            if self.token:
                return ModelError(
                    f"The Hub refused your token for {repo} ({status}): {login} with one that may read it, "
                    f"and accept its licence on {page} if it has one."
                )
            return ModelError(
                f"There is no public model {repo} on {self.endpoint}: check the name; if it is private or "
                f"gated, accept its licence on {page} and {login}."
            )
        if code == "RevisionNotFound":
            return ModelError(
                f"{repo} has no revision {revision}; its branches and tags are on {page}/tree/main."
            )
        if code == "EntryNotFound" or (status == 404 and path):
            return ModelError(f"{repo} has no file {path}; its files are on {page}/tree/{revision}.")
        if status == 404:
            return ModelError(
                f"There is no model {repo} on {self.endpoint}; check the name (it is owner/name)."
            )
        if status == 429:
            return ModelError(f"{self.endpoint} is limiting requests; wait a few minutes, or {login}.")
        return ModelError(f"{self.endpoint} answered {status} for {path or repo}; try again later.")


def partial(target: Path) -> Path:
    """Return the path of the beginning of `target` while it is being downloaded."""
    return target.with_name(target.name + ".incomplete")


def _limit_head(request: Any) -> None:
    request.extensions["trace"] = limit_head


def _paced(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield chunks as they arrive. Raises _Slow if they come too slowly."""
    began, arrived = monotonic(), 0
    for chunk in chunks:
        yield chunk
        arrived += len(chunk)
        if (seconds := monotonic() - began) >= PATIENCE_S:
            if arrived < SLOWEST * seconds:
                raise _Slow(f"less than {bytes_text(SLOWEST)} a second arrives")
            began, arrived = monotonic(), 0


def _remote_file(entry: dict[str, Any]) -> RemoteFile:
    """Parse a file entry of the Hub's API."""
    lfs = entry.get("lfs") or {}
    size, identity = lfs.get("size", entry.get("size")), lfs.get("sha256") or entry.get("blobId")
    valid = is_size(size) and isinstance(identity, str) and re.fullmatch(r"[0-9a-f]{40,64}", identity)
    return RemoteFile(str(entry["rfilename"]), *((size, identity) if valid else (None, None)))


def is_safe(path: str) -> bool:
    """Return whether a path from a server is a valid file path that stays inside its folder."""
    return not re.search(r"[\\:\x00-\x1f\ud800-\udfff]", path) and all(
        part not in ("", ".", "..") and len(part.encode()) <= _LONGEST_NAME for part in path.split("/")
    )


def is_size(value: object) -> bool:
    """Return whether a file can have this many bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60


def is_identity(value: object) -> bool:
    """Return whether `value` is a safe name for a blob (".." is not)."""
    return isinstance(value, str) and _IDENTITY.fullmatch(value) is not None


def _matches(path: Path, file: RemoteFile) -> bool:
    """Return whether the content at `path` is that of `file`: its size, and its checksum if its id is one."""
    if file_size(path) != file.size:
        return False
    found = content_id(path, file.id or "")
    return found is None or found == file.id


def _reason(error: Exception) -> str:
    """Describe a broken connection in a few words."""
    kind = type(error).__name__
    if "Timeout" in kind:
        return "no answer in time"
    text = re.sub(r"\[Errno -?\d+\] ", "", str(error)).strip()
    return text.splitlines()[0][:120] if text else kind
