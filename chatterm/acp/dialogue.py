"""One conversation of an editor: an ordinary session, a folder, and the tools that are on."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from acp import schema

from chatterm.backends.backend import EngineError
from chatterm.conversation.headless import Talk
from chatterm.tools.session import ToolSession

CHAT, READ, ALL, GIVEN = "chat", "read", "all", "given"


@dataclass(slots=True)
class Dialogue:
    id: str
    talk: Talk
    folder: Path
    tools: ToolSession
    servers: tuple[str, ...] = ()
    """MCP servers that the editor named, not yet started; the mode `all` starts them."""
    mode: str = CHAT
    is_running: bool = False
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the person stops the running prompt. Set on the loop, read from any thread."""
    numbers: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    """Returns the next number of a call, from 1."""


def modes(given: str, now: str) -> schema.SessionModeState:
    """Return the modes, sets of tools, with `now` as the current one; `given` names the command line's tools."""
    offered = {
        CHAT: ("Chat", "No tools: the model only talks."),
        READ: ("Read", "The model may ask to read and search files; you are asked each time."),
        ALL: (
            "All tools",
            "The model may ask to read, write, run commands and fetch pages; you are asked each time.",
        ),
    }
    if given:
        offered[GIVEN] = ("Chosen tools", f"The model may ask to use: {given}; you are asked each time.")
    return schema.SessionModeState(
        current_mode_id=now,
        available_modes=[
            schema.SessionMode(id=id, name=name, description=told) for id, (name, told) in offered.items()
        ],
    )


def switch(dialogue: Dialogue, mode: str, given: str) -> None:
    """Switch to the tools of this mode from the next message on. Raises EngineError; then nothing changes."""
    words: Mapping[str, tuple[str, ...]] = {
        CHAT: (),
        READ: ("read", "search"),
        ALL: ("all",),
        **({GIVEN: tuple(filter(None, (word.strip() for word in given.split(","))))} if given else {}),
    }
    if mode not in words:
        raise EngineError(f"There is no such mode; the modes are: {', '.join(words)}.")
    box = dialogue.tools.box
    box.on = {name for word in words[mode] for name in box.found(word)}
    dialogue.mode = mode
