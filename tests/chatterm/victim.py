"""Run as a program: for every line on standard input (a database, a seed or "-") a fork chats until it is killed.

The fork writes its process id; then, again and again, the number of its latest exchange and how many tokens of it are
committed for sure; in the end "done".
"""

import os
import signal
import sys
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import tokenizers  # noqa: F401 - whatever is imported here, a fork need not import
import torch

from chatterm.backends.backend import ChatOptions
from chatterm.backends.local import LocalBackend
from chatterm.conversation.headless import Talk
from chatterm.sessions.store import SessionStore
from engine.engine import Engine  # noqa: F401

MESSAGES = ("first", "second")
SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.2,
    "max_tokens": 80,
    "stop": ("q!", "zz"),
}


def backend_of(folder: Path, sampling: dict[str, Any]) -> LocalBackend:
    torch.set_num_threads(1)
    return LocalBackend(str(folder), ChatOptions("cpu", "float32", context=512, sampling=sampling))


def tell(*words: object) -> None:
    """One line, whole or not at all."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def chat(folder: Path, path: Path, seed: int | None) -> None:
    tell(os.getpid())
    sampling = SAMPLING | ({} if seed is None else {"seed": seed})
    backend, store = backend_of(folder, sampling), SessionStore.open(path)
    backend.open()
    talk = Talk(backend, store, sampling=sampling)
    said = [0, 0]

    def watch() -> None:
        while True:
            number, count = said
            store.flush()
            tell(number, count)
            sleep(0.005)

    for number, message in enumerate(MESSAGES, 1):
        for count, _ in enumerate(talk.ask(message), 1):
            if said == [0, 0]:
                Thread(target=watch, daemon=True).start()
            said = [number, count]
    store.flush()
    tell("done")
    signal.pause()


def main(folder: Path) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for line in sys.stdin:
        path, seed = line.rsplit(maxsplit=1)
        if os.fork() == 0:
            try:
                chat(folder, Path(path), None if seed == "-" else int(seed))
            finally:
                os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
