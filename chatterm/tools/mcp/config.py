"""The configured servers: a file beside the settings, in the format that other programs use."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from chatterm.backends.backend import EngineError
from chatterm.settings.file import write
from chatterm.settings.paths import config_path
from chatterm.settings.toml import read_source
from chatterm.terminal.sanitize import is_safe, one_line

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VARIABLE = re.compile(r"[^=\0]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_USER = re.compile("(?<=://)[^/?#]*@")
_MOST = 64


@dataclass(frozen=True, slots=True)
class Server:
    """One server: a program that is started here, or an address."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Its command or address as shown: without anything that may be secret (variables, headers, a password)."""
        return _USER.sub("***@", self.url) or " ".join([self.command, *self.args])


def servers_path() -> Path:
    return config_path().parent / "mcp.json"


def checked_name(name: str) -> str:
    """Return `name` if a server can have it. Raises EngineError."""
    if not _NAME.fullmatch(name) or "__" in name:
        raise EngineError(
            f"{one_line(name, 40)!r} cannot be the name of a server; use up to 32 letters, digits, - and _, but not __."
        )
    return name


def parse_server(name: str, data: Any, where: str) -> Server:
    """Parse one entry of the file. Raises EngineError."""
    checked_name(name)
    if not isinstance(data, dict):
        raise EngineError(f"{where}: {name} must be an object.")

    def wrong(key: str, what: str) -> EngineError:
        return EngineError(f"{where}: {key} of {name} must be {what}.")

    def text(key: str) -> str:
        value = data.get(key, "")
        if not isinstance(value, str) or not is_safe(value) or "\n" in value:
            raise wrong(key, "text on one line")
        return value

    def texts(key: str, names: re.Pattern[str], unfit: str = "\0") -> dict[str, str]:
        value = data.get(key, {})
        if not isinstance(value, dict) or not all(_is_text(item, unfit) for item in value.values()):
            raise wrong(key, "an object of strings")
        for one in value:
            if not names.fullmatch(one) or not _is_text(one):
                raise EngineError(f"{where}: {key} of {name} has the invalid name {one_line(one, 40)!r}.")
        return dict(value)

    args = data.get("args", [])
    if not isinstance(args, list) or not all(map(_is_text, args)):
        raise wrong("args", "a list of strings")
    env, headers = texts("env", _VARIABLE), texts("headers", _HEADER, "\0\r\n")
    made = Server(name, text("command"), tuple(args), env, text("cwd"), text("url"), headers)
    if bool(made.command) == bool(made.url):
        raise EngineError(f'{where}: {name} needs either a "command" or a "url".')
    if made.url and not _is_address(made.url):
        raise wrong("url", "an address that begins with https:// or http://")
    return made


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_text(value: object, unfit: str = "\0") -> bool:
    """Return whether `value` is text that can be passed to a program and written to a file."""
    return isinstance(value, str) and not _SURROGATE.search(value) and not any(c in value for c in unfit)


def read_servers(path: Path) -> list[Server]:
    """Return the servers of a file, [] if it does not exist. Raises EngineError for an invalid one."""
    source = read_source(path)
    if not source and not path.exists():
        return []
    try:
        data: Any = json.loads(source)
    except (ValueError, RecursionError):
        raise EngineError(f"{path} is not JSON; fix it, or delete it.") from None
    found = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise EngineError(f'{path} has no object "mcpServers"; fix it, or delete it.')
    if len(found) > _MOST:
        raise EngineError(f"{path} has {len(found)} MCP servers; leave at most {_MOST} in it.")
    return [parse_server(name, item, str(path)) for name, item in found.items()]


def write_servers(path: Path, servers: list[Server]) -> None:
    """Replace the file; a new one is private, since it may contain keys. Raises EngineError, SettingsError."""
    if len(servers) > _MOST:
        raise EngineError(f"At most {_MOST} MCP servers are kept; remove some: chatterm mcp remove NAME")
    made = {server.name: _written(server) for server in servers}
    write(path, json.dumps({"mcpServers": made}, indent=1, ensure_ascii=False) + "\n")


def _written(server: Server) -> dict[str, Any]:
    if server.url:
        return {"url": server.url, **({"headers": dict(server.headers)} if server.headers else {})}
    made: dict[str, Any] = {"command": server.command, "args": list(server.args)}
    if server.env:
        made["env"] = dict(server.env)
    if server.cwd:
        made["cwd"] = server.cwd
    return made
