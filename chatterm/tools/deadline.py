"""A deadline for a whole response: limits of single reads do not stop a server that sends a byte now and then."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOOK = 0.1
"""Seconds between two checks of the deadline."""


@contextmanager
def ended_in_time(
    sock: socket.socket, until: float, stopped: threading.Event | None = None
) -> Iterator[None]:
    """Shut a connection down at `until` (monotonic clock) or once `stopped` is set, even during a read.

    Raises TimeoutError then.
    """
    over, is_late = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK):
            if time.monotonic() > until or (stopped is not None and stopped.is_set()):
                is_late.set()
                with suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's: another thread is reading
                return

    watching = threading.Thread(target=watch, name="deadline", daemon=True)
    watching.start()
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError):
        if not is_late.is_set():
            raise
    finally:
        over.set()
        watching.join()
    if is_late.is_set():
        raise TimeoutError
