"""Several sequences in the slots of a decode runner, with the real engine on a tiny model and without a network."""

from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from threading import Event

import pytest
import torch

from engine import EngineError, FinishReason, SamplingParams
from engine.batch import StepBatch
from engine.cache.rows import Rows
from engine.schedule.sequence import Sequence, SequenceStatus
from tests.counting import PATIENCE, until
from tests.engine.fake_decoding import FakeRunner
from tests.engine.schedule_world import CONTEXT, SIZE, World, prompt_of
from tests.engine.test_chat import CONFIG
from tests.engine.tiny import TinyEngine, tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PROMPTS = [
    torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    for size in (30, 90, 5, 61)
]


@pytest.fixture
def engine(folder: Path) -> Iterator[TinyEngine]:
    """An engine whose answers are decoded in three slots."""
    with tiny_engine(folder, CONFIG) as engine:
        engine.loop.call(lambda: engine.engine_step.decode_with(FakeRunner(engine.pieces.runner, 3)))
        yield engine


def runner_of(engine: TinyEngine) -> FakeRunner:
    assert engine.engine_step.decoding is not None
    runner = engine.engine_step.decoding.runner
    assert isinstance(runner, FakeRunner)
    return runner


def together(engine: TinyEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """The tokens of answers to prompts that arrive between two steps."""
    sequences: list[Sequence] = []
    engine.loop.call(lambda: sequences.extend(engine.start(Rows.of(ids), params) for ids in prompts))
    return [[event.token_id for event in engine.events(sequence)] for sequence in sequences]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, top_k=20, seed=3, max_tokens=20)])
def test_everybody_gets_the_tokens_it_gets_alone_in_shared_steps(
    engine: TinyEngine, params: SamplingParams
) -> None:
    alone = [[event.token_id for event in engine.stream(prompt, params)] for prompt in PROMPTS]
    engine.evict_all()
    before = len(runner_of(engine).launches)
    assert together(engine, PROMPTS, params) == alone
    launches = runner_of(engine).launches[before:]
    assert max(launches) == 3
    assert len(launches) < 0.7 * sum(map(len, alone))
    engine.check()


def test_what_was_decoded_is_found_again_and_a_thrown_away_step_left_nothing(engine: TinyEngine) -> None:
    answer = [event.token_id for event in engine.stream(PROMPTS[0], GREEDY)]
    rows = [*PROMPTS[0], *answer]
    assert engine.cached_rows(Rows.of([*rows, 1])) == len(rows) - 1, (
        "the row of the last token is not promised"
    )
    computed = engine.scripted.rows_computed
    list(engine.stream([*rows, 7], SamplingParams(temperature=0.0, max_tokens=1)))
    assert engine.scripted.rows_computed == computed + 2


def test_a_stream_that_is_closed_frees_its_slot(engine: TinyEngine) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=400)
    streams = [engine.stream(prompt, endless) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert len(list(engine.stream(PROMPTS[3], GREEDY))) == 20
    engine.check()


def test_a_runner_that_fails_ends_those_who_decode_and_the_engine_lives_on(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(engine)
    with monkeypatch.context() as patch:

        def fail(sequences: list[Sequence]) -> None:
            raise RuntimeError("CUDA error: invalid argument\nmore")

        patch.setattr(runner, "launch", fail)
        with pytest.raises(EngineError, match="invalid argument") as caught:
            list(engine.stream(PROMPTS[0], GREEDY))
        assert "\n" not in str(caught.value)
    assert not runner.slots
    assert len(list(engine.stream(PROMPTS[0], GREEDY))) == 20
    engine.check()


def too_little_memory(runner: FakeRunner, fails: Callable[[int], bool]) -> Callable[[list[Sequence]], bool]:
    """The launch of `runner` where memory runs out at the numbers of launches that `fails` names."""
    launch, numbers = runner.launch, count()

    def launched(sequences: list[Sequence]) -> bool:
        if fails(next(numbers)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return launch(sequences)

    return launched


def test_a_decode_step_that_runs_out_of_memory_is_tried_again(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [[event.token_id for event in engine.stream(prompt, GREEDY)] for prompt in PROMPTS]
    runner = runner_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", too_little_memory(runner, lambda launch: launch in (3, 8)))
        assert together(engine, PROMPTS, GREEDY) == alone
    engine.check()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", too_little_memory(runner, lambda launch: launch >= 3))
        with pytest.raises(EngineError, match="Out of memory"):
            list(engine.stream(PROMPTS[0], GREEDY))
    assert not runner.slots
    engine.check()


def test_idle_work_that_runs_out_of_memory_ends_and_nothing_else(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[None] = []

    def record() -> bool:
        tries.append(None)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    monkeypatch.setattr(runner_of(engine), "while_idle", record, raising=False)
    step = engine.engine_step
    monkeypatch.setattr(step.computing, "device", torch.device("meta"))  # on a CPU other work is done
    assert engine.loop.call(lambda: [step.while_idle() for _ in range(3)]) == [False] * 3
    monkeypatch.undo()
    assert len(tries) == 1
    assert len(list(engine.stream(PROMPTS[0], GREEDY))) == 20


def test_logits_that_are_no_numbers_end_one_answer(engine: TinyEngine) -> None:
    engine.loop.call(lambda: engine.scripted.model.network.final_norm.weight.fill_(float("nan")))
    with pytest.raises(EngineError, match="not a number"):
        list(engine.stream(PROMPTS[0], GREEDY))
    engine.check()


def test_a_chat_computes_nothing_after_enter(engine: TinyEngine) -> None:
    """What was prewarmed is used to the last row but one: a decode step after idle work, with slots as without."""
    chat, params = engine.chat(), SamplingParams(temperature=0.0, max_tokens=8)
    for i in range(3):
        chat.prepare(f"message {i}", wait=True, params=params)
        list(chat.send(f"message {i}", params))
        chat.settle(wait=True)
        assert chat.last is not None
        stats = chat.last.stats
        assert stats.prefilled_tokens == 0, stats
        assert stats.cached_tokens == stats.prompt_tokens
    engine.check()


# -- without a network


def world(slots: int = 3, spare: int = 60) -> World:
    return World(slots, -(-CONTEXT // SIZE) + spare, 0, ends=False)


def run_until(w: World, ready: Callable[[], bool]) -> None:
    for _ in range(200):
        if ready():
            return
        w.step()
    raise AssertionError("that never happens")


def rows_of_steps(w: World) -> list[int]:
    """From now on the rows of prompts in each step."""
    seen: list[int] = []
    run = w.engine_step.computing.runner.run

    def counted(batch: StepBatch) -> list:
        seen.append(sum(span.count for span in batch.spans))
        return run(batch)

    w.engine_step.computing.runner.run = counted  # type: ignore[method-assign]
    return seen


ENDLESS = SamplingParams(temperature=0.0, repetition_penalty=5.0)


@pytest.mark.parametrize("slots", [0, 3])
def test_a_prompt_beside_decoding_comes_in_small_chunks_and_alone_in_large_ones(slots: int) -> None:
    w = world(slots)
    reader = w.arrive(prompt_of(0, 4), "person", ENDLESS)
    run_until(w, lambda: reader.sequence.first_token > 0)
    seen = rows_of_steps(w)
    beside = w.arrive(prompt_of(2, 20), "person", ENDLESS)
    before = len(reader.sequence.generated)
    run_until(w, lambda: beside.sequence.first_token > 0)
    own = 0 if slots else 1  # without slots the reader's row is in the batch
    assert [rows - own for rows in seen[:5]] == [4] * 5
    assert len(reader.sequence.generated) - before >= 5, "a token of the reader's came with each"
    reader.sequence.cancelled = beside.sequence.cancelled = True
    w.step()
    seen.clear()
    alone = w.arrive(prompt_of(1, 40), "person", ENDLESS)
    run_until(w, lambda: alone.sequence.first_token > 0)
    assert seen[:3] == [10, 10, 10]


def test_the_host_is_one_step_behind_and_no_more() -> None:
    w = world()
    requests = [w.arrive(prompt_of(2, 3 + i), "person", ENDLESS) for i in range(3)]
    run_until(w, lambda: all(r.sequence.first_token > 0 for r in requests))
    assert w.engine_step.decoding is not None
    for _ in range(10):
        w.step()
        assert len(w.engine_step.decoding.in_flight) == 1
        assert [r.sequence.unread for r in requests] == [1, 1, 1]
    lengths = [len(r.sequence.generated) for r in requests]
    w.step()
    assert [len(r.sequence.generated) for r in requests] == [n + 1 for n in lengths]


def test_joining_and_leaving_costs_the_others_no_step() -> None:
    w = world()
    reader = w.arrive(prompt_of(0, 4), "person", ENDLESS)
    run_until(w, lambda: reader.sequence.first_token > 0)
    counts = [len(reader.sequence.generated)]
    for step in range(20):
        if step % 3 == 0:
            w.arrive(
                prompt_of(2, 2 + step), "person", SamplingParams(temperature=0.0, max_tokens=1 + step % 4)
            )
        if step % 5 == 4:
            w.requests[-1].sequence.cancelled = True
        w.step()
        counts.append(len(reader.sequence.generated))
    assert [after - before for before, after in pairwise(counts)] == [1] * 20


def test_idle_work_pauses_in_its_slot_while_a_person_is_there_and_goes_on() -> None:
    w = world()
    idle = w.arrive(prompt_of(2, 6), "idle", ENDLESS)
    run_until(w, lambda: len(idle.sequence.generated) >= 3)
    person = w.arrive(prompt_of(0, 6), "person", SamplingParams(temperature=0.0, max_tokens=8))
    w.step()
    count = len(idle.sequence.generated)
    run_until(w, lambda: person.sequence.status is SequenceStatus.FINISHED)
    assert len(idle.sequence.generated) <= count + 1, "what was launched before is all that came"
    w.finish()


def test_idle_work_leaves_its_slot_where_persons_need_all() -> None:
    w = world(slots=1)
    idle = w.arrive(prompt_of(2, 6), "idle", ENDLESS)
    run_until(w, lambda: len(idle.sequence.generated) >= 3)
    person = w.arrive(prompt_of(0, 6), "person", SamplingParams(temperature=0.0, max_tokens=8))
    run_until(w, lambda: person.sequence.status is SequenceStatus.FINISHED)
    assert idle.sequence.preemptions == 1
    assert person.sequence.finish_reason is FinishReason.LENGTH
    w.finish()


def test_idle_work_that_a_person_waits_for_now_takes_the_slot_of_a_younger_one() -> None:
    w = world(slots=1)
    idle = w.arrive(prompt_of(2, 30), "idle", ENDLESS)
    run_until(w, lambda: idle.sequence.computed > 0)
    person = w.arrive(prompt_of(0, 6), "person", ENDLESS)
    run_until(w, lambda: len(person.sequence.generated) >= 3)
    w.do("promote", 0)
    run_until(w, lambda: idle.sequence.status is SequenceStatus.FINISHED)
    assert person.sequence.preemptions == 1
    assert person.sequence.status is not SequenceStatus.FINISHED
    w.finish()


@pytest.mark.parametrize("host", [0, 60])
def test_a_preempted_sequence_decodes_again_what_was_lost_of_its_answer_or_gets_it_back(host: int) -> None:
    """The rows of an answer have the bits of decode steps, which chunks have not: the text shows which it was."""
    w = World(3, -(-CONTEXT // SIZE) + 1, host, ends=False)
    requests = [w.arrive(prompt_of(family, 9), "person", ENDLESS) for family in (0, 2)]
    run_until(w, lambda: requests[1].sequence.preemptions > 0)
    count = len(requests[1].sequence.generated)
    assert count > 8
    run_until(w, lambda: requests[0].sequence.status is SequenceStatus.FINISHED)
    seen, before = rows_of_steps(w), w.model.computed
    run_until(w, lambda: len(requests[1].sequence.generated) > count)
    assert not seen or max(seen) <= 9, "no chunk had rows of the answer"
    assert (w.model.computed - before < 9) == bool(host)
    assert (w.tier.restored_rows > 0) == bool(host)
    w.finish()


def test_a_token_that_is_drawn_otherwise_the_second_time_stays_what_it_was() -> None:
    """In large batches of a GPU sums have another order; nobody who has read a token may find another one there."""
    w = World(3, -(-CONTEXT // SIZE) + 1, 0, ends=False)
    requests = [w.arrive(prompt_of(family, 9), "person", ENDLESS) for family in (0, 2)]
    run_until(w, lambda: requests[1].sequence.preemptions > 0)
    told = list(requests[1].sequence.generated)
    decode = w.model.decode
    w.model.decode = lambda batch: [logits.flip(0) for logits in decode(batch)]  # type: ignore[method-assign]
    run_until(w, lambda: len(requests[1].sequence.generated) > len(told) + 3)
    assert requests[1].sequence.generated[: len(told)] == told
    assert requests[1].sequence.rows.token_ids[9:][: len(told)] == told
    requests[1].listen()
    assert requests[1].tokens == requests[1].sequence.generated


@pytest.mark.parametrize("slots", [0, 3])
def test_a_full_cache_ends_an_answer_after_the_last_token_that_was_drawn(slots: int) -> None:
    w = World(slots, 5, 0, ends=False)
    request = w.arrive(prompt_of(0, 9), "person", ENDLESS)
    run_until(w, lambda: request.sequence.status is SequenceStatus.FINISHED)
    assert request.sequence.finish_reason is FinishReason.CONTEXT_FULL
    assert len(request.sequence.generated) == 5 * SIZE - 9 + 1, "the last one needs no row"


def test_a_hundred_sequences_share_slots_and_blocks_fairly() -> None:
    w = world(slots=8, spare=20)
    for i in range(100):
        w.arrive(
            prompt_of(i % 3, 1 + i % 40), "person", SamplingParams(temperature=0.0, max_tokens=1 + i % 7)
        )
    w.finish()
    firsts = [r.sequence.first_token for r in w.requests]
    assert all(firsts)


def test_a_waiting_event_is_no_busy_loop(engine: TinyEngine) -> None:
    """With nothing to do the loop sleeps."""
    list(engine.stream(PROMPTS[0], GREEDY))
    assert not engine.loop.call(lambda: engine.pieces.scheduler.has_work)
    done = Event()
    engine.loop.post(done.set)
    assert done.wait(PATIENCE)


def test_stop_strings_and_ends_of_turns_throw_the_next_token_away(engine: TinyEngine) -> None:
    """It was launched already: it is read all the same, or it would hold its sequence until the next answer."""
    answer = list(engine.stream(PROMPTS[1], GREEDY))
    text = "".join(event.text for event in answer)
    stop = next(event.text for event in answer[4:] if event.text.strip() and "\ufffd" not in event.text)
    found = list(engine.stream(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=20, stop=(stop,))))
    assert "".join(event.text for event in found) == text[: text.index(stop)]
    engine.check()
    until(lambda: not engine.loop.call(lambda: engine.engine_step.has_work))  # jobs go before steps
    assert not runner_of(engine)._unread
