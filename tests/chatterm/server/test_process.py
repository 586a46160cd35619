"""A conversation through the channel is the one that the engine has in its own process."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends import failover, local
from chatterm.backends.backend import (
    Backend,
    ChatOptions,
    Document,
    EngineError,
    Exchange,
    Message,
    ModelError,
    Outcome,
    Request,
    TokenEvent,
)
from chatterm.backends.failover import attach, connect_to_server
from chatterm.backends.local import LocalBackend
from chatterm.backends.process import ProcessBackend
from chatterm.ipc.link import ServerGoneError
from chatterm.ipc.runtime import listen
from chatterm.server.process import engine_process
from chatterm.server.process.attached_session import SharedEngines
from chatterm.server.process.model_pool import ModelPool
from engine.errors import GpuLostError
from tests.chatterm.server.conftest import ROOT, Gate, Served, Tinies, serving
from tests.counting import until

SAMPLING = {"max_tokens": 10, "seed": 5, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
OPTIONS = ChatOptions(system="Be terse.", sampling=SAMPLING)


def remote(model: str = "tiny", options: ChatOptions = OPTIONS) -> ProcessBackend:
    found = connect_to_server("terminal")
    assert found is not None
    backend = ProcessBackend(found[0], model, options)
    backend.open()
    return backend


@pytest.fixture
def pair(served: Served) -> Iterator[tuple[ProcessBackend, LocalBackend]]:
    """The same conversation twice, on one engine."""
    there = remote()
    here = LocalBackend("tiny", OPTIONS, SharedEngines(served.calls.host))
    here.open()
    yield there, here
    there.close()
    here.close()


def plain(outcome: Outcome | None) -> Outcome | None:
    """What does not depend on what is cached and how long it takes."""
    if outcome is None:
        return None
    stats = replace(
        outcome.stats,
        **dict.fromkeys(("cached_tokens", "prefilled_tokens", "warmed_tokens"), 0),
        **dict.fromkeys(("ttft_s", "prefill_s", "decode_s"), 0.0),
        parting=None,
        draft_parting=None,
    )
    return replace(outcome, stats=stats, token_ids=list(outcome.token_ids), opening=list(outcome.opening))


def state(backend: Backend) -> tuple[Any, ...]:
    names = ("system", "documents", "think", "think_cache", "sampling", "tools", "kept_as")
    settings = [getattr(backend.options, name) for name in names]
    return (backend.info, backend.used_tokens, *settings, plain(backend.last))


Step = Callable[[Backend], Any]


def several(parts: Any) -> list[Any]:
    """What came of each, by number."""
    came: dict[int, list[Any]] = {}
    for index, part in parts:
        if isinstance(part, Outcome):
            part = plain(part) if part.finish_reason is not None else "begun"
        elif isinstance(part, Exception):
            part = (type(part), str(part))
        came.setdefault(index, []).append(part)
    return sorted(came.items())


REQUESTS = [
    Request((Message("user", "one"),), {"seed": 1, "stop": ("x",)}),
    Request(
        (Message("system", "s"), Message("user", "two"), Message("assistant", "a"), Message("user", "b"))
    ),
    Request((Message("user", " "),)),
    Request((Message("user", "word " * 2000),), think="off"),
]
STEPS: dict[str, Step] = {
    "send": lambda backend: list(backend.send("Name a river.")),
    "another": lambda backend: list(backend.send("And a lake?")),
    "limit": lambda backend: backend.configure({"sampling": {**SAMPLING, "max_tokens": 3, "stop": ("zz",)}}),
    "short": lambda backend: list(backend.send("Short.")),
    "resume": lambda backend: list(backend.resume()),
    "candidates": lambda backend: several(backend.candidates("Which?", 3)),
    "answers": lambda backend: several(backend.answers(iter(REQUESTS))),
    "count": lambda backend: backend.count("a draft").tokens,  # type: ignore[union-attr]
    "think": lambda backend: backend.configure({"think": "off"}),
    "unthinking": lambda backend: list(backend.send("Now?")),
    "mask": lambda backend: backend.configure({"think_cache": "mask"}),
    "system": lambda backend: backend.configure({"system": "Be long."}),
    "documents": lambda backend: backend.configure(
        {"documents": (Document("paper", "A text."), Document("notes", "Milk."))}
    ),
    "on them": lambda backend: list(backend.send("What is it?")),
    "too long": lambda backend: refused(
        lambda: backend.configure({"documents": (Document("book", "word " * 2000),)})
    ),
    "read": lambda backend: backend.read(Document("letter", "Dear all.")),
    "no documents": lambda backend: backend.configure({"documents": ()}),
    "settle": lambda backend: backend.settle(),
    "prepare": lambda backend: backend.prepare("a draf"),
    "path": lambda backend: backend.load_path(
        [Exchange(1, None, "hi", "ho", model="m", finish_reason="eos")]
    ),
    "its figures": lambda backend: backend.load_path(
        [Exchange(1, None, "hi", "ho", model="m", finish_reason="length", stats={"prompt_tokens": 7})]
    ),
    "know": lambda backend: backend.know([Exchange(1, None, "hi", "ho", model="m", token_ids=[1, 2])]),
    "after": lambda backend: list(backend.send("And now?")),
    "empty": lambda backend: refused(lambda: list(backend.send(" "))),
    "long": lambda backend: refused(lambda: list(backend.send("word " * 2000))),
    "surrogate": lambda backend: refused(lambda: list(backend.send("\ud800")))[1][:26],
    "title": lambda backend: backend.begin_title("q", "a"),
    "nobody": lambda backend: refused(lambda: backend.switch("nobody")),
    "wrong": lambda backend: refused(lambda: backend.configure({"sampling": {"temperature": -1}})),
    "reset": lambda backend: backend.reset(),
    "nothing": lambda backend: refused(lambda: list(backend.resume())),
    "unknown": lambda backend: backend.token_text(10**6),
    "text": lambda backend: backend.token_text(65),
}


def refused(action: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises((EngineError, ModelError)) as caught:
        action()
    return type(caught.value).__name__, str(caught.value)


def test_every_call_does_what_it_does_locally(
    pair: tuple[ProcessBackend, LocalBackend], served: Served
) -> None:
    there, here = pair
    for name, step in STEPS.items():
        ours, theirs = step(here), step(there)
        assert theirs == ours, name
        assert state(there) == state(here), name
    served.engine.check()


def test_what_is_looked_at_comes_by_itself(served: Served) -> None:
    backend = remote()
    list(backend.send("Name a river."))
    figures = backend.figures()
    assert figures is not None
    assert figures.model_name == served.engine.model_name
    came = None
    for _ in range(3000):
        if (came := backend.blocks()) is not None and came.tokens:
            break
        threading.Event().wait(0.01)
    assert came is not None
    assert came.present > 0
    backend.close()


LONG = replace(OPTIONS, sampling={**SAMPLING, "max_tokens": 700})


def test_two_terminals_share_an_engine_and_its_cache(served: Served) -> None:
    one, two = remote(), remote()
    list(one.send("Name a river."))
    ours = one.last
    assert len(served.calls.host.held) == 1
    list(two.send("Name a river."))
    assert two.last is not None
    assert ours is not None
    assert two.last.stats.cached_tokens == two.last.stats.prompt_tokens - 1
    assert list(two.last.token_ids) == list(ours.token_ids)
    one.close()
    list(two.send("And a lake?"))
    two.close()


def test_the_server_tells_during_an_answer_what_it_has_loaded(served: Served) -> None:
    backend, _ = attach("tiny", LONG)
    assert backend is not None
    backend.open()
    gate = Gate(served.engine)
    events = backend.send("Name a river.")
    next(events)
    assert backend.has_loaded("tiny")
    assert not backend.has_loaded("tiny-2")
    gate.open()
    events.close()
    backend.close()
    assert not backend.has_loaded("tiny")


@pytest.mark.parametrize("method", ["close", "has_loaded", "figures", "_load", "__init__", "model", "info"])
def test_no_other_method_can_be_called(served: Served, method: str) -> None:
    backend = remote()
    with pytest.raises(ServerGoneError):
        backend._link.ask(method, (), str)
    another = remote()
    assert list(another.send("Name a river."))
    another.close()


def test_wrong_arguments_are_refused_and_change_nothing(served: Served) -> None:
    backend = remote()
    for method, arguments in (
        ("send", (3,)),
        ("send", ()),
        ("candidates", ("a", "b")),
        ("configure", (["think"],)),
    ):
        with pytest.raises(EngineError, match="sent something unexpected") as caught:
            backend._link.ask(method, arguments, str)
        assert "\n" not in str(caught.value)
    list(backend.send("Name a river."))
    backend.close()


def test_a_server_that_computes_otherwise_is_not_used(served: Served) -> None:
    backend, why = attach("tiny", replace(OPTIONS, context=512))
    assert backend is None
    assert "--context" in why
    assert "\n" not in why
    backend, why = attach("tiny", OPTIONS)
    assert backend is not None
    backend.close()


def test_without_a_server_there_is_nothing_to_say(runtime: Path) -> None:
    assert attach("tiny", OPTIONS) == (None, "")


def test_a_server_of_another_version_is_not_used(served: Served) -> None:
    served.calls.agreed = "another"
    backend, why = attach("tiny", OPTIONS)
    assert backend is None
    assert "another version" in why


class Here(LocalBackend):
    """A local backend whose engine is a tiny one of the test's."""

    engines: Any = None

    def __init__(self, model: str, options: ChatOptions) -> None:
        super().__init__(model, options, self.engines)


def test_a_killed_server_leaves_a_chat_that_goes_on(
    server_process: "subprocess.Popen[bytes]",
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, why = attach("tiny", LONG)
    assert backend is not None, why
    backend.open()
    events = backend.send("Name a river.")
    said: list[TokenEvent] = [next(events) for _ in range(5)]
    server_process.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError, match="has ended") as caught:
        said.extend(events)
    assert "\n" not in str(caught.value)
    last = backend.last
    assert last is not None
    assert list(last.token_ids) == [event.token_id for event in said]
    backend.settle()
    backend.prepare("And")
    Here.engines = SharedEngines(ModelPool(ChatOptions(), None, Tinies(checkpoint)))
    monkeypatch.setattr(local, "LocalBackend", Here)
    list(backend.resume())
    assert backend.last is not None
    assert list(backend.last.token_ids)[: len(said)] == [event.token_id for event in said]
    figures = backend.figures()
    assert figures is not None
    assert any("server has ended" in note for note in figures.notes)
    assert list(backend.notes()) == list(figures.notes), "what people are told once"
    backend.close()


_CLIENT = """
import os, sys
from chatterm.backends.failover import attach
from chatterm.backends.backend import ChatOptions
backend, why = attach("tiny", ChatOptions(sampling={"max_tokens": 700, "seed": 5, "temperature": 1.0}))
backend.open()
for number, event in enumerate(backend.send("Name a river.")):
    if number == 3:
        print("begun", flush=True)
"""


def test_a_killed_terminal_disturbs_nobody(served: Served) -> None:
    other = remote()
    gate = Gate(served.engine)
    client = subprocess.Popen([sys.executable, "-c", _CLIENT], cwd=ROOT, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"begun\n"
    (begun,) = served.running
    client.kill()
    client.wait()
    client.stdout.close()
    gate.open_when(lambda: begun.cancelled)  # it may have ended before the engine came to the gate
    list(other.send("Name a lake."))
    for _ in range(3000):
        if served.calls.status().terminals == 1 and served.calls.host.held[0].users == 1:
            break
        threading.Event().wait(0.01)
    assert served.calls.host.held[0].users == 1
    other.close()


def test_a_server_that_is_ended_says_so(served: Served) -> None:
    backend = remote(options=LONG)
    gate = Gate(served.engine)
    events = backend.send("Name a river.")
    next(events)
    served.end()
    gate.open_when(lambda: any(sequence.cancelled for sequence in served.running))
    with pytest.raises(ServerGoneError):
        list(events)
    assert backend.last is not None


def test_a_server_that_has_lost_its_gpu_ends_and_the_chat_goes_on_in_another_process(
    runtime: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_LOOK", 0.01)
    server = serving(checkpoint)
    with server as served:
        backend, why = attach("tiny", LONG)
        assert backend is not None, why
        backend.open()
        events = backend.send("Name a river.")
        said = [next(events) for _ in range(3)]
        served.engine.scripted.fail_next = RuntimeError("CUDA error: unspecified launch failure\nmore")
        with pytest.raises(EngineError, match=r"the GPU was lost\. What had arrived") as caught:
            said.extend(events)
        assert "\n" not in str(caught.value)
        until(lambda: served.has_ended and backend._has_ended)
    (problem,) = server.problems
    assert isinstance(problem, GpuLostError), "so its exit code tells that another one is to be started"
    Here.engines = SharedEngines(ModelPool(ChatOptions(), None, Tinies(checkpoint)))
    monkeypatch.setattr(local, "LocalBackend", Here)
    list(backend.resume())
    assert backend.last is not None
    assert list(backend.last.token_ids)[: len(said)] == [event.token_id for event in said]
    backend.close()


def test_a_server_that_does_not_answer_is_not_waited_for(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "_PATIENCE", 0.1)
    with listen():
        backend, why = attach("tiny", OPTIONS)
    assert backend is None
    assert "does not answer" in why
