"""What a front end may expect of every backend: here, in another process, on a server, and in the tests themselves."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Event
from typing import Any, cast

import pytest

from chatterm.backends.backend import (
    Backend,
    ChatOptions,
    EngineError,
    Exchange,
    FinishReason,
    Message,
    ModelError,
    Outcome,
    Part,
    Request,
    TokenEvent,
)
from chatterm.backends.failover import attach, connect_to_server
from chatterm.backends.local import LocalBackend
from chatterm.backends.process import ProcessBackend
from chatterm.backends.remote.address import found
from chatterm.backends.remote.backend import RemoteBackend
from chatterm.backends.router import BackendRouter
from chatterm.server.process.attached_session import SharedEngines
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.chatterm.server.conftest import Gate, Served
from tests.chatterm.server.test_whole_way import Site, limits, site

__all__ = ["limits", "site"]

SAMPLING = {"max_tokens": 40, "seed": 5, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
OPTIONS = ChatOptions(system="Be terse.", sampling=SAMPLING)
LONG = "word " * 2000
"""More than the context holds."""


@dataclass
class Bench:
    """A backend that is not open yet, and the hand that leads its model."""

    backend: Backend
    served: Served

    def says(self, *answers: str) -> None:
        """Have the model say these answers, one after the other."""
        Site(self.served, "").script(*answers)

    def goes_on(self) -> Callable[[], None]:
        """Have the model say something and then wait. What is returned has it wait only until it is stopped."""
        gate = Gate(self.served.engine)

        def release() -> None:
            begun = self.served.running
            gate.open_when(lambda: all(sequence.cancelled for sequence in begun))

        return release

    def refuses(self, *messages: bool) -> None:
        """Prepare for messages of which these are too LONG."""


@dataclass
class ScriptedBench(Bench):
    """The backend that other tests use."""

    backend: ScriptedBackend

    def says(self, *answers: str) -> None:
        self.backend.scripts += [Script(answer) for answer in answers]

    def goes_on(self) -> Callable[[], None]:
        self.backend.scripts += [Script("x" * 100, gate=Event(), gate_after=2), Script("and more")]
        return lambda: None

    def refuses(self, *messages: bool) -> None:
        error = EngineError("The message does not fit.")
        self.backend.scripts += [Script(error=error if is_long else None) for is_long in messages]


def made(kind: str, served: Served, asked: Callable[[str], Any]) -> Backend:
    """Return a backend of the tiny model that is not open yet."""

    def here(model: str, options: ChatOptions) -> LocalBackend:
        return LocalBackend(model, options, SharedEngines(served.calls.host))

    match kind:
        case "local":
            return here("tiny", OPTIONS)
        case "process":
            server = connect_to_server("terminal")
            assert server is not None
            return ProcessBackend(server[0], "tiny", OPTIONS)
        case "failover":
            backend, why = attach("tiny", OPTIONS)
            assert backend is not None, why
            return backend
        case "router":
            return BackendRouter("tiny", OPTIONS, {}, here)
        case "remote":
            url = asked("site").url.removeprefix("http://")
            address = found(f"openai://{url}/tiny", {})
            assert address is not None
            return RemoteBackend(address, OPTIONS, {})
    raise ValueError(kind)


@pytest.fixture(params=["local", "process", "failover", "router", "remote", "scripted"])
def bench(request: pytest.FixtureRequest, served: Served) -> Iterator[Bench]:
    if request.param == "scripted":
        yield ScriptedBench(ScriptedBackend(), served)
        return
    backend = made(request.param, served, request.getfixturevalue)
    yield Bench(backend, served)
    backend.close()
    backend.close()


@pytest.fixture
def backend(bench: Bench) -> Backend:
    bench.backend.open()
    return bench.backend


def last(backend: Backend) -> Outcome:
    assert backend.last is not None
    return backend.last


def said(events: Iterable[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def check_empty(backend: Backend) -> None:
    """Check that the history has no answer."""
    with pytest.raises(EngineError):
        next(iter(backend.resume()))


def test_nothing_is_known_before_a_model_is_open(bench: Bench) -> None:
    backend = bench.backend
    assert (backend.info, backend.last, backend.figures(), backend.used_tokens) == (None, None, None, 0)
    assert (backend.count("draft"), backend.blocks(), backend.token_text(65)) == (None, None, None)
    for change in (backend.stop, backend.answer_now, backend.settle, backend.reset):
        change()
    backend.prepare("draft")
    backend.know([])
    backend.load_path([Exchange(1, None, "hi", "ho", model="m", finish_reason="eos")])


def test_a_turn_is_counted_taken_back_and_asked_again(bench: Bench, backend: Backend) -> None:
    empty = backend.used_tokens
    check_empty(backend)
    bench.says("A river.", "A lake.")
    assert said(backend.send("Name one.")) == "A river."
    assert (last(backend).text, last(backend).finish_reason) == ("A river.", FinishReason.EOS)
    assert backend.used_tokens > empty
    backend.load_path([])
    assert (backend.last, backend.used_tokens) == (None, empty)
    check_empty(backend)
    assert said(backend.send("Name one.")) == "A lake."
    assert last(backend).text == "A lake."


def test_a_running_answer_can_be_looked_at(bench: Bench, backend: Backend) -> None:
    bench.says("A river and a lake.")
    events = backend.send("Name one.")
    text = next(events).text
    assert last(backend).finish_reason is None
    assert last(backend).text.startswith(text)
    assert text + said(events) == "A river and a lake."


def test_what_came_before_a_stop_is_kept_and_goes_on(bench: Bench, backend: Backend) -> None:
    release = bench.goes_on()
    events = backend.send("Name one.")
    first = next(events).text
    release()
    backend.stop()
    text = first + said(events)
    assert (last(backend).text, last(backend).finish_reason) == (text, FinishReason.CANCELLED)
    assert backend.info is not None
    if "text" not in backend.info.resumes:
        with pytest.raises(EngineError):
            next(backend.resume())
        assert last(backend).text == text
        return
    more = said(backend.resume())
    assert more
    assert last(backend).text == text + more


def test_closing_an_answer_keeps_what_came(bench: Bench, backend: Backend) -> None:
    release = bench.goes_on()
    with closing(cast("Any", backend.send("Name one."))) as events:
        first = next(events).text
        release()
    assert last(backend).text.startswith(first)
    assert last(backend).finish_reason is FinishReason.CANCELLED


def test_a_message_that_is_refused_was_never_there(bench: Bench, backend: Backend) -> None:
    bench.refuses(False, True)
    list(backend.send("Name one."))
    before, used = last(backend).text, backend.used_tokens
    with pytest.raises(EngineError):
        next(backend.send(LONG))
    assert (last(backend).text, backend.used_tokens) == (before, used)


def test_a_path_takes_the_place_of_the_history(bench: Bench, backend: Backend) -> None:
    bench.says("A river.")
    list(backend.send("Name one."))
    backend.load_path(
        [
            Exchange(1, None, "A", "a", model="other", finish_reason="eos"),
            Exchange(2, 1, "B", "b", "why", model="other", finish_reason="length"),
        ]
    )
    assert (last(backend).text, last(backend).finish_reason) == ("b", FinishReason.LENGTH)
    backend.load_path([Exchange(1, None, "A", "a", model="other", finish_reason="length")])
    assert (last(backend).text, last(backend).finish_reason) == ("a", FinishReason.LENGTH)
    backend.reset()
    check_empty(backend)


def items(parts: Iterable[tuple[int, Part]]) -> dict[int, list[Part]]:
    """Return the items of several answers by the number of the answer."""
    found: dict[int, list[Part]] = {}
    for index, part in parts:
        found.setdefault(index, []).append(part)
    return found


def check_whole(parts: Sequence[Part]) -> None:
    """Check that it begins with an outcome without a reason, has tokens, and ends with an outcome with one."""
    first, *tokens, end = parts
    assert isinstance(first, Outcome)
    assert first.finish_reason is None
    assert isinstance(end, Outcome)
    assert end.finish_reason is not None
    assert tokens
    assert end.text.startswith(said(cast("list[TokenEvent]", tokens)))


def test_candidates_change_nothing_until_one_is_taken(bench: Bench, backend: Backend) -> None:
    found = items(backend.candidates("Name one.", 3))
    assert sorted(found) == [0, 1, 2]
    for parts in found.values():
        check_whole(parts)
    assert backend.last is None
    check_empty(backend)
    chosen = Exchange(1, None, "Name one.", model=backend.model)
    chosen.take(cast("Outcome", found[1][-1]))
    backend.load_path([chosen])
    assert last(backend).text == chosen.text


def test_requests_leave_the_conversation_alone_and_fail_alone(bench: Bench, backend: Backend) -> None:
    bench.refuses(False, False, True, False)
    list(backend.send("Name one."))
    before, used = last(backend), backend.used_tokens
    requests = [Request([Message("user", text)]) for text in ("Name two.", LONG, "Name three.")]
    found = items(backend.answers(iter(requests)))
    check_whole(found[0])
    check_whole(found[2])
    assert isinstance(found[1][-1], EngineError)
    assert (backend.last, backend.used_tokens) == (before, used)


def test_a_model_that_is_not_there_leaves_the_present_one(bench: Bench, backend: Backend) -> None:
    if isinstance(backend, ScriptedBackend):
        backend.on_switch = lambda name: (_ for _ in ()).throw(ModelError(f"There is no model {name}."))
    info = backend.info
    with pytest.raises((ModelError, EngineError)):
        backend.switch("nobody")
    assert backend.info == info
    bench.says("Still here.")
    assert said(backend.send("Hello?")) == "Still here."
