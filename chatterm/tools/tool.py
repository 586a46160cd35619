"""What a tool is: a plan of each call, which a person sees before anything happens, and the call itself."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from chatterm.backends.backend import EngineError, Tool

Effect = Literal["read", "write", "run", "fetch", "server"]
"""What a call may do: read below the working folder, write there, run a command, ask the network, ask an MCP server."""

Tone = Literal["text", "muted", "added", "removed", "warning"]
"""How a line of a plan is shown."""


class ToolError(EngineError):
    """A call that cannot be done. The message is one line, for the model and for the person."""


@dataclass(slots=True)
class ToolRun:
    """A call that is being done: how it is stopped, and where its output goes as it comes."""

    stopped: threading.Event = field(default_factory=threading.Event)
    say: Callable[[str], None] = lambda text: None
    """From any thread. The text is not sanitised."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """A call that nobody has agreed to yet. Making it did nothing but look at what is to be shown."""

    tool: str
    effect: Effect
    subject: str
    """What the call is about, in one text: a path, a command, an address. Rules compare it."""
    shown: tuple[tuple[str, Tone], ...]
    """Everything that the call was given, and a preview where there is one."""
    run: Callable[[ToolRun], str]
    """Do it, and return what the model is told. Raises ToolError. Blocks."""
    dangers: tuple[str, ...] = ()
    """Why this one needs a second look; such a call is always asked for."""


class Planner(Protocol):
    """One tool."""

    @property
    def tool(self) -> Tool:
        """What the model is told of it."""

    @property
    def effect(self) -> Effect: ...

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        """A call with these arguments. Raises ToolError where they make no sense; touches nothing then."""
