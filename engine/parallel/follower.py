"""The process of a rank other than 0, started by `engine.parallel.ranks`.

It loads its part of the model, joins the group, and carries out rank 0's messages until the socket is closed.
"""

import os
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import torch

from engine.build import Pieces, build
from engine.device import DTYPES
from engine.execute.build_options import BuildOptions
from engine.execute.cuda.slots import DividedCheck, DividedStep
from engine.execute.group import Group
from engine.execute.loading import load_here, plan_here
from engine.parallel.link import hear, receive, tell
from engine.parallel.messages import (
    GivenBlock,
    GivenCopy,
    GivenStates,
    GivenStep,
    Message,
    read_message,
)
from engine.parallel.ranks import decode_load, failure
from engine.parallel.ring import Ring

_LOOK_S = 1.0
"""Longest sleep, in seconds, before the ring is checked again: on a processor with weak memory ordering rank 0 might
not see in time that this rank sleeps."""


def main(link: socket.socket, memory: int) -> None:
    """Follow rank 0 until `link` is closed. Report a failure to rank 0 in one line."""
    begin = hear(link)
    if begin is None:
        return
    try:
        _follow(link, Ring(memory), begin)
    except Exception as error:  # noqa: BLE001 - rank 0 reports any failure
        with suppress(OSError):
            tell(link, {"error": str(failure(error))})


def _follow(link: socket.socket, ring: Ring, begin: dict[str, Any]) -> None:
    (files, options), rank = decode_load(begin), int(begin["rank"])
    ranks, dtype = options.tensor_parallel, DTYPES[options.dtype]
    told, meeting = _LeaderMessages(ring), Path(begin["meeting"])
    # Without rank 0 this process has no use: it ends at once, even in the middle of a step.
    Thread(target=_listen, args=(link, told, meeting.parent), daemon=True).start()
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(options.threads or 1)
    network = load_here(plan_here(files, dtype, device, options, rank=(rank, ranks)))
    tell(link, {"said": "loaded"})
    told.next()
    group = Group.join(meeting, rank, ranks, device)
    # On a CPU, only rank 0 knows how much memory all ranks may use.
    free = sys.maxsize if device.type == "cpu" else None
    pieces = build(network, device, BuildOptions.of(options, group=group, free=free))
    tell(link, {"said": "ready"})
    while True:
        _carry_out(read_message(told.next()), pieces)


def _carry_out(message: Message, pieces: Pieces) -> None:
    """Do what rank 0 does; only it samples."""
    match message:
        case GivenStep(batch, slots):
            for pool, given in zip(pieces.cache.pools, slots, strict=True):
                pool.mirror(given)
            pieces.runner.run(batch)
        case DividedStep() | DividedCheck():
            assert pieces.decode_runner is not None
            pieces.decode_runner.follow(message)
        case GivenBlock(copy, slot):
            if copy.group:
                pieces.cache.pools[copy.group - 1].mirror({copy.block: slot})
            pieces.cache.carry_out(copy)
        case GivenStates(copy, slots):
            assert pieces.cache.log is not None
            pieces.cache.pools[pieces.cache.log - 1].mirror(slots)
            pieces.cache.carry_out(copy)
        case GivenCopy(source, target, group):
            pieces.cache.copy_rows(source, target, group)
        case None:
            assert pieces.cache.host is not None
            pieces.cache.host.close()


class _LeaderMessages:
    """The messages of rank 0: from the ring, or from the socket if too long for it. An empty socket message wakes."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._woken = Semaphore(0)
        self._long: SimpleQueue[bytes] = SimpleQueue()

    def next(self) -> bytes:
        """Return the next message; wait for it without limit."""
        return self._ring.take(self._sleep) or self._long.get()

    def _sleep(self) -> None:
        self._woken.acquire(timeout=_LOOK_S)

    def hear(self, message: bytes) -> None:
        """Take a message from the socket; an empty one wakes `next`."""
        if message:
            self._long.put(message)
        else:
            self._woken.release()


def _listen(link: socket.socket, told: _LeaderMessages, folder: Path) -> None:
    while (message := receive(link)) is not None:
        told.hear(message)
    shutil.rmtree(folder, ignore_errors=True)  # rank 0 may have been killed
    os._exit(0)
