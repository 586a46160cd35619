"""The chat as its commands see it: the screen with its parts. It is a `ChatContext`."""

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Unpack

from chatterm.backends import worker
from chatterm.backends.backend import Backend, ConversationSettings, EngineError, Exchange
from chatterm.commands.registry import COMMANDS, Command
from chatterm.commands.reports import LOADING
from chatterm.conversation.compaction import nth
from chatterm.conversation.entries import AnswerEntry
from chatterm.conversation.session_tree import SessionTree
from chatterm.markdown.lines import Line
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.code_blocks import CodeBlocks
from chatterm.screens.chat.compacting import Compacting
from chatterm.screens.chat.documents import Documents
from chatterm.screens.chat.drafts import Writing
from chatterm.screens.chat.finding import Finding
from chatterm.screens.chat.model_choice import ModelChoosing
from chatterm.screens.chat.sessions import Sessions
from chatterm.screens.chat.tool_runner import ToolRunner
from chatterm.screens.report import ReportScreen
from chatterm.screens.themed_app import ThemedApp
from chatterm.settings.settings import Settings


class Chat(ChatBase):
    def __init__(
        self, backend: Backend, thread: worker.Worker, saved: SessionTree, settings: Settings
    ) -> None:
        super().__init__(backend, thread, saved, settings)
        self.finding = Finding(self)
        self.tooling = ToolRunner(self)
        self.writing = Writing(self, lambda command, argument: command.run(self, argument))
        self.code = CodeBlocks(self, self.tooling)
        self.compacting = Compacting(self)
        self.sessions = Sessions(self, self.writing, self.tooling)
        self.documents = Documents(self, self.sessions)
        self.models = ModelChoosing(self, self.sessions)

    # --- running commands ---

    def choose(self, command: Command, argument: str | None) -> None:
        """Run a command, or put it into the composer if `argument` is None and must be typed."""
        if argument is not None:
            self.attempt(partial(command.run, self, argument))
        else:
            self.writing.begin_command(command)

    def action_run_command(self, name: str, argument: str | None) -> None:
        self.choose(next(command for command in COMMANDS if command.name == name), argument)

    # --- what commands work with ---

    @property
    def path(self) -> Sequence[Exchange]:
        return self.conversation.path

    @property
    def sampling(self) -> dict[str, Any]:
        return self.conversation.sampling

    def report(
        self, name: str, title: str, lines: Callable[[int], Iterable[Line]], plain: Sequence[str] = ()
    ) -> None:
        self.ask(ReportScreen(name, title, lines), lambda other: self.action_run_command(other, ""))

    def configure(self, **chosen: Unpack[ConversationSettings]) -> None:
        options = chosen.copy()
        if "sampling" in options:
            self.use_sampling(dict(options.pop("sampling")))
        if options:
            self.submit(Backend.configure, options)
        self.conversation.saved.update(**chosen)

    def rename(self, title: str) -> None:
        self.conversation.saved.rename(title)

    def use_tools(self, words: str) -> None:
        if self.is_loading:
            self.tooling.wanted = words
        else:
            self.action_run_command("tools", words)

    def use_prompt(self, name: str, argument: str, server: str = "") -> None:
        from chatterm.settings.prompts import filled_in, prompt_text, prompts_folder

        def send(text: str) -> None:
            self.writing.send_for(filled_in(name, text, argument))

        if server:
            self.hint(f"Asking {server}…", 3.0)
            self.in_thread(
                partial(self.tooling.session.prompt, server, name, argument),
                lambda text: self.writing.send_as_it_is(text, f"/{name} {argument}".rstrip()),
            )
        else:
            self.in_thread(partial(prompt_text, prompts_folder() / f"{name}.md"), send)

    def quit(self) -> None:
        self.app.exit(0)

    @property
    def themed_app(self) -> ThemedApp:
        assert isinstance(self.app, ThemedApp)
        return self.app

    # --- messages and answers ---

    def exchange(self, which: str = "") -> Exchange | None:
        """Return the exchange of this number (from 1, or from the end if negative); "" is the selected or last one."""
        path, selected = self.conversation.path, self.transcript.selected
        if which:
            return nth(path, which)
        found = self.conversation.exchange_of(selected) if selected is not None else None
        return found or (path[-1] if path else None)

    def need_model(self) -> None:
        """Raise EngineError if no model is loaded."""
        if self.is_loading:
            raise EngineError(LOADING)
        if self.info is None:
            raise EngineError("No model is loaded; /model chooses one.")

    def show_candidates(self) -> None:
        """Open the choice between candidates if there is one to make."""
        if not self.conversation.choice:
            return
        from chatterm.screens.candidates import CandidatesScreen

        self.app.push_screen(CandidatesScreen(self.conversation, self.backend.blocks))

    def stop_answer(self) -> bool:
        """Stop the answer, or its tool calls. Return whether there was one."""
        if self.conversation.turn is not None:
            self.conversation.stop()
        elif self.conversation.acting is not None:
            self.tooling.stop()
        else:
            return False
        return True

    def take_back(self) -> bool:
        """Put the waiting messages back into the composer. Return whether there were any."""
        if not self.conversation.waiting:
            return False
        self.conversation.take_back()
        return True

    def show_thinking(self, opened: bool | None) -> None:
        """Expand or collapse the thinking of every answer; None expands it only while it runs."""
        self.conversation.show_thinking = opened

        def fold() -> Generator[None, None, None]:
            for entry in self.transcript.entries[::-1]:  # what is in view is usually at the end
                if isinstance(entry, AnswerEntry):
                    entry.show_thinking(self.conversation.show_thinking)
                    yield

        self.change(fold())
