"""The remote backend against a server that behaves, waits, breaks off and lies."""

import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from chatterm.backends.backend import (
    ChatOptions,
    Document,
    EngineError,
    Exchange,
    FinishReason,
    Message,
    Request,
    TokenEvent,
)
from chatterm.backends.exchange import Outcome
from chatterm.backends.remote import client as client_module
from chatterm.backends.remote.address import Remote, found
from chatterm.backends.remote.backend import RemoteBackend
from chatterm.backends.remote.errors import Refused, retry_delay
from engine.params import Constraint
from models.hub import response_head
from tests.chatterm.remote.rough_server import (
    Handler,
    RoughServer,
    breaks,
    delta,
    document,
    drips,
    events,
    gated,
    reply,
    rough,
    said,
    status,
    stream,
    usage,
)
from tests.chatterm.remote.rough_server import Request as Received
from tests.counting import until
from tests.fresh import examples


@contextmanager
def chat(
    server: RoughServer, scheme: str = "openai", options: ChatOptions | None = None, **remote: Any
) -> Iterator[RemoteBackend]:
    """An open backend. With `remote`, it is named in the settings."""
    remotes = {"work": Remote(f"http://{server.place}", "tiny", **remote)} if remote else {}
    address = found("work" if remote else f"{scheme}://{server.place}/tiny", remotes)
    assert address is not None
    backend = RemoteBackend(address, options or ChatOptions(), remotes)
    try:
        backend.open()
        yield backend
    finally:
        backend.close()
        backend.close()


def text_of(events: Any) -> str:
    return "".join(event.text for event in events)


def last(backend: RemoteBackend) -> Outcome:
    assert backend.last is not None
    return backend.last


# --- an answer ---


def test_documents_are_sent_behind_the_system_prompt_and_the_beginning_stays_the_same() -> None:
    with rough(said("One."), said("Two."), said("Three.")) as server, chat(server) as backend:
        backend.configure({"system": "Be brief."})
        backend.configure({"documents": (Document("paper", "A text."), Document("notes", "Milk."))})
        assert backend.read(Document("letter", "Dear all.")) is None, "nothing is kept that we could say"
        assert (backend.options.system, len(backend.options.documents)) == ("Be brief.", 2)
        for text in ("hello", "more"):
            list(backend.send(text))
        first, second = (request.json for request in server.requests[-2:])
        assert first["messages"][0] == {"role": "system", "content": "Be brief.\n\nA text.\n\nMilk."}
        assert second["messages"][: len(first["messages"])] == first["messages"]
        assert first.get("prompt_cache_key") == second.get("prompt_cache_key")
        backend.configure({"documents": ()})
        list(backend.send("again"))
        assert server.requests[-1].json["messages"][0]["content"] == "Be brief."


def test_an_answer_its_figures_and_the_next_turn() -> None:
    with rough(said("He", "llo", prompt=20, cached=16), said("again")) as server, chat(server) as backend:
        info = backend.info
        assert info is not None
        assert (info.name, info.context_length, info.is_remote) == (
            f"openai://{server.place}/tiny",
            4096,
            True,
        )
        running = backend.send("Hi")
        first = next(running)
        assert first == TokenEvent("He", -1, "answer")
        assert last(backend).text == "He"
        assert last(backend).finish_reason is None
        assert text_of(running) == "llo"
        stats = last(backend).stats
        assert (stats.prompt_tokens, stats.cached_tokens, stats.prefilled_tokens) == (20, 16, 4)
        assert (stats.generated_tokens, backend.used_tokens) == (2, 22)
        assert stats.ttft_s > 0
        assert last(backend).finish_reason is FinishReason.EOS
        assert text_of(backend.send("More")) == "again"
        assert server.connections == 1
        one, two = (request.json for request in server.requests)
        assert one["messages"] == [{"role": "user", "content": "Hi"}]
        # What was sent once is sent again as it was, so that the server finds it in its cache.
        head = json.dumps(one["messages"])[:-1].encode()
        assert server.requests[1].body.count(head) == 1
        assert two["messages"][1:] == [
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "More"},
        ]
        assert one["prompt_cache_key"] == two["prompt_cache_key"]


def test_what_was_chosen_is_asked_for() -> None:
    sampling = {"temperature": 0.5, "top_k": 5, "seed": 7, "max_tokens": 9, "stop": ("A",)}
    options = ChatOptions(system="Be brief.", think="off", sampling=sampling)
    with rough(said("x")) as server, chat(server, options=options) as backend:
        list(backend.send("Hi"))
        backend.configure({"sampling": {"min_p": 0.1}})
        backend.configure({"system": None})
        backend.configure({"think": "auto"})
        backend.reset()
        list(backend.send("Hi"))
    one, two = (request.json for request in server.requests)
    assert {name: one[name] for name in sampling} == {**sampling, "stop": ["A"]}
    assert one["messages"][0] == {"role": "system", "content": "Be brief."}
    assert one["chat_template_kwargs"] == {"enable_thinking": False}
    assert two["min_p"] == 0.1
    assert two["messages"] == [{"role": "user", "content": "Hi"}]
    assert not {"temperature", "chat_template_kwargs"} & set(two)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_that_the_server_tells_apart(field: str) -> None:
    parts = events(
        delta(**{field: "hm"}), delta(**{field: "m"}), delta("Yes"), delta(finish="stop"), usage(3, 12)
    )
    with rough(stream(*parts)) as server, chat(server) as backend:
        kinds = [(event.text, event.kind) for event in backend.send("Hi")]
        assert kinds == [("hm", "reasoning"), ("m", "reasoning"), ("Yes", "answer")]
        assert (last(backend).reasoning, last(backend).text) == ("hmm", "Yes")
        assert last(backend).stats.reasoning_tokens == 8
        list(backend.send("More"))
    assert server.requests[1].json["messages"][1] == {"role": "assistant", "content": "Yes"}


def test_thinking_in_tags() -> None:
    parts = events(*map(delta, ("<th", "ink>h", "m</think>", "\n\nYes")), delta(finish="length"))
    with rough(stream(*parts)) as server, chat(server) as backend:
        list(backend.send("Hi"))
        assert (last(backend).reasoning, last(backend).text) == ("hm", "Yes")
        assert last(backend).finish_reason is FinishReason.LENGTH


def test_an_answer_that_comes_whole() -> None:
    whole = {"choices": [{"message": {"role": "assistant", "content": "All."}, "finish_reason": "stop"}]}
    whole |= {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    with rough(document(whole)) as server, chat(server) as backend:
        assert text_of(backend.send("Hi")) == "All."
        assert last(backend).stats.generated_tokens == 2


def test_fields_that_a_server_refuses_are_left_out() -> None:
    def strict(request: Received, sock: socket.socket) -> bool | None:
        for name in ("prompt_cache_key", "stream_options"):
            if name in request.json:
                return status(422, f"Extra inputs are not permitted: {name}")(request, sock)
        return said("x")(request, sock)

    with rough(strict) as server, chat(server) as backend:
        assert text_of(backend.send("Hi")) == "x"
        assert len(server.requests) == 3
        assert text_of(backend.send("Hi")) == "x"
        assert len(server.requests) == 4


# --- the history ---


def test_paths_and_stopped_answers() -> None:
    with rough(said("one"), said("two"), said("three")) as server, chat(server) as backend:
        list(backend.send("Hi"))
        backend.load_path([])
        list(backend.send("Hi"))
        assert [request.json["messages"] for request in server.requests[:2]] == [
            [{"role": "user", "content": "Hi"}]
        ] * 2
        backend.load_path([])
        assert backend.last is None
        path = [
            Exchange(1, None, "A", text="", finish_reason="cancelled"),
            Exchange(2, 1, "B", text="b", reasoning="why", finish_reason="eos", model="other"),
        ]
        backend.load_path(path)
        assert last(backend).text == "b"
        list(backend.send("C"))
    # What got no answer becomes one message with what came next: some templates take turns only.
    assert [message["content"] for message in server.requests[2].json["messages"]] == ["A\n\nB", "b", "C"]


def test_stopping_keeps_what_came() -> None:
    gate = threading.Event()
    with rough(gated(gate, events(delta("One"), done=False)), said("two")) as server, chat(server) as backend:
        running = backend.send("Hi")
        assert next(running).text == "One"
        threading.Timer(0.05, backend.stop).start()
        assert list(running) == []
        assert (last(backend).text, last(backend).finish_reason) == ("One", FinishReason.CANCELLED)
        gate.set()
        list(backend.send("More"))
    assert server.requests[1].json["messages"][1]["content"] == "One"


def test_stopping_before_a_byte_has_come() -> None:
    gate = threading.Event()

    def silent(request: Received, sock: socket.socket) -> None:
        gate.wait(30)

    with rough(silent) as server, chat(server) as backend:
        timer = threading.Timer(0.05, lambda: (until(lambda: server.requests), backend.stop()))
        timer.start()
        assert list(backend.send("Hi")) == []
        timer.join()
        assert last(backend).finish_reason is FinishReason.CANCELLED
        gate.set()


def test_continuing_where_the_server_can() -> None:
    with rough(stream(*events(delta("One, "), delta(finish="length"))), said("two.")) as server:
        with chat(server) as backend:
            list(backend.send("Hi"))
            assert text_of(backend.resume()) == "two."
            assert last(backend).text == "One, two."
            with pytest.raises(EngineError, match="complete"):
                backend.resume()
            list(backend.send("More"))
        asked = server.requests[1].json
        assert asked["messages"][-1] == {"role": "assistant", "content": "One, "}
        assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
        assert server.requests[2].json["messages"][1]["content"] == "One, two."


def test_continuing_where_it_cannot() -> None:
    listing = {"data": [{"id": "tiny", "owned_by": "somebody"}]}
    cut = stream(*events(delta("One"), delta(finish="length")))
    with rough(cut, models=listing) as server, chat(server) as backend:
        list(backend.send("Hi"))
        with pytest.raises(EngineError, match="cannot continue an answer"):
            backend.resume()
        backend.load_path([])
        with pytest.raises(EngineError, match="no answer"):
            backend.resume()
    with (
        rough(stream(*events(delta(reasoning="hm"), delta(finish="length")))) as server,
        chat(server) as backend,
    ):
        list(backend.send("Hi"))
        with pytest.raises(EngineError, match="cannot continue its thinking"):
            backend.resume()


def test_an_answer_of_which_nothing_came_is_asked_for_again() -> None:
    listing = {"data": [{"id": "tiny", "owned_by": "somebody"}]}
    with rough(said("here"), models=listing) as server, chat(server) as backend:
        backend.load_path([Exchange(1, None, "Hi", finish_reason="cancelled")])
        assert text_of(backend.resume()) == "here"
        assert [message["content"] for message in server.requests[0].json["messages"]] == ["Hi"]


def test_an_answer_without_counts_leaves_what_is_known_of_the_context() -> None:
    cut = stream(*events(delta("a"), delta("b"), done=False), ends=False)
    with rough(said("One", prompt=40), cut) as server, chat(server) as backend:
        list(backend.send("Hi"))
        used = backend.used_tokens
        assert used > 40
        with pytest.raises(EngineError):
            list(backend.send("More"))
        assert backend.used_tokens == used + 2


# --- several ---


def test_candidates_are_asked_for_at_once_and_change_nothing() -> None:
    options = ChatOptions(sampling={"seed": 4})
    with rough(said("a", "b")) as server, chat(server, options=options) as backend:
        parts = list(backend.candidates("Hi", 3))
        ends = {index: part for index, part in parts if isinstance(part, Outcome) and part.finish_reason}
        assert sorted(ends) == [0, 1, 2]
        assert {outcome.text for outcome in ends.values()} == {"ab"}
        for index in range(3):
            mine = [part for number, part in parts if number == index]
            assert isinstance(mine[0], Outcome)
            assert mine[0].finish_reason is None
        assert sorted(request.json["seed"] for request in server.requests) == [4, 5, 6]
        assert backend.last is None


def test_one_candidate_is_kept_and_the_others_stop() -> None:
    gate = threading.Event()
    handler = gated(gate, events(delta("a"), done=False), events(delta("b"), delta(finish="stop")))
    with rough(handler) as server, chat(server) as backend:
        seen = []
        for index, part in backend.candidates("Hi", 3):
            seen.append((index, part))
            if len([1 for _, part in seen if isinstance(part, TokenEvent)]) == 3 and not gate.is_set():
                backend.stop(but=1)
                gate.set()
        ends = {i: part.finish_reason for i, part in seen if isinstance(part, Outcome) and part.finish_reason}
    assert ends == {0: FinishReason.CANCELLED, 1: FinishReason.EOS, 2: FinishReason.CANCELLED}


def test_requests_fail_alone() -> None:
    handlers = [said("fine"), status(400, "too long"), said("also")]
    requests = [
        Request([Message("user", str(number))], sampling={"constraint": Constraint("json_object")})
        for number in range(3)
    ]
    with rough(*handlers) as server, chat(server, options=ChatOptions(system="S")) as backend:
        ends = [part for _, part in backend.answers(iter(requests)) if not isinstance(part, TokenEvent)]
    assert sum(isinstance(part, EngineError) for part in ends) == 1
    assert {part.text for part in ends if isinstance(part, Outcome) and part.finish_reason} == {
        "fine",
        "also",
    }
    assert all(request.json["response_format"] == {"type": "json_object"} for request in server.requests)
    assert server.requests[0].json["messages"][0]["role"] == "system"


def test_a_constraint_that_no_api_knows() -> None:
    options = ChatOptions(constraint=Constraint("regex", "a+"))
    with rough(said("x")) as server, chat(server, options=options) as backend:
        with pytest.raises(EngineError, match="--regex"):
            next(backend.send("Hi"))
        assert server.requests == []
        assert backend.last is None


# --- which model ---


@pytest.mark.parametrize(
    ("listing", "model", "why"),
    [
        (
            {"data": [{"id": "a", "owned_by": "vllm"}, {"id": "b", "owned_by": "vllm"}]},
            "c",
            "no model c; it has: a, b",
        ),
        ({"data": [{"id": "a"}, {"id": "b"}]}, "", "needs the name of a model.*Its models: a, b"),
        (status(404), "", "needs the name of a model"),
        (status(401, "no"), "a", "requires a key"),
        (status(503, "Loading model"), "a", "still loading the model.*Loading model"),
        (reply(b"", 301, Location="http://evil.example/"), "a", "redirects to http://evil.example/"),
    ],
)
def test_what_keeps_a_chat_from_beginning(listing: Any, model: str, why: str) -> None:
    with rough(models=listing) as server:
        address = found(f"openai://{server.place}/{model}".rstrip("/"), {})
        assert address is not None
        backend = RemoteBackend(address, ChatOptions(), {})
        with pytest.raises(EngineError, match=why):
            backend.open()
        assert backend.info is None
        with pytest.raises(EngineError, match="No model is loaded"):
            next(backend.send("Hi"))
        backend.close()


@pytest.mark.parametrize(
    "listing", [status(404), reply(b"<html>"), document([]), reply(b'{"data": [3, {"id": 4}]}')]
)
def test_a_server_without_a_list_is_asked_all_the_same(listing: Handler) -> None:
    with rough(said("x"), models=listing) as server, chat(server) as backend:
        assert text_of(backend.send("Hi")) == "x"
        assert backend.info is not None
        assert backend.info.context_length == 0


def test_the_only_model_needs_no_name() -> None:
    with rough(said("x")) as server:
        address = found(f"openai://{server.place}", {})
        assert address is not None
        backend = RemoteBackend(address, ChatOptions(), {})
        backend.open()
        assert backend.model == f"openai://{server.place}/tiny"
        backend.switch(f"openai://{server.place}/tiny")
        assert text_of(backend.send("Hi")) == "x"
        backend.close()


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    address = found(f"openai://127.0.0.1:{port}/m", {})
    assert address is not None
    backend = RemoteBackend(address, ChatOptions(), {})
    with pytest.raises(EngineError, match=f"127.0.0.1:{port} cannot be reached .*; is its server running"):
        backend.open()


# --- faults ---

FAULTS = [
    (
        status(400, "maximum context length is 4096"),
        "refuses the request \\(400\\): maximum|refuses.*maximum context",
    ),
    (status(401, "bad"), "requires a key \\(401\\)"),
    (status(403, "no"), "does not allow this \\(403\\)"),
    (
        status(404, "gone"),
        "lists tiny, but does not answer with it \\(404\\). gone. It may not be a model for chats.$",
    ),
    (status(429, "slow", Retry_After="9999"), "is limiting requests \\(429\\).*in 167 min"),
    (reply(b"<html>", 413, "text/html"), "no request as large as this one \\(413\\). Shorten"),
    (status(500, "boom"), "failed \\(500\\). boom"),
    (status(503, "busy"), "overloaded"),
    (reply(b"", 307, Location="https://evil.example/x"), "redirects to https://evil.example/x"),
    (reply(b"<html>hello</html>", 502), "failed \\(502\\)"),
    (reply(b"<html>login</html>", 200, "text/html"), "sent text/html instead of an answer; check its add"),
    (reply(b"\x1f\x8b\n\n", 200, Content_Encoding="gzip"), "sent gzip data instead of an answer"),
    (reply(b"", 200, "text/event-stream"), "ended the connection in the middle"),
    (stream(b"data: <html>\n\n"), "not JSON: '<html>'"),
    (stream(b"data: [1]\n\n"), "not JSON"),
    (stream(b'data: {"error": {"message": "out of memory"}}\n\n'), "reports: out of memory"),
    (stream(b'data: {"error": "plain"}\n\n'), "reports: plain"),
    (stream(b"data: " + b"[" * 100_000 + b"\n\n"), "not JSON"),
]


@pytest.mark.parametrize(("handler", "why"), FAULTS, ids=[why for _, why in FAULTS])
def test_a_refusal_changes_nothing_and_says_why_in_a_line(handler: Handler, why: str) -> None:
    with rough(handler) as server, chat(server) as backend:
        with pytest.raises(EngineError, match=why) as caught:
            list(backend.send("Hi"))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000
        assert backend.last is None
        with pytest.raises(EngineError, match="no answer to continue"):
            backend.resume()
        assert backend.waiting() == ""


LISTED = "but does not answer with it (404). gone. It may not be a model for chats"


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["tiny", "b"], f"lists tiny, {LISTED}; it also has: b."),
        (["tiny:latest"], f"lists tiny:latest, {LISTED}."),
        (["a", "b"], "has no tiny (404). gone. It has: a, b."),
        ([], "has no tiny (404). gone."),
    ],
)
def test_a_404_says_what_the_server_has(names: list[str], why: str) -> None:
    with rough(status(404, "gone")) as server, chat(server) as backend:
        server.models = document({"data": [{"id": name} for name in names]})
        with pytest.raises(EngineError) as caught:
            list(backend.send("Hi"))
        assert str(caught.value) == f"{server.place} {why}"


BREAKS = [
    (stream(*events(delta("One"), done=False), ends=False), "closed the connection"),
    (stream(*events(delta("One"), done=False)), "in the middle of the answer"),
    (stream(*events(delta("One"), done=False), b"data: {oops\n\n"), "not JSON: '{oops'"),
    (stream(*events(delta("One"), done=False), b"data: {oops"), "in the middle of the answer"),
    (stream(*events(delta("One"), {"error": {"message": "GPU lost"}})), "reports: GPU lost"),
    (stream(*events(delta("One"), delta(finish="content_filter"))), "filter"),
    (stream(*events(delta("One"), done=False), b"data: " + b"x" * 9_000_000), "more than 8 MiB"),
]


@pytest.mark.parametrize(("handler", "why"), BREAKS, ids=[why for _, why in BREAKS])
def test_what_came_before_a_fault_is_kept(handler: Handler, why: str) -> None:
    with rough(handler, said("more")) as server, chat(server) as backend:
        running = backend.send("Hi")
        assert next(running).text == "One"
        with pytest.raises(EngineError, match=why):
            list(running)
        assert (last(backend).text, last(backend).finish_reason) == ("One", FinishReason.CANCELLED)
        assert text_of(backend.resume()) == "more"
        assert last(backend).text == "Onemore"


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": "x"},
        {"choices": [3]},
        {"choices": [{"delta": [], "finish_reason": 3}]},
        {"choices": [{"delta": {"content": 5, "reasoning": {}}}]},
        {"usage": {"prompt_tokens": "many", "completion_tokens": -5, "prompt_tokens_details": 3}},
        {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 99}}},
        {"choices": [{"delta": {"tool_calls": [{"x": 1}]}}]},
        {},
    ],
)
def test_wrong_types_are_passed_over(odd: Any) -> None:
    parts = events(delta("One"), odd, delta("Two"), delta(finish="stop"))
    with rough(stream(*parts)) as server, chat(server) as backend:
        assert text_of(backend.send("Hi")) == "OneTwo"
        stats = last(backend).stats
        assert 0 <= stats.cached_tokens <= stats.prompt_tokens


def test_half_characters_and_invalid_utf_8() -> None:
    parts = [
        b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"',
    ]
    parts += [b'\\ude00 \xff"}}]}\n\n', *events(delta(finish="stop"))]
    with rough(stream(*parts)) as server, chat(server) as backend:
        assert text_of(backend.send("Hi")) == "\U0001f600 \ufffd"


def test_a_trickle() -> None:
    whole = b"".join(events(delta("One"), delta(finish="stop")))
    with rough(stream(*(whole[n : n + 1] for n in range(len(whole))))) as server, chat(server) as backend:
        assert text_of(backend.send("Hi")) == "One"


@pytest.mark.parametrize("goes_before", [(), (said("One."),)])
def test_a_head_that_drips_ends_the_request(
    goes_before: tuple[Handler, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with rough(*goes_before, drips) as server, chat(server) as backend:
        for _ in goes_before:
            assert text_of(backend.send("Hi")) == "One."
        monkeypatch.setattr(response_head, "HEAD_S", 0.2)
        with pytest.raises(EngineError, match="began to answer and then sent next to nothing"):
            list(backend.send("Hi"))
        until(server.closed.is_set)


def test_a_connection_that_breaks_before_anything_came_is_made_once_more() -> None:
    with rough(breaks, said("x"), breaks, breaks, said("y")) as server, chat(server) as backend:
        assert text_of(backend.send("Hi")) == "x"
        with pytest.raises(EngineError, match="closed the connection"):
            list(backend.send("Hi"))
        assert len(server.requests) == 4


def test_a_busy_server_is_waited_for_and_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    with rough(status(429, Retry_After="1"), said("x")) as server, chat(server) as backend:
        watching = threading.Thread(
            target=lambda: (
                until(lambda: backend.waiting()),
                shown.append(backend.waiting()),
            )
        )
        watching.start()
        assert text_of(backend.send("Hi")) == "x"
        watching.join()
    assert shown == ["the server is limiting requests; trying again in 1 s"]


def test_waiting_can_be_stopped() -> None:
    with rough(status(429, Retry_After="500")) as server, chat(server) as backend:
        timer = threading.Thread(target=lambda: (until(backend.waiting), backend.stop()))
        timer.start()
        assert list(backend.send("Hi")) == []
        timer.join()
        assert last(backend).finish_reason is FinishReason.CANCELLED
        assert backend.waiting() == ""


@pytest.mark.parametrize(
    ("status", "after", "tries", "seconds"),
    [
        (429, "7", 1, 7.0),
        (429, None, 1, 1.0),
        (429, None, 3, 4.0),
        (429, "nonsense", 2, 2.0),
        (429, "1", 6, None),
        (429, "601", 1, None),
        (429, "0", 1, 0.5),
        (503, "3", 1, 3.0),
        (503, None, 1, None),
        (500, "3", 1, None),
        (429, "Wed, 21 Oct 2015 07:28:30 GMT", 1, 30.0),
        (429, "Wed, 99 Oct 2015 07:28:30 GMT", 1, 1.0),
        (429, "9" * 400, 1, 1.0),
    ],
)
def test_how_long_to_wait(status: int, after: str | None, tries: int, seconds: float | None) -> None:
    from datetime import UTC, datetime

    now = datetime(2015, 10, 21, 7, 28, 0, tzinfo=UTC)
    assert retry_delay(Refused(status, b"", after), tries, now) == seconds


SOME = st.sampled_from(
    [
        *events(delta("One"), delta(reasoning="t"), delta(finish="stop"), usage(2, 3)),
        b"data: ",
        b"{",
        b"\n\n",
        b"\xff",
        b"\0",
    ]
)


@examples(40, HealthCheck.function_scoped_fixture)
@given(
    st.lists(SOME | st.binary(max_size=20), max_size=8),
    st.booleans(),
    st.sampled_from(["openai", "responses", "ollama"]),
)
def test_whatever_bytes_come_no_other_error_comes_of_them(
    parts: list[bytes], ends: bool, scheme: str
) -> None:
    with rough(stream(*parts, ends=ends)) as server, chat(server, scheme) as backend:
        said: list[str] = []
        problem = ""
        try:
            for event in backend.send("Hi"):
                said.append(event.text)
        except EngineError as error:
            problem = str(error)
        assert len(problem.splitlines()) <= 1
        outcome = backend.last
        assert problem or outcome is not None
        if outcome is not None:
            assert sorted(outcome.reasoning + outcome.text) == sorted("".join(said))


# --- keys, certificates, proxies ---


def test_the_key_goes_to_the_server_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORK_KEY", "sk-secret")
    with rough(said("x")) as other:
        away = reply(b"", 307, Location=f"http://{other.place}/v1/chat/completions")
        wrong = status(401, "Incorrect API key: sk-secret")
        with rough(said("x"), wrong, away) as server, chat(server, key_env="WORK_KEY") as backend:
            list(backend.send("Hi"))
            assert server.requests[0].headers["authorization"] == "Bearer sk-secret"
            assert server.listings[0].headers["authorization"] == "Bearer sk-secret"
            for why in ("rejects the key", "redirects to"):
                with pytest.raises(EngineError, match=why) as caught:
                    list(backend.send("Hi"))
                assert "sk-secret" not in str(caught.value)
            assert "sk-secret" not in repr([backend.options, backend.info, last(backend), backend.model])
        assert other.requests == []
        assert "authorization" not in str(other.listings)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a server that signed its own."""
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "cert.pem", folder / "key.pem"
    line = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    line += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(paths[0]), "-keyout", str(paths[1])]
    try:
        subprocess.run(line, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl makes no certificate here")
    return paths


def test_a_certificate_that_a_server_signed_itself(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(*certificate)
    with rough(said("x"), trust=trust) as server:
        url = f"https://{server.place}"
        for ca_file, why in (
            (None, "not trusted .*set ca_file for it in \\[remotes.w\\]"),
            (str(tmp_path), "cannot be used"),
        ):
            remotes = {"w": Remote(url, "tiny", ca_file=ca_file)}
            address = found("w", remotes)
            assert address is not None
            with pytest.raises(EngineError, match=why):
                RemoteBackend(address, ChatOptions(), remotes).open()
        remotes = {"w": Remote(url, "tiny", ca_file=str(certificate[0]))}
        address = found("w", remotes)
        assert address is not None
        backend = RemoteBackend(address, ChatOptions(), remotes)
        backend.open()
        assert text_of(backend.send("Hi")) == "x"
        backend.close()


def test_https_where_only_http_is_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        client_module, "_CONNECT", 1.0
    )  # what says hello may hold no end of a line, and it waits
    with rough(said("x")) as server:
        address = found(f"openai+https://{server.place}/tiny", {})
        assert address is not None
        with pytest.raises(EngineError, match=r"does not speak https|broken off|does not answer in https"):
            RemoteBackend(address, ChatOptions(), {}).open()


def test_https_where_nobody_answers_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of HTTP that wait for the end of a line wait for ever."""
    monkeypatch.setattr(client_module, "_CONNECT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = found(f"openai+https://127.0.0.1:{listener.getsockname()[1]}/tiny", {})
        assert address is not None
        with pytest.raises(EngineError, match="answers, but not over https; write openai"):
            RemoteBackend(address, ChatOptions(), {}).open()


def test_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    far, near = found("openai+http://example.invalid/tiny", {}), found("openai://127.0.0.1:1/tiny", {})
    assert far is not None
    assert near is not None
    assert client_module.proxy_for(far) is None
    with rough(said("x")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.place)
        assert client_module.proxy_for(far) == f"http://{proxy.place}"
        assert client_module.proxy_for(near) is None
        backend = RemoteBackend(far, ChatOptions(), {})
        backend.open()
        assert text_of(backend.send("Hi")) == "x"
        assert proxy.requests[0].path == "http://example.invalid/v1/chat/completions"
        backend.close()
        monkeypatch.setenv("no_proxy", "example.invalid")
        assert client_module.proxy_for(far) is None
    for value, why in (
        ("socks5://127.0.0.1:1", "socksio"),
        ("http://[bad", "proxy"),
        ("http://127.0.0.1:1", "reached|proxy"),
    ):
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("http_proxy", value)
        with pytest.raises(EngineError, match=why):
            RemoteBackend(far, ChatOptions(), {}).open()


# --- titles ---


def test_a_server_on_this_machine_makes_titles_and_another_where_it_may() -> None:
    with rough(said("An ", "egg"), said("Another"), status(400), said("late")) as server:
        with chat(server) as backend:
            assert backend.begin_title("how long?", "Six minutes.")
            assert backend.begin_title("how long?", "Six minutes."), "asked once"
            until(lambda: backend.made_title() == "An egg")
            assert backend.begin_title("which?", "That one.")
            until(lambda: backend.made_title() == "Another")
            assert backend.begin_title("why?", "So.")
            until(lambda: backend.made_title() == "")
            assert text_of(backend.send("Hi")) == "late"
        asked = server.requests[0].json
        assert asked["messages"][0]["content"].startswith("User: how long?\n\nAssistant: Six minutes.")
        assert (asked["max_tokens"], len(server.requests)) == (24, 4)
        with chat(server) as backend:
            address = backend._address
            for titles in (False, True):
                remote = Remote("https://example.org/v1", titles=titles)
                backend._address = replace(address, url="https://example.org/v1", remote=remote)
                assert backend.begin_title("a", "b") == titles


def test_an_answer_does_not_wait_for_a_title() -> None:
    release = threading.Event()
    with rough(gated(release, [b"data: {}\n\n"]), said("at once")) as server, chat(server) as backend:
        assert backend.begin_title("a", "b")
        until(lambda: len(server.requests) == 1)
        assert text_of(backend.send("Hi")) == "at once"
        assert backend.made_title() == ""
        release.set()
