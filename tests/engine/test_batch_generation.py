"""Several answers at once: each is what it would be alone, what they share is computed once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cache.rows import Rows
from engine.conversation.batch_generation import AnswerEnd, BatchGenerator, Part, Prompt
from engine.conversation.turns import Answer, Turn
from engine.errors import ContextFullError, EngineError
from engine.events import FinishReason, TokenEvent
from engine.params import SamplingParams, seeds
from tests.engine.tiny import TinyEngine, tiny_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    with tiny_engine(tmp_path_factory.mktemp("model")) as made:
        yield made


def prompt(text: str, engine: TinyEngine, **params: object) -> Prompt:
    rows = Rows.of(engine.tokenizer.encode(text))
    return Prompt(rows, SamplingParams(**{"max_tokens": 8, "seed": 1, **params}))  # type: ignore[arg-type]


def endings(parts: Iterator[tuple[int, Part]]) -> dict[int, AnswerEnd | Exception]:
    found = {}
    for index, part in parts:
        if isinstance(part, AnswerEnd | Exception):
            assert index not in found
            found[index] = part
    return found


def test_each_answer_is_what_it_is_alone(engine: TinyEngine) -> None:
    texts = ["alpha", "beta gamma", "alpha delta", "x" * 90, "alpha"]
    alone = []
    for number, text in enumerate(texts):
        engine.evict_all()
        asked = prompt(text, engine, seed=number)
        alone.append([event.token_id for event in engine.stream(asked.rows.token_ids, asked.params)])
    engine.evict_all()
    prompts = (prompt(text, engine, seed=number) for number, text in enumerate(texts))
    tokens: dict[int, list[int]] = {}
    kinds: dict[int, list[type]] = {}
    for index, part in BatchGenerator(engine).run(prompts):
        kinds.setdefault(index, []).append(type(part))
        if isinstance(part, TokenEvent):
            tokens.setdefault(index, []).append(part.token_id)
        if isinstance(part, AnswerEnd):
            assert part.answer.token_ids == tokens[index]
            assert part.answer.seed == index
    assert [tokens[number] for number in range(len(texts))] == alone
    for seen in kinds.values():
        assert (seen[0], seen[-1], set(seen[1:-1])) == (Answer, AnswerEnd, {TokenEvent})


def test_what_prompts_share_is_computed_once(engine: TinyEngine) -> None:
    engine.evict_all()
    shared = "a system prompt that all of them begin with, "
    before = engine.scripted.rows_computed
    prompts = [prompt(f"{shared}{n}", engine, max_tokens=1) for n in range(6)]
    assert len(endings(BatchGenerator(engine).run(prompts))) == 6
    size = len(prompts[0].rows) - 1
    assert engine.scripted.rows_computed - before <= size + 6 * (engine.block_size + 2)


def test_what_is_wrong_with_one_is_its_own(engine: TinyEngine) -> None:
    wrong = EngineError("there is no prompt")
    too_long = Prompt(Rows.of([1] * 5000), SamplingParams())
    found = endings(
        BatchGenerator(engine).run(iter([wrong, prompt("a", engine), too_long, prompt("b", engine)]))
    )
    assert found[0] is wrong
    assert isinstance(found[2], ContextFullError)
    assert all(isinstance(found[n], AnswerEnd) for n in (1, 3))


def test_a_failing_step_ends_only_those_in_it_and_a_closed_engine_ends_all(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        engine.scripted.fail_next = RuntimeError("bad luck")
        found = endings(BatchGenerator(engine).run([prompt("a", engine)]))
        assert isinstance(found[0], EngineError)
        assert isinstance(endings(BatchGenerator(engine).run([prompt("a", engine)]))[0], AnswerEnd)
        parts = BatchGenerator(engine).run(prompt(f"{n}", engine, max_tokens=None) for n in range(3))
        next(parts)
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            list(BatchGenerator(engine).run([prompt("a", engine)]))


def test_prompts_are_taken_as_they_are_needed(engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.conversation.batch_generation.AT_ONCE", 4)
    taken: list[int] = []
    ended = 0

    def source() -> Iterator[Prompt]:
        for number in range(40):
            taken.append(number)
            yield prompt(f"{number}", engine, max_tokens=1 + number % 3)

    for _, part in BatchGenerator(engine).run(source()):
        ended += isinstance(part, AnswerEnd)
        assert len(taken) <= ended + 5
    assert (ended, taken) == (40, list(range(40)))


def test_a_slow_answer_is_not_overtaken_for_ever(engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.conversation.batch_generation.AHEAD", 3)
    lengths = [200, *[1] * 20]
    order = [
        index
        for index, part in BatchGenerator(engine).run(
            prompt(f"{n} is asked", engine, max_tokens=length) for n, length in enumerate(lengths)
        )
        if isinstance(part, AnswerEnd)
    ]
    assert sorted(order) == list(range(21))
    assert order.index(0) <= 3


def test_stopping_all_but_one(engine: TinyEngine) -> None:
    several = BatchGenerator(engine)
    found: dict[int, AnswerEnd] = {}
    for index, part in several.run(prompt(f"q{n}", engine, max_tokens=60, seed=n) for n in range(3)):
        if isinstance(part, TokenEvent) and not several._stopped:
            several.stop(but=1)
        if isinstance(part, AnswerEnd):
            found[index] = part
    reasons = [found[n].answer.finish_reason for n in range(3)]
    assert reasons[0] == reasons[2] == FinishReason.CANCELLED
    assert reasons[1] is not FinishReason.CANCELLED


def test_closing_ends_them(engine: TinyEngine) -> None:
    parts = BatchGenerator(engine).run(prompt(f"q{n}", engine, max_tokens=None) for n in range(3))
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    engine.warm([1])  # comes after what runs
    assert engine.figures().blocks_held == 0


def test_candidates_leave_the_conversation_and_one_can_be_loaded(engine: TinyEngine) -> None:
    engine.evict_all()
    chat = engine.chat(system="Be brief.")
    list(chat.send("hello there", SamplingParams(max_tokens=6, seed=3)))
    before = list(chat.turns)
    params = SamplingParams(max_tokens=6, seed=70)  # answers that are text: others are encoded anew
    ends = {
        index: part for index, part in chat.candidates("and again", 4, params) if isinstance(part, AnswerEnd)
    }
    assert chat.turns == before
    for index, seed in enumerate(seeds(70, 4)):
        alone = engine.chat(system="Be brief.")
        alone.load(before)
        list(alone.send("and again", SamplingParams(max_tokens=6, seed=seed)))
        assert alone.last is not None
        answer = ends[index].answer
        assert (answer.token_ids, answer.shown, answer.seed) == (alone.last.token_ids, alone.last.shown, seed)
    kept = Turn("and again", ends[2].answer)
    chat.load([*before, kept])
    assert chat.turns[-1].answer.token_ids == ends[2].answer.token_ids
    chat.settle(wait=True)
    computed = engine.scripted.rows_computed
    chat.load([*before, Turn("and again", ends[1].answer)])
    chat.settle(wait=True)
    assert engine.scripted.rows_computed - computed <= len(chat.history) - len(ends[1].answer.token_ids)
    keys = chat.history.keys
    found: list[object] = []
    engine.look_at_blocks(keys, found.append)
    engine.warm([1])
    assert found[0].shared > 0  # type: ignore[attr-defined]


def test_candidates_of_an_empty_message(engine: TinyEngine) -> None:
    with pytest.raises(EngineError, match="empty"):
        next(engine.chat().candidates(" ", 2))
