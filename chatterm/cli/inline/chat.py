"""`chatterm run --inline`: a plain conversation, line by line, without a full screen.

For pipes, dumb terminals and screen readers: no cursor movement, no boxes, and nothing is redrawn.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import takewhile
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Literal, TextIO, Unpack

from chatterm.backends.backend import (
    Backend,
    ConversationSettings,
    EngineError,
    Exchange,
    FinishReason,
    ModelError,
    ModelInfo,
    ThinkMode,
    TokenEvent,
    ToolCall,
)
from chatterm.cli.inline.library import library_command
from chatterm.cli.inline.page import InlinePage, LineInput, standard_lines
from chatterm.cli.inline.tools import InlineTools
from chatterm.cli.oneshot import MOST_ROUNDS, close_store, start_line, stats_line
from chatterm.cli.progress import PlainLines
from chatterm.cli.wait_notices import waits_told
from chatterm.commands.registry import Command, is_command, parse
from chatterm.conversation.compaction import COMPACTED
from chatterm.conversation.ending import describe_ending
from chatterm.conversation.figures import new_notes
from chatterm.conversation.headless import Talk
from chatterm.conversation.preset import Preset
from chatterm.markdown.lines import Line, line_text
from chatterm.screens.chat.commands import COMMANDS
from chatterm.screens.chat.commands.messages import change_thinking
from chatterm.screens.chat.commands.settings import use_preset
from chatterm.screens.chat.commands.views import explain_cache, refuse_remote_cache
from chatterm.sessions.titles import given_title
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
                self._obey(*parse(text))
            elif text.strip():
                self.talk.add_prompt(text)
                self.answer(self.talk.ask(text))
        except (EngineError, ModelError) as error:
            self.complain(in_chat(error))
        except KeyboardInterrupt:
            if not self._lines.by_hand:
                raise
        for problem in filter(None, (self.talk.problem, self.talk.was_deleted)):
            self.note_once(problem)

    def _obey(self, command: Command, argument: str) -> None:
        if command.name in _HERE:
            command = replace(command, function=_HERE[command.name])
        elif command.needs_screen:
            raise EngineError(f"/{command.name} needs the chat screen: run chatterm without --inline.")
        command.run(self, argument)

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

    def configure(self, **chosen: Unpack[ConversationSettings]) -> None:
        options = chosen.copy()
        if "sampling" in chosen:
            options["sampling"] = {**self.settings.sampling.given(), **chosen["sampling"]}
        self.backend.configure(options)
        self.talk.sampling = dict(chosen.get("sampling", self.sampling))
        self.talk.update(**chosen)

    def switch_model(self, name: str) -> None:
        self.backend.switch(name, PlainLines(self._err))
        self.talk.begin()
        self.talk.update(model=self.backend.model)
        self.greet()

    def use_tools(self, words: str) -> None:
        for line in self.tools.command(words, self.backend):
            self.say(line)

    def use_prompt(self, name: str, argument: str, server: str = "") -> None:
        from chatterm.conversation.attachments import attach, working_folder
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
            title = one_line(self.talk.info.title, 200)
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


# --- commands ---


def commands_here() -> list[Command]:
    """Return the commands that make sense without a screen, with their texts here."""
    known = [command for command in COMMANDS if command.name in _HERE or not command.needs_screen]
    return [replace(command, **_TEXTS.get(command.name, {})) for command in known]


def _help(chat: Inline) -> None:
    chat.say("A line is a message; one that ends with \\ continues on the next line.")
    chat.say("Ctrl-C stops an answer, Ctrl-D quits. Commands:")
    for command in commands_here():
        chat.say(f"  {command.usage}: {command.help}")


def _retry(chat: Inline, count: str) -> None:
    if count:
        raise EngineError("Several answers at once need the chat screen; /retry generates one here.")
    chat.answer(chat.talk.retry())


def _compact(chat: Inline, what: str) -> None:
    if not what:
        raise EngineError(
            "A summary is read before it is used, in the chat screen; /compact files, start and off work here."
        )
    chat.talk.compact(what)
    chat.say(COMPACTED[what])


def _reset(chat: Inline) -> None:
    chat.tools.leave(chat.backend)
    if chat.backend.options.documents:
        chat.backend.configure({"documents": ()})
    chat.talk.reset()
    chat.say("A new conversation has started." + Preset.of(chat.backend.options.system, chat.sampling).kept)


def _library(chat: Inline, text: str) -> None:
    for line in library_command(text, chat.backend, chat.talk, chat.width):
        chat.say(line)


def _rename(chat: Inline, title: str) -> None:
    title = given_title(title)
    chat.talk.rename(title)
    chat.say(f"This conversation is now called {title}.")


def _think(chat: Inline, mode: ThinkMode | Literal["show", "hide", ""]) -> None:
    if mode == "show" or mode == "hide":
        chat.page.shows_thinking, mode = mode == "show", ""
    shown = "shown" if chat.page.shows_thinking else "hidden"
    chat.say(f"{change_thinking(chat, mode)} Thinking is {shown}.")


def _model(chat: Inline, name: str) -> None:
    if name:
        chat.switch_model(name)
        return
    for known in chat.backend.models():
        chat.say(f"{'*' if known == chat.backend.model else ' '} {one_line(known, 200)}")


def _preset(chat: Inline, name: str) -> None:
    from chatterm.settings.presets import load_preset, preset_names

    if name:
        use_preset(chat, name, load_preset(name))
    else:
        chat.say(f"Presets: {', '.join(preset_names()) or 'none yet'}.")


def _system(chat: Inline, text: str) -> None:
    if text:
        chat.configure(system=None if text == "none" else text)
    now = chat.backend.options.system
    chat.say(f"The system prompt: {one_line(now)}" if now else "There is no system prompt.")


def _stats(chat: Inline) -> None:
    figures, latest = chat.backend.figures(), chat.backend.last
    if figures is not None:
        chat.say(start_line(figures))
    if latest is not None:
        chat.say(stats_line(latest))
    chat.say(f"[the conversation uses {counted(chat.backend.used_tokens, 'token')} of the context]")


def _cache(chat: Inline, what: str) -> None:
    refuse_remote_cache(chat)
    if not what:
        raise EngineError("The cache map needs the chat screen; /cache why works here.")
    explain_cache(chat)


_HERE: dict[str, Callable[..., None]] = {
    "help": _help,
    "continue": lambda chat: chat.answer(chat.talk.resume()),
    "retry": _retry,
    "undo": lambda chat: chat.say(f"Undone: {one_line(chat.talk.undo())}"),
    "redo": lambda chat: chat.say(f"Restored: {one_line(chat.talk.redo())}"),
    "think": _think,
    "compact": _compact,
    "pin": lambda chat, which: chat.say(chat.talk.pin(which)),
    "reset": _reset,
    "library": _library,
    "rename": _rename,
    "model": _model,
    "preset": _preset,
    "system": _system,
    "tools": Inline.use_tools,
    "stats": _stats,
    "cache": _cache,
}
"""What commands do without a screen, where that is not what they do on one."""
_TEXTS: dict[str, dict[str, Any]] = {
    "retry": {"usage": "/retry", "help": "Answer again; the old answer is kept"},
    "compact": {"usage": "/compact files|start|off", "help": "Make room: no files, or start from here"},
    "preset": {"usage": "/preset [NAME]", "help": "List presets, or use one"},
    "cache": {"usage": "/cache why", "help": "What of the KV cache each turn reused"},
}
"""What the help says of commands that can do less here."""


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
    lines = lines or standard_lines(store, [name for c in commands_here() for name in (c.name, *c.aliases)])
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
