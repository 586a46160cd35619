"""Signals that end the program, which restores the terminal first."""

import signal

ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT")


def heeded(*names: str) -> list[int]:
    """Return the numbers of those signals that exist here and are not ignored, as nohup ignores SIGHUP."""
    numbers = [getattr(signal, name, None) for name in names]
    return [number for number in numbers if number and signal.getsignal(number) is not signal.SIG_IGN]
