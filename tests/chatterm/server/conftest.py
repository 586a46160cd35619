"""An engine process around tiny random models: in a thread of the test, or in a process of its own."""

import asyncio
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import ChatOptions
from chatterm.server.process.engine_process import EngineProcess, serve
from chatterm.server.spawn import ProcessOptions
from engine.errors import EngineError
from engine.machine.memory_check import MemoryNeed
from models.errors import ModelError
from models.files import ModelFiles
from tests.counting import PATIENCE
from tests.engine.tiny import TinyEngine, tiny_engine, write_tokenizer
from tests.models.checkpoints import tiny_qwen3, write_checkpoint

ROOT = Path(__file__).parents[3]


@dataclass
class Tinies:
    """Loads models called tiny..., each a random one."""

    folder: Path
    made: list[TinyEngine] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    _contexts: list[Any] = field(default_factory=list)
    """Kept: without them engines would be closed."""

    def find(self, model: str, on_progress: Any) -> ModelFiles:
        if not model.startswith("tiny"):
            raise ModelError(f"There is no model {model}.")
        return ModelFiles(model)

    def need(self, files: ModelFiles, options: ChatOptions) -> MemoryNeed:
        return MemoryNeed(0, 0, 0, 0)

    def load(self, model: str, files: ModelFiles, options: ChatOptions, on_progress: Any) -> TinyEngine:
        made = tiny_engine(self.folder, **{"num_blocks": 2048, **self.options})
        self._contexts.append(made)
        engine = made.__enter__()
        engine.model_name = model
        self.made.append(engine)
        return engine

    def close(self, engine: Any) -> None:
        engine.close()


class Gate:
    """The model says x for ever, and computes `steps` times; then it waits until the gate is open."""

    def __init__(self, engine: TinyEngine, steps: int = 6) -> None:
        self._open = threading.Event()
        self.holds = threading.Event()
        """Set once the engine waits."""
        forward, left = engine.scripted.forward, iter(range(steps))
        engine.scripted.script = engine.tokenizer.encode("x") * 800

        def gated(*arguments: Any) -> Any:
            if next(left, None) is None:
                self.holds.set()
                assert self._open.wait(PATIENCE)
            return forward(*arguments)

        engine.scripted.forward = gated  # type: ignore[method-assign]

    def open(self) -> None:
        self._open.set()

    def open_when(self, is_so: Callable[[], bool]) -> None:
        """From another thread."""

        def wait() -> None:
            while not is_so():
                threading.Event().wait(0.002)
            self.open()

        threading.Thread(target=wait, daemon=True).start()


@dataclass
class Served:
    """A running engine process, in a thread."""

    calls: EngineProcess
    tinies: Tinies
    loop: asyncio.AbstractEventLoop

    @property
    def engine(self) -> TinyEngine:
        """The engine that was loaded last."""
        return self.tinies.made[-1]

    @property
    def running(self) -> list[Any]:
        """The sequences that the engine has; none once it is closed."""
        try:
            return list(self.engine.pieces.scheduler.running)
        except EngineError:
            return []

    @property
    def has_ended(self) -> bool:
        return self.calls.ended.is_set()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.calls.ended.set)


@pytest.fixture(scope="package", autouse=True)
def _same_authorities() -> Iterator[None]:
    """No client here needs the authorities of the web, which each would read from a file for 30 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder with a short name."""
    folder = Path(tempfile.mkdtemp(prefix="ct"))
    monkeypatch.setenv("CHATTERM_RUNTIME", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, 1024)


@pytest.fixture(scope="session")
def roomy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For long conversations."""
    return written(tmp_path_factory, 4096)


def written(factory: pytest.TempPathFactory, positions: int) -> Path:
    """A model of one layer: what it computes does not matter here."""
    config = tiny_qwen3(vocab_size=272, max_position_embeddings=positions, num_hidden_layers=1)
    return write_checkpoint(factory.mktemp("tiny"), config)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that a model has, for processes of their own."""
    folder = tmp_path_factory.mktemp("whole") / "tiny"
    write_checkpoint(folder, tiny_qwen3(vocab_size=272, max_position_embeddings=1024))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def served(runtime: Path, checkpoint: Path) -> Iterator[Served]:
    """A server with the tiny model."""
    with serving(checkpoint) as found:
        yield found


class serving:
    """A server in a thread, as `engines` make its models."""

    def __init__(
        self,
        checkpoint: Path,
        keep_alive_s: float | None = None,
        parent: int | None = None,
        engines: Tinies | None = None,
        chat: ChatOptions | None = None,
        **options: Any,
    ) -> None:
        """With `parent`, a file, it is one that `chatterm run` leaves behind."""
        self._tinies = engines or Tinies(checkpoint, options=options)
        self._process = ProcessOptions(chat or ChatOptions(), keep_alive_s, ends_unused=parent is not None)
        self._parent = parent
        self._thread: threading.Thread | None = None
        self.problems: list[BaseException] = []

    def __enter__(self) -> Served:
        came: list[Served] = []
        is_ready = threading.Event()
        problem = self.problems

        def ready(calls: EngineProcess) -> None:
            came.append(Served(calls, self._tinies, asyncio.get_running_loop()))
            is_ready.set()

        def run() -> None:
            try:
                asyncio.run(serve(self._process, self._tinies, ready, self._parent))
            except BaseException as error:  # noqa: BLE001 (it is the test's)
                problem.append(error)
            finally:
                is_ready.set()

        self._thread = threading.Thread(target=run, name="server")
        self._thread.start()
        is_ready.wait()
        if problem:
            raise problem[0]
        self._served = came[0]
        return self._served

    def __exit__(self, *error: object) -> None:
        assert self._thread is not None
        if self._thread.is_alive():
            self._served.end()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture
def server_process(runtime: Path, checkpoint: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A server with tiny models in a process of its own."""
    program = Path(__file__).with_name("tiny_server.py")
    process = subprocess.Popen(
        [sys.executable, str(program), str(checkpoint)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
