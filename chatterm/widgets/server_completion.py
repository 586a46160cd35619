"""Completions from MCP servers: resources after `@server:`, and arguments of their prompts."""

from collections.abc import Callable
from contextlib import suppress

from chatterm.backends.backend import EngineError
from chatterm.commands.registry import server_prompt
from chatterm.conversation.attachments import mentioned_server
from chatterm.tools.mcp.catalog import known, writing
from chatterm.tools.mcp.config import read_servers, servers_path
from chatterm.tools.session import ToolSession
from chatterm.widgets.path_completion import FoundPath

Tools = Callable[[], ToolSession]
"""Returns the tools of the session, created on demand; callable from any thread."""
_MOST = 200


def server_names() -> list[str]:
    """Return the names of the configured servers. Reads the disk."""
    with suppress(EngineError):
        return [server.name for server in read_servers(servers_path())]
    return []


def found_resources(path: str, names: list[str]) -> list[FoundPath]:
    """Return completions of `@path`: servers, or the resources of a server whose offers are known."""
    server = mentioned_server(path)
    if server not in names:
        begins = [name for name in names if path and name.lower().startswith(path.lower())]
        return [FoundPath(f"{name}:", True, "MCP server") for name in begins]
    begun = path.partition(":")[2].lower()
    offers = known().get(server)
    resources = offers.resources if offers is not None else ()
    lead = [one for one in resources if one.uri.lower().startswith(begun)]
    inside = [one for one in resources if one not in lead and begun in f"{one.uri} {one.name}".lower()]
    return [
        FoundPath(f"{server}:{one.uri}", one.is_template, one.name or one.about)
        for one in [*lead, *inside][:_MOST]
    ]


def unknown_server(path: str, names: list[str]) -> str:
    """Return the server that `path` mentions if its offers are not known yet; "" otherwise."""
    server = mentioned_server(path)
    return server if server in names and server not in known() else ""


def is_argument(text: str) -> bool:
    """Return whether an argument of a server's prompt is being typed."""
    found = server_prompt(text)
    return found is not None and writing(found[1], text[found[2] :]) is not None


def argument_help(text: str) -> str:
    """Return the description of the argument being typed; "" if there is none."""
    found = server_prompt(text)
    asked = writing(found[1], text[found[2] :]) if found is not None else None
    if found is None or asked is None:
        return ""
    argument = next(one for one in found[1].arguments if one.name == asked.name)
    needed = "" if argument.is_required else "optional"
    return " · ".join(filter(None, (argument.about, needed)))


def found_values(text: str, tools: Tools) -> list[str]:
    """Return the server's completions of the line `text`. Starts the server: do not call it on the screen's thread."""
    found = server_prompt(text)
    asked = writing(found[1], text[found[2] :]) if found is not None else None
    if found is None or asked is None:
        return []
    server, prompt, start = found
    with suppress(EngineError):
        values = tools().values(server, prompt.name, asked)
        return [text[:start] + asked.line(text[start:], value) for value in values]
    return []
