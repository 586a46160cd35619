"""Terminals of a soak: they attach to the engine process and chat, and some die in the middle of it."""

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from random import Random

from benchmarks.soak_plans import text_of
from benchmarks.soak_server import CHATTERM


@dataclass(frozen=True, slots=True)
class Talk:
    """A chat of a terminal."""

    model: str
    messages: Sequence[str]
    seed: int

    @classmethod
    def of(cls, number: int, model: str) -> "Talk":
        random = Random(f"talk {number}")
        return cls(model, [text_of(random, 20) for _ in range(random.randint(1, 3))], number)


def talk(asked: Talk, dies_after: int | None = None) -> list[str]:
    """Return the answers of a terminal; its connection breaks off after `dies_after` tokens of the last one.

    Raises EngineError and ModelError.
    """
    from chatterm.backends.backend import ChatOptions, EngineError
    from chatterm.backends.failover import connect_to_server
    from chatterm.backends.process import ProcessBackend

    found = connect_to_server("terminal")
    if found is None:
        raise EngineError("there is no server")
    link = found[0]
    sampling = {"seed": asked.seed, "temperature": 0.8, "max_tokens": 24}
    backend = ProcessBackend(link, asked.model, ChatOptions(system="Be brief.", sampling=sampling))
    backend.open()
    answers = []
    for number, message in enumerate(asked.messages):
        backend.prepare(message[: len(message) // 2])
        if dies_after is not None and number == len(asked.messages) - 1:
            list(islice(backend.send(message), dies_after))
            with suppress(OSError):
                link._peer.shutdown(socket.SHUT_RDWR)  # as if the process were killed
            link.close()
            return answers
        answers.append("".join(event.text for event in backend.send(message)))
        backend.settle()
        backend.figures()
    backend.close()
    return answers


async def killed_run(model: str, random: Random) -> None:
    """Run `chatterm run -p`, and kill it after some bytes of its answer."""
    process = await asyncio.create_subprocess_exec(
        *(*CHATTERM, "run", model, "-p", text_of(random, 20), "--max-tokens", "40"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    await process.stdout.read(random.choice((1, 10, 30)))
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def noise(random: Random) -> None:
    """Connect to the engine process and send data that no client sends."""
    from chatterm.ipc.runtime import connect

    peer = connect()
    if peer is None:
        raise OSError("the engine process cannot be reached")
    with peer, suppress(OSError):
        peer.settimeout(10)
        said = random.choice(
            (b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", os.urandom(50), b"\xff" * 100, b"\x00\x00\x00\x20")
        )
        peer.sendall(said)
        if random.random() < 0.5 and len(said) > 20:
            peer.recv(4096)
