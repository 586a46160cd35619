"""The engine process: owns the engines and serves the clients of its socket. It knows nothing of HTTP.

`chatterm.server.spawn` starts it as `python -P -m chatterm.server.process.engine_process`, with its options as a line
of JSON on standard input. It prints `ready` on standard output, or why it failed. It ends when standard input does; if
`chatterm run` has left it behind, it ends as soon as nobody needs it after that.
"""

import asyncio
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from chatterm.backends.backend import EngineError, Progress
from chatterm.backends.protocol import HelloReply, Hold, LoadedModel, Loading, ServerStatus, agreed
from chatterm.ipc.frames import FrameError
from chatterm.ipc.messages import Call, unpack
from chatterm.ipc.runtime import ServerRunsError, listen
from chatterm.server.gc_tuning import leave_out, search_all
from chatterm.server.process.attached_session import AttachedSession, named
from chatterm.server.process.connection import ENDING, CallStream, ClientConnection
from chatterm.server.process.frame_batcher import Pump
from chatterm.server.process.generation_task import GenerationTask
from chatterm.server.process.memory import trim_heap
from chatterm.server.process.model_pool import MeasuredEngines, ModelPool, PooledModel
from chatterm.server.process.queries import Queries, Tokenize, TokenTexts
from chatterm.server.process.request_parsing import LONG_PROMPT, message_texts
from chatterm.server.process.workers import Workers
from chatterm.server.service import Generation
from chatterm.server.spawn import ProcessOptions
from chatterm.terminal.signals import on_signals
from engine.errors import GpuLostError

MOST_CLIENTS = 256
_LOOK = 1.0
"""Seconds between two checks for unused models."""
_FAREWELL = 1.0
"""Seconds between the loss of the GPU and the end of the process."""
_TIDY = 20.0
"""Seconds between two returns of free memory to the system."""
_LEAVE = 5.0
"""Seconds that clients have to read the end of their streams when the server ends."""


class EngineProcess:
    """Handles the calls of all clients. Everything here belongs to the event loop's thread."""

    def __init__(self, host: ModelPool, ends_unused: bool = False, freezes: bool = False) -> None:
        """`ends_unused` is as in ProcessOptions; `freezes`: exclude the models' objects from garbage collection."""
        self.host = host
        self.agreed = agreed()
        self.pump = Pump(asyncio.get_running_loop())
        self.workers = Workers()
        self.ended = asyncio.Event()
        """Set when the process is to end."""
        self.ends_unused = ends_unused
        self._freezes = freezes
        self.let_go = asyncio.Event()
        """Set once the parent has detached or is gone."""
        self._clients: set[ClientConnection] = set()
        self._began = time.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking = Queries(host)
        self._methods: dict[str, Callable[[Call, CallStream], Any]] = {
            "generate": self._generate,
            "models": lambda call, stream: self._off(stream, self._looking.models),
            "tokenize": self._tokenize,
            "token_texts": lambda call, stream: self._off(
                stream, self._looking.token_texts, unpack(call.body, TokenTexts)
            ),
            "hold": self._hold,
            "metrics": self._metrics,
            "status": lambda call, stream: stream.done(self.status()),
            "end": self._end,
        }

    # -- what connections ask

    def joined(self, connection: ClientConnection) -> bool:
        self._clients.add(connection)
        return len(self._clients) <= MOST_CLIENTS and not self.ended.is_set()

    def greeted(self, connection: ClientConnection) -> HelloReply:
        stays = self.host.keep_alive_s
        return HelloReply(os.getpid(), self.host.options, -1.0 if stays is None else stays, self.ends_unused)

    def left(self, connection: ClientConnection) -> None:
        self._clients.discard(connection)
        if isinstance(connection.session, AttachedSession):
            connection.session.close()
            connection.session = None  # its streams refer to the connection

    def begin(self, connection: ClientConnection, call: Call, stream: CallStream) -> Any:
        if self.ended.is_set():
            raise ENDING
        if (method := self._methods.get(call.method)) is not None:
            return method(call, stream)
        if connection.session is None:
            connection.session = AttachedSession(self.host, self.pump)
        return connection.session.begin(call, stream)

    # -- calls

    def _generate(self, call: Call, stream: CallStream) -> GenerationTask:
        request = unpack(call.body, Generation)
        if not 1 <= request.count <= 1024:
            raise EngineError(f"count is {request.count}; it must be from 1 to 1024.")
        return GenerationTask(request, self.host, self.pump, self.workers, stream)

    def _hold(self, call: Call, stream: CallStream) -> None:
        """Load or unload a model, and report the progress."""
        wanted = unpack(call.body, Hold)
        loop = asyncio.get_running_loop()

        def tell(progress: Progress) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(stream.item, Loading(progress))

        def work() -> None:
            model = named(wanted.model, wanted.folder) if wanted.folder else wanted.model
            if not wanted.folder:
                self._looking.check(model)
            if wanted.keep_alive_s == 0:
                if (held := self.host.find(model)) is not None:
                    held.keep_alive_s = 0.0
                    self.host.unload(held)
                return
            self.host.release(self.host.acquire(model, tell, wanted.keep_alive_s))

        self._off(stream, work, thread=True)

    def _tokenize(self, call: Call, stream: CallStream) -> None:
        wanted = unpack(call.body, Tokenize)
        texts = [wanted.text] if isinstance(wanted.text, str) else message_texts(wanted.text)
        self._off(stream, self._looking.tokenize, wanted, is_long=sum(map(len, texts)) > LONG_PROMPT)

    def _metrics(self, call: Call, stream: CallStream) -> None:
        """Send the metrics. The web process sends its queue lengths with the call."""
        stream.client.queued = unpack(call.body, dict[str, int] | None) or {}  # type: ignore[arg-type]
        queued = sum((Counter(client.queued) for client in self._clients), Counter[str]())
        stream.done(self._looking.metrics(self._terminals, queued))

    def _end(self, call: Call, stream: CallStream) -> None:
        stream.done()
        self.ended.set()

    def _off(
        self,
        stream: CallStream,
        work: Callable[..., Any],
        *arguments: Any,
        thread: bool = False,
        is_long: bool = False,
    ) -> None:
        """Run `work` in another thread; what it returns is the result of the call."""

        async def run() -> None:
            try:
                if thread:  # it may take minutes
                    stream.done(await asyncio.to_thread(work, *arguments))
                else:
                    done = self.workers.submit("", work, *arguments, is_long=is_long)
                    stream.done(await asyncio.wrap_future(done))
            except Exception as error:  # noqa: BLE001 (whatever it is, the client is told)
                stream.failed(error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _terminals(self) -> int:
        return sum(isinstance(client.session, AttachedSession) for client in self._clients)

    def status(self) -> ServerStatus:
        """Return what `chatterm ps` shows."""
        now = time.monotonic()
        addresses = [client.hello.address for client in self._clients if client.hello is not None]
        return ServerStatus(
            pid=os.getpid(),
            uptime_s=time.time() - self._began,
            address=next(filter(None, addresses), ""),
            terminals=self._terminals,
            ends_unused=self.ends_unused,
            models=tuple(_loaded(held, now) for held in self.host.held),
        )

    # -- its life

    async def run(self) -> None:
        """Release what is no longer used, until the process is asked to end.

        Raises GpuLostError once only another process can use the GPU; the parent then starts another.
        """
        tidied, models = time.monotonic(), list[PooledModel]()
        while not self.ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), _LOOK)
            if self.host.lost_gpu:
                await asyncio.sleep(_FAREWELL)  # clients are first told why their answers failed
                self.ended.set()
                raise GpuLostError("The GPU was lost; another engine process can use it.")
            now = time.monotonic()
            await asyncio.to_thread(self.host.unload_unused, now)
            if self._freezes and models != (held := self.host.held):
                has_lost = any(one not in held for one in models)
                models = held  # or this list would keep unloaded models alive
                (search_all if has_lost else leave_out)()
            if now >= tidied + _TIDY:
                await asyncio.to_thread(trim_heap)
                tidied = now
            if self.ends_unused and self.let_go.is_set() and not self._clients and not self.host.held:
                self.ended.set()

    async def leave(self) -> None:
        """Tell every client that the server ends, and free everything."""
        for client in list(self._clients):
            client.end()
        await asyncio.to_thread(self.host.close)
        for client in list(self._clients):
            client.close()
        self.workers.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE):
                while self._clients:
                    await asyncio.sleep(0.02)


def _loaded(held: PooledModel, now: float) -> LoadedModel:
    figures = held.engine.figures()
    return LoadedModel(
        name=held.name,
        device=figures.device,
        weight_bytes=figures.weight_bytes + figures.draft_bytes,
        kv_bytes=figures.kv_bytes,
        context_length=figures.context_length,
        users=held.users,
        running=len(held.sequences),
        loaded_at=held.loaded_at,
        keep_alive_left_s=held.left(now),
        keep_alive_s=held.keep_alive_s,
    )


async def serve(
    process: ProcessOptions,
    engines: MeasuredEngines | None = None,
    ready: Callable[["EngineProcess"], None] = lambda calls: None,
    parent: int | None = None,
    freezes: bool = False,
) -> None:
    """Listen until told to end. The parent is gone at the end of the file `parent`; `freezes` is as above.

    Raises ServerRunsError if there is a server already, and EngineError.
    """
    loop = asyncio.get_running_loop()
    host = ModelPool(process.options, process.keep_alive_s, engines)
    with listen() as listener:
        listener.socket.setblocking(False)
        calls = EngineProcess(host, process.ends_unused, freezes)
        with suppress(ValueError, RuntimeError):  # in a thread of a test
            on_signals(loop, calls.ended.set)
        server = await loop.create_server(
            lambda: ClientConnection(calls, listener.asked, listener.reply), sock=listener.socket
        )
        if parent is not None:
            _wait_for_parent(parent, loop, calls.let_go if process.ends_unused else calls.ended)
        ready(calls)
        try:
            await calls.run()
        finally:
            server.close()
            await calls.leave()


def _wait_for_parent(parent: int, loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    """Set `gone` at the end of the file `parent`, which the parent process holds open."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(parent, 4096):
                pass
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(gone.set)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def main() -> int:
    """Run as a process of its own; return the exit code."""
    line = sys.stdin.buffer.readline()
    sys.setswitchinterval(0.0001)  # as in a chat's worker: the engine's thread must not wait for the loop's
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # its threads would not have the priority of the one that asks
    )

    def ready(calls: EngineProcess) -> None:
        print("ready", flush=True)
        os.dup2(2, 1)  # nobody reads what libraries print after this

    try:
        process = msgspec.json.decode(line, type=ProcessOptions)
        asyncio.run(serve(process, ready=ready, parent=sys.stdin.fileno(), freezes=True))
    except ServerRunsError as error:
        print(f"taken {error}", flush=True)
        return 1
    except (EngineError, FrameError, msgspec.MsgspecError) as error:
        print(f"failed {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of libraries must not hold it up
