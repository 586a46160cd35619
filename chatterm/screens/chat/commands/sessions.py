"""Commands about conversations: begin, open, name, export, import them, with documents of the library."""

from pathlib import Path
from typing import TYPE_CHECKING

from chatterm.backends.backend import EngineError
from chatterm.commands.context import ChatContext
from chatterm.commands.library import suggested
from chatterm.commands.registry import command, screen_command
from chatterm.conversation.preset import Preset
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.titles import given_title, pick
from chatterm.sessions.tree import Tree

if TYPE_CHECKING:
    from chatterm.screens.chat.chat import Chat


@screen_command("/reset", "Start a new conversation; this one stays saved", {"ctrl+n": ""}, ("clear", "new"))
def reset(chat: "Chat") -> None:
    def begin() -> None:
        chat.sessions.begin_anew()
        kept = Preset.of(chat.backend.options.system, chat.sampling).kept
        if documents := chat.conversation.documents:
            chat.sessions.begin_with(())
            names = " ".join(document.name for document in documents)
            kept += f" It begins without documents; /library open {names} begins one with them."
        chat.tell("A new conversation." + kept + chat.sessions.kept)

    chat.sessions.ask_to_leave(begin, "begin a new conversation")


@screen_command(
    "/sessions [NAME]", "Find and open an earlier conversation", {"f6": ""}, ("resume", "open", "load")
)
def sessions(chat: "Chat", name: str) -> None:
    store = chat.conversation.saved.store
    if store is None:
        raise EngineError("Conversations are not saved (see /settings), so there are none to open.")
    if name:
        chat.in_thread(lambda: pick(store.find(""), name).id, chat.sessions.open)
        return
    from chatterm.screens.sessions import SessionPicker

    chat.ask(SessionPicker(store, chat.conversation.saved.session), chat.sessions.open)


@screen_command(
    "/library [add FILE|open NAME]",
    "List documents, add one, or begin a conversation with some",
    {"alt+l": ""},
    ("documents",),
    offers=("add",),
    goes_on=suggested,
    takes_path=True,
)
def library(chat: "Chat", text: str) -> None:
    chat.documents.library(text)


@command("/rename TITLE", "Rename this conversation", {"alt+n": None})
def rename(chat: ChatContext, title: str) -> None:
    title = given_title(title)
    chat.rename(title)
    chat.say(f"This conversation is now called “{title}”.")


@screen_command(
    "/export [md|json|html] [FILE]",
    "Export the conversation to a file",
    {"alt+x": None},
    ("save",),
    offers=("md", "json", "html"),
    takes_path=True,
)
def export(chat: "Chat", text: str) -> None:
    from chatterm.sessions.export import FORMATS, choose_format, exported, file_name, write_export

    name, _, rest = text.partition(" ")
    chosen = next((form for form in FORMATS if form == name), None)
    target = rest.strip() if chosen else text
    if not chat.conversation.path:
        raise EngineError("There is nothing to export yet.")
    info, tree = chat.conversation.info(), chat.conversation.tree
    place = _file_path(target) if target else None
    form = chosen or (choose_format(place) if place else "md")
    path = place or Path(file_name(info, form))

    def write() -> Path:
        free, number = path, 2
        while not target and free.exists():  # a default name must not overwrite a file
            free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
        write_export(free, exported(info, tree, form))
        return free.absolute()

    chat.in_thread(write, lambda written: chat.say(f"Saved to {written}."))


@screen_command("/import FILE", "Import an exported conversation", {"alt+i": None}, takes_path=True)
def import_session(chat: "Chat", path: str) -> None:
    from chatterm.sessions.export import read_import

    def load() -> tuple[SessionInfo, Tree, str]:
        return *read_import(place), ""

    place = _file_path(path)
    chat.in_thread(chat.sessions.prepared(load), chat.sessions.add)


def _file_path(text: str) -> Path:
    """Parse a typed path, maybe with ~ or in quotes. Raise EngineError if ~NAME is not a user."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise EngineError(f"{text.split('/')[0]} is not a home folder here; write the full path.") from None
