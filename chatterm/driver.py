"""The keyboard, read so that bytes which are no UTF-8 do no harm (Textual's own driver ends the application)."""

import os
import selectors
import sys
from codecs import getincrementaldecoder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.driver import Driver


def terminal_driver() -> "type[Driver] | None":
    """The driver for this platform; None leaves the choice to Textual."""
    if sys.platform == "win32" or "TEXTUAL_DRIVER" in os.environ:
        return None
    from textual._xterm_parser import XTermParser
    from textual.drivers.linux_driver import LinuxDriver

    class TerminalDriver(LinuxDriver):
        def run_input_thread(self) -> None:
            """Turn what the terminal sends into events until the application ends."""
            parser = XTermParser(self._debug)
            decoder = getincrementaldecoder("utf-8")(errors="replace")
            with selectors.SelectSelector() as selector:
                selector.register(self.fileno, selectors.EVENT_READ)
                while not self.exit_event.is_set():
                    # The timeout is what tells an Escape key from the start of a sequence.
                    if selector.select(0.1):
                        data = _read(self.fileno)
                        if not data:  # the terminal is gone, and with it the person
                            self._app.call_later(self._app.exit, 0)
                            return
                        for event in parser.feed(decoder.decode(data)):
                            self.process_message(event)
                    for event in parser.tick():
                        self.process_message(event)

    return TerminalDriver


def _read(fileno: int) -> bytes:
    try:
        return os.read(fileno, 1 << 16)
    except OSError:
        return b""
