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

from engine.batch import StepBatch
from engine.build import build
from engine.cache.kv_cache import KVCache, Runs
from engine.cache.offload import Offload, Restore
from engine.device import DTYPES
from engine.execute.build_options import BuildOptions
from engine.execute.cuda.decode_runner import DecodeRunner
from engine.execute.cuda.slots import DividedCheck, DividedStep
from engine.execute.group import Group
from engine.execute.loading import load_here, plan_here
from engine.execute.runner import Runner
from engine.parallel.link import hear, receive, tell
from engine.parallel.messages import follow
from engine.parallel.ranks import decode_load, failure
from engine.parallel.ring import Ring
from engine.schedule.sequence import Sequence

_LOOK_S = 1.0
"""Longest sleep, in seconds, before the ring is checked again: on a processor with weak memory ordering rank 0 might
not see in time that this rank sleeps."""


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

    def copy_block(self, copy: Offload | Restore | None) -> None:
        """Copy a block from or to host memory; None: free that memory."""
        assert self._cache.host is not None
        if copy is None:
            self._cache.host.close()
        else:
            self._cache.carry_out(copy)

    def decode(self, step: DividedStep | DividedCheck) -> None:
        """Enqueue a step of the decode runner."""
        assert self._decode_runner is not None
        self._decode_runner.follow(step)


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
    follower = _Follower(pieces.runner, pieces.decode_runner, pieces.cache)
    tell(link, {"said": "ready"})
    while True:
        follow(told.next(), follower)


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
