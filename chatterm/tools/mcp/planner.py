"""Tools of MCP servers as tools of a session."""

import json
import re
from collections.abc import Mapping
from typing import Any

from chatterm.backends.backend import Tool
from chatterm.tools.arguments import show_arguments
from chatterm.tools.mcp.client import Servers, ServerTool
from chatterm.tools.tool import Effect, Tone, ToolPlan, ToolRun

_OTHER = re.compile(r"[^A-Za-z0-9_-]+")


class McpTool:
    """One tool of one server. Its description goes to the model and is treated as plain text only."""

    effect: Effect = "server"

    def __init__(self, servers: Servers, server: str, told: ServerTool, name: str) -> None:
        self._servers = servers
        self._server = server
        self._told = told
        self.tool = Tool(name, f"Of the server {server}: {told.description}", told.parameters)

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        given = dict(arguments)
        lines: list[tuple[str, Tone]] = [
            (f"server: {self._server}", "muted"),
            (f"tool: {self._told.name}", "muted"),
        ]
        lines += show_arguments(given) or [("no arguments", "muted")]

        def run(running: ToolRun) -> str:
            return self._servers.call(self._server, self._told.name, given, running)

        subject = json.dumps(given, ensure_ascii=False, sort_keys=True)
        return ToolPlan(self.tool.name, "server", subject, tuple(lines), run)


def planners(servers: Servers, server: str, running: ToolRun | None = None) -> list[McpTool]:
    """Return the tools of a server, starting it if needed. Raises ToolError."""
    found: dict[str, McpTool] = {}
    for told in servers.tools(server, running):
        plain = _OTHER.sub("_", told.name).strip("_") or "tool"
        name = f"{server}__{plain}"[:64]
        number = 2
        while name in found:  # two that differ only in replaced characters
            name = f"{server}__{plain}"[:60] + f"_{number}"
            number += 1
        found[name] = McpTool(servers, server, told, name)
    return list(found.values())
