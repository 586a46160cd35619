"""/tools: the tools that are on, the rules, and the sandbox."""

from functools import partial
from typing import TYPE_CHECKING

from chatterm.backends.backend import EngineError
from chatterm.commands.registry import screen_command
from chatterm.tools.builtin import sandbox

if TYPE_CHECKING:
    from chatterm.screens.chat.chat import Chat


@screen_command(
    "/tools [on|off|NAMES]",
    "Choose what the model may ask to use; remove rules",
    {"alt+o": ""},
    suggest=lambda: ["on", "off", "read", "search", "write", "run", "fetch", "all"],
)
def tools(chat: "Chat", text: str) -> None:
    if not text:
        chat.in_thread(sandbox.program, partial(_show, chat))
        return
    if (info := chat.info) is not None and not info.calls_tools and text != "off":
        raise EngineError(f"{info.name} does not support tools; /model chooses another model.")
    session = chat.tooling.session
    if servers := session.to_start(text):
        chat.hint(f"Starting {servers[0]}…", 3.0)
        chat.in_thread(partial(session.start, servers[0]), lambda _: tools(chat, text))
        return
    said = session.switch(text)
    chat.tooling.offer()
    chat.say(said)


def _show(chat: "Chat", bwrap: str | None) -> None:
    from chatterm.screens.tools import ToolsScreen

    around = (
        "Commands run in a sandbox: no network, and read-only unless you allow more."
        if bwrap is not None
        else "Commands have no sandbox here: bubblewrap (bwrap) is missing."
    )
    session = chat.tooling.session
    try:
        servers = [name for name in session.server_names() if name not in session.box.known]
    except EngineError as error:
        chat.say(str(error), "error")
        servers = []
    picker = ToolsScreen(session, around, servers, partial(chat.attempt, chat.tooling.offer))
    chat.ask(picker, lambda server: tools(chat, f"on {server}"))
