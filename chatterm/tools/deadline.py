"""The time that a server has for all it sends: limits of single reads do not end one that gives a byte now and then."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOOK = 0.1
"""Seconds between two looks at whether it has to end."""


@contextmanager
def ended_in_time(
    sock: socket.socket, until: float, stopped: threading.Event | None = None
) -> Iterator[None]:
    """End a connection at `until`, of the monotonic clock, or once `stopped` is set, wherever it is being read.

    Raises TimeoutError then.
    """
    over, is_late = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK):
            if time.monotonic() > until or (stopped is not None and stopped.is_set()):
                is_late.set()
                with suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not that of TLS, which is being read
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
