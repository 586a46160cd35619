"""The interface of a tool: it plans each call, which a person sees before anything happens, and then runs it."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from chatterm.backends.backend import EngineError, Tool

Effect = Literal["read", "write", "run", "fetch", "server"]
"""What a call may do: read below the working folder, write there, run a command, fetch a page, call an MCP server."""

Tone = Literal["text", "muted", "added", "removed", "warning"]
"""How a line of a plan is shown."""


class ToolError(EngineError):
    """A call that cannot be done. The message is one line, for the model and for the person."""


@dataclass(slots=True)
class ToolRun:
    """A running call: how it is stopped, and where its output is streamed."""

    stopped: threading.Event = field(default_factory=threading.Event)
    say: Callable[[str], None] = lambda text: None
    """Receives output, from any thread. The text is not sanitised."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """A call that is not approved yet. Planning it has read at most what is to be shown."""

    tool: str
    effect: Effect
    subject: str
    """The object of the call as one text, compared by rules: a path, a command, an address."""
    shown: tuple[tuple[str, Tone], ...]
    """All arguments of the call, and a preview if there is one."""
    run: Callable[[ToolRun], str]
    """Runs the call and returns the text for the model. Raises ToolError. Blocks."""
    dangers: tuple[str, ...] = ()
    """Why this call always needs approval."""


class Planner(Protocol):
    """One tool."""

    @property
    def tool(self) -> Tool:
        """The description for the model."""

    @property
    def effect(self) -> Effect: ...

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        """Plan a call without side effects. Raises ToolError if the arguments are invalid."""
