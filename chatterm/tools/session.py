"""The tools of one session with what is allowed there, and calls as results."""

from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from chatterm.backends.backend import ToolCall, ToolResult
from chatterm.backends.exchange import ResultState
from chatterm.terminal.error_log import write_down
from chatterm.terminal.sanitize import one_line
from chatterm.tools.box import Box
from chatterm.tools.output import bounded
from chatterm.tools.policy import Policy
from chatterm.tools.tool import Plan, Running, ToolError

if TYPE_CHECKING:
    from chatterm.tools.mcp.client import Servers


@dataclass(slots=True)
class ToolSession:
    """All tools are off in the beginning."""

    folder: Path
    box: Box
    policy: Policy
    servers: "Servers | None" = None
    """MCP servers, once one was wanted."""

    @classmethod
    def of(cls, folder: Path, policy: Policy) -> "ToolSession":
        """With the tools that come with chatterm, confined to this folder."""
        from chatterm.tools.builtin.all import built_in  # not before somebody wants tools

        return cls(folder, Box(built_in(folder)), policy)

    def server_names(self) -> list[str]:
        """The MCP servers that there are. Raises EngineError for a file that cannot be understood."""
        from chatterm.tools.mcp.config import read_servers, servers_path

        return [server.name for server in read_servers(servers_path())]

    def start(self, name: str, running: Running | None = None) -> list[str]:
        """Start an MCP server, unless it runs; the names of its tools, which are off. Blocks.

        Raises ToolError, and EngineError where the SDK is missing or the file cannot be understood.
        """
        from chatterm.tools.mcp.client import Servers, needed
        from chatterm.tools.mcp.config import read_servers, servers_path
        from chatterm.tools.mcp.planner import planners

        needed()
        if self.servers is None or name not in self.servers.servers:
            if self.servers is not None:
                self.servers.close()
            self.servers = Servers(read_servers(servers_path()))
        found = planners(self.servers, name, running)
        self.box.put(found)
        return [planner.tool.name for planner in found]

    def close(self) -> None:
        """End what was started. Blocks for a moment."""
        if self.servers is not None:
            self.servers.close()

    def plan(self, call: ToolCall) -> Plan:
        """What a call would do. It may look at the disk for a preview. Raises ToolError."""
        return self.box.plan(call)


def performed(call: ToolCall, plan: Plan, running: Running) -> ToolResult:
    """Do it. Blocks; whatever goes wrong is a result."""
    began = monotonic()
    try:
        text = plan.run(running)
    except ToolError as error:
        return failed(call, str(error), monotonic() - began)
    except Exception as error:  # noqa: BLE001 (whatever it is, the chat goes on)
        write_down(error)
        return failed(call, f"The tool failed: {one_line(str(error), 200)}", monotonic() - began)
    state: ResultState = "stopped" if running.stopped.is_set() else "done"
    return ToolResult(call.name, call.arguments, bounded(text), state, round(monotonic() - began, 3))


def failed(call: ToolCall, why: str, seconds: float = 0.0) -> ToolResult:
    """The model is told what was wrong."""
    return ToolResult(call.name, call.arguments, f"Error: {bounded(why, 2_000)}", "failed", round(seconds, 3))


def refused(call: ToolCall) -> ToolResult:
    """The person said no."""
    said = "The person did not allow this. Do not try it again; go on without it, or ask the person."
    return ToolResult(call.name, call.arguments, said, "refused")


def stopped(call: ToolCall) -> ToolResult:
    """It was never begun."""
    return ToolResult(call.name, call.arguments, "The person stopped before this was run.", "stopped")
