"""Networks with recurrent layers: what an engine remembers of them is what the reference computes from the start."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import PretrainedConfig

from chatterm.conversation.cache_map import cache_lines
from chatterm.conversation.cache_why import _reason
from chatterm.conversation.figures import SessionStats
from chatterm.conversation.stats import stats_lines
from chatterm.markdown.lines import line_text
from engine import ContextFullError, SamplingParams
from engine.cache import kv_needs
from engine.cache.block_map import BlockMap
from engine.cache.prefix_hit import PrefixHit
from engine.cache.rows import Rows
from engine.conversation.cache_explainer import Explainer, Question
from engine.conversation.chat import Turn
from engine.events import Cause, Parting, TurnStats
from engine.kernels.native import library
from engine.schedule.prompt_logits import PromptLogits
from models.reference.decoder import Decoder
from models.units import counted
from tests.covering import each_value_once
from tests.engine.hybrid import hybrid_engine
from tests.engine.inside import offload
from tests.engine.keeping import GREEDY, answer, heard
from tests.engine.speculation import Oracle, speculate
from tests.engine.test_chat_paths import copies
from tests.engine.test_chat_random import OPERATIONS, one
from tests.engine.tiny import TinyEngine, say, tiny_engine
from tests.fresh import seeds
from tests.models.checkpoints import run
from tests.models.families import tiny_bamba, tiny_falcon_h1, tiny_granite_hybrid, tiny_nemotron_h
from tests.models.hybrids import tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next

STEPS = 40


@pytest.fixture(params=[False, True], ids=["plain", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    """Whether native kernels compute the network."""
    if request.param and (reason := library.problem()) is not None:
        pytest.skip(reason)
    return bool(request.param)


def expected(engine: TinyEngine, prompt: list[int], count: int) -> list[int]:
    """What the reference says greedily, computing the whole text each time."""
    model, tokens = Decoder(engine.pieces.network), list(prompt)
    for _ in range(count):
        tokens.append(int(run(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def told(engine: TinyEngine, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many rows of the prompt were computed."""
    found, computed = answer(engine, prompt)
    return [token for token, _ in found], computed


def text(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(250) for _ in range(length)]


def test_greedy_answers_are_those_of_the_reference_however_a_prompt_is_cut(native: bool) -> None:
    prompt = text(0, 100)
    for chunk in (1, 7, 64):
        with hybrid_engine(native=native, max_chunk=chunk) as engine:
            found, computed = told(engine, prompt)
            assert computed == 100
            assert found == expected(engine, prompt, len(found))


@each_value_once
@pytest.mark.parametrize(
    "config",
    [
        *(tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next),
        *(partial(config, mamba_d_state=16) for config in (tiny_bamba, tiny_granite_hybrid)),
        partial(tiny_falcon_h1, mamba_d_state=16, mamba_d_ssm=48),
        partial(tiny_nemotron_h, ssm_state_size=16),
    ],
)
def test_families_answer_as_the_reference_does(
    folder: Path, config: Callable[..., PretrainedConfig], native: bool
) -> None:
    prompt, given = text(3, 70), config(vocab_size=272, max_position_embeddings=1024)
    with tiny_engine(folder, given, context=300, fused=native) as engine:
        assert engine.pieces.runner.all_native == native
        found, _ = told(engine, prompt)
        assert found == expected(engine, prompt, len(found))
        assert told(engine, prompt) == (found, 0)
        assert told(engine, [*prompt, *found[:-3], 1, 2])[1] == 2


def test_prompts_that_are_computed_together_are_answered_as_alone(native: bool) -> None:
    stem = text(1, 90)
    rng = Random(1)
    prompts = [stem[: rng.randint(1, 90)] + text(at, rng.randint(1, 20)) for at in range(12)]
    with hybrid_engine(native=native, max_chunk=16) as engine:
        for first in range(0, len(prompts), 4):
            asked = [engine.start(Rows.of(prompt), GREEDY) for prompt in prompts[first : first + 4]]
            for prompt, sequence in zip(prompts[first:], asked, strict=False):
                found = [token for token, _ in heard(engine, sequence)]
                assert found == expected(engine, prompt, len(found))
            engine.check()


def test_a_prefix_is_reused_to_the_row(native: bool) -> None:
    prompt = text(2, 100)
    with hybrid_engine(native=native) as engine:
        first, _ = told(engine, prompt)
        assert told(engine, prompt) == (first, 0), "a retry"
        after = [*prompt, *first[:-1]]
        assert told(engine, [*after, 7])[1] == 1, "the next message"
        assert told(engine, [*after[:-4], 7, 8])[1] == 2, "an answer of which the end was taken back"
        assert told(engine, [*prompt[:-9], 1, 2, 3])[1] == 3, "an edit near the end of the prompt"
        found, _ = told(engine, [*prompt[:40], 1, 2, 3])
        assert found == expected(engine, [*prompt[:40], 1, 2, 3], len(found))
        assert told(engine, [*prompt[:40], 4, 5, 6])[1] == 3, "a fork that a prompt has found"


def test_what_comes_back_from_host_memory_has_the_bits_of_what_never_left(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_needs, "MOST_MARKS", 2)
    monkeypatch.setattr(kv_needs, "BRANCH_WINDOWS", (0,))
    prompts = [text(seed, 200) for seed in range(4)]
    with hybrid_engine(native=native, offload=1 << 24) as engine:
        first, _ = told(engine, prompts[0])
        after = [*prompts[0], *first, 5, 6, 7]
        expected, few = answer(engine, after)
        assert few <= 4
        blocks = engine.pieces.blocks
        restored = [0]
        for most in (0, 10, None):  # what is lost first: only states, or blocks at the end, or all
            for prompt in prompts[1:]:
                answer(engine, prompt)
            engine.loop.call(lambda most=most: offload(blocks, most))
            assert engine.loop.call(lambda: len(blocks.index.find(after)[0])) * 4 < 200
            found, computed = answer(engine, after)
            assert (found, computed <= few) == (expected, True)
            figures = engine.figures().offload
            assert figures is not None
            restored.append(figures.restored_tokens)
            engine.check()
        assert all(more - before >= 200 for before, more in pairwise(restored))


@pytest.mark.parametrize("seed", seeds(4))
def test_random_conversations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    monkeypatch.setattr(kv_needs, "MOST_MARKS", rng.choice([0, 2, 8, 48]))
    monkeypatch.setattr(kv_needs, "BRANCH_WINDOWS", rng.choice([(0,), (8, 1, 0)]))
    options: dict[str, Any] = {"num_blocks": rng.choice([None, 110]), "max_chunk": rng.choice([16, 64])}
    options["offload"] = rng.choice([None, 1 << 17, 1 << 22])
    with hybrid_engine(**options) as engine:
        engine.pieces.scheduler.logits = PromptLogits(0)  # every answer has a script
        chat = engine.chat(think_cache=rng.choice(["exact", "mask"]))
        loaded: list[list[Turn]] = [[]]
        for _ in range(STEPS):
            operation = rng.choice(OPERATIONS)
            if operation == "load":
                loaded.append(copies(chat.turns))
                chat.load(copies(rng.choice(loaded)))
            try:
                one(engine, chat, rng, operation)
            except (ContextFullError, StopIteration):  # the second where the context ends within an answer
                chat.load(copies(chat.turns[: len(chat.turns) // 2]))
            engine.check()


def test_only_what_is_new_is_computed_after_each_message() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    with hybrid_engine(context=900) as engine:
        chat = engine.chat("a system prompt that is longer than a few rows")
        chat.settle(wait=True)
        for message in ("the first message", "another one", "and a third"):
            engine.scripted.script = say(engine, "some thoughts", f"an answer to {message}")
            before = len(chat._history.rows(chat.turns))
            list(chat.send(message, replace(greedy, max_tokens=200)))
            stats = chat.turns[-1].answer.stats
            assert stats.cached_tokens == before
            chat.settle(wait=True)
            engine.scripted.rows_computed = 0
            chat.settle(wait=True)
            assert engine.scripted.rows_computed == 0, "all that the next turn sees is there"
        list(chat.retry(greedy))
        assert chat.turns[-1].answer.stats.prefilled_tokens == 0
        chat.settle(wait=True)
        last = chat.turns[-1].user
        chat.undo()
        list(chat.send(last[:-5] + "changed", greedy))
        assert chat.turns[-1].answer.stats.prefilled_tokens < 40, "the message from where it was changed"
        chat.prepare("a draft", wait=True)
        engine.scripted.rows_computed = 0
        chat.prepare("a dra", wait=True)
        chat.prepare("a draft that goes on", wait=True)
        assert engine.scripted.rows_computed < 60
        engine.check()


@pytest.mark.parametrize("marks", [0, 3, 48])
def test_idle_work_goes_on_in_a_conversation_with_more_marks_than_there_is_room_for(
    marks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_needs, "MOST_MARKS", marks)
    monkeypatch.setattr(kv_needs, "BRANCH_WINDOWS", (1, 0))
    with hybrid_engine(context=1000, max_chunk=16) as engine:
        chat = engine.chat("a system prompt")
        for number in range(12):
            engine.scripted.script = say(engine, "some thoughts", f"answer {number}")
            list(chat.send(f"message {number}", SamplingParams(temperature=0.0, max_tokens=40)))
            chat.settle(wait=True)
            rows = chat.history
            assert engine.cached_rows(rows) == len(rows), f"turn {number}"
            engine.check()


@each_value_once
@pytest.mark.parametrize("seed", seeds(3))
def test_guesses_change_no_token_and_cost_no_state(native: bool, seed: int) -> None:
    rng, stem = Random(seed), text(seed, 120)
    params = SamplingParams(temperature=0.0, max_tokens=30, speculation="suffix")
    prompts = [stem[: rng.randint(1, 120)] + text(at, rng.randint(1, 9)) for at in range(8)]
    with hybrid_engine(native=native, max_chunk=32) as engine:
        answers = {at: [*prompt, *expected(engine, prompt, 30)] for at, prompt in enumerate(prompts)}
        speculate(engine, Oracle(answers=dict(answers), random=rng, vocab=250))
        asked = []
        for at, prompt in enumerate(prompts):
            pair = [engine.start(Rows.of(prompt), params) for _ in range(2)]
            for sequence in pair:
                found = [token for token, _ in heard(engine, sequence)]
                assert [*prompt, *found] == answers[at][: len(prompt) + len(found)]
            asked += pair
        assert sum(sequence.guessed for sequence in asked) > sum(sequence.accepted for sequence in asked) > 50
        engine.check()


class Sure(Random):
    """Always the most, and never too little."""

    def random(self) -> float:
        return 0.0

    def randint(self, a: int, b: int) -> int:
        return b


def test_an_answer_whose_guesses_hold_has_marks_all_the_same(native: bool) -> None:
    """Where right guesses pass a row that would have a mark, the first row after them has it."""
    prompt = text(5, 40)
    with hybrid_engine(native=native) as engine:
        said = expected(engine, prompt, 130)
        speculate(engine, Oracle(answers={0: [*prompt, *said]}, random=Sure()))
        params = SamplingParams(temperature=0.0, max_tokens=130, speculation="suffix")
        sequence = engine.start(Rows.of(prompt), params)
        assert [token for token, _ in heard(engine, sequence)] == said
        assert sequence.accepted > 90
        rows = [mark.row for mark in engine.pieces.blocks.marks or ()]
        for first in (128, 160):
            assert any(first <= row < first + 9 for row in rows), rows
        engine.check()


def test_the_end_of_a_cancelled_answer_is_taken_back_at_no_cost(native: bool) -> None:
    prompt = text(4, 60)
    with hybrid_engine(native=native) as engine:
        said = expected(engine, prompt, 60)
        events = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=60))
        for _ in range(50):
            next(events)
        events.close()  # type: ignore[attr-defined]
        for kept in (49, 40, 20):
            found, computed = told(engine, [*prompt, *said[:kept], 7])
            assert computed == 1, f"{kept} tokens of the answer are kept"
            assert found == expected(engine, [*prompt, *said[:kept], 7], len(found))


def test_a_fork_that_a_prompt_has_found_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_needs, "MOST_MARKS", 8)
    stem = text(5, 200)
    with hybrid_engine() as engine:
        told(engine, [*stem, *text(6, 100)])
        found, computed = told(engine, [*stem, *text(7, 100)])
        assert computed > 100, "no state was kept there"
        assert told(engine, [*stem, *text(8, 100)])[1] == 100
        assert found == expected(engine, [*stem, *text(7, 100)], len(found))


def test_people_are_told_of_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_needs, "MOST_MARKS", 1)
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    with hybrid_engine() as engine:
        chat = engine.chat()
        list(chat.send("a message", greedy))
        list(chat.send("another", greedy))
        figures = engine.figures()
        assert 0 < figures.marks <= figures.state_slots == 4
        assert figures.state_bytes == 2 * 4 * 16 * 16 * 4
        said = " ".join(map(line_text, stats_lines(300, None, SessionStats(), None, figures)))
        assert f"states kept at {counted(figures.marks, 'place')}, room for 4, 8 kB each" in said
        assert "of it for recent inputs of recurrent layers" in said
        seen: list[BlockMap] = []
        engine.look_at_blocks(chat._history.rows(chat.turns).keys, seen.append)
        engine.loop.call(lambda: None)
        about = " ".join(map(line_text, cache_lines(seen[0], 200)))
        assert f"What recurrent layers remember is kept at {counted(seen[0].marks or 0, 'place')}" in about


def test_why_a_prompt_was_computed_again_is_told_in_words() -> None:
    hit = PrefixHit(rows=8, known=30)
    stats = TurnStats(prompt_tokens=40, cached_tokens=8)
    explained = Explainer().explain(stats, Question((), "a message"), Rows.of(list(range(40))), hit)
    assert explained.parting == Parting(8, 1, False, -1, 8, Cause.STATE)
    (line,) = [line_text(_reason(explained.parting, [], lambda token: None))]
    assert line == (
        "Message 1 was computed again from token 9 on: what recurrent layers remembered there was no longer kept."
    )


def test_a_retry_computes_no_row_and_draws_from_the_same_chances(native: bool) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, logit_bias={5: -3.0}, presence_penalty=1.0)
    prompt, other = text(6, 60), text(7, 30)
    with hybrid_engine(native=native) as engine:
        first = engine.start(Rows.of(prompt), params)
        wanted = heard(engine, first)
        assert heard(engine, engine.start(Rows.of(other), GREEDY))
        beside = engine.start(Rows.of([*prompt[:-1], 1]), GREEDY)
        for seed in (3, 4, 3):
            again = engine.start(Rows.of(prompt), replace(params, seed=seed))
            assert (heard(engine, again) == wanted) == (seed == 3)
            assert again.stats().prefilled_tokens == 0
        heard(engine, beside)
        engine.loop.call(engine.pieces.blocks.evict_all)
        again = engine.start(Rows.of(prompt), params)
        assert heard(engine, again) == wanted
        assert again.stats().prefilled_tokens == len(prompt), "its rows were lost"
        engine.check()
