"""A server on a loopback port that gives a byte now and then, and never ends."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.counting import PATIENCE


@contextmanager
def dripping(begins: bytes, begun: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Its address. `begun` is called once it has sent `begins`. In the end the client must have gone."""
    gone = threading.Event()

    def drip() -> None:
        sock, _ = listener.accept()
        with sock, suppress(OSError):
            sock.sendall(begins)
            begun()
            while not gone.wait(0.01):
                sock.sendall(b"x")
        gone.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert gone.wait(PATIENCE)
