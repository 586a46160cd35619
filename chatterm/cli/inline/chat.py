"""`chatterm run --inline`: a plain conversation, line by line, without a full screen.

For pipes, dumb terminals and screen readers: no cursor movement, no boxes, and nothing is redrawn.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from itertools import takewhile
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, TextIO, Unpack

from chatterm.backends.backend import (
    Backend,
    ConversationSettings,
    EngineError,
    Exchange,
    FinishReason,
    ModelError,
    ModelInfo,
    TokenEvent,
    ToolCall,
)
from chatterm.backends.documents import list_names
from chatterm.cli.inline.page import InlinePage, LineInput, standard_lines
from chatterm.cli.inline.tools import InlineTools
from chatterm.cli.oneshot import MOST_ROUNDS, close_store, start_line, stats_line
from chatterm.cli.progress import PlainLines
from chatterm.cli.wait_notices import waits_told
from chatterm.commands.library import Add, Open, Remove, library_lines, told
from chatterm.commands.registry import is_command, parse, plain_commands, without_screen
from chatterm.conversation.attachments import attach, working_folder
from chatterm.conversation.compaction import COMPACTED, PINNED, nth
from chatterm.conversation.document_source import keep_document
from chatterm.conversation.ending import describe_ending
from chatterm.conversation.figures import new_notes
from chatterm.conversation.headless import Talk
from chatterm.conversation.preset import Preset
from chatterm.markdown.lines import Line, line_text
from chatterm.screens.chat.commands.settings import use_preset
from chatterm.sessions.library import DocumentLibrary, size_text
from chatterm.settings.settings import Settings
from chatterm.terminal.sanitize import cleaned, one_line
from chatterm.terminal.wording import in_chat
from models.units import counted

if TYPE_CHECKING:
    from chatterm.sessions.store import SessionStore


class Leave(Exception):
    """Ends the conversation."""


class Inline:
    """Reads messages and commands, writes answers. It is a `ChatContext` in which every call blocks."""

    is_loading = False

    def __init__(
        self,
        backend: Backend,
        talk: Talk,
        *,
        lines: LineInput,
        out: TextIO,
        err: TextIO,
        stats: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self.backend = backend
        self.settings = settings or Settings()
        self.talk = talk
        self._lines = lines
        self._err = err
        self._stats = stats
        self.page = InlinePage(out)
        self.tools = InlineTools(lines, self.note)
        self._said: set[str] = set()
        self.has_failed = False

    def run(self, first: Sequence[str] = ()) -> int:
        """Load the model, send the `first` messages, then those that are read. Return 1 if input from a pipe failed.

        Raises ModelError and EngineError when the model cannot be loaded.
        """
        self.backend.open(PlainLines(self._err))
        self.talk.begin()
        self.greet()
        try:
            for text in first:
                self._handle(text)
            while (message := self._read()) is not None:
                self._handle(message)
        except Leave:
            pass
        finally:
            self.tools.close()
        return 1 if self.has_failed and not self._lines.by_hand else 0

    def _read(self) -> str | None:
        """Read the next message or command; return None at the end."""
        parts: list[str] = []
        while True:
            try:
                line = self._lines.next("> " if not parts else ". ")
            except KeyboardInterrupt:
                if not self._lines.by_hand:
                    raise
                self.page.line("")
                parts.clear()  # what was being written is not sent
                continue
            except UnicodeError:
                self.complain("That line is not UTF-8 text and was not sent.")
                continue
            if line is None:
                if self._lines.by_hand:
                    self.page.line("")
                return "\n".join(parts) if parts else None
            if line.endswith("\\"):
                parts.append(line[:-1])
                continue
            return "\n".join([*parts, line])

    def _handle(self, text: str) -> None:
        text = cleaned(text)
        try:
            if "\n" not in text and is_command(text):
                command, argument = parse(text, has_screen=False)
                command.run(self, argument)
            elif text.strip():
                self.talk.saved.add_prompt(text)
                self.answer(self.talk.ask(text))
        except (EngineError, ModelError) as error:
            self.complain(in_chat(error))
        except KeyboardInterrupt:
            if not self._lines.by_hand:
                raise
        for problem in filter(None, (self.talk.saved.problem, self.talk.saved.was_deleted)):
            self.note_once(problem)

    # --- answers ---

    def answer(self, events: Generator[TokenEvent, None, None]) -> None:
        """Write an answer as it arrives, run its tool calls, and answer their results."""
        try:
            with waits_told(self.backend, self.note), closing(events):
                for event in events:
                    self.page.write(event)
        except KeyboardInterrupt:
            if not self._lines.by_hand:
                raise
        finally:
            self.page.end()
        latest = self.backend.last
        if latest is not None:
            info = self.backend.info
            ending = describe_ending(latest.finish_reason or FinishReason.CANCELLED).said(
                has_text=bool(latest.text),
                has_thought=bool(latest.reasoning),
                resumes=info.resumes if info is not None else (),
            )
            if ending:
                self.note(f"[{ending}]")
            if self._stats:
                self.note(stats_line(latest))
        self._say_notes()
        self.backend.settle()
        if (
            latest is not None
            and latest.calls
            and latest.finish_reason in (FinishReason.EOS, FinishReason.STOP)
        ):
            self._act(latest.calls)

    def _act(self, calls: Sequence[ToolCall]) -> None:
        """Run the tool calls of an answer that the person allows, and answer their results."""
        rounds = sum(1 for _ in takewhile(lambda exchange: exchange.results, reversed(self.talk.path)))
        if not self._lines.by_hand and rounds >= MOST_ROUNDS:
            self.complain(f"The model called tools {rounds} times in a row; no further calls are run.")
        elif (results := self.tools.results(calls)) is not None:
            self.answer(self.talk.tell(results))

    # --- what commands work with ---

    @property
    def info(self) -> ModelInfo | None:
        return self.backend.info

    @property
    def path(self) -> Sequence[Exchange]:
        return self.talk.path

    @property
    def sampling(self) -> dict[str, Any]:
        return self.talk.sampling

    @property
    def width(self) -> int:
        """The width of a report, in columns; 80 if there is no terminal to ask."""
        return get_terminal_size((80, 0)).columns

    def say(self, text: str) -> None:
        self.page.line(text)

    def report(
        self, name: str, title: str, lines: Callable[[int], Iterable[Line]], plain: Sequence[str] = ()
    ) -> None:
        for text in plain or [title, *(line_text(line).rstrip() for line in lines(self.width))]:
            self.say(text)

    def show_thinking(self, opened: bool) -> None:
        self.page.shows_thinking = opened

    def configure(self, **chosen: Unpack[ConversationSettings]) -> None:
        options = chosen.copy()
        if "sampling" in chosen:
            options["sampling"] = {**self.settings.sampling.given(), **chosen["sampling"]}
        self.backend.configure(options)
        self.talk.sampling = dict(chosen.get("sampling", self.sampling))
        self.talk.saved.update(**chosen)

    def switch_model(self, name: str) -> None:
        self.backend.switch(name, PlainLines(self._err))
        self.talk.begin()
        self.talk.saved.update(model=self.backend.model)
        self.greet()

    def rename(self, title: str) -> None:
        self.talk.saved.rename(title)

    def use_tools(self, words: str) -> None:
        for line in self.tools.command(words, self.backend):
            self.say(line)

    def use_prompt(self, name: str, argument: str, server: str = "") -> None:
        from chatterm.settings.prompts import filled_in, prompt_text, prompts_folder

        if server:
            message = self.tools.session.prompt(server, name, argument)
        else:
            text = filled_in(name, prompt_text(prompts_folder() / f"{name}.md"), argument)
            attached = attach(text, working_folder())
            message = "\n\n".join([attached.message, *attached.blocks])
        self.answer(self.talk.ask(message))

    def quit(self) -> None:
        raise Leave

    # --- messages ---

    def greet(self) -> None:
        self._say_notes()
        if not self._lines.by_hand:
            return
        if (info := self.backend.info) is not None:
            self.page.line(_welcome(info))
        path = self.talk.path
        if path:
            title = one_line(self.talk.saved.info.title, 200)
            self.page.line(
                f"Continuing {title or 'the conversation'}. Your last message: {one_line(path[-1].user)}"
            )

    def _say_notes(self) -> None:
        for note in new_notes(self.backend.notes(), self._said):
            self.note(f"chatterm: {one_line(note, 400)}")

    def note_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.note(f"chatterm: {one_line(text)}")

    def note(self, text: str) -> None:
        """Write a message for people on standard error, so that a pipe gets only the answers."""
        self._err.write(text + "\n")
        self._err.flush()

    def complain(self, text: str) -> None:
        self.has_failed = True
        self.note(f"chatterm: {one_line(text)}")


def _welcome(info: ModelInfo) -> str:
    room = f", context {counted(info.context_length, 'token')}" if info.context_length else ""
    return f"{one_line(info.label, 200)} on {info.device}{room}. /help lists the commands, Ctrl-D quits."


# --- what commands do without a screen, where that is not what they do on one ---


without_screen("continue")(lambda chat: chat.answer(chat.talk.resume()))
without_screen("undo")(lambda chat: chat.say(f"Undone: {one_line(chat.talk.undo())}"))
without_screen("redo")(lambda chat: chat.say(f"Restored: {one_line(chat.talk.redo())}"))
without_screen("pin")(lambda chat, which: chat.say(PINNED[chat.talk.pin(nth(chat.path, which or "-1"))]))
without_screen("tools")(Inline.use_tools)


@without_screen("retry", usage="/retry", about="Answer again; the old answer is kept")
def _retry(chat: Inline) -> None:
    chat.answer(chat.talk.retry())


@without_screen("compact", usage="/compact files|start|off", about="Make room: no files, or start from here")
def _compact(chat: Inline, what: str) -> None:
    chat.talk.compact(what)
    chat.say(COMPACTED[what])


@without_screen("reset")
def _reset(chat: Inline) -> None:
    chat.tools.leave(chat.backend)
    if chat.backend.options.documents:
        chat.backend.configure({"documents": ()})
    chat.talk.clear()
    chat.say("A new conversation." + Preset.of(chat.backend.options.system, chat.sampling).kept)


@without_screen("library")
def _library(chat: Inline, argument: str) -> None:
    backend, talk = chat.backend, chat.talk
    library = DocumentLibrary(talk.saved.store.path if talk.saved.store is not None else None)
    match told(argument):
        case None:
            opened = [document.name for document in backend.options.documents]
            model = backend.info.name if backend.info is not None else ""
            for line in library_lines(library.entries(), opened, model, chat.width):
                chat.say(line_text(line).rstrip())
        case Add(source, name):
            entry, document, remark = keep_document(library, source, name, working_folder())
            tokens = backend.read(document)
            size = size_text(entry) if tokens is None else counted(tokens, "token")
            chat.say(f"{entry.name} is in the library: {size}.")
            if remark:
                chat.say(remark)
        case Open(names):
            talk.begin_on(library.find(names))
            chat.say(f"A new conversation with {list_names(backend.options.documents)} begins.")
        case Remove(name):
            chat.say(f"{library.remove(name).name} is removed; conversations that began with it keep it.")


@without_screen("model")
def _model(chat: Inline, name: str) -> None:
    if name:
        chat.switch_model(name)
        return
    for known in chat.backend.models():
        chat.say(f"{'*' if known == chat.backend.model else ' '} {one_line(known, 200)}")


@without_screen("preset", usage="/preset [NAME]", about="List presets, or use one")
def _preset(chat: Inline, name: str) -> None:
    from chatterm.settings.presets import load_preset, preset_names

    if name:
        use_preset(chat, name, load_preset(name))
    else:
        chat.say(f"Presets: {', '.join(preset_names()) or 'none yet'}.")


@without_screen("stats")
def _stats(chat: Inline) -> None:
    figures, latest = chat.backend.figures(), chat.backend.last
    if figures is not None:
        chat.say(start_line(figures))
    if latest is not None:
        chat.say(stats_line(latest))
    chat.say(f"[the conversation uses {counted(chat.backend.used_tokens, 'token')} of the context]")


def run_inline(
    backend: Backend,
    *,
    first: Sequence[str] = (),
    session: str | None = None,
    sampling: dict[str, object] | None = None,
    stats: bool = False,
    settings: Settings | None = None,
    store: "SessionStore | None" = None,
    lines: LineInput | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Run a conversation on the standard streams, saved in `store` (default: the person's own); return the exit code.

    The backend and the store are closed in the end. Raises ModelError and EngineError if it cannot start.
    """
    from chatterm.sessions.store import SessionStore

    out, err = out or sys.stdout, err or sys.stderr
    store = store or SessionStore.open()
    lines = lines or standard_lines(store, [name for c in plain_commands() for name in (c.name, *c.aliases)])
    try:
        talk = Talk(backend, store, session, sampling)
        return Inline(backend, talk, lines=lines, out=out, err=err, stats=stats, settings=settings).run(first)
    except BrokenPipeError:
        # The reader of the answers is gone; at exit, Python must not fail to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        backend.close()
        close_store(store, err)
