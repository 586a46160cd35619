"""Requests over the channel: the engine's own answers, several at once, cancelled, and clients that misbehave."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from chatterm.backends.backend import ChatOptions, EngineError
from chatterm.backends.protocol import Hello, HelloReply, agreed
from chatterm.ipc.link import Link
from chatterm.ipc.messages import Call, pack, to_frame
from chatterm.ipc.runtime import connect
from chatterm.server import supervisor as supervising
from chatterm.server.channel_service import ChannelService
from chatterm.server.process import engine_process
from chatterm.server.process.engine_process import ProcessOptions
from chatterm.server.service import AnswerEnded, ChatMessage, Delta, Generation, Piece, RequestError, Started
from chatterm.server.supervisor import Supervisor
from models.files import ModelFiles
from tests.chatterm.server.conftest import Gate, Served, serving
from tests.counting import PATIENCE, until_true

QUESTION = (ChatMessage("user", "Name a river."),)


@pytest.fixture
async def service(served: Served) -> AsyncIterator[ChannelService]:
    await asyncio.to_thread(hold, served)
    made = ChannelService()
    await made.connect()
    yield made
    await made.close()


def hold(served: Served, name: str = "tiny") -> None:
    """Have the model loaded."""
    host = served.calls.host
    host.release(host.acquire(name))


async def answers_of(service: ChannelService, request: Generation) -> tuple[list[Started], dict[int, Any]]:
    """What came at first, and by number the text, the ids and the end of each answer."""
    started, answers = [], {}
    async for piece in service.generate(request):
        match piece:
            case Started():
                started.append(piece)
            case Delta():
                one = answers.setdefault(piece.index, {"text": "", "reasoning": "", "ids": [], "end": None})
                one["text" if piece.kind == "answer" else "reasoning"] += piece.text
                one["ids"] += piece.token_ids
            case AnswerEnded():
                answers.setdefault(piece.index, {"text": "", "reasoning": "", "ids": []})["end"] = piece
    return started, answers


async def test_the_first_token_waits_for_no_other(
    service: ChannelService, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatterm.server.process.frame_batcher.INTERVAL", 3600.0)
    gate = Gate(served.engine)
    pieces = service.generate(asks())
    try:
        assert isinstance(await anext(pieces), Started)
        assert isinstance(await anext(pieces), Delta)  # the gate is closed: no end has it sent
    finally:
        gate.open()
        await pieces.aclose()


async def test_that_all_has_come_is_told_before_it_is_read(service: ChannelService) -> None:
    finished = asyncio.Event()
    pieces = service.generate(asks(), finished.set)
    assert isinstance(await anext(pieces), Started)
    await finished.wait()
    assert isinstance([piece async for piece in pieces][-1], AnswerEnded)


def asks(**more: Any) -> Generation:
    given = {"max_tokens": 12, "seed": 7, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    given |= more.pop("sampling", {})
    return Generation(**{"model": "tiny", "messages": QUESTION, "sampling": given, **more})


async def test_an_answer_is_the_engines_own(service: ChannelService, served: Served) -> None:
    engine = served.engine
    request = asks()
    ids = await service.tokenize("tiny", QUESTION)
    params = engine.default_params(**request.sampling)
    alone = await asyncio.to_thread(lambda: list(engine.stream(ids, params)))
    (started,), answers = await answers_of(service, request)
    assert answers[0]["ids"] == [event.token_id for event in alone]
    assert answers[0]["text"] + answers[0]["reasoning"] == "".join(event.text for event in alone)
    assert started.prompt_tokens == len(ids)
    assert started.cached_tokens == len(ids) - 1  # the engine had answered it before
    assert answers[0]["end"].usage.completion_tokens == len(alone)


async def test_several_answers_have_seeds_that_count_on(service: ChannelService) -> None:
    (started,), answers = await answers_of(service, asks(count=3))
    assert sorted(answers) == [0, 1, 2]
    for index, answer in answers.items():
        _, alone = await answers_of(service, asks(sampling={"seed": 7 + index}))
        assert alone[0]["ids"] == answer["ids"]
    assert started.prompt_tokens > started.cached_tokens


async def test_stop_strings_and_limits(service: ChannelService, served: Served) -> None:
    served.engine.scripted.script = served.engine.tokenizer.encode("one two three<|im_end|>")
    _, answers = await answers_of(service, asks(sampling={"stop": ["wo"], "max_tokens": 50}))
    assert (answers[0]["text"], answers[0]["end"].reason) == ("one t", "stop")
    served.engine.scripted.script = served.engine.tokenizer.encode("one two three<|im_end|>")
    _, answers = await answers_of(service, asks(sampling={"max_tokens": 3}))
    assert (answers[0]["text"], answers[0]["end"].reason) == ("one", "length")


async def test_more_messages_than_the_context_has_tokens_are_refused_unread(
    service: ChannelService, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = served.calls.host.find("tiny")
    assert held is not None
    read = list[int]()
    monkeypatch.setattr(held.requests, "asked", lambda messages, *_, **__: read.append(len(messages)))
    many = tuple(ChatMessage("user", "x") for _ in range(served.engine.context_length + 1))
    with pytest.raises(RequestError, match="messages, more than the context") as caught:
        await answers_of(service, asks(messages=many))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert read == []


@pytest.mark.parametrize("text", ["a" * 10**6, " a" * 10_000], ids=["too many characters", "too many tokens"])
@pytest.mark.parametrize("is_message", [True, False])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    service: ChannelService, served: Served, monkeypatch: pytest.MonkeyPatch, text: str, is_message: bool
) -> None:
    tokenizer, read = served.engine.tokenizer, list[int]()
    encode = tokenizer.encode_pieces

    def counted(pieces: Any, after: int | None = None) -> list[int]:
        read.append(sum(len(piece.text) for piece in pieces))
        return encode(pieces, after)

    monkeypatch.setattr(tokenizer, "encode_pieces", counted)
    monkeypatch.setattr(tokenizer, "encode", lambda text: pytest.fail("all of it was read"))
    changed = {"messages": (ChatMessage("user", text),)} if is_message else {"messages": None, "prompt": text}
    with pytest.raises(RequestError, match="characters, more than the context of 1,024 tokens") as caught:
        await answers_of(service, asks(**changed))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert max(read, default=0) <= 16 * served.engine.context_length
    with pytest.raises(RequestError, match="characters, more than"):
        await service.tokenize("tiny", text)


async def test_many_requests_run_side_by_side(service: ChannelService) -> None:
    requests = [asks(prompt=f"river {n}", messages=None, sampling={"seed": n}) for n in range(12)]
    alone = [(await answers_of(service, request))[1][0]["ids"] for request in requests]
    together = await asyncio.gather(*(answers_of(service, request) for request in requests))
    assert [answers[0]["ids"] for _, answers in together] == alone


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"sampling": {"temperature": -1.0}}, 400, "temperature"),
        ({"sampling": {"top_k": "many"}}, 400, "top_k"),
        ({"sampling": {"telepathy": 1}}, 400, "telepathy"),
        ({"messages": ()}, 400, None),
        ({"messages": (*QUESTION, ChatMessage("assistant", "The Rhine."))}, 400, None),
        ({"messages": None, "prompt": (1, 99_999)}, 400, "prompt"),
        ({"messages": (ChatMessage("user", "river " * 1000),)}, 400, "messages"),
        ({"tools": ({"type": "function"},)}, 400, "tools"),
    ],
)
async def test_what_cannot_be_answered_is_refused(
    service: ChannelService, change: dict[str, Any], status: int, param: str | None
) -> None:
    with pytest.raises(RequestError) as caught:
        await answers_of(service, asks(**change))
    assert (caught.value.status, caught.value.param) == (status, param)
    assert "\n" not in caught.value.message
    await answers_of(service, asks())


async def test_closing_an_answer_ends_it_at_once(service: ChannelService, served: Served) -> None:
    gate = Gate(served.engine)
    pieces = service.generate(asks(sampling={"max_tokens": 700}))
    async for piece in pieces:
        if isinstance(piece, Delta):
            break
    (held,) = served.calls.host.held
    (sequence,) = held.sequences
    await pieces.aclose()
    await until_true(lambda: sequence.cancelled)
    gate.open()
    await until_true(lambda: sequence.finished.is_set() and not held.users and not held.cleanups)
    assert len(sequence.generated) <= 7
    assert held.sequences == set()
    await asyncio.to_thread(served.engine.check)


async def test_a_deadline_ends_an_answer_as_too_long(service: ChannelService, served: Served) -> None:
    gate = Gate(served.engine)
    gate.open_when(lambda: any(sequence.cancelled for sequence in served.running))
    _, answers = await answers_of(service, asks(sampling={"max_tokens": 700}, deadline_s=0.05))
    assert answers[0]["end"].reason == "length"
    assert len(answers[0]["ids"]) <= 7


async def test_the_same_conversation_is_computed_once(service: ChannelService, served: Served) -> None:
    """Twenty turns of a client that sends everything back each time, as text, with thinking that it leaves out."""
    engine, (held,) = served.engine, served.calls.host.held
    encode = engine.tokenizer.encode
    messages: list[ChatMessage] = [ChatMessage("system", "Be terse.")]
    glue = "<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    for turn in range(20):
        question = f"Question {turn}?"
        messages.append(ChatMessage("user", question))
        thought = "<think>\nhm\n</think>\n\n" if turn % 2 else ""
        engine.scripted.script = encode(f"{thought}Answer é {turn}.<|im_end|>")
        (started,), answers = await answers_of(
            service, asks(messages=tuple(messages), sampling={"max_tokens": 60})
        )
        assert answers[0]["text"] == f"Answer é {turn}."
        if turn:
            new = started.prompt_tokens - started.cached_tokens
            assert new <= len(encode(question)) + len(encode(glue)), turn
        messages.append(ChatMessage("assistant", answers[0]["text"]))
        await until_true(lambda: not held.users and not held.cleanups)
        assert await asyncio.to_thread(held.requests.settled, 30.0)
    engine.check()


async def test_tokens_that_come_before_their_sequence_is_known_are_told_after_it(
    service: ChannelService, served: Served
) -> None:
    """The engine's thread may be ahead of the one that begins a request."""
    (held,) = served.calls.host.held
    begin = held.requests.begin

    def late(*given: Any) -> Any:
        sequence = begin(*given)
        sequence.finished.wait(PATIENCE)
        # What woke the event loop before this did has been done by then.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), served.loop).result(30.0)
        return sequence

    with patch.object(held.requests, "begin", late):
        started, answers = await answers_of(service, asks(sampling={"max_tokens": 3}))
    assert len(started) == 1
    assert len(answers[0]["ids"]) <= 3
    assert answers[0]["end"] is not None


async def test_what_prompts_share_is_computed_once(service: ChannelService, served: Served) -> None:
    engine = served.engine
    await until_true(lambda: not served.running)
    gate, before = Gate(engine, steps=1), engine.scripted.rows_computed
    engine.scripted.script = []
    long = "river " * 50
    requests = [asks(messages=None, prompt=long + str(n), sampling={"max_tokens": 2}) for n in range(3)]
    first = asyncio.create_task(answers_of(service, requests[0]))
    await until_true(gate.holds.is_set)  # in its second chunk
    others = [asyncio.create_task(answers_of(service, request)) for request in requests[1:]]
    await until_true(lambda: engine.loop._jobs.qsize() >= 2)  # they look for what is there
    gate.open()
    answers = await asyncio.gather(first, *others)
    new = [started.prompt_tokens - started.cached_tokens for ((started,), _) in answers]
    assert new[0] == len(long) + 1
    assert max(new[1:]) <= engine.block_size + 1
    assert engine.scripted.rows_computed - before <= len(long) + 3 * (engine.block_size + 4)


async def test_a_client_that_never_reads_holds_up_nobody(service: ChannelService, served: Served) -> None:
    peer = await asyncio.to_thread(greeted)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    request = asks(messages=None, prompt="x", sampling={"max_tokens": 200, "seed": 1}, count=4)
    for number in range(2, 30):
        await asyncio.to_thread(peer.sendall, to_frame(Call(number, "generate", pack(request))))
    _, answers = await answers_of(service, asks())
    assert answers[0]["end"] is not None
    written = [client._transport.get_write_buffer_size() for client in served.calls._clients]  # type: ignore[union-attr]
    assert max(written) < 2**20
    peer.close()
    await until_true(lambda: not served.calls.host.held[0].users)
    assert served.calls.host.held[0].sequences == set()


def greeted() -> socket.socket:
    """A client that has said who it is, without anything that reads."""
    peer = connect()
    assert peer is not None
    peer.sendall(to_frame(Call(1, "hello", pack(Hello(agreed(), "web")))))
    return peer


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x03abc",
        to_frame(Call(1, "generate", pack(None))),
        to_frame(Call(1, "hello", pack({"agreed": 3}))),
        to_frame(Call(1, "hello", pack(Hello("another", "web")))),
    ],
)
async def test_garbage_ends_one_connection(service: ChannelService, garbage: bytes) -> None:
    peer = connect()
    assert peer is not None

    def spoil() -> None:
        with contextlib.suppress(OSError):
            peer.sendall(garbage)
        peer.settimeout(30)
        with contextlib.suppress(ConnectionError):
            while peer.recv(4096):
                pass
        peer.close()

    await asyncio.to_thread(spoil)  # the server parts
    peer = await asyncio.to_thread(greeted)
    await asyncio.to_thread(peer.sendall, garbage)
    peer.close()
    _, answers = await answers_of(service, asks())
    assert answers[0]["end"] is not None


async def test_bodies_of_the_wrong_shape_end_nothing_else(service: ChannelService) -> None:
    link = Link(connect())  # type: ignore[arg-type]
    with pytest.raises(EngineError):
        link.ask("nothing", None, HelloReply, 30.0)
    _, answers = await answers_of(service, asks())
    assert answers[0]["end"] is not None


async def test_when_the_server_ends_streams_end_with_an_error(
    service: ChannelService, served: Served
) -> None:
    gate = Gate(served.engine)
    pieces: AsyncIterator[Piece] = service.generate(asks(sampling={"max_tokens": 700}))
    await anext(pieces)
    served.end()
    gate.open_when(lambda: any(sequence.cancelled for sequence in served.running))
    with pytest.raises(RequestError) as caught:
        async for _ in pieces:
            pass
    assert caught.value.status == 503
    await service.lost.wait()
    assert not service.health().is_there
    with pytest.raises(RequestError):
        await answers_of(service, asks())


async def test_what_is_served(service: ChannelService) -> None:
    (model,) = [one for one in service.models() if one.loaded]
    assert (model.name, model.thinks, model.chats) == ("tiny", True, True)
    metrics = await service.metrics()
    assert metrics.models[0].model == "tiny"
    texts = await service.token_texts("tiny", [3, 4])
    assert len(texts) == 2
    with pytest.raises(RequestError):
        await service.token_texts("tiny", [10**6])
    with pytest.raises(RequestError):
        await service.hold("nobody", None)


def test_a_model_that_nobody_uses_is_unloaded(
    runtime: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_LOOK", 0.01)
    with serving(checkpoint, keep_alive_s=0.0) as served:
        hold(served)
        until_s = time.monotonic() + 60
        while served.calls.host.held:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        assert served.engine.is_closed


async def test_an_engine_that_ends_under_a_request_is_no_fault_of_the_request(
    service: ChannelService, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the answer has begun, too."""
    host = served.calls.host
    held = host.acquire("tiny")
    served.engine.loop.fail(EngineError("A part is lost."))
    await until_true(lambda: served.engine.is_closed)
    with monkeypatch.context() as patch:
        patch.setattr(host, "take_loaded", lambda name: held)  # it was there a moment ago
        with pytest.raises(RequestError, match=r"A part is lost. Send the request again") as caught:
            await answers_of(service, asks())
    assert (caught.value.status, caught.value.code) == (503, "engine_ended")


async def test_the_first_model_is_known_once_the_server_is_ready(served: Served) -> None:
    supervisor = Supervisor(ProcessOptions(ChatOptions()), None, lambda: hold(served), print, print)
    await supervisor._begin()
    assert [model.name for model in supervisor._service.models() if model.loaded] == ["tiny"]
    await supervisor._service.close()


@pytest.mark.parametrize(
    ("has_served", "runs", "waits"),
    [(False, [10, 5], [0]), (True, [10, 86_400, 70, 50, 5, 5, 5, 70, 5], [0, 0, 0, 1, 2, 3, 3, 0, 1])],
)
async def test_an_engine_process_is_replaced_later_and_later_once_there_was_one(
    monkeypatch: pytest.MonkeyPatch, has_served: bool, runs: list[float], waits: list[float]
) -> None:
    now, told = 0.0, list[str]()

    class Failing(Supervisor):
        async def _once(self, child: object) -> int:
            nonlocal now
            self._has_served = has_served
            if not runs:
                return 0
            now += runs.pop(0)
            return 9

    monkeypatch.setattr(supervising, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(supervising, "EngineChild", lambda options: None)
    monkeypatch.setattr(supervising, "_WAITS", (1e-3, 3e-3))
    running = Failing(ProcessOptions(ChatOptions()), None, lambda: None, print, told.append).run()
    if has_served:
        await running
    else:
        with pytest.raises(EngineError, match=r"unexpectedly \(exit code 9\), again"):
            await running
    found = [float(line.split(" in ")[1].split()[0]) if " in " in line else 0 for line in told]
    assert [wait * 1000 for wait in found] == waits


async def test_what_an_engine_process_last_told_is_there_while_it_hangs(
    service: ChannelService, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, metrics = service.models(), await service.metrics()
    assert service.health().trouble is None
    monkeypatch.setattr("chatterm.server.channel_service._PATIENCE", 0.05)
    monkeypatch.setattr("chatterm.server.service.HEARD_S", 0.05)
    goes_on = threading.Event()
    served.loop.call_soon_threadsafe(goes_on.wait, PATIENCE)
    try:
        await until_true(lambda: service.health().trouble is not None)
        with pytest.raises(RequestError, match="does not answer") as caught:
            await service.look()
        assert caught.value.status == 503
        assert (service.models(), await service.metrics()) == (known, metrics)
    finally:
        goes_on.set()
    await until_true(lambda: service.health().trouble is None)


async def test_a_model_of_a_file_is_loaded_again_as_long_as_the_file_is_there(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, host = tmp_path / "mine.gguf", served.calls.host
    file.touch()
    load = host.engines.load

    def load_file(model: str, *rest: Any) -> Any:
        engine = load(model, *rest)
        engine.model_name = Path(model).name
        return engine

    monkeypatch.setattr(host.engines, "find", lambda model, on_progress: ModelFiles(model))
    monkeypatch.setattr(host.engines, "load", load_file)
    await asyncio.to_thread(hold, served, str(file))
    service = ChannelService()
    await service.connect()
    for name in ("mine.gguf", str(file)):
        loaded = host.find(name)
        assert loaded is not None
        assert host.unload(loaded)
        await service.look()
        (listed,) = [model for model in service.models() if name in (model.name, *model.aliases)]
        assert (listed.name, listed.loaded) == ("mine.gguf", False)
        _, answers = await answers_of(service, asks(model=name))
        assert answers[0]["end"].usage.completion_tokens > 0
    loaded = host.find("mine.gguf")
    assert loaded is not None
    assert host.unload(loaded)
    file.unlink()
    await service.look()
    assert "mine.gguf" not in [model.name for model in service.models()]
    with pytest.raises(RequestError, match="There is no model"):
        await answers_of(service, asks(model="mine.gguf"))
    await service.close()
