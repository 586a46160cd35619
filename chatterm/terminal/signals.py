"""Signals that end a program which has changed the terminal: it restores the terminal first."""

import signal

ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT")


def heeded(*names: str) -> list[int]:
    """The numbers of those signals that exist here and are not ignored, as under nohup."""
    numbers = [getattr(signal, name, None) for name in names]
    return [number for number in numbers if number and signal.getsignal(number) is not signal.SIG_IGN]
