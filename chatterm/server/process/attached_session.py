"""The conversation of an attached terminal: a local backend on a shared engine."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from msgspec import Raw

from chatterm.backends.backend import (
    ENGINE_OPTIONS,
    ChatOptions,
    EngineError,
    OnProgress,
    Outcome,
    Part,
    Progress,
    Request,
    TokenEvent,
    TurnStats,
)
from chatterm.backends.calls import KINDS, arguments_type
from chatterm.backends.local import LocalBackend
from chatterm.backends.protocol import (
    BegunAnswer,
    LiveState,
    Loading,
    OnePart,
    Open,
    Said,
    State,
    Tokens,
    Wanted,
)
from chatterm.ipc.frames import FrameError
from chatterm.ipc.messages import Call, pack, unpack
from chatterm.server.process.connection import CallStream, failure
from chatterm.server.process.frame_batcher import Pump
from chatterm.server.process.model_pool import ModelPool, PooledModel
from engine.params import Constraint

if TYPE_CHECKING:
    from engine.engine import Engine
    from models.files import ModelFiles


class _Cancelled(Exception):
    """The call was cancelled."""


class SharedEngines:
    """The engines of the model pool, for one conversation."""

    def __init__(self, host: ModelPool, keep_alive_s: float | None = None) -> None:
        """`keep_alive_s` is as in `ModelPool.keep`."""
        self._host = host
        self._keep_alive_s = keep_alive_s
        self._taken: dict[int, PooledModel] = {}

    def find(self, model: str, on_progress: OnProgress | None) -> "ModelFiles":
        from models.files import ModelFiles

        if self._host.find(model) is not None:
            return ModelFiles(model)
        return self._host.engines.find(model, on_progress)

    def load(
        self, model: str, files: "ModelFiles", options: ChatOptions, on_progress: OnProgress | None
    ) -> "Engine":
        held = self._host.acquire(model, on_progress, self._keep_alive_s)
        self._taken[id(held.engine)] = held
        return held.engine

    def close(self, engine: "Engine") -> None:
        if (held := self._taken.pop(id(engine), None)) is not None:
            self._host.release(held)


class AttachedSession:
    """Runs the calls of one terminal, one after the other in its own thread; immediate calls bypass the queue."""

    def __init__(self, host: ModelPool, pump: Pump) -> None:
        self._host = host
        self._pump = pump
        self._backend: LocalBackend | None = None
        self._folder = ""
        """The terminal's folder."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._latest: _Job | None = None
        """The job that came last."""
        self._thread = threading.Thread(target=self._serve, name="terminal", daemon=True)
        self._thread.start()

    def begin(self, call: Call, stream: CallStream) -> "_Job | None":
        """Start a call, on the event loop's thread; return it unless done. Raises FrameError for an unknown method."""
        if call.method == "look":
            stream.done(look(self._backend))
            return None
        kind = KINDS.get(call.method)
        if kind is None:
            raise FrameError(f"There is no call {call.method[:40]!r}.")
        if kind == "immediate":
            stream.done(self._immediate(call))
            return None
        job = self._latest = _Job(self, call, stream, self._pump)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the session, as the terminal is gone. Does not wait."""
        self.interrupt()
        self._jobs.put(None)

    def interrupt(self) -> None:
        """Stop what runs within one step. From any thread."""
        if (backend := self._backend) is not None:
            backend.stop()

    def _immediate(self, call: Call) -> Any:
        arguments = _arguments(call.method, call.body)
        if call.method == "stop" and (job := self._latest) is not None:
            job.stopped = arguments
        return getattr(self._backend, call.method)(*arguments) if self._backend is not None else None

    # -- in the thread

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                value = self._run(job)
            except Exception as error:  # noqa: BLE001 (whatever it is, the terminal is told)
                job.end(self._state(job, None), None if isinstance(error, _Cancelled) else error)
            else:
                job.end(self._state(job, value), None)
        if self._backend is not None:
            with suppress(Exception):
                self._backend.close()
        self._latest = None  # it refers to this session

    def _state(self, job: "_Job", value: Any) -> State:
        backend = self._backend
        if backend is None:
            return State(None, 0, (None,), LiveState(None, None), pack(value))
        last = (backend.last,) if KINDS[job.method] in ("load", "answer", "history") else ()
        return State(backend.info, backend.used_tokens, last, look(backend), pack(value))

    def _run(self, job: "_Job") -> Any:
        if job.cancelled:
            raise _Cancelled
        if job.method == "open":
            return self._open(job)
        if self._backend is None:
            raise EngineError("No model is open yet.")
        kind = KINDS[job.method]
        if kind == "aside":
            return self._several(job, self._backend.answers(job.requests()))
        method, arguments = getattr(self._backend, job.method), _arguments(job.method, job.body)
        match kind:
            case "load":
                return method(named(arguments[0], self._folder), job.tell)
            case "answer":
                return self._answer(job, method(*arguments))
            case "several":
                return self._several(job, method(*arguments))
        return method(*arguments)

    def _open(self, job: "_Job") -> None:
        wanted = unpack(job.body, Open)
        if self._backend is not None:
            self._backend.close()
        shared = {name: getattr(self._host.options, name) for name in (*ENGINE_OPTIONS, "streams")}
        self._folder = wanted.folder
        options = _restored(replace(wanted.options, **shared))
        engines = SharedEngines(self._host, wanted.keep_alive_s)
        self._backend = LocalBackend(named(wanted.model, wanted.folder), options, engines)
        self._backend.open(job.tell)

    def _answer(self, job: "_Job", events: Iterator[TokenEvent]) -> None:
        backend = self._backend
        assert backend is not None
        begun = False
        if job.stopped is not None:  # before the backend started
            backend.stop(*job.stopped)
        with closing(cast("Any", events)):
            for event in events:
                last = backend.last
                if not begun and last is not None:
                    job.note(BegunAnswer(last.before(event)))
                begun = True
                job.say(Tokens([event], last.stats if last is not None else TurnStats()))
                if job.cancelled:
                    raise _Cancelled

    def _several(self, job: "_Job", parts: Iterator[tuple[int, Part]]) -> None:
        assert self._backend is not None
        if job.stopped is not None:
            self._backend.stop(*job.stopped)
        with closing(cast("Any", parts)):
            for index, part in parts:
                job.say(_one(index, part))
                if job.cancelled:
                    raise _Cancelled


class _Job:
    """One call and its output. The session's thread calls `note`, `say`, `tell`, `requests` and `end`."""

    def __init__(self, terminal: AttachedSession, call: Call, stream: CallStream, pump: Pump) -> None:
        self.waits, self.due = False, 0.0
        self.method, self.body = call.method, call.body
        self.cancelled = False
        self.stopped: tuple[Any, ...] | None = None
        """The arguments of a `stop` that came meanwhile."""
        self._terminal = terminal
        self._stream = stream
        self._pump = pump
        self._said: deque[Said] = deque()
        self._fed: SimpleQueue[Raw | None] = SimpleQueue()
        self._end: tuple[State, Exception | None] | None = None

    def cancel(self) -> None:
        self.cancelled = True
        self._fed.put(None)
        self._terminal.interrupt()

    def feed(self, body: Raw) -> None:
        self._fed.put(Raw(bytes(body)))

    def note(self, said: Said) -> None:
        """Queue an item without waking the sender."""
        self._said.append(said)

    def say(self, said: Said) -> None:
        self._said.append(said)
        self._pump.wake(self)

    def tell(self, progress: Progress) -> None:
        """Report the progress of a load. Raises if the call was cancelled."""
        if self.cancelled:
            raise _Cancelled
        self.say(Loading(progress))

    def end(self, state: State, error: Exception | None) -> None:
        self._end = (state, error)
        self._pump.wake(self, at_once=True)

    def requests(self) -> Iterable[Request]:
        """Yield the requests that the client feeds, asking for each one when it is needed."""
        while not self.cancelled:
            self.say(Wanted())
            body = self._fed.get()
            request = None if body is None else unpack(body, Request | None)  # type: ignore[arg-type]
            if request is None:
                return
            yield _restored(request)

    def fail(self, error: Exception) -> None:
        self._stream.failed(error)

    def send(self) -> bool:
        if self._stream.blocked(self):
            return True
        end = self._end  # read before the items: none comes after it
        gathered: list[Said] = []
        while self._said:
            said, last = self._said.popleft(), gathered[-1] if gathered else None
            if isinstance(said, Tokens) and isinstance(last, Tokens):
                gathered[-1] = Tokens(last.events + said.events, said.stats)
            elif isinstance(said, Loading) and isinstance(last, Loading):
                gathered[-1] = said
            else:
                gathered.append(said)
        for said in gathered:
            self._stream.item(said)
        if end is not None:
            state, error = end
            if error is not None:
                self._stream.item(state)
                self._stream.failed(error)
            else:
                self._stream.done(state)
        return not self._stream.is_over


def named(model: str, folder: str) -> str:
    """Resolve the name that a terminal in `folder` uses for a model to one that this process can find."""
    from models.hub.catalogue import names

    if model.strip().lower() in names():
        return model
    path = Path(folder) / Path(model).expanduser()
    return str(path.resolve()) if model.strip() and path.exists() else model


def look(backend: LocalBackend | None) -> LiveState:
    """Return the state that can be read at any time."""
    return LiveState(None, None) if backend is None else LiveState(backend.figures(), backend.made_title())


def _arguments(method: str, body: Raw) -> tuple[Any, ...]:
    """Return the arguments of a call as the backend takes them. Raises FrameError if they have other types."""
    return tuple(_restored(value) for value in unpack(body, arguments_type(method)))


def _restored(value: Any) -> Any:
    """Restore the types that sampling settings had before they were sent."""
    if isinstance(value, ChatOptions | Request):
        return replace(value, sampling=_sampling(value.sampling))
    if isinstance(value, dict) and "sampling" in value:
        return {**value, "sampling": _sampling(value["sampling"])}
    return value


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if found.get("constraint") is not None:
        found["constraint"] = unpack(pack(found["constraint"]), Constraint)
    return found


def _one(index: int, part: Part) -> OnePart:
    if isinstance(part, TokenEvent):
        return OnePart(index, token=part)
    if isinstance(part, Outcome):
        return OnePart(index, outcome=part)
    return OnePart(index, error=failure(0, part))
