"""`chatterm run --inline`: a plain conversation, line by line, without a full screen.

For pipes, dumb terminals and screen readers: no cursor movement, no boxes, and nothing is redrawn.
"""

import io
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from itertools import takewhile
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TextIO

from chatterm.backends.backend import (
    Backend,
    EngineError,
    FinishReason,
    ModelError,
    ModelInfo,
    TokenEvent,
    ToolCall,
)
from chatterm.cli.inline.library import library_command
from chatterm.cli.inline.page import InlinePage, LineInput
from chatterm.cli.inline.tools import InlineTools
from chatterm.cli.oneshot import MOST_ROUNDS, close_store, start_line, stats_line
from chatterm.cli.progress import PlainLines
from chatterm.cli.wait_notices import waits_told
from chatterm.commands.registry import COMMANDS, is_command, parse
from chatterm.commands.reports import no_thinking, thinking_text
from chatterm.conversation.compaction import COMPACTED
from chatterm.conversation.ending import describe_ending
from chatterm.conversation.figures import new_notes
from chatterm.conversation.headless import Talk
from chatterm.conversation.preset import Preset
from chatterm.settings.settings import Settings
from chatterm.terminal.sanitize import cleaned, is_safe, one_line
from chatterm.terminal.wording import in_chat
from models.units import counted

if TYPE_CHECKING:
    from chatterm.sessions.store import SessionStore

HERE = (
    *("help", "continue", "retry", "undo", "redo", "reset", "think", "model", "system", "set", "stats"),
    *("compact", "pin", "preset", "library"),
    *("tools", "cache", "rename", "quit"),
)
"""The commands that make sense without a screen."""
_IN_PART = {
    "retry": ("", "Answer again; the old answer is kept"),
    "compact": ("files|start|off", "Make room: no files, or start from here"),
    "preset": ("[NAME]", "List presets, or use one"),
    "cache": ("why", "What of the KV cache each turn reused"),
}
"""Commands that can do less here: their arguments and help texts."""
_WIDTH = 80
"""The width of a report, in columns, if there is no terminal to ask."""


class Leave(Exception):
    """Ends the conversation."""


class Inline:
    """Reads messages and commands, writes answers. `run` returns the exit code."""

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
        self._backend = backend
        self._settings = settings or Settings()
        self._talk = talk
        self._lines = lines
        self._out = out
        self._err = err
        self._stats = stats
        self._page = InlinePage(out)
        self._tools = InlineTools(lines, self._note)
        self._said: set[str] = set()
        self._failed = False

    def run(self, first: Sequence[str] = ()) -> int:
        """Load the model, send the `first` messages, then those that are read. Return 1 if input from a pipe failed.

        Raises ModelError and EngineError when the model cannot be loaded.
        """
        self._backend.open(PlainLines(self._err))
        self._talk.begin()
        self._greet()
        try:
            for text in first:
                self._handle(text)
            while (message := self._read()) is not None:
                self._handle(message)
        except Leave:
            pass
        finally:
            self._tools.close()
        return 1 if self._failed and not self._lines.by_hand else 0

    def _read(self) -> str | None:
        """Read the next message or command; return None at the end."""
        parts: list[str] = []
        while True:
            try:
                line = self._lines.next("> " if not parts else ". ")
            except KeyboardInterrupt:
                if not self._lines.by_hand:
                    raise
                self._page.line("")
                parts.clear()  # what was being written is not sent
                continue
            except UnicodeError:
                self._complain("That line is not UTF-8 text and was not sent.")
                continue
            if line is None:
                if self._lines.by_hand:
                    self._page.line("")
                return "\n".join(parts) if parts else None
            if line.endswith("\\"):
                parts.append(line[:-1])
                continue
            return "\n".join([*parts, line])

    def _handle(self, text: str) -> None:
        text = cleaned(text)
        try:
            if "\n" not in text and is_command(text):
                self._obey(text)
            elif text.strip():
                self._talk.add_prompt(text)
                self._answer(self._talk.ask(text))
        except (EngineError, ModelError) as error:
            self._complain(in_chat(error))
        except KeyboardInterrupt:
            if not self._lines.by_hand:
                raise
        for problem in filter(None, (self._talk.problem, self._talk.was_deleted)):
            self._say_once(problem)

    def _obey(self, text: str) -> None:
        command, argument = parse(text)
        match command.name:
            case "help":
                self._help()
            case "continue":
                self._answer(self._talk.resume())
            case "retry" if argument:
                raise EngineError("Several answers at once need the chat screen; /retry generates one here.")
            case "retry":
                self._answer(self._talk.retry())
            case "undo":
                self._page.line(f"Undone: {one_line(self._talk.undo())}")
            case "redo":
                self._page.line(f"Restored: {one_line(self._talk.redo())}")
            case "compact":
                self._compact(argument)
            case "pin":
                self._page.line(self._talk.pin(argument))
            case "preset":
                self._preset(argument)
            case "tools":
                for line in self._tools.command(argument, self._backend):
                    self._page.line(line)
            case "library":
                width = get_terminal_size((_WIDTH, 0)).columns
                for line in library_command(argument, self._backend, self._talk, width):
                    self._page.line(line)
            case "reset":
                self._tools.leave(self._backend)
                if self._backend.options.documents:
                    self._backend.configure({"documents": ()})
                self._talk.reset()
                kept = Preset.of(self._backend.options.system, self._talk.sampling).kept
                self._page.line("A new conversation has started." + kept)
            case "think":
                self._think(argument)
            case "model":
                self._model(argument)
            case "system":
                self._system(argument)
            case "set":
                self._set(argument)
            case "stats":
                self._figures()
            case "cache" if (info := self._backend.info) is not None and info.is_remote:
                raise EngineError(f"The KV cache is on {info.device}; /stats shows what was found in it.")
            case "cache" if argument:
                self._explain_cache()
            case "rename":
                self._rename(argument)
            case "quit":
                raise Leave
            case "cache":
                raise EngineError("The cache map needs the chat screen; /cache why works here.")
            case other if command not in COMMANDS:
                from chatterm.cli.inline.files import prompt_message

                self._answer(self._talk.ask(prompt_message(other, argument, self._tools)))
            case other:
                raise EngineError(f"/{other} needs the chat screen: run chatterm without --inline.")

    # --- answers ---

    def _answer(self, events: Generator[TokenEvent, None, None]) -> None:
        try:
            with waits_told(self._backend, self._note), closing(events):
                for event in events:
                    self._page.write(event)
        except KeyboardInterrupt:
            if not self._lines.by_hand:
                raise
        finally:
            self._page.end()
        latest = self._backend.last
        if latest is not None:
            info = self._backend.info
            ending = describe_ending(latest.finish_reason or FinishReason.CANCELLED).said(
                has_text=bool(latest.text),
                has_thought=bool(latest.reasoning),
                resumes=info.resumes if info is not None else (),
            )
            if ending:
                self._note(f"[{ending}]")
            if self._stats:
                self._note(stats_line(latest))
        self._say_notes()
        self._backend.settle()
        if (
            latest is not None
            and latest.calls
            and latest.finish_reason in (FinishReason.EOS, FinishReason.STOP)
        ):
            self._act(latest.calls)

    def _act(self, calls: Sequence[ToolCall]) -> None:
        """Run the tool calls of an answer that the person allows, and answer their results."""
        rounds = sum(1 for _ in takewhile(lambda exchange: exchange.results, reversed(self._talk.path)))
        if not self._lines.by_hand and rounds >= MOST_ROUNDS:
            self._complain(f"The model called tools {rounds} times in a row; no further calls are run.")
        elif (results := self._tools.results(calls)) is not None:
            self._answer(self._talk.tell(results))

    # --- commands ---

    def _help(self) -> None:
        self._page.line("A line is a message; one that ends with \\ continues on the next line.")
        self._page.line("Ctrl-C stops an answer, Ctrl-D quits. Commands:")
        for command in COMMANDS:
            if command.name in HERE:
                arguments, what = _IN_PART.get(command.name, (command.arguments, command.help))
                self._page.line(f"  {f'/{command.name} {arguments}'.strip()}: {what}")

    def _preset(self, argument: str) -> None:
        from chatterm.cli.inline.files import use_preset
        from chatterm.settings.presets import preset_names

        if not argument:
            self._page.line(f"Presets: {', '.join(preset_names()) or 'none yet'}.")
            return
        preset = use_preset(argument, self._backend, self._talk, self._settings.sampling)
        if preset.model not in (None, self._backend.model):
            self._model(preset.model or "")
        self._page.line(f"The preset {argument} applies from the next message on.")
        if preset.tools is not None:
            for line in self._tools.command(" ".join(preset.tools) or "off", self._backend):
                self._page.line(line)

    def _compact(self, argument: str) -> None:
        if not argument:
            raise EngineError(
                "A summary is read before it is used, in the chat screen; /compact files, start and off work here."
            )
        self._talk.compact(argument)
        self._page.line(COMPACTED[argument])

    def _think(self, argument: str) -> None:
        match argument:
            case "show" | "hide":
                self._page.shows_thinking = argument == "show"
            case "on" if why := no_thinking(self._backend.info):
                raise EngineError(why)
            case "on" | "off" | "auto":
                self._backend.configure({"think": argument})
                self._talk.update(think=argument)
        shown = "shown" if self._page.shows_thinking else "hidden"
        text = thinking_text(self._backend.options.think, self._backend.info)
        self._page.line(f"{text} Thinking is {shown}.")

    def _model(self, argument: str) -> None:
        if not argument:
            for name in self._backend.models():
                mark = "*" if name == self._backend.model else " "
                self._page.line(f"{mark} {one_line(name, 200)}")
            return
        self._backend.switch(argument, PlainLines(self._err))
        self._talk.begin()
        self._talk.update(model=self._backend.model)
        self._greet()

    def _system(self, argument: str) -> None:
        if argument:
            text = None if argument == "none" else argument
            self._backend.configure({"system": text})
            self._talk.update(system=text)
        now = self._backend.options.system
        self._page.line(f"The system prompt: {one_line(now)}" if now else "There is no system prompt.")

    def _set(self, argument: str) -> None:
        from chatterm.commands.sampling import answer_to

        chosen, lines = answer_to(argument, self._talk.sampling, self._settings.sampling, self._backend.info)
        if chosen is not None:
            self._backend.configure({"sampling": {**self._settings.sampling.given(), **chosen}})
            self._talk.sampling = chosen
            self._talk.update(sampling=chosen)
        for line in lines:
            self._page.line(line)

    def _explain_cache(self) -> None:
        from chatterm.conversation.cache_why import TITLE, explained, why_lines
        from chatterm.markdown.lines import line_text

        backend = self._backend
        models = (backend.info.name, backend.model) if backend.info is not None else ()
        turns = explained(self._talk.path, models, backend.token_text)
        self._page.line(TITLE)
        for line in why_lines(turns, get_terminal_size((_WIDTH, 0)).columns):
            self._page.line(line_text(line).rstrip())

    def _figures(self) -> None:
        figures, latest = self._backend.figures(), self._backend.last
        if figures is not None:
            self._page.line(start_line(figures))
        if latest is not None:
            self._page.line(stats_line(latest))
        self._page.line(
            f"[the conversation uses {counted(self._backend.used_tokens, 'token')} of the context]"
        )

    def _rename(self, argument: str) -> None:
        from chatterm.sessions.titles import given_title

        title = given_title(argument)
        self._talk.rename(title)
        self._page.line(f"This conversation is now called {title}.")

    # --- messages ---

    def _greet(self) -> None:
        self._say_notes()
        if not self._lines.by_hand:
            return
        if (info := self._backend.info) is not None:
            self._page.line(_welcome(info))
        path = self._talk.path
        if path:
            title = one_line(self._talk.info.title, 200)
            self._page.line(
                f"Continuing {title or 'the conversation'}. Your last message: {one_line(path[-1].user)}"
            )

    def _say_notes(self) -> None:
        for note in new_notes(self._backend.notes(), self._said):
            self._note(f"chatterm: {one_line(note, 400)}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._note(f"chatterm: {one_line(text)}")

    def _note(self, text: str) -> None:
        """Write a message for people on standard error, so that a pipe gets only the answers."""
        self._err.write(text + "\n")
        self._err.flush()

    def _complain(self, text: str) -> None:
        self._failed = True
        self._note(f"chatterm: {one_line(text)}")


def _welcome(info: ModelInfo) -> str:
    room = f", context {counted(info.context_length, 'token')}" if info.context_length else ""
    return f"{one_line(info.label, 200)} on {info.device}{room}. /help lists the commands, Ctrl-D quits."


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
    lines = lines or _standard_lines(store)
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


def _standard_lines(store: "SessionStore") -> LineInput:
    if sys.stdin is None:  # as under some schedulers
        return LineInput(io.BytesIO(), by_hand=False)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return LineInput(sys.stdin.buffer, by_hand=sys.stdin.isatty())
    with suppress(ImportError):
        _use_readline(store)
    return LineInput(None, by_hand=True)


def _use_readline(store: "SessionStore") -> None:
    """Set up line editing for input(): earlier messages with Up and Down, commands with Tab. Raises ImportError."""
    import readline

    with suppress(EngineError):  # a database that cannot be read
        for text in store.prompts(500):
            if is_safe(text) and "\n" not in text:
                readline.add_history(text)

    def complete(begun: str, which: int) -> str | None:
        known = [name for c in COMMANDS if c.name in HERE for name in (c.name, *c.aliases)]
        names = [f"/{name} " for name in known if begun and f"/{name}".startswith(begun)]
        return names[which] if which < len(names) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
