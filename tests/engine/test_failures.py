"""Whatever goes wrong in the loop thread, nobody is left waiting and no wrong row is left in the cache."""

import threading
from pathlib import Path

import pytest
import torch

from engine import EngineError, FinishReason, SamplingParams
from engine.cache.blocks import BlockTable
from engine.cache.rows import Rows
from engine.schedule.sequence import Priority, Sequence
from tests.engine.tiny import TinyEngine, close_to, say, tiny_engine
from tests.models.checkpoints import run

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=900)
PROMPT = torch.randint(256, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def once(error: BaseException, real: object) -> object:
    """A function that raises `error` the first time and is `real` from then on."""
    errors = [error]

    def call(*args: object) -> object:
        if errors:
            raise errors.pop()
        return real(*args)  # type: ignore[operator]

    return call


@pytest.mark.parametrize(
    "error", [KeyError("x"), AssertionError(), ValueError("a\nb"), NotImplementedError()]
)
def test_any_exception_of_a_step_is_one_line_and_the_engine_lives_on(
    engine: TinyEngine, error: Exception
) -> None:
    engine.scripted.fail_next = error
    with pytest.raises(EngineError, match="failed") as caught:
        list(engine.stream(PROMPT, GREEDY))
    assert "\n" not in str(caught.value)
    engine.check()
    assert len(list(engine.stream(PROMPT, GREEDY))) == 12


def test_a_scheduler_that_fails_ends_everything_that_waits(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._blocks, "open", once(IndexError("pop"), engine._blocks.open))
    with pytest.raises(EngineError, match="failed"):
        list(engine.stream(PROMPT, GREEDY))
    assert len(list(engine.stream(PROMPT, GREEDY))) == 12


def test_a_thread_that_dies_ends_its_streams_and_the_engine_says_so(folder: Path) -> None:
    with tiny_engine(folder) as engine:
        engine.scripted.fail_next = SystemExit()  # type: ignore[assignment]
        with pytest.raises(EngineError, match=r"unexpected error.*load the model again"):
            list(engine.stream(PROMPT, GREEDY))
        with pytest.raises(EngineError, match=r"unexpected error.*load the model again"):
            engine.warm(PROMPT)


def test_rows_whose_copy_failed_are_not_found_again(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.warm(PROMPT)
    branch = [*PROMPT[:50], 7, 8, 9]
    monkeypatch.setattr(engine._blocks, "carry_out", once(RuntimeError("boom"), engine._cache.carry_out))
    with pytest.raises(EngineError, match="boom"):
        engine.warm(branch)
    list(engine.stream(branch, GREEDY))
    assert close_to(engine.scripted.logits_seen[0], run(engine.scripted.model, branch)[-1])


def test_logits_that_are_no_numbers_end_the_answer(engine: TinyEngine) -> None:
    engine.scripted.model.network.final_norm.weight.fill_(float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(EngineError, match="not a number"):
            list(engine.stream(PROMPT, SamplingParams(temperature=temperature, max_tokens=3)))


def test_a_token_that_only_the_network_knows_has_no_text(engine: TinyEngine) -> None:
    assert engine.tokenizer.vocab_size < engine.scripted.model.spec.vocab_size
    chat = engine.chat()
    engine.scripted.script = [271, *say(engine, None, "yes")]
    list(chat.send("go", GREEDY))
    assert (chat.last.text, chat.last.finish_reason) == ("yes", FinishReason.EOS)
    list(chat.send("again", GREEDY))


def test_a_sequence_posted_while_the_engine_closes_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine(folder) as engine:
        late = Sequence(Rows.of(PROMPT), Priority.PERSON)
        close = engine._loop.close

        def post_and_close() -> None:
            engine.submit(late)
            close()

        with monkeypatch.context() as patch:
            patch.setattr(engine._loop, "close", post_and_close)
            engine.close()
        assert late.finished.wait(30)


def test_a_table_that_vanishes_between_two_looks_is_no_error() -> None:
    """Figures are read in one thread while the loop gives tables back in another."""

    class Vanishing:
        looks = 0

        @property
        def table(self) -> BlockTable | None:
            self.looks += 1
            return BlockTable([0], 3) if self.looks == 1 else None

    assert Sequence.computed.fget(Vanishing()) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_an_answer_collected_as_garbage_on_the_loop_thread_blocks_nothing(
    engine: TinyEngine, think_cache: str
) -> None:
    chat = engine.chat(think_cache=think_cache)  # type: ignore[arg-type]
    engine.scripted.script = say(engine, "x", "a long answer " * 40)  # does not end by itself first
    events = chat.send("go", ENDLESS)
    next(events)
    sequence = chat._running
    engine._loop.post(events.close)  # type: ignore[attr-defined]
    assert sequence.finished.wait(30)
    engine.scripted.script = []
    assert len(list(engine.stream(PROMPT, GREEDY))) == 12
    for thread in threading.enumerate():
        if thread.name == "finish":
            thread.join(5)
    assert chat.last.finish_reason is FinishReason.CANCELLED
    assert chat.last.token_ids


def test_closing_the_engine_ends_a_masked_answer_without_an_error(folder: Path) -> None:
    with tiny_engine(folder) as engine:
        chat = engine.chat(think_cache="mask")
        engine.scripted.script = say(engine, "x", "a long answer " * 40)
        events = chat.send("go", ENDLESS)
        for _ in range(12):
            next(events)
        engine.close()
        list(events)
        assert chat.last.finish_reason is FinishReason.CANCELLED


def test_hiding_a_think_span_that_fails_costs_time_but_not_the_answer(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = engine.chat(think_cache="mask")
    engine.scripted.script = say(engine, "thoughts", "first")
    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(engine._cache, "copy_rows", once(error, engine._cache.copy_rows))
    list(chat.send("one", ENDLESS))
    assert (chat.last.text, chat.last.finish_reason) == ("first", FinishReason.EOS)
    engine.check()
    engine.scripted.script = say(engine, None, "second")
    list(chat.send("two", ENDLESS))
    assert chat.last.text == "second"
