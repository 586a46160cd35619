"""The other ranks of a model, seen from rank 0: it starts their processes, sends them each step, and ends them."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread, current_thread
from time import monotonic
from typing import Any

import torch

from engine.batch import NONE, StepBatch
from engine.build import Pieces
from engine.cache.copies import HostCopy, OffloadStates, RestoreStates
from engine.cache.kv_cache import KVCache, Runs
from engine.errors import EngineError
from engine.execute.cuda.slots import DividedCheck, DividedStep
from engine.execute.faults import explain
from engine.execute.group import LOST, PATIENCE, Group
from engine.parallel.link import hear, send, tell
from engine.parallel.messages import (
    GivenBlock,
    GivenCopy,
    GivenStates,
    GivenStep,
    of_copy,
    of_decode,
    of_host,
    of_step,
)
from engine.parallel.ring import LARGEST, Ring, open_file
from engine.params import LoadOptions
from models.files import ModelFiles

_GRACE_S = 3.0
"""How long ranks may take to end before they are killed, in seconds."""
_SILENCE_S = 9.0
"""How long a rank may be silent, in seconds: its loss is then reported within ten seconds."""
_START = str(Path(__file__).with_name("start.py"))


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    ring: Ring
    said: "SimpleQueue[dict[str, object] | None]" = field(default_factory=SimpleQueue)


class Ranks:
    """Ranks 1 to `count` - 1. They all end with this process, however it ends."""

    def __init__(self, files: ModelFiles, options: LoadOptions, lost: Callable[[EngineError], None]) -> None:
        """Start the ranks; each loads at once. If one is lost, all end, and `lost` is called once, from any thread.

        Raises EngineError if the processes cannot be started.
        """
        self.count = options.tensor_parallel
        self._lost = lost
        try:
            self._folder = TemporaryDirectory(prefix="chatterm-ranks-", ignore_cleanup_errors=True)
        except OSError as error:
            raise _no_start(error) from None
        self._meeting = Path(self._folder.name) / "meeting"
        self._lock = Lock()
        self._closed = False
        self._problem: EngineError | None = None
        self._group: Group | None = None
        self._ranks: list[_Rank] = []
        self._listeners: list[Thread] = []
        self._ended, started = Event(), Future[None]()
        self._starter = Thread(
            target=self._start_all, args=(files, options, started), name="ranks", daemon=True
        )
        self._starter.start()
        try:
            started.result()
        except OSError as error:
            self.close()
            raise _no_start(error) from None
        except BaseException:
            wait([started])
            self.close()
            raise
        for rank in self._ranks:
            listener = Thread(target=self._listen, args=(rank,), name=f"rank {rank.number}", daemon=True)
            self._listeners.append(listener)
            listener.start()

    def meet(self, device: torch.device) -> Group:
        """Wait until all ranks have loaded, then join them in a group. Raises EngineError when a rank fails."""
        for rank in self._ranks:
            self._wait(rank)
        for rank in self._ranks:
            self._send(rank, b"meet")
        try:
            self._group = Group.join(self._meeting, 0, self.count, device)
        except EngineError as error:  # it may only know that a rank did not come, not that it has ended
            raise EngineError(*(self._problem or error).args) from None
        return self._group

    def lead(self, pieces: Pieces) -> None:
        """Wait until all ranks follow, then make them repeat every step of `pieces`. Raises EngineError on failure."""
        for rank in self._ranks:
            self._wait(rank)
        pieces.runner.together, pieces.cache.tell = partial(self.step, pieces.cache), self.copy
        if pieces.cache.host is not None:
            pieces.cache.host.tell = partial(self.host_copy, pieces.cache)
        if (decodes := pieces.decode_runner) is not None:
            decodes.together, decodes.watch = self.decode, partial(self.watch, decodes.watch)

    def step(self, cache: KVCache, batch: StepBatch) -> AbstractContextManager[None]:
        """Have all ranks compute a step while this process does. Raises EngineError once a rank is lost.

        If this process fails, all ranks are lost: they wait for it within the step, and would mistake the data of its
        next step for the rest of this one.
        """
        return self._together(of_step(GivenStep(batch, cache.seen_slots(batch))))

    def decode(self, step: DividedStep | DividedCheck) -> AbstractContextManager[None]:
        """Like `step`, for a step of the decode runner."""
        return self._together(of_decode(step))

    def copy(self, source: Runs, target: Runs, group: int) -> None:
        """Have the other ranks copy KV rows; the caller then copies its own. Raises EngineError if a rank is lost."""
        self._broadcast(of_copy(GivenCopy(source, target, group)))

    def host_copy(self, cache: KVCache, copy: HostCopy | None) -> None:
        """Like `copy`, for a block or states from or to host memory; None: free that memory."""
        given: GivenBlock | GivenStates | None = None
        if isinstance(copy, OffloadStates | RestoreStates):
            assert cache.log is not None
            blocks = [block for block in copy.states.blocks if block != NONE]
            given = GivenStates(copy, dict(zip(blocks, cache.table(blocks, cache.log), strict=True)))
        elif copy is not None:
            given = GivenBlock(copy, *cache.table((copy.block,), copy.group))
        self._broadcast(of_host(given))

    def watch(self, ask: Callable[[], None] = lambda: None) -> None:
        """Raise EngineError once a rank is lost: later results mean nothing. If `ask` raises it, all are lost."""
        try:
            ask()
        except EngineError as error:
            self._lose(error)
        if self._problem is not None:
            raise EngineError(*self._problem.args)

    def close(self) -> None:
        """End the ranks. Closing twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._end(_GRACE_S)
        for listener in self._listeners:  # until they end, they hold all that is freed now
            if listener is not current_thread():
                listener.join(_GRACE_S)
        self._ended.set()
        self._starter.join(_GRACE_S)
        for rank in self._ranks:
            rank.link.close()
        for release in self._group.shared if self._group is not None else ():
            with suppress(RuntimeError):  # a GPU that failed has nothing to give back
                release()
        self._folder.cleanup()

    def _start_all(self, files: ModelFiles, options: LoadOptions, started: "Future[None]") -> None:
        """Start the ranks. Runs on its own thread until they have ended: Linux ends them with the thread."""
        try:
            words = {"meeting": str(self._meeting), **encode_load(files, options)}
            for number in range(1, self.count):
                self._ranks.append(_start(number))
                tell(self._ranks[-1].link, {"rank": number, **words})
        except BaseException as error:  # noqa: BLE001 - whoever waits for them gets it
            started.set_exception(error)
        else:
            started.set_result(None)
        self._ended.wait()

    @contextmanager
    def _together(self, message: bytes) -> Iterator[None]:
        try:
            self._broadcast(message)
            yield
        except Exception as error:
            raise EngineError(*self._lose(failure(error)).args) from error

    def _broadcast(self, message: bytes) -> None:
        for rank in self._ranks:
            self._send(rank, message)

    def _send(self, rank: _Rank, message: bytes) -> None:
        if self._problem is not None:
            raise EngineError(*self._problem.args)
        in_ring = message if len(message) <= LARGEST else b""
        try:
            wakes = rank.ring.put(in_ring, PATIENCE.total_seconds())
            if message is not in_ring:
                send(rank.link, message)
            if wakes:
                send(rank.link, b"")
        except OSError:  # TimeoutError is one
            raise EngineError(*self._lose(EngineError(LOST)).args) from None

    def _wait(self, rank: _Rank) -> None:
        """Wait for the next message of a rank. Raises EngineError when the rank is lost."""
        if rank.said.get() is None:
            raise EngineError(*(self._problem or EngineError(LOST)).args)

    def _listen(self, rank: _Rank) -> None:
        """Receive a rank's messages until it ends, then end the other ranks. Runs on its own thread."""
        error = None
        while (words := hear(rank.link)) is not None:
            if "error" in words:
                error = str(words["error"])
                break
            rank.said.put(words)
        self._lose(EngineError(error or _how_lost(rank)))
        rank.said.put(None)

    def _lose(self, error: EngineError) -> EngineError:
        """End all ranks because of `error`, unless they have ended. Return the error that ended them."""
        with self._lock:
            is_first = not self._closed and self._problem is None
            if is_first:
                self._problem = error
                self._end(0.0)
        if is_first:
            for leave in self._group.leave if self._group is not None else ():
                leave()
            self._lost(error)
        return self._problem or error

    def _end(self, grace: float) -> None:
        until = monotonic() + grace
        for rank in self._ranks:
            with suppress(OSError):
                rank.link.shutdown(socket.SHUT_RDWR)
        for rank in self._ranks:
            try:
                rank.process.wait(max(until - monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                rank.process.kill()
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):  # a hanging driver can keep the process alive
                rank.process.wait(_GRACE_S)


def encode_load(files: ModelFiles, options: LoadOptions) -> dict[str, Any]:
    """Return what each rank loads and how, for `decode_load`."""
    paths = (None if path is None else str(path) for path in (files.folder, files.gguf))
    return {"files": (files.name, *paths), "options": asdict(options)}


def decode_load(words: dict[str, Any]) -> tuple[ModelFiles, LoadOptions]:
    """Return what `encode_load` put into words."""
    name, *paths = words["files"]
    folder, gguf = (None if path is None else Path(path) for path in paths)
    return ModelFiles(name, folder, gguf), LoadOptions(**words["options"])


def failure(error: Exception) -> EngineError:
    """Return the error that ends all ranks, in one line."""
    return explain(error, "Load the model again.")


def _how_lost(rank: _Rank) -> str:
    with suppress(subprocess.TimeoutExpired):
        rank.process.wait(0.5)
    code = rank.process.returncode
    if code is None:
        return LOST
    how = f" (signal {-code})" if code < 0 else ""
    return (
        f"The process that computes part {rank.number + 1} of the model has ended{how}; the conversation is intact. "
        "Load the model again."
    )


def _no_start(error: OSError) -> EngineError:
    why = error.strerror or error
    return EngineError(
        f"The processes of the model cannot be started ({why}). Choose a smaller --tensor-parallel, or 1."
    )


def _start(number: int, platform: str = sys.platform) -> _Rank:
    """Start a rank in a process group of its own, so that Ctrl-C reaches only this process, which then ends the ranks.

    The rank stays in this session. When this process ends, the rank's group is orphaned, and a POSIX system sends
    SIGHUP and SIGCONT to it if processes in it are stopped: they could not notice by themselves that they are alone.
    """
    ours, theirs = socket.socketpair()
    with ExitStack() as failed, theirs, open_file() as memory:
        failed.callback(ours.close)
        ring = Ring(memory)
        process = subprocess.Popen(
            [sys.executable, "-P", _START, str(theirs.fileno()), str(memory), platform],
            pass_fds=(theirs.fileno(), memory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        failed.pop_all()
    ours.settimeout(_SILENCE_S)
    return _Rank(number, process, ours, ring)
