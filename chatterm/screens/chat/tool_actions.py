"""/tools: the tools that are on, the rules, and the sandbox."""

from functools import partial

from chatterm.backends.backend import EngineError
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.drafts import Writing
from chatterm.screens.chat.parts import ScreenPart
from chatterm.screens.chat.tool_runner import ToolRunner
from chatterm.tools.builtin import sandbox


class ToolActions(ScreenPart):
    def __init__(self, screen: ChatBase, writing: Writing, tooling: ToolRunner) -> None:
        super().__init__(screen)
        self.writing = writing
        self.tooling = tooling

    def tools(self, text: str) -> None:
        if not text:
            self.screen.in_thread(sandbox.program, self._show)
            return
        if (info := self.screen.info) is not None and not info.calls_tools and text != "off":
            raise EngineError(f"{info.name} does not support tools; /model chooses another model.")
        session = self.tooling.session
        if servers := session.to_start(text):
            self.screen.hint(f"Starting {servers[0]}…", 3.0)
            self.screen.in_thread(partial(session.start, servers[0]), lambda _: self.tools(text))
            return
        said = session.switch(text)
        self.tooling.offer()
        self.screen.say(said)

    def use_server_prompt(self, server: str, name: str, argument: str) -> None:
        recall = f"/{name} {argument}".rstrip()
        self.screen.hint(f"Asking {server}…", 3.0)
        self.screen.in_thread(
            partial(self.tooling.session.prompt, server, name, argument),
            lambda text: self.writing.send_as_it_is(text, recall),
        )

    def _show(self, bwrap: str | None) -> None:
        from chatterm.screens.tools import ToolsScreen

        around = (
            "Commands run in a sandbox: no network, and read-only unless you allow more."
            if bwrap is not None
            else "Commands have no sandbox here: bubblewrap (bwrap) is missing."
        )
        session = self.tooling.session
        try:
            servers = [name for name in session.server_names() if name not in session.box.known]
        except EngineError as error:
            self.screen.say(str(error), "error")
            servers = []

        def closed(server: str | None) -> None:
            if server is not None:
                self.screen.attempt(partial(self.tools, f"on {server}"))

        self.screen.app.push_screen(ToolsScreen(session, around, servers, self._changed), closed)

    def _changed(self) -> None:
        self.screen.attempt(partial(self.tooling.offer))
