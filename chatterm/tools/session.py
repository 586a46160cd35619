"""The tools of one session and their permissions, and the results of calls."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from chatterm.backends.backend import ToolCall, ToolResult
from chatterm.backends.exchange import ResultState
from chatterm.settings.settings import SettingsError
from chatterm.terminal.error_log import write_down
from chatterm.terminal.sanitize import one_line
from chatterm.tools.box import ToolRegistry, tool_words
from chatterm.tools.output import bounded
from chatterm.tools.policy import Policy
from chatterm.tools.rules import rules_path
from chatterm.tools.tool import ToolError, ToolPlan, ToolRun

if TYPE_CHECKING:
    from chatterm.tools.mcp.catalog import DraftArgument, Offers
    from chatterm.tools.mcp.client import Servers


@dataclass(slots=True)
class ToolSession:
    """The tools of a session, all of them off at first."""

    folder: Path
    box: ToolRegistry
    policy: Policy
    servers: "Servers | None" = None
    """MCP servers, once one is needed."""
    without_tools: set[str] = field(default_factory=set)
    """Servers that were started and have no tools."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `servers`: composer and commands use it from their own threads."""

    @classmethod
    def of(cls, folder: Path, policy: Policy) -> "ToolSession":
        """Return a session with the built-in tools, confined to this folder."""
        from chatterm.tools.builtin.all import built_in  # imported only when tools are used

        return cls(folder, ToolRegistry(built_in(folder)), policy)

    @classmethod
    def open(cls, folder: Path, warn: Callable[[str], None]) -> "ToolSession":
        """Return a session with the rules of the settings; `warn` is told in a sentence if they cannot be read."""
        try:
            policy = Policy.of(rules_path())
        except SettingsError as error:
            warn(f"{error} Until then no permanent rules apply.")
            policy = Policy()
        return cls.of(folder, policy)

    def forget(self) -> bool:
        """Switch all tools off and drop the session's rules, before another conversation. Return whether any was on."""
        was_on = bool(self.box.on)
        self.policy.session.clear()
        self.box.on.clear()
        return was_on

    def server_names(self) -> list[str]:
        """Return the names of the configured MCP servers. Raises EngineError for an invalid file."""
        from chatterm.tools.mcp.config import read_servers, servers_path

        return [server.name for server in read_servers(servers_path())]

    def to_start(self, text: str) -> list[str]:
        """Return the servers that `/tools TEXT` names and that do not run yet. Raises as `server_names`."""
        known = self.box.known | self.without_tools
        unknown = [word.split("__")[0] for word in tool_words(text) if word not in known]
        if not unknown or text.split()[0] == "off":
            return []
        names = self.server_names()
        return [word for word in unknown if word in names]

    def switch(self, text: str) -> str:
        """Do what `/tools TEXT` asks for, once its servers run, and return what is on now. Raises EngineError."""
        bare = [word for word in tool_words(text) if word in self.without_tools]
        if bare:
            name = bare[0]
            return f"{name} has no tools; /{name}__ and @{name}: offer its prompts and resources."
        return self.box.switch(text)

    def start(self, name: str, running: ToolRun | None = None) -> list[str]:
        """Start an MCP server, unless it runs, and return the names of its tools, which are off. Blocks.

        Raises ToolError, and EngineError if the SDK is missing or the file is invalid.
        """
        from chatterm.tools.mcp.planner import planners

        found = planners(self._with(name), name, running)
        self.box.put(found)
        if not found:
            self.without_tools.add(name)
        with suppress(ToolError):  # its tools work without
            self.learn(name)
        return [planner.tool.name for planner in found]

    def learn(self, name: str) -> "Offers":
        """Ask a server for its prompts and resources, and save them. Blocks; raises as `start`."""
        from chatterm.tools.mcp.catalog import keep

        offers = self._with(name).offers(name)
        with suppress(SettingsError):  # then they are asked for again
            keep(name, offers)
        return offers

    def prompt(self, server: str, command: str, argument: str) -> str:
        """Return the text of the prompt behind this slash command. Blocks; raises as `start`."""
        from chatterm.tools.mcp.catalog import given, known

        offers = known().get(server) or self.learn(server)
        prompt = offers.commands(server).get(command)
        if prompt is None:
            raise ToolError(f"{server} has no such prompt any more; /tools {server} asks what it has.")
        arguments = given(command, prompt, argument)
        return self._with(server).prompt(server, prompt.name, arguments)

    def resource(self, server: str, written: str) -> str:
        """Return the text of the resource written after `@server:`. Blocks; raises as `start`."""
        from chatterm.tools.mcp.catalog import known

        offers = known().get(server)
        uri = offers.uri(written) if offers is not None else self.learn(server).uri(written)
        return self._with(server).resource(server, uri)

    def values(self, server: str, prompt: str, writing: "DraftArgument") -> list[str]:
        """Return completions of a prompt's argument that is being typed. Blocks; raises as `start`."""
        return self._with(server).values(server, prompt, writing.name, writing.begun, writing.given)

    def _with(self, name: str) -> "Servers":
        """Return the client of all servers, reopened if it does not know this one."""
        from chatterm.tools.mcp.client import Servers, needed
        from chatterm.tools.mcp.config import read_servers, servers_path

        needed()
        with self._lock:
            if self.servers is None or name not in self.servers.servers:
                if self.servers is not None:
                    self.servers.close()
                self.servers = Servers(read_servers(servers_path()))
            return self.servers

    def close(self) -> None:
        """Stop the servers that were started. Blocks for a moment."""
        if self.servers is not None:
            self.servers.close()

    def plan(self, call: ToolCall) -> ToolPlan:
        """Plan a call. It may read the disk for a preview. Raises ToolError."""
        return self.box.plan(call)


def performed(call: ToolCall, plan: ToolPlan, running: ToolRun) -> ToolResult:
    """Run a planned call and return its result. Blocks; failures are results, too."""
    began = monotonic()
    try:
        text = plan.run(running)
    except ToolError as error:
        result = failed(call, str(error), monotonic() - began)
        return replace(result, state="stopped") if running.stopped.is_set() else result
    except Exception as error:  # noqa: BLE001 (whatever it is, the chat goes on)
        write_down(error)
        return failed(call, f"The tool failed: {one_line(str(error), 200)}", monotonic() - began)
    state: ResultState = "stopped" if running.stopped.is_set() else "done"
    return ToolResult(call.name, call.arguments, bounded(text), state, round(monotonic() - began, 3))


def failed(call: ToolCall, why: str, seconds: float = 0.0) -> ToolResult:
    """Return the result that tells the model what went wrong."""
    return ToolResult(call.name, call.arguments, f"Error: {bounded(why, 2_000)}", "failed", round(seconds, 3))


def refused(call: ToolCall) -> ToolResult:
    """Return the result of a call that the person refused."""
    said = "The user did not allow this. Do not try it again; continue without it, or ask the user."
    return ToolResult(call.name, call.arguments, said, "refused")


def stopped(call: ToolCall) -> ToolResult:
    """Return the result of a call that was stopped before it began."""
    return ToolResult(call.name, call.arguments, "The user stopped before this was run.", "stopped")
