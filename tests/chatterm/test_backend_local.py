"""The local engine as a backend, with the real default model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatterm.backends.backend import (
    Backend,
    ChatOptions,
    ContextFullError,
    EngineError,
    Exchange,
    FinishReason,
    Message,
    ModelError,
    Outcome,
    Progress,
    Request,
    TokenEvent,
)
from chatterm.backends.local import LocalBackend
from tests.counting import until

SHORT = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> Iterator[tuple[LocalBackend, list[Progress]]]:
    reports: list[Progress] = []
    backend = LocalBackend(str(smollm2), ChatOptions(context=1024, system="Be terse.", sampling=SHORT))
    backend.open(reports.append)
    yield backend, reports
    backend.close()


@pytest.fixture
def backend(loaded: tuple[LocalBackend, list[Progress]]) -> LocalBackend:
    loaded[0].reset()
    return loaded[0]


def test_it_is_a_backend_and_costs_nothing_before_it_is_opened() -> None:
    backend: Backend = LocalBackend("no such model", ChatOptions())
    assert (backend.info, backend.last, backend.figures(), backend.used_tokens) == (None, None, None, 0)
    backend.stop()
    backend.reset()
    backend.settle()
    backend.prepare("draft")
    backend.configure({"system": "x"})
    backend.configure({"think": "off"})
    backend.configure({"think_cache": "mask"})
    backend.configure({"sampling": {"top_k": 2}})
    backend.know([Exchange(1, None, "hi", "ho")])
    backend.answer_now()
    backend.load_path([Exchange(1, None, "hi", "ho", model="m", finish_reason="eos")])
    assert (backend.options.system, backend.options.think, backend.options.think_cache) == (
        "x",
        "off",
        "mask",
    )
    assert (backend.count("draft"), backend.blocks()) == (None, None)
    for call in (
        lambda: next(backend.send("hi")),
        lambda: next(backend.resume()),
        lambda: next(backend.candidates("hi", 2)),
        lambda: next(backend.answers([])),
    ):
        with pytest.raises(EngineError, match="No model is loaded"):
            call()
    backend.close()
    backend.close()


def test_what_was_said_elsewhere_with_this_model_can_be_guessed_from(backend: LocalBackend) -> None:
    info, engine = backend.info, backend.engine
    assert info is not None
    assert engine is not None
    said = Exchange(1, None, "hello", "there", model=info.name, token_ids=[5, 6, 7, 10**9])
    backend.know([said, Exchange(2, None, "by another", model="other", token_ids=[1, 2])])
    speculating = engine.loop.call(lambda: engine.engine_step.speculating)
    assert speculating is not None
    assert list(speculating.texts.elsewhere.tokens) == [*engine.tokenizer.encode_plain("hello"), 5, 6, 7]
    backend.know([])
    assert engine.loop.call(lambda: len(speculating.texts.elsewhere)) == 0


def test_a_model_that_does_not_exist() -> None:
    with pytest.raises(ModelError):
        LocalBackend("./no/such/folder", ChatOptions()).open()


def test_loading_tells_how_far_it_is(loaded: tuple[LocalBackend, list[Progress]]) -> None:
    backend, reports = loaded
    assert reports
    assert all(report.total is None or report.done <= report.total for report in reports)
    assert backend.info is not None
    assert backend.info.context_length == 1024
    assert "torch" not in backend.info.dtype
    figures = backend.figures()
    assert figures is not None
    assert figures.weight_bytes > 0


def test_a_turn_another_answer_and_their_count(backend: LocalBackend) -> None:
    empty = backend.used_tokens
    events = list(backend.send("Name a colour."))
    last = backend.last
    assert last is not None
    assert last.text.startswith("".join(event.text for event in events))
    assert last.finish_reason in (FinishReason.LENGTH, FinishReason.EOS)
    assert len(last.token_ids) >= len(events) > 0
    assert last.stats.generated_tokens - len(last.token_ids) in (0, 1)  # the marker that ends a turn
    used = backend.used_tokens
    assert used > empty
    backend.load_path([])
    assert backend.used_tokens == empty
    list(backend.send("Name a colour."))
    assert backend.last is not None
    assert backend.last.text == last.text  # greedy
    assert backend.used_tokens == used
    backend.load_path([])
    assert backend.used_tokens == empty


def exchange(backend: LocalBackend, user: str, model: str) -> Exchange:
    """The latest answer as a session keeps it."""
    last = backend.last
    assert last is not None
    assert last.finish_reason is not None
    return Exchange(
        1,
        None,
        user,
        last.text,
        last.reasoning,
        list(last.token_ids),
        last.shown,
        list(last.opening),
        str(last.finish_reason),
        last.stats.to_dict(),
        model,
    )


def test_a_path_keeps_its_tokens_with_the_same_model_and_its_text_with_another(backend: LocalBackend) -> None:
    assert backend.info is not None
    list(backend.send("Name a colour."))
    used, last = backend.used_tokens, backend.last
    assert last is not None
    ours = exchange(backend, "Name a colour.", backend.info.name)
    theirs = exchange(backend, "Name a colour.", "another model")
    for model_of, ids in ((ours, list(last.token_ids)), (theirs, None)):
        backend.reset()
        backend.load_path([model_of])
        assert backend.last is not None
        assert (backend.last.text, backend.last.finish_reason) == (last.text, last.finish_reason)
        assert backend.last.stats == last.stats
        assert abs(backend.used_tokens - used) <= (0 if ids else 2)
        if ids:
            assert list(backend.last.token_ids) == ids
    backend.load_path([ours])
    list(backend.send("Another."))
    assert backend.last.stats.cached_tokens >= used - 6  # the end of turn and what opens the next one


def test_continue_computes_one_token_and_adds_to_the_answer(backend: LocalBackend) -> None:
    backend.configure({"sampling": {**SHORT, "max_tokens": 2}})
    try:
        list(backend.send("Name three colours."))
        first = backend.last
        assert first is not None
        assert first.finish_reason is FinishReason.LENGTH
        new = "".join(event.text for event in backend.resume())
    finally:
        backend.configure({"sampling": SHORT})
    assert backend.last is not None
    assert backend.last.text == first.text + new
    assert list(backend.last.token_ids)[:2] == list(first.token_ids)
    assert backend.last.stats.prefilled_tokens == 1


def test_the_cost_of_a_draft_and_the_blocks(backend: LocalBackend) -> None:
    cost = backend.count("How are you?")
    assert cost is not None
    assert 3 < cost.new <= cost.tokens < 40
    list(backend.send("How are you?"))
    assert backend.last is not None
    assert backend.last.stats.prompt_tokens == 1024 - cost.free
    until(lambda: (found := backend.blocks()) is not None and found.tokens == backend.used_tokens)


def test_sampling_is_checked_and_obeyed(backend: LocalBackend) -> None:
    with pytest.raises(EngineError, match="top_p is 2"):
        backend.configure({"sampling": {"top_p": 2}})
    with pytest.raises(EngineError, match="Unknown sampling setting among heat"):
        backend.configure({"sampling": {"heat": 2}})
    backend.configure({"sampling": {**SHORT, "max_tokens": 2}})
    try:
        list(backend.send("Count."))
        assert backend.last is not None
        assert backend.last.stats.generated_tokens <= 2
    finally:
        backend.configure({"sampling": SHORT})


def test_the_catalogue_says_what_is_here_and_what_fits(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.device.available_memory", lambda device: 10_000_000_000)
    found = {choice.name: choice for choice in backend.catalogue()}
    assert found["qwen3:32b"].bytes is not None
    assert found["qwen3:32b"].bytes > 60_000_000_000
    assert (found["qwen3:32b"].fits, found["qwen3:0.6b"].fits) == (False, True)
    assert found["smollm2"].fits
    assert len(found) >= 7


def test_candidates_share_the_prompt_and_one_of_them_becomes_the_history(backend: LocalBackend) -> None:
    backend.configure({"sampling": {"temperature": 1.0, "max_tokens": 6, "seed": 5}})
    try:
        ends = {i: p for i, p in backend.candidates("Name a river.", 3) if isinstance(p, Outcome)}
        assert [ends[index].seed for index in range(3)] == [5, 6, 7]
        assert backend.last is None
        assert all(ends[index].stats.prompt_tokens == ends[0].stats.prompt_tokens for index in ends)
        assert all(ends[index].stats.cached_tokens > 0 for index in (1, 2))
        chosen = ends[1]
        exchange = Exchange(1, None, "Name a river.", model=backend.model)
        exchange.take(chosen)
        backend.load_path([exchange])
        assert backend.last is not None
        assert (backend.last.text, list(backend.last.token_ids)) == (chosen.text, list(chosen.token_ids))
        list(backend.send("And a lake."))
        assert backend.last.stats.cached_tokens >= chosen.stats.prompt_tokens
        list(backend.send("Name a river."))
    finally:
        backend.configure({"sampling": SHORT})


def test_requests_of_their_own(backend: LocalBackend) -> None:
    """They leave the conversation alone, and each is what it would be as a conversation."""
    list(backend.send("Hello."))
    last = backend.last
    talk = [Message("user", "Hi."), Message("assistant", "Hello!"), Message("user", "Name a colour.")]
    requests = [
        Request([Message("user", "Name a fruit.")]),
        Request([Message("user", "x " * 2000)]),
        Request([Message("system", "Shout."), *talk], {"max_tokens": 3}),
        Request([Message("user", "Name a fruit.")], {"temperature": -1}),
    ]
    ends: dict[int, object] = {}
    for index, part in backend.answers(iter(requests)):
        if not isinstance(part, TokenEvent):
            ends[index] = part
    assert backend.last == last
    first, long, third, wrong = (ends[index] for index in range(4))
    assert isinstance(long, ContextFullError)
    assert isinstance(wrong, EngineError)
    backend.reset()
    list(backend.send("Name a fruit."))
    assert isinstance(first, Outcome)
    assert backend.last is not None
    assert first.text == backend.last.text
    assert isinstance(third, Outcome)
    assert third.stats.generated_tokens == 3


def test_an_empty_system_message_is_what_it_is_for_the_server(backend: LocalBackend) -> None:
    """Without one the template writes its own, and with a system prompt of the options that one would stand there."""
    from engine.conversation.requests import Requests

    said = [Message("user", "Name a fruit.")]
    asked = [Request(said), Request([Message("system", ""), *said]), Request([Message("system", " "), *said])]
    engine = backend.engine
    assert engine is not None
    expected = [
        len(
            Requests(engine)
            .asked([{"role": one.role, "content": one.content} for one in request.messages])
            .rows
        )
        for request in asked
    ]
    for system in (None, "Be terse, and say nothing that nobody has asked you for."):
        backend.configure({"system": system})
        found = {
            i: part.stats.prompt_tokens for i, part in backend.answers(asked) if isinstance(part, Outcome)
        }
        assert [found[1], found[2]] == expected[1:]
        assert (found[0] == expected[0]) == (system is None)
    backend.configure({"system": None})
    assert expected[1] < expected[0]
