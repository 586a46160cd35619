"""A rank other than the first: `python -m engine.parallel.follower SOCKET RING`, started by `engine.parallel.ranks`.

It loads its part, joins the others, and does what rank 0 tells it through the ring until the socket is closed.
"""

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import torch

from engine.batch import StepBatch
from engine.build import build
from engine.cache.kv_cache import KVCache, Runs
from engine.device import DTYPES
from engine.errors import EngineError
from engine.execute.cpu.held_weights import read_model
from engine.execute.cuda.decode_runner import DecodeRunner
from engine.execute.cuda.slots import DividedStep
from engine.execute.group import Group
from engine.execute.runner import Runner
from engine.parallel.link import hear, receive, tell
from engine.parallel.messages import follow
from engine.parallel.ranks import Order
from engine.parallel.ring import Ring
from engine.schedule.sequence import Sequence
from models.errors import ModelError


class _Follower:
    """The runner and the KV cache of this rank."""

    def __init__(self, runner: Runner, decode_runner: DecodeRunner[Sequence] | None, cache: KVCache) -> None:
        self._runner = runner
        self._decode_runner = decode_runner
        self._cache = cache

    def run(self, batch: StepBatch) -> None:
        """Compute a step; rank 0 samples."""
        self._runner.run(batch)

    def copy_rows(self, source: Runs, target: Runs) -> None:
        """Copy rows of the KV cache."""
        self._cache.copy_rows(source, target)

    def decode(self, step: DividedStep) -> None:
        """Enqueue a step of the decode runner."""
        assert self._decode_runner is not None
        self._decode_runner.follow(step)


def main(fd: int, memory: int) -> None:
    """Follow until the socket is closed. What goes wrong is told to rank 0, in one line."""
    link = socket.socket(fileno=fd)
    begin = hear(link)
    if begin is None:
        return
    try:
        _follow(link, Ring(memory), begin)
    except (EngineError, ModelError) as error:
        _complain(link, str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 says it
        _complain(link, f"A part of the model cannot be computed: {error!r:.200}")


def _follow(link: socket.socket, ring: Ring, begin: dict[str, Any]) -> None:
    order, rank, ranks = Order(**begin["order"]), int(begin["rank"]), int(begin["ranks"])
    told = _Told(ring)
    # Nobody waits for this process: without rank 0 it ends at once, whatever it computes.
    Thread(target=_listen, args=(link, told), daemon=True).start()
    device = torch.device("cpu")
    if order.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(order.threads)
    network, _ = read_model(
        order.files, DTYPES[order.dtype], device, order.quantize, None, order.context, rank=(rank, ranks)
    )
    tell(link, {"said": "loaded"})
    told.next()
    group = Group.join(Path(begin["meeting"]), rank, ranks, device)
    # Rank 0 knows how much memory there is for all ranks of a CPU.
    pieces = build(network, device, DTYPES[order.dtype], order.options(group, sys.maxsize), ())
    follower = _Follower(pieces.runner, pieces.decode_runner, pieces.cache)
    tell(link, {"said": "ready"})
    while True:
        follow(told.next(), follower)


class _Told:
    """What rank 0 says: in the ring, and over the socket what is too long for it, or that there is something again."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._woken = Semaphore(0)
        self._long: SimpleQueue[bytes] = SimpleQueue()

    def next(self) -> bytes:
        """The next message, however long that takes."""
        return self._ring.take(self._sleep) or self._long.get()

    def _sleep(self) -> None:
        self._woken.acquire()

    def hear(self, message: bytes) -> None:
        """What came over the socket."""
        if message:
            self._long.put(message)
        else:
            self._woken.release()


def _listen(link: socket.socket, told: _Told) -> None:
    while (message := receive(link)) is not None:
        told.hear(message)
    os._exit(0)


def _complain(link: socket.socket, line: str) -> None:
    with suppress(OSError):
        tell(link, {"error": line})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
