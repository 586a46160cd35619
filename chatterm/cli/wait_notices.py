"""Tells what an answer waits for, when there is no screen to show it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

from chatterm.backends.backend import Backend

_LOOK = 0.25
"""Seconds between checks."""
_AGAIN = 60.0
"""Seconds after which a wait that continues is told again."""


@contextmanager
def waits_told(backend: Backend, say: Callable[[str], None]) -> Iterator[None]:
    """Tell what running answers wait for, if it is not the model itself. `say` is called on another thread."""
    if backend.info is None or not backend.info.is_remote:
        yield
        return
    over = Event()

    def watch() -> None:
        told: float | None = None
        while not over.wait(_LOOK):
            if not (waits := backend.waiting()):
                told = None
            elif told is None or monotonic() - told >= _AGAIN:
                told = monotonic()
                say(f"chatterm: Waiting: {waits}.")

    thread = Thread(target=watch, name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
