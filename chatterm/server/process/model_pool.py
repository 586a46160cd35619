"""The models of the engine process: loaded on demand, shared by all clients, unloaded when unused."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from chatterm.backends.backend import ChatOptions, EngineError, ModelError, OnProgress, ThinkMode
from chatterm.backends.local import Engines, OwnEngines
from chatterm.server.service import Think, ToolFormat
from chatterm.tool_calls.format import tool_format
from engine.errors import GpuLostError
from models.errors import NoRoomError
from models.units import bytes_text

if TYPE_CHECKING:
    from engine.conversation.requests import Requests
    from engine.engine import Engine
    from engine.machine.memory_check import MemoryNeed
    from models.files import ModelFiles


class MeasuredEngines(Engines, Protocol):
    """Engines that share one memory."""

    def need(self, files: "ModelFiles", options: ChatOptions) -> "MemoryNeed":
        """Return the memory that a model needs beside the loaded ones, and what is free. Raises as `load` does."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that was loaded before, and is loaded again on request."""

    name: str
    source: str
    """The name, folder or file that it was loaded by."""
    aliases: frozenset[str]
    loaded_at: float
    """Seconds since the epoch."""
    place: str
    """Its canonical name."""

    @property
    def is_there(self) -> bool:
        """Whether it is a folder or a file that still exists."""
        return Path(self.place).exists()


@dataclass(slots=True, eq=False)
class PooledModel:
    """A loaded model."""

    name: str
    engine: "Engine"
    requests: "Requests"
    keep_alive_s: float | None
    """Seconds that it stays loaded while unused; None: forever."""
    loaded_at: float
    """Seconds since the epoch."""
    tool_format: ToolFormat | None = None
    think: ThinkMode = "auto"
    """Whether it thinks where a request does not say."""
    aliases: set[str] = field(default_factory=set)
    most_characters: int = 0
    """No longer text fits the context."""
    users: int = 0
    cleanups: int = 0
    """Finished answers still being cleaned up."""
    unused_since: float = 0.0
    """On the monotonic clock; meaningless while it is in use."""
    sequences: set[Any] = field(default_factory=set)
    """Sequences that run for requests now."""
    pending_recalls: dict[Future[None], str | None] = field(default_factory=dict)
    """Cleanups of finished requests, which record their answers for the next prompt, with the client of each."""
    waiting_for_prefix: list[tuple[Any, Callable[[], None]]] = field(default_factory=list)
    """Callbacks that wait for a sequence's first token, to reuse the prefix that it computes."""
    lock: Any = field(default_factory=threading.Lock)

    @property
    def bytes(self) -> int:
        """The device memory that it uses."""
        figures = self.engine.figures()
        return figures.weight_bytes - figures.host_bytes + figures.kv_bytes + figures.draft_bytes

    def thinks(self, wanted: Think) -> bool | None:
        """Return whether it is to think, as a request wants it or else as the server was started; None: as the model
        does."""
        return {"auto": None, "on": True, "off": False}[self.think if wanted == "auto" else wanted]

    def follow(self, leader: Any, begin: Callable[[], None]) -> bool:
        """Register `begin` to run once `leader` has its first token; return False if it has, or is over."""
        with self.lock:
            if leader.first_token or leader.finished.is_set():
                return False
            self.waiting_for_prefix.append((leader, begin))
            return True

    def cancel(self, begin: Callable[[], None]) -> bool:
        """Cancel `begin`; return False if it ran or was never registered."""
        with self.lock:
            before = len(self.waiting_for_prefix)
            self.waiting_for_prefix = [waiting for waiting in self.waiting_for_prefix if waiting[1] != begin]
            return len(self.waiting_for_prefix) < before

    def begun(self, leader: Any) -> list[Callable[[], None]]:
        """Remove and return what waited for this sequence, which has its first token or is over."""
        with self.lock:
            ready = [begin for other, begin in self.waiting_for_prefix if other is leader]
            self.waiting_for_prefix = [
                waiting for waiting in self.waiting_for_prefix if waiting[0] is not leader
            ]
            return ready

    def left(self, now: float) -> float | None:
        """Return the seconds until it is unloaded; None: it is in use, or it stays."""
        if self.engine.is_closed and not self.users:
            return 0.0  # it failed
        if self.users or self.keep_alive_s is None:
            return None
        return max(self.unused_since + self.keep_alive_s - now, 0.0)


class ModelPool:
    """Owns the engines. Usable from any thread; taking a model that is not loaded is slow."""

    def __init__(
        self, options: ChatOptions, keep_alive_s: float | None, engines: MeasuredEngines | None = None
    ) -> None:
        self.options = options
        self.keep_alive_s = keep_alive_s
        self.loads = 0
        """How many models have been loaded so far."""
        self.engines: MeasuredEngines = engines or OwnEngines()
        """Finds, loads and closes engines."""
        self._held: list[PooledModel] = []
        self._known: dict[str, KnownModel] = {}
        """Keyed by canonical name."""
        self._state = threading.RLock()
        self._cleaned = threading.Condition(self._state)
        self._loading = threading.Lock()
        """Held while loading, so that one model at a time takes memory step by step."""
        self._closed = False
        self._lost_gpu = False

    @property
    def lost_gpu(self) -> bool:
        """Whether this process can no longer use the GPU, as noticed by a loaded model or while loading one."""
        with self._state:
            return self._lost_gpu or any(held.engine.lost_gpu for held in self._held)

    @property
    def held(self) -> list[PooledModel]:
        """The loaded models in the order of their loads, without those that failed."""
        with self._state:
            return [held for held in self._held if not held.engine.is_closed]

    @property
    def known(self) -> list[KnownModel]:
        """All models loaded so far, whether or not they still are, the latest first."""
        with self._state:
            return list(self._known.values())[::-1]

    def known_as(self, name: str) -> KnownModel | None:
        """Return the model that was last loaded by this name."""
        return next((one for one in self.known if name in one.aliases), None)

    def is_here(self, name: str) -> bool:
        """Return whether requests may load this model: it is installed, or was loaded before and still exists.

        Others could make the server read or fetch any file. Raises ModelError if the installed models cannot be read.
        """
        known, names = self.known_as(name), local_names()
        return name in names or (known is not None and (known.source in names or known.is_there))

    def find(self, name: str) -> PooledModel | None:
        """Return the loaded model of this name, if any, without acquiring it."""
        return next((held for held in self.held if name in held.aliases), None)

    def acquire(
        self, name: str, on_progress: OnProgress | None = None, keep_alive_s: float | None = None
    ) -> PooledModel:
        """Acquire a model until `release`, loading it if needed. `keep_alive_s` is as in `keep`.

        Raises ModelError and EngineError.
        """
        if (held := self.take_loaded(name)) is None:
            with self._loading:
                known = self.known_as(name)
                source = name if known is None else known.source
                held = self.take_loaded(name) or self._add(source, on_progress)
        self.keep(held, keep_alive_s)
        return held

    def keep(self, held: PooledModel, keep_alive_s: float | None) -> None:
        """Set how long a model stays loaded while unused; below 0: forever, None: the server's default."""
        usual = self.keep_alive_s if keep_alive_s is None else keep_alive_s
        held.keep_alive_s = usual if usual is None or usual >= 0 else None

    def take_loaded(self, name: str) -> PooledModel | None:
        """Acquire the model if it is loaded; otherwise return None. Never waits for a load."""
        with self._state:
            if self._closed:
                raise EngineError("The server is shutting down; start it again with chatterm serve.")
            if (held := self.find(name)) is not None:
                held.users += 1
            return held

    def release(self, held: PooledModel) -> None:
        """Release a model that `acquire` acquired."""
        with self._state:
            held.users -= 1
            held.unused_since = time.monotonic()

    def begin_cleanup(self, held: PooledModel) -> None:
        """Release the model, but delay unloading until `end_cleanup` ends the cleanup of an answer."""
        with self._state:
            held.cleanups += 1
            self.release(held)

    def end_cleanup(self, held: PooledModel) -> None:
        """End the cleanup that `begin_cleanup` began."""
        with self._cleaned:
            held.cleanups -= 1
            self._cleaned.notify_all()

    @contextmanager
    def using(self, name: str) -> Iterator[PooledModel]:
        """Acquire a model for the length of a block. Raises as `acquire` does."""
        held = self.acquire(name)
        try:
            yield held
        finally:
            self.release(held)

    def unload(self, held: PooledModel) -> bool:
        """Free a model unless it is in use; return whether it was freed."""
        with self._state:
            if held.users or held not in self._held:
                return False
            self._held.remove(held)
            self._cleaned.wait_for(lambda: not held.cleanups)
        self.engines.close(held.engine)
        return True

    def unload_unused(self, now: float) -> None:
        """Free the models that have been unused for too long or have failed. `now` is on the monotonic clock."""
        with self._state:
            loaded = list(self._held)
        for held in loaded:
            if (left := held.left(now)) is not None and left <= 0.0:
                self.unload(held)

    def close(self) -> None:
        """Free everything; whatever runs ends as cancelled. Closing twice is fine."""
        with self._state:
            self._closed = True
            held, self._held = self._held, []
        for one in held:
            self.engines.close(one.engine)

    def _add(self, name: str, on_progress: OnProgress | None) -> PooledModel:
        from engine.conversation.requests import Requests

        key = canonical(name)
        with self._state:
            if (held := self.find(key)) is not None:
                held.aliases.add(name)
                held.users += 1
                return held
        files = self.engines.find(name, on_progress)
        self.unload_unused(time.monotonic())  # a failed one still has its memory
        engine = self._load(name, files, on_progress)
        try:
            requests = Requests(engine, think_cache=self.options.think_cache)
            most_characters = engine.context_length * engine.tokenizer.longest_token
        except BaseException:
            self.engines.close(engine)
            raise
        with self._state:
            if self._closed:
                self.engines.close(engine)
                raise EngineError("The server is shutting down; start it again with chatterm serve.")
            full = engine.model_name
            aliases = {name, key} if self.find(full) is not None else {name, key, full}
            held = PooledModel(
                full,
                engine,
                requests,
                self.keep_alive_s,
                time.time(),
                tool_format(engine.tokenizer),
                self.options.think,
                aliases,
                most_characters,
                users=1,
            )
            self._held.append(held)
            self._known.pop(key, None)
            self._known[key] = KnownModel(full, name, frozenset(aliases), held.loaded_at, key)
            self.loads += 1
        return held

    def _load(self, name: str, files: "ModelFiles", on_progress: OnProgress | None) -> "Engine":
        """Load a model, unloading unused ones (least recently used first) as far as it needs their memory."""
        while True:
            need, idle = self.engines.need(files, self.options), self._idle()
            can_fit = need.least <= need.free + sum(held.bytes for held in idle)
            if need.is_met or not can_fit or not self._unload_oldest():
                break
        while True:
            try:
                return self.engines.load(name, files, self.options, on_progress)
            except NoRoomError as error:  # it needs more than was expected
                if not can_fit or not self._unload_oldest():
                    raise self._refused(error) from None
            except GpuLostError:
                self._lost_gpu = True
                raise

    def _idle(self) -> list[PooledModel]:
        """Return the unused models, the least recently used first."""
        with self._state:
            idle = [held for held in self._held if not held.users]
        return sorted(idle, key=lambda held: held.unused_since)

    def _unload_oldest(self) -> bool:
        """Unload the least recently used of the unused models; return whether there was one."""
        done = any(self.unload(held) for held in self._idle())
        gc.unfreeze()  # frozen objects may belong to that model
        gc.collect()  # reference cycles hold its memory until then
        return done

    def _refused(self, error: NoRoomError) -> NoRoomError:
        """Return the error with the models that take the memory added to its message."""
        loaded = ", ".join(f"{held.name} ({bytes_text(held.bytes)})" for held in self.held)
        return type(error)(f"{error} Loaded here: {loaded}.") if loaded else error


def local_names() -> set[str]:
    """Return the names of the models on this machine. Raises ModelError if they cannot be read."""
    from models.hub.sources import local_models

    return {model.name for model in local_models()}


def canonical(name: str) -> str:
    """Return the one name that stands for all names of a model; for a folder or a file, its absolute path."""
    from models.hub.sources import parse

    try:
        source = parse(name)
    except ModelError:
        return name
    return str(source.resolve()) if isinstance(source, Path) else source.name
