"""Terminal input and output: invalid UTF-8 does no harm, long pastes are taken whole, and the terminal may vanish.

Textual reads a paste character by character, which takes seconds for a megabyte and slows the screen meanwhile.
"""

import errno
import os
import selectors
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO, runtime_checkable

from textual import events
from textual._xterm_parser import XTermParser
from textual.message import Message

from chatterm.terminal.background import ASK, STOP, BackgroundReader, BackgroundReported
from chatterm.terminal.title import RESTORE_TITLE, SAVE_TITLE, has_title, title_sequence

if TYPE_CHECKING:
    from textual.driver import Driver

_BEGIN, _END = "\x1b[200~", "\x1b[201~"
_PATIENCE = 50
"""Tenths of a second without input after which a paste without an end mark is taken as complete."""


@runtime_checkable
class OwnDriver(Protocol):
    """What this module's driver has beside Textual's."""

    def show_title(self, title: str) -> None:
        """Make it the window's title, until the program ends or is suspended."""

    def watch_background(self) -> None:
        """Ask whether the background is dark, now and after each change; BackgroundReported tells the application."""

    def write(self, data: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Pasted:
    """The text between the marks of a bracketed paste."""

    text: str


class PasteReader:
    """Extracts bracketed pastes from the input of a terminal."""

    def __init__(self) -> None:
        self._parts: list[str] | None = None
        """The paste so far; None outside of one."""
        self._tail = ""
        """Its last characters, which may be the beginning of the end mark."""

    @property
    def is_inside(self) -> bool:
        return self._parts is not None

    def feed(self, data: str) -> Iterator[str | Pasted]:
        """Yield the parts of `data` in order: keys as they came, each paste whole once its end is there."""
        while data:
            if self._parts is None:
                keys, begin, data = data.partition(_BEGIN)
                if begin:
                    self._parts, self._tail = [], ""
                if keys:
                    yield keys
                continue
            text, end, rest = (self._tail + data).partition(_END)
            if end:
                self._parts.append(text)
                yield self.flush()
            elif text:
                kept = next((n for n in range(len(_END) - 1, 0, -1) if text.endswith(_END[:n])), 0)
                self._parts.append(text[: len(text) - kept])
                self._tail = text[len(text) - kept :]
            data = rest

    def flush(self) -> Pasted:
        """End the paste and return it as far as it has come."""
        text, self._parts, self._tail = "".join(self._parts or ()), None, ""
        return Pasted(text)


class TerminalOutput:
    """The output file. Once the terminal is gone nothing is written; the keyboard thread then ends the application."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_gone = False

    def write(self, text: str) -> None:
        self._try(lambda: self._file.write(text))

    def flush(self) -> None:
        self._try(self._file.flush)

    def fileno(self) -> int:
        return self._file.fileno()

    def _try(self, work: Callable[[], object]) -> None:
        if self._is_gone:
            return
        try:
            work()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._is_gone = True


class Keyboard:
    """Turns the input of a terminal into events."""

    def __init__(self, debug: bool = False) -> None:
        self._debug = debug
        self._parser = XTermParser(debug)
        self._pastes = PasteReader()
        self._background = BackgroundReader()
        self._quiet = 0

    def feed(self, data: str) -> Iterator[Message]:
        """Yield the events of `data` that has just arrived."""
        self._quiet = 0
        for part in self._pastes.feed(data):
            if isinstance(part, Pasted):
                # A pending Escape was pressed before the paste: it is the key itself, not the start of a sequence.
                if self._parser._timeout_time is not None:
                    self._parser._timeout_time = 0.0
                    yield from self._known(self._parser.tick())
                yield events.Paste(part.text)
                continue
            for piece in self._background.feed(part):
                if isinstance(piece, BackgroundReported):
                    yield piece
                else:
                    yield from self._pressed(piece)

    def tick(self, *, is_quiet: bool) -> Iterator[Message]:
        """Yield the events that fall due as time passes; `is_quiet`: a tenth of a second passed without input."""
        if is_quiet:
            yield from self._pressed(self._background.flush())
        if is_quiet and self._pastes.is_inside:
            self._quiet += 1
            if self._quiet > _PATIENCE:
                yield events.Paste(self._pastes.flush().text)
        yield from self._known(self._parser.tick())

    def _pressed(self, keys: str) -> Iterator[Message]:
        for character in keys:  # one by one: when a sequence fails to parse, nothing else is lost
            yield from self._known(self._parser.feed(character))

    def _known(self, found: Iterable[Message]) -> Iterator[Message]:
        """Yield `found`; replace Textual's parser if it fails, as it does for some rare sequences."""
        try:
            yield from found
        except Exception:  # noqa: BLE001 (a parser that failed cannot be used again: its generator has ended)
            self._parser = XTermParser(self._debug)


def terminal_driver() -> "type[Driver] | None":
    """Return the driver for this platform; None leaves the choice to Textual."""
    if sys.platform == "win32" or "TEXTUAL_DRIVER" in os.environ:
        return None
    from textual.drivers.linux_driver import LinuxDriver

    class TerminalDriver(LinuxDriver):
        _title = ""
        _titled = has_title(os.environ)
        _watches = False

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self._file: Any = TerminalOutput(self._file)

        def show_title(self, title: str) -> None:
            if title != self._title and self._titled:
                self._title = title
                self.write(title_sequence(title))

        def watch_background(self) -> None:
            self._watches = True
            self.write(ASK)

        def start_application_mode(self) -> None:
            super().start_application_mode()  # type: ignore[no-untyped-call]
            if self._watches:
                self.write(ASK)
            if self._titled:
                self.write(SAVE_TITLE + (title_sequence(self._title) if self._title else ""))

        def stop_application_mode(self) -> None:
            if self._watches:
                self.write(STOP)
            if self._titled:
                self.write(RESTORE_TITLE)
            super().stop_application_mode()

        def _run_input_thread(self) -> None:
            """Read the keyboard; report an error and go on, because without a keyboard the program is unusable."""
            while not self.exit_event.is_set():
                try:
                    self.run_input_thread()
                    break
                except Exception as error:  # noqa: BLE001 (whatever it is)
                    self._app.call_later(self._app._handle_exception, error)
                    self.exit_event.wait(0.1)

        def run_input_thread(self) -> None:
            """Turn what the terminal sends into events until the application ends."""
            keyboard = Keyboard(self._debug)
            decoder = getincrementaldecoder("utf-8")(errors="replace")
            with selectors.SelectSelector() as selector:
                selector.register(self.fileno, selectors.EVENT_READ)
                while not self.exit_event.is_set():
                    # The timeout distinguishes an Escape key from the start of a sequence.
                    has_come = bool(selector.select(0.1))
                    if has_come:
                        data = _read(self.fileno)
                        if not data:  # the terminal is gone
                            self._app.call_later(self._app.exit, 0)
                            return
                        for event in keyboard.feed(decoder.decode(data)):
                            self.process_message(event)
                    for event in keyboard.tick(is_quiet=not has_come):
                        self.process_message(event)

    return TerminalDriver


def _read(fileno: int) -> bytes:
    try:
        return os.read(fileno, 1 << 16)
    except OSError:
        return b""
