"""Commands about messages: what is seen of them, here and by the model."""

from functools import partial
from typing import TYPE_CHECKING, Literal

from chatterm.backends.backend import EngineError
from chatterm.commands.context import ChatContext
from chatterm.commands.registry import command, screen_command
from chatterm.commands.reports import NO_ANSWER, no_thinking, thinking_text
from chatterm.conversation.compaction import PINNED
from chatterm.conversation.entries import AnswerEntry, Entry, UserEntry
from chatterm.conversation.tool_entry import RunEntry, ToolsEntry

if TYPE_CHECKING:
    from chatterm.screens.chat.chat import Chat


@screen_command(
    "/select [prev|next]",
    "Select a message to copy, edit or retry it",
    {"alt+up": "prev", "alt+down": "next"},
)
def select(chat: "Chat", where: str) -> None:
    entry = chat.transcript.neighbour(1 if where == "next" else -1)
    if entry is None:
        chat.back_to_composer()
    else:
        chat.select(entry)


@screen_command(
    "/copy [N|code N|all]",
    "Copy an answer, a code block, or everything",
    {"alt+c": "", "alt+k": "code"},
    offers=("code", "all"),
)
def copy(chat: "Chat", what: str) -> None:
    name, _, number = what.partition(" ")
    selected = chat.transcript.selected
    if name == "all":
        if number:
            raise EngineError(f"/copy all takes nothing more, not {number.strip()!r}.")
        _copy_all(chat)
    elif name == "code":
        chat.code.copy(number.strip() or "-1")
    elif not name and isinstance(selected, UserEntry | AnswerEntry):
        chat.copy_text(selected.source_text)
    elif (exchange := chat.exchange(name)) is not None:
        chat.copy_text(chat.conversation.entries_of(exchange)[1].source_text)
    else:
        raise EngineError(NO_ANSWER)


def _copy_all(chat: "Chat") -> None:
    from chatterm.sessions.as_markdown import to_markdown

    path = chat.conversation.path
    if not path:
        raise EngineError(NO_ANSWER)
    chat.in_thread(partial(to_markdown, chat.conversation.info(), path), chat.copy_text)


@screen_command("/find [TEXT]", "Search this conversation", {"ctrl+f": ""})
def find(chat: "Chat", text: str) -> None:
    if not chat.conversation.path:
        raise EngineError("There is nothing to search yet; /sessions searches earlier conversations.")
    chat.finding.open(text)


@screen_command("/expand", "Expand or collapse the thinking", {"ctrl+t": ""}, ("fold", "collapse"))
def expand(chat: "Chat") -> None:
    entry = chat.transcript.selected
    if not isinstance(entry, AnswerEntry | ToolsEntry):
        entry = next(filter(_can_fold, reversed(chat.transcript.entries)), None)
    if isinstance(entry, RunEntry | ToolsEntry):
        entry.toggle()
    elif isinstance(entry, AnswerEntry) and entry.has_thought:
        entry.show_thinking(not entry.is_open)
    else:
        raise EngineError("There is no thinking to expand.")
    chat.transcript.update()


def _can_fold(entry: Entry) -> bool:
    """Return whether the entry has a part that can be folded."""
    return isinstance(entry, RunEntry | ToolsEntry) or (isinstance(entry, AnswerEntry) and entry.has_thought)


@command("/think [on|off|auto|show|hide]", "Turn thinking on or off, show or hide it", {"alt+t": None})
def think(chat: ChatContext, mode: Literal["on", "off", "auto", "show", "hide", ""]) -> None:
    if mode == "show" or mode == "hide":
        chat.show_thinking(mode == "show")
        chat.say(f"Thinking is always {'shown' if mode == 'show' else 'hidden'}.")
        return
    if mode == "on" and (why := no_thinking(chat.info)):
        raise EngineError(why)
    if mode:
        chat.configure(think=mode)
    chat.say(thinking_text(mode or chat.backend.options.think, chat.info))


@screen_command(
    "/compact [files|start|off]", "Make room: a summary, no files, or start from here", {"alt+m": ""}
)
def compact(chat: "Chat", what: str) -> None:
    chat.compacting.compact(what)


@screen_command(
    "/pin [N]", "Pin a message, so that /compact leaves it whole; or unpin it", {"alt+p": ""}, ("unpin",)
)
def pin(chat: "Chat", which: str) -> None:
    exchange = chat.exchange(which)
    if exchange is None:
        raise EngineError("There is no message to pin yet.")
    chat.say(PINNED[chat.conversation.pin(exchange)])
