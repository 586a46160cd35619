"""Whatever goes wrong in the loop thread, nobody is left waiting and no wrong row is left in the cache."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineError, FinishReason, SamplingParams
from engine.cache.block_table import BlockTable
from engine.cache.rows import Rows
from engine.device import DeviceChoice
from engine.engine import Engine
from engine.errors import GpuLostError
from engine.execute.faults import lost_gpu
from engine.schedule.loop import Loop
from engine.schedule.sequence import Priority, Sequence
from tests.counting import PATIENCE, until
from tests.engine.inside import evict_all
from tests.engine.tiny import TinyEngine, close_to, say, tiny_engine, tiny_tokenizer
from tests.models.checkpoints import files_of, run, tiny_qwen3, write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=900)
PROMPT = torch.randint(256, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def once(error: BaseException, real: object) -> object:
    """A function that raises `error` the first time and is `real` from then on."""
    errors = [error]

    def call(*args: object, **options: object) -> object:
        if errors:
            raise errors.pop()
        return real(*args, **options)  # type: ignore[operator]

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


class Narrow:
    """A network that has memory for `room` rows at once. Keeps how many rows were asked for."""

    def __init__(self, engine: TinyEngine, room: int) -> None:
        self.asked: list[int] = []
        self._room, self._forward = room, engine.scripted.model.forward
        engine.scripted.model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, token_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        self.asked.append(len(token_ids))
        if len(token_ids) > self._room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return self._forward(token_ids, *arguments)


def test_a_chunk_that_memory_is_too_short_for_is_halved_and_stays_so(engine: TinyEngine) -> None:
    expected = [event.token_id for event in engine.stream(PROMPT[::-1], GREEDY)]
    narrow = Narrow(engine, room=40)
    assert [event.token_id for event in engine.stream([1, *PROMPT], GREEDY)]
    assert narrow.asked[:4] == [61, 30, 30, 1]
    evict_all(engine)
    narrow.asked.clear()
    assert [event.token_id for event in engine.stream(PROMPT[::-1], GREEDY)] == expected
    assert narrow.asked[:2] == [30, 30], "the next prompt does not try the large chunk again"
    engine.check()


def test_memory_that_stays_too_short_is_tried_once_more_and_then_told(engine: TinyEngine) -> None:
    narrow = Narrow(engine, room=0)
    with pytest.raises(EngineError, match="Out of memory; the conversation is intact"):
        list(engine.stream(PROMPT, GREEDY))
    assert narrow.asked == [60, 30]
    with pytest.raises(EngineError, match="Out of memory"):
        list(engine.stream(PROMPT, GREEDY))
    assert narrow.asked[2:] == [16, 16], "fewer rows hardly take less memory"
    engine.check()


LOST = [
    "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unknown error",
    "Triton Error [CUDA]: an illegal memory access was encountered",
]


@pytest.mark.parametrize("error", LOST)
def test_a_gpu_that_is_lost_ends_the_engine_once_and_keeps_the_conversation(folder: Path, error: str) -> None:
    with tiny_engine(folder) as engine:
        chat = engine.chat()
        engine.scripted.script = say(engine, None, "first")
        list(chat.send("one", ENDLESS))
        tries: list[object] = []

        def run(*arguments: object) -> None:
            tries.append(arguments)
            raise RuntimeError(error)

        engine.pieces.runner.run = run  # type: ignore[method-assign, assignment]
        memory = weakref.ref(engine.pieces.cache.kv)
        for _ in range(3):
            with pytest.raises(
                EngineError, match=r"^The GPU was lost \(.*intact\. Restart chatterm\.$"
            ) as caught:
                list(chat.send("two", ENDLESS))
            assert "\n" not in str(caught.value)
        with pytest.raises(EngineError, match="Restart chatterm"):
            chat.settle()
        assert len(tries) == 1, "nothing is tried again, in idle time neither"
        assert engine.is_closed
        assert engine.lost_gpu
        assert chat.turns[0].answer.text == "first"
    del engine, chat, caught
    gc.collect()
    assert memory() is not None, "torch ends the process when memory of a lost GPU is freed"


def test_a_gpu_that_does_not_answer_is_lost_whatever_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(device: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`")
    assert lost_gpu(error) is None, "this process uses none"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("engine.execute.faults.wait_for", lambda device: None)
    assert lost_gpu(error) is None
    monkeypatch.setattr("engine.execute.faults.wait_for", silent)
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in str(lost_gpu(error))
    assert lost_gpu(torch.OutOfMemoryError("CUDA out of memory")) is None
    assert lost_gpu(ValueError("device-side assert")) is None


def test_a_gpu_that_is_lost_in_idle_time_is_told_as_such() -> None:
    loop = Loop()
    loop.call(
        lambda: loop.work(lambda: False, lambda: None, lambda _: None, once(RuntimeError(LOST[0]), bool))
    )  # type: ignore[arg-type]
    until(lambda: loop.closed)
    assert loop.lost_gpu
    with pytest.raises(GpuLostError, match="Restart chatterm"):
        loop.post(lambda: None)
    loop.close()


def test_a_model_for_a_gpu_that_was_lost_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(device: torch.device) -> int:
        raise RuntimeError(LOST[3])

    write_checkpoint(tmp_path, tiny_qwen3())
    monkeypatch.setattr("engine.engine.pick_device", lambda name: DeviceChoice(torch.device("cuda")))
    monkeypatch.setattr("engine.engine.pick_dtype", lambda name, device: torch.bfloat16)
    monkeypatch.setattr("engine.engine.check_parallel", lambda ranks, device: None)
    monkeypatch.setattr("engine.engine.load_tokenizer", lambda files: tiny_tokenizer())
    monkeypatch.setattr("engine.engine.available_memory", refuse)
    with pytest.raises(GpuLostError, match=r"unknown error.*Restart chatterm"):
        Engine.load(files_of(tmp_path))


def test_a_scheduler_that_fails_ends_everything_that_waits(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.pieces.blocks, "open", once(IndexError("pop"), engine.pieces.blocks.open))
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
    monkeypatch.setattr(
        engine.pieces.blocks, "carry_out", once(RuntimeError("boom"), engine.pieces.cache.carry_out)
    )
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
        close = engine.loop.close

        def post_and_close() -> None:
            engine.submit(late)
            close()

        with monkeypatch.context() as patch:
            patch.setattr(engine.loop, "close", post_and_close)
            engine.close()
        assert late.finished.wait(PATIENCE)


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
    engine.loop.post(events.close)  # type: ignore[attr-defined]
    assert sequence.finished.wait(PATIENCE)
    engine.scripted.script = []
    assert len(list(engine.stream(PROMPT, GREEDY))) == 12
    for thread in threading.enumerate():
        if thread.name == "finish":
            thread.join(PATIENCE)
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
    monkeypatch.setattr(engine.pieces.cache, "copy_rows", once(error, engine.pieces.cache.copy_rows))
    list(chat.send("one", ENDLESS))
    assert (chat.last.text, chat.last.finish_reason) == ("first", FinishReason.EOS)
    engine.check()
    engine.scripted.script = say(engine, None, "second")
    list(chat.send("two", ENDLESS))
    assert chat.last.text == "second"
