"""An engine process that `chatterm run` leaves behind: who starts it, what it serves, and when it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends import failover, local
from chatterm.backends.backend import (
    ENGINE_OPTIONS,
    ChatOptions,
    Document,
    EngineError,
    Exchange,
    Message,
    Request,
    Tool,
)
from chatterm.backends.failover import FailoverBackend, Stays, attach, connect_to_server
from chatterm.backends.protocol import ServerStatus
from chatterm.cli.main import call
from chatterm.cli.servers import command_link, stays_text
from chatterm.ipc.runtime import ServerRunsError
from chatterm.server.process import engine_process
from chatterm.server.process.attached_session import SharedEngines
from chatterm.server.process.model_pool import ModelPool
from chatterm.server.spawn import left_behind
from engine.params import Constraint
from tests.chatterm.server.conftest import ROOT, Served, Tinies, serving
from tests.chatterm.test_end_to_end import ENTER, runs
from tests.counting import PATIENCE, until
from tests.engine.tiny import TinyEngine

OPTIONS = ChatOptions(sampling={"max_tokens": 5, "seed": 5})
CTRL_Q = "\x11"
WORDS = ["-p", "Name a river.", "--max-tokens", "4", "--seed", "3", "--json", "--context", "512"]


@pytest.fixture(autouse=True)
def nothing_stays(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "stdin", None)
    yield
    if (pid := status_pid()) not in (None, os.getpid()):
        os.kill(pid, signal.SIGKILL)


def status() -> ServerStatus | None:
    link = command_link()
    if link is None:
        return None
    try:
        return link.ask("status", None, ServerStatus, 5.0)
    finally:
        link.close()


def status_pid() -> int | None:
    found = status()
    return found.pid if found is not None else None


# --- real processes, a model in a folder


def test_the_next_command_attaches_to_what_a_chat_left(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The screen is as with an engine of its own; then commands, a crash, and the end."""
    person = runs(str(tiny_model), "--keep-alive", "1h", "--context", "512", "--max-tokens", "5")
    try:
        person.waits_until(lambda screen: "512 tokens of context" in screen)
        person.types("Name a river." + ENTER)
        person.waits_until(lambda screen: "first token" in screen and "0 cached" in screen)
        person.types(CTRL_Q)
        said = person.child.read()
    finally:
        person.child.close(force=True)
    assert "The model stays loaded" in said
    assert "for 1 h; chatterm stop frees it now." in said
    until(lambda: (found := status()) is not None and found.terminals == 0)
    left = status()
    assert left is not None
    assert left.ends_unused
    assert [model.keep_alive_s for model in left.models] == [3600.0]

    run = ["run", str(tiny_model), *WORDS]
    keep = [*run, "--keep-alive", "2h"]
    came = []
    for command in (keep, run):  # whether it would start one itself or not
        assert call(command) == 0
        done = capsys.readouterr()
        came.append(json.loads(done.out))
        assert ("stays loaded" in done.err) == (command is keep)  # else only a terminal is told
        assert status_pid() == left.pid
    assert came[0]["text"] == came[1]["text"]
    assert came[1]["stats"]["cached_tokens"] == came[0]["stats"]["prompt_tokens"] - 1
    assert call(["ps"]) == 0
    assert capsys.readouterr().out.startswith("Left running by chatterm run; up ")
    os.kill(left.pid, signal.SIGKILL)
    until(lambda: status() is None)
    assert call(keep) == 0  # its socket is still there
    assert status_pid() not in (None, left.pid)
    assert call(["stop"]) == 0
    assert call(["ps"]) == 1


def test_two_terminals_that_start_at_once_have_one_process(tiny_model: Path) -> None:
    backends = [opened(tiny_model) for _ in range(2)]
    threads = [threading.Thread(target=backend.open) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        found = status()
        assert found is not None
        assert (found.terminals, len(found.models), found.models[0].users) == (2, 1, 2)
        pids = {backend._welcome.pid for backend in backends if backend._welcome is not None}
        assert pids == {found.pid}
        for backend in backends:
            assert list(backend.send("Name a river."))
    finally:
        for backend in backends:
            backend.close()


def opened(model: Path, **changes: Any) -> FailoverBackend:
    """One that is about to start a process."""
    options = replace(OPTIONS, **{"context": 512, **changes})
    backend, why = attach(str(model), options, partial(left_behind, options, 3600.0), 3600.0)
    assert backend is not None, why
    return backend


def test_a_model_that_cannot_be_loaded_leaves_nothing(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = ["run", str(tiny_model), "-p", "x", "--keep-alive", "forever", "--context", "2048"]
    assert call(too_long) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "made for 1,024 tokens" in line
    until(lambda: status() is None)


_STARTER = """
import time
from chatterm.backends.backend import ChatOptions
from chatterm.server.spawn import left_behind
let_go = left_behind(ChatOptions(), None)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_command_that_is_killed_while_it_starts_one_leaves_nothing(runtime: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", _STARTER], cwd=ROOT, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"ready\n"
    assert status() is not None
    starter.kill()
    starter.wait()
    starter.stdout.close()
    until(lambda: status() is None)


# --- a server in a thread


@dataclass
class Slow(Tinies):
    """Tells of its progress, and waits until a load may go on."""

    goes_on: threading.Event = field(default_factory=threading.Event)
    loading: threading.Event = field(default_factory=threading.Event)

    def load(self, model: str, files: Any, options: ChatOptions, on_progress: Any) -> TinyEngine:
        from models.progress import Progress

        on_progress(Progress("load", "weights", 1, 10))
        self.loading.set()
        assert self.goes_on.wait(PATIENCE)
        on_progress(Progress("load", "weights", 10, 10))
        return super().load(model, files, options, on_progress)


@pytest.fixture
def left(
    runtime: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Served, Callable[[], None]]]:
    """A server whose loads wait, as one starts it; and what lets go of it."""
    monkeypatch.setattr(engine_process, "_LOOK", 0.01)
    ours, theirs = os.pipe()
    gone: list[None] = []

    def let_go() -> None:
        if not gone:
            gone.append(os.close(theirs))

    slow = Slow(checkpoint)
    try:
        with serving(checkpoint, 0.0, ours, slow) as served:
            yield served, let_go
            slow.goes_on.set()
    finally:
        let_go()
        os.close(ours)


Left = tuple[Served, Callable[[], None]]


def on(left: Left, **changes: Any) -> FailoverBackend:
    backend, why = attach("tiny", replace(OPTIONS, **changes))
    assert backend is not None, why
    return backend


def test_it_ends_once_it_is_used_by_nobody(left: Left) -> None:
    served, let_go = left
    served.tinies.goes_on.set()  # type: ignore[attr-defined]
    with closing(on(left)) as backend:
        backend.open()
        let_go()
        list(backend.send("Name a river."))
        served.calls.host.unload_unused(float("inf"))  # somebody uses it
        assert served.calls.host.held
        assert not served.has_ended
    assert backend.stays is not None
    until(lambda: served.has_ended)
    assert not served.calls.host.held


def test_it_waits_for_whoever_starts_it(left: Left) -> None:
    served, let_go = left
    asked: list[float] = []
    unload = served.calls.host.unload_unused

    def counted(now: float) -> None:
        asked.append(now)
        unload(now)

    served.calls.host.unload_unused = counted  # type: ignore[method-assign]
    until(lambda: len(asked) > 1)
    assert not served.has_ended
    let_go()
    until(lambda: served.has_ended)


def test_a_terminal_that_goes_while_it_loads_leaves_nothing(left: Left) -> None:
    served, let_go = left
    slow = served.tinies
    backend = on(left)
    thread = threading.Thread(target=refused, args=(backend.open,))
    thread.start()
    slow.loading.wait()  # type: ignore[attr-defined]
    let_go()
    backend.close()  # as Ctrl+C and kill -9 do
    thread.join()
    assert backend.stays is None
    until(lambda: not served.calls._clients)
    slow.goes_on.set()  # type: ignore[attr-defined]
    until(lambda: served.has_ended)
    assert not served.tinies.made


def test_two_that_wait_for_a_load_are_not_disturbed_by_one_that_goes(left: Left) -> None:
    served, let_go = left
    slow = served.tinies
    one, two = on(left), on(left)
    let_go()
    threads = [
        threading.Thread(target=refused, args=(one.open,)),
        threading.Thread(target=two.open),
    ]
    threads[0].start()
    slow.loading.wait()  # type: ignore[attr-defined]
    threads[1].start()
    one.close()
    threads[0].join()
    slow.goes_on.set()  # type: ignore[attr-defined]
    threads[1].join()
    assert two.info is not None
    assert list(two.send("Name a river."))
    two.close()


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(EngineError) as caught:
        work()
    return str(caught.value)


def test_a_process_that_ends_while_it_loads_is_said(left: Left) -> None:
    served, _ = left
    slow = served.tinies
    backend = on(left)
    came: list[str] = []
    thread = threading.Thread(target=lambda: came.append(refused(backend.open)))
    thread.start()
    slow.loading.wait()  # type: ignore[attr-defined]
    (client,) = served.calls._clients
    served.loop.call_soon_threadsafe(client._transport.abort)  # type: ignore[union-attr]
    thread.join()
    (line,) = came
    assert line.startswith("The engine process ended while it was loading the model; it may have run out of")
    backend.close()
    assert backend.stays is None


# --- what a chat without the process does


class Here(local.LocalBackend):
    """A local backend whose engine is a tiny one of the test's."""

    engines: Any = None

    def __init__(self, model: str, options: ChatOptions) -> None:
        super().__init__(model, options, self.engines)


@pytest.fixture
def here(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Here, "engines", SharedEngines(ModelPool(ChatOptions(), None, Tinies(checkpoint))))
    monkeypatch.setattr(local, "LocalBackend", Here)


def test_where_none_can_be_started_the_model_is_loaded_here(runtime: Path, here: None) -> None:
    def start() -> Callable[[], None]:
        raise EngineError("Others may enter the folder x.")

    backend, why = attach("tiny", OPTIONS, start)
    assert backend is not None, why
    backend.configure({"system": "Be terse."})
    backend.load_path([Exchange(1, None, "hi", "ho", model="m", finish_reason="eos")])
    backend.open()
    assert backend.options.system == "Be terse."
    assert backend.used_tokens > 10
    figures = backend.figures()
    assert figures is not None
    assert figures.notes[-1] == "Others may enter the folder x. The model is loaded in this process."
    list(backend.send("Name a river."))
    backend.close()
    assert backend.stays is None


def test_what_was_chosen_before_it_starts_is_kept(left: Left) -> None:
    """Nobody is asked for a server until the model is opened."""
    served, let_go = left
    served.tinies.goes_on.set()  # type: ignore[attr-defined]
    with listening_elsewhere(served):
        backend, why = attach("tiny", OPTIONS, lambda: let_go)
        assert backend is not None, why
    backend.configure({"system": "Be terse."})
    backend.configure({"think": "off"})
    backend.load_path([Exchange(1, None, "hi", "ho", model="m", finish_reason="eos")])
    backend.open()
    assert backend._process is not None
    assert (backend.options.system, backend.options.think) == ("Be terse.", "off")
    assert backend.used_tokens > 10
    backend.close()


class listening_elsewhere:
    """Nobody finds the server."""

    def __init__(self, served: Served) -> None:
        self._found = failover.connect

    def __enter__(self) -> None:
        failover.connect = lambda: None  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        failover.connect = self._found


def test_one_that_is_about_to_end_is_waited_for(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "_AGAIN", 0.0)
    tried = []

    def start() -> Callable[[], None]:
        tried.append(None)
        if len(tried) < 4:
            raise ServerRunsError("A chatterm server is already running.")
        return lambda: None

    assert failover._started(OPTIONS, start) == (None, "")
    assert len(tried) == 4
    monkeypatch.setattr(failover, "_PATIENCE", -1.0)
    tried.clear()
    with pytest.raises(ServerRunsError):
        failover._started(OPTIONS, start)


def test_one_with_other_options_says_how_to_end_it(left: Left) -> None:
    backend, why = attach("tiny", replace(OPTIONS, context=512), lambda: left[1], 60.0)
    assert backend is None
    assert why.endswith("so the model is loaded in this process. chatterm stop ends that server.")


# --- how long, in words and on the wire


@pytest.mark.parametrize(
    ("keep_alive_s", "text"),
    [
        (1800.0, "The model stays loaded (1.2 GB) for 30 min; chatterm stop frees it now."),
        (-1.0, "The model stays loaded (1.2 GB) until chatterm stop."),
    ],
)
def test_what_is_said_of_it(keep_alive_s: float, text: str) -> None:
    assert stays_text(Stays(1_200_000_000, keep_alive_s)) == text


@pytest.mark.parametrize(("asked", "kept"), [(None, 0.0), (7200.0, 7200.0), (-1.0, None)])
def test_the_latest_command_says_how_long(left: Left, asked: float | None, kept: float | None) -> None:
    served, _ = left
    served.tinies.goes_on.set()  # type: ignore[attr-defined]
    backend, _ = attach("tiny", OPTIONS, None, asked)
    assert backend is not None
    backend.open()
    assert served.calls.host.held[0].keep_alive_s == kept
    backend.close()
    assert backend.stays is not None
    assert backend.stays.keep_alive_s == (0.0 if asked is None else asked)


def test_a_server_that_was_started_by_hand_keeps_its_own_time(served: Served) -> None:
    backend, _ = attach("tiny", OPTIONS, None, 60.0)
    assert backend is not None
    backend.open()
    assert served.calls.host.held[0].keep_alive_s is None
    backend.close()
    assert backend.stays is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep-alive", "soon"], "--keep-alive is 'soon'; write a time like 30m"),
        (["--keep-alive", "5m", "--no-server"], "leave out --no-server or --keep-alive"),
    ],
)
def test_wrong_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "tiny", "-p", "x", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


# --- what a terminal asks for arrives whole


def test_every_option_of_a_conversation_arrives(served: Served) -> None:
    options = ChatOptions(
        system="s",
        documents=(Document("paper", "A text."),),
        think="off",
        think_cache="mask",
        sampling={"stop": ("a", "b"), "seed": 3, "logit_bias": {5: 1.5}},
        constraint=Constraint("regex", "[ab]{3}"),
        tools=(Tool("look", "Looks.", {"type": "object"}),),
        kept_as="abc",
    )
    own = [part.name for part in fields(ChatOptions) if part.name not in (*ENGINE_OPTIONS, "streams")]
    assert all(getattr(options, name) != getattr(ChatOptions(), name) for name in own)
    backend, _ = attach("tiny", options)
    assert backend is not None
    backend.open()
    (client,) = (client for client in served.calls._clients if client.session is not None)
    there = client.session._backend.options
    assert {name: getattr(there, name) for name in own} == {name: getattr(options, name) for name in own}
    events = list(backend.send("x"))
    assert backend.last is not None
    assert set(backend.last.text) <= set("ab")
    assert events
    backend.close()


def test_a_request_s_constraint_arrives(served: Served) -> None:
    found = connect_to_server("terminal")
    assert found is not None
    backend, _ = attach("tiny", ChatOptions(sampling={"max_tokens": 40}, think="off"))
    assert backend is not None
    backend.open()
    request = Request((Message("user", "x"),), {"constraint": Constraint("regex", "[ab]{3}")})
    parts = [part for _, part in backend.answers([request])]
    assert len(parts[-1].text) == 3  # type: ignore[union-attr]
    assert set(parts[-1].text) <= set("ab")  # type: ignore[union-attr]
    backend.close()
    found[0].close()
