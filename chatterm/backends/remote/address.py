"""The location of a remote model: addresses as users write them, and the remotes of the settings. No network here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from chatterm.terminal.sanitize import one_line
from engine.errors import EngineError

Api = Literal["chat", "responses", "ollama"]

_SCHEMES: Mapping[str, Api] = {"openai": "chat", "responses": "responses", "ollama": "ollama"}
_ADDRESS = re.compile(r"(openai|responses|ollama)(?:\+(https?))?://(.*)", re.DOTALL)
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[\w.-]+)(?::(\d{1,5}))?")
_MODEL = re.compile(r"[^\x00-\x20\x7f-\xa0\ud800-\udfff]{1,300}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_OLLAMA_PORT = 11434
_KNOWN: Mapping[str, tuple[str, str]] = {
    "api.openai.com": ("/v1", "OPENAI_API_KEY"),
    "openrouter.ai": ("/api/v1", "OPENROUTER_API_KEY"),
}
"""Well-known hosts: the path of their API, and the variable that usually holds its key."""
_FORM = "openai://HOST:PORT/MODEL, responses://HOST:PORT/MODEL or ollama://HOST:PORT/MODEL"


@dataclass(frozen=True, slots=True)
class Remote:
    """A server in the settings: `[remotes.NAME]`."""

    url: str
    """Where its API begins, as in "https://openrouter.ai/api/v1"; "/v1" is added where there is no path."""
    model: str | None = None
    """The model to ask when only the remote is named; not set: the only one there."""
    api: Api = "chat"
    """The API it has: chat completions, responses, or Ollama's own."""
    key_env: str | None = None
    """The environment variable that has the key."""
    key_command: str | None = None
    """A command that prints the key on its first line, as in "pass show work"; no shell is involved."""
    keyring: str | None = None
    """The service under which the keyring of the system has the key; the user is the remote's name."""
    ca_file: str | None = None
    """A PEM file with certificates to trust, for a server that signed its own."""
    titles: bool = False
    """Whether it also writes the titles of conversations; servers on this machine always are."""


@dataclass(frozen=True, slots=True)
class Address:
    """One model of one server."""

    api: Api
    url: str
    """The base URL of the API, without a trailing slash."""
    model: str
    """"" until a model is chosen."""
    prefix: str
    """The part of `name` before the model: an address, or the name of a remote."""
    remote: Remote = field(default_factory=lambda: Remote(""))
    """The source of its key, and the certificates to trust."""

    @property
    def name(self) -> str:
        """The name that `found` resolves to this address."""
        return f"{self.prefix}/{self.model}" if self.model else self.prefix

    @property
    def host(self) -> str:
        """Host and port, for display."""
        return urlsplit(self.url).netloc

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine, so that no proxy is used."""
        return is_loopback(urlsplit(self.url).hostname or "")

    @property
    def is_secure(self) -> bool:
        return self.url.startswith("https:")

    @property
    def setting(self) -> str:
        """The settings section where the user configures this server."""
        return f"[remotes.{self.prefix}]" if "://" not in self.prefix else "a remote in the settings"


def found(model: str, remotes: Mapping[str, Remote]) -> Address | None:
    """Return the address of `model`; None for a model on this machine. Raises EngineError for an invalid address."""
    name, _, rest = model.partition("/")
    if "://" not in model and name in remotes:
        remote = remotes[name]
        return Address(remote.api, base_url(remote), _model(rest or remote.model or "", model), name, remote)
    if (match := _ADDRESS.fullmatch(model)) is not None:
        return _addressed(model, *match.groups())
    if "://" in model and not model.lower().startswith(("hf:", "file:")):
        raise EngineError(f"{one_line(model, 80)!r} is not the address of a model; write {_FORM}.")
    return None


def _addressed(model: str, scheme: str, transport: str | None, rest: str) -> Address:
    place, _, name = rest.partition("/")
    if "@" in place:
        raise EngineError(
            "An address must not contain a user or a key: they would be shown and saved. Name the server "
            "in the settings with key_env, key_command or keyring."
        )
    match = _HOST.fullmatch(place)
    try:
        host = urlsplit(f"//{place}").hostname or ""
    except ValueError:  # brackets around no IP address
        host = ""
    if match is None or not host or int(match[1] or 1) not in range(1, 65536):
        raise EngineError(f"{one_line(model, 80)!r} does not name a server; write {_FORM}.")
    is_plain = transport == "http" or (transport is None and is_loopback(host))
    api = _SCHEMES[scheme]
    path, key_env = _KNOWN.get(place.lower(), ("/v1", ""))
    if api == "ollama":
        path = ""
        place = place if match[1] or not is_plain else f"{place}:{_OLLAMA_PORT}"
    prefix = f"{scheme}{f'+{transport}' if transport else ''}://{rest.partition('/')[0]}"
    url = f"{'http' if is_plain else 'https'}://{place}{path}"
    remote = Remote(url, api=api, key_env=key_env if key_env and not is_plain else None)
    return Address(api, url, _model(name, model), prefix, remote)


def _model(name: str, whole: str) -> str:
    if name and not _MODEL.fullmatch(name):
        raise EngineError(
            f"{one_line(whole, 80)!r} does not name a model; the name of a model has no spaces."
        )
    return name


def base_url(remote: Remote) -> str:
    """Return the base URL of a remote's API. Raises EngineError; see `wrong_url`."""
    if problem := wrong_url(remote.url):
        raise EngineError(f"The url of a remote {problem}.")
    url = remote.url.rstrip("/")
    return url + "/v1" if remote.api != "ollama" and not urlsplit(url).path else url


def wrong_url(url: str) -> str:
    """Return what is wrong with the URL of a remote, to follow its name; "" if it is valid."""
    try:
        parts = urlsplit(url)
        is_place = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_place = False
    if not is_place or not _MODEL.fullmatch(url):
        return 'must be the address of a server, as in "https://example.org/v1"'
    if parts.username is not None or parts.password is not None:
        return "must not contain a user or a key; use key_env, key_command or keyring"
    if parts.query or parts.fragment:
        return "must end before any ? or #"
    return ""


def is_name(name: str) -> bool:
    """Return whether this is a valid name of a remote."""
    return _NAME.fullmatch(name) is not None


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Return whether this name or address is this machine only."""
    host = host.strip("[]").lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
