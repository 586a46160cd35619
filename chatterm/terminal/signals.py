"""Signals that end the program, which restores the terminal first."""

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that only look at a server do without asyncio
    from asyncio import AbstractEventLoop

ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT")


def heeded(*names: str) -> list[int]:
    """Return the numbers of those signals that exist here and are not ignored, as nohup ignores SIGHUP."""
    numbers = [getattr(signal, name, None) for name in names]
    return [number for number in numbers if number and signal.getsignal(number) is not signal.SIG_IGN]


def on_signals(loop: "AbstractEventLoop", act: Callable[[], object]) -> None:
    """Have `loop` call `act` on SIGINT and SIGTERM. Raises ValueError or RuntimeError outside the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, act)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(act))
