"""Guesses: what they are, how many pay, and that an answer is the same to the token and the bit with any of them."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine import Engine, EngineError, SamplingParams
from engine.batch import StepBatch
from engine.cache.rows import Rows
from engine.events import TokenEvent
from engine.kernels.native import library as native
from engine.params import Constraint
from engine.schedule.sequence import Sequence
from engine.schedule.speculating import Speculating
from engine.speculation import suffixes
from engine.speculation.cost_model import (
    AGAIN,
    CREDIT,
    ENOUGH,
    FADES,
    LATEST,
    MOST_ROWS,
    SHARE,
    Balance,
    CostModel,
    StepCosts,
)
from engine.speculation.sources import Guess
from engine.speculation.suffixes import GRAM, LONGEST, SuffixIndex
from engine.speculation.texts import ELSEWHERE, KEPT, Texts, from_elsewhere
from models.loading.load import load_model
from models.network import Network
from tests.engine.inside import check_blocks, evict_all
from tests.engine.speculation import Oracle, speculate
from tests.engine.test_native_engine import CPU, a_native_engine
from tests.fresh import examples
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint
from tests.models.hybrids import tiny_qwen3_5

TOKENS = st.lists(st.integers(0, 3), max_size=200)


def index_of(*parts: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    for part in parts:
        index.extend(part)
    return index


def longest_match(text: list[int], tail: list[int]) -> int:
    """Of the ends of `tail` the longest that stands in `text` with something after it; 0 if below GRAM."""
    for length in range(min(len(tail), LONGEST), GRAM - 1, -1):
        if any(text[at : at + length] == tail[-length:] for at in range(len(text) - length)):
            return length
    return 0


@given(TOKENS, TOKENS)
def test_the_longest_match_is_found(text: list[int], tail: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffixes, "LOOKED", 1000)
        guess = index_of(text).guess(tail, 4)
        own = index_of(text).guess(text, 4)
    for found, end in ((guess, tail), (own, text)):
        assert found.length == longest_match(text, end)
        assert bool(found.tokens) == bool(found.length)
        whole = [*end[len(end) - found.length :], *found.tokens]
        assert not found.tokens or any(text[at : at + len(whole)] == whole for at in range(len(text)))


@given(st.lists(st.lists(st.integers(0, 100_000), max_size=150), max_size=20))
def test_however_a_text_came_its_index_is_the_same(parts: list[list[int]]) -> None:
    whole = [token for part in parts for token in part]
    one_by_one, in_parts, at_once = index_of(*[[t] for t in whole]), index_of(*parts), index_of(whole)
    assert one_by_one._links == in_parts._links == at_once._links
    assert one_by_one._heads == in_parts._heads == at_once._heads


def test_the_places_with_the_longest_match_vote() -> None:
    text = [1, 2, 3, 7, 9, 1, 2, 3, 8, 5, 1, 2, 3, 8, 6, 0, 1, 2, 3]
    assert index_of(text).guess(text, 3) == Guess((8, 6, 0), 3, agreed=False)
    assert index_of(text).guess([0, 1, 2, 3], 2) == Guess((8, 6), 3, agreed=False)
    assert index_of([9, 1, 2, 3, 4, 4]).guess([5, 1, 2, 3], 2) == Guess((4, 4), 3, agreed=True)


def test_a_text_that_is_said_again_with_changes_is_followed() -> None:
    """However alike its parts are, and wherever a match with what was said just now is longer."""
    before = [token for part in range(20) for token in (1, 2, 3, 4, 5, 6, 1000 + part, 7, 8, 9)]
    now = [99 if token == 4 else token for token in before if token != 8]
    texts, right = Texts(), 0
    text = texts.take(None, [*before, 0, 0, 0])
    for at, token in enumerate(now):
        guess = texts.guess(text, 4)
        right += at >= 20 and guess.tokens[:1] == (token,)
        text.go_on([token])
    assert right >= 0.8 * (len(now) - 20), "all but the changes themselves"
    assert text.copy.place >= 0
    text.go_on(list(range(5000, 5010)))
    assert not texts.guess(text, 4).tokens
    assert text.copy.place < 0


def test_a_token_is_expected_to_be_changed_as_it_was_the_last_time() -> None:
    parts = [[4, *range(1000 + part, 1012 + part)] for part in range(0, 1200, 12)]
    before = [token for part in parts for token in part]
    now = [99 if token == 4 else token for token in before[:650]] + before[650:]
    texts = Texts()
    text = texts.take(None, [*before, 0, 0, 0])
    text.go_on(now[:20])
    wrong = set()
    for at in range(20, len(now) - 7):
        guess = texts.guess(text, 7)
        wrong |= {at + ahead for ahead, token in enumerate(guess.tokens) if now[at + ahead] != token}
        text.go_on(now[at : at + 1])
    assert wrong == {26, 650}, "only the first one that is changed and the first one that is not"


@given(st.lists(TOKENS, max_size=6))
def test_a_place_that_is_followed_lies_before_what_follows_it(parts: list[list[int]]) -> None:
    texts = Texts()
    text = texts.take(None, [0, 1, 2, 3] * 8)
    for part in parts:
        for token in part:
            text.go_on([token])
            guess = texts.guess(text, 5)
            assert len(guess.tokens) <= 5
            assert text.copy.place < len(text.index) - 1
        text.go_on(part)


def test_an_index_takes_far_less_memory_than_the_kv_of_the_text() -> None:
    index = index_of(torch.randint(50_000, (100_000,)).tolist())
    assert index.nbytes < 14 * 100_000  # of a small model, SmolLM2 135M, a token of KV takes 23,040


def test_a_conversation_finds_its_text_again_on_every_branch() -> None:
    texts, words = Texts(), list(range(100, 200))
    text = texts.take(None, words)
    text.go_on([1, 2, 3, 4, 5, 6])
    texts.give_back(text)
    again = texts.take(None, [*words, 1, 2, 3, 9, 9])
    assert again is text
    assert list(again.path) == [*words, 1, 2, 3, 9, 9]
    again.go_on([2, 3, 4])
    assert texts.guess(again, 2).tokens == (5, 6)


def test_others_are_looked_at_as_long_as_they_are_the_clients_own() -> None:
    texts = Texts()
    texts.give_back(texts.take("me", list(range(50))))
    mine, theirs = texts.take("me", [900, 901, 7, 8, 9]), texts.take("you", [900, 901, 7, 8, 9])
    assert texts.guess(mine, 3).tokens == (10, 11, 12)
    assert texts.guess(theirs, 3).tokens == ()
    for first in range(1000, 1000 + 100 * KEPT, 50):
        texts.give_back(texts.take("me", list(range(first, first + 40))))
    assert len(texts.idle) == KEPT


def test_what_was_said_elsewhere_is_looked_at_for_the_person_alone() -> None:
    texts = Texts(elsewhere=from_elsewhere([[7, 8, 9, 10, 11], [7, 8, 9, 20]]))
    mine, theirs = texts.take(None, [1, 7, 8, 9]), texts.take("client", [1, 7, 8, 9])
    assert texts.guess(mine, 2) == Guess((10, 11), 3, agreed=False), "the latest comes first"
    assert texts.guess(theirs, 2).tokens == ()
    assert len(from_elsewhere([[1] * ELSEWHERE, [2]])) == ELSEWHERE, "no more than these"


def test_guesses_are_as_many_as_pay() -> None:
    pace = CostModel()
    sure = Guess(tuple(range(7)), 32)
    assert pace.count(sure, 1, 1.0, Balance(), 0) == 0, "nothing was measured"
    pace.costs.saw(1, 0.01)
    for _ in range(40):
        for rows in range(1, MOST_ROWS + 1):
            pace.costs.saw(rows, 0.01 + 0.001 * (rows - 1))
    assert pace.count(sure, 1, 1.0, Balance(), 0) == 7
    assert pace.count(sure, 6, 6.0, Balance(), 0) == 2, "a step has 8 rows"
    for _ in range(40):
        pace.acceptance.saw(sure, 4, 0)
    assert pace.count(sure, 1, 1.0, Balance(), 0) == 0, "they never hold"
    for _ in range(40):
        for rows in range(2, MOST_ROWS + 1):
            pace.costs.saw(rows, 0.01 * rows)
    other = Guess(tuple(range(7)), 5)
    assert pace.count(other, 1, 1.0, Balance(), 0) == 0, "every row costs as much as a step"


@given(st.integers(0, 2**32), st.floats(0.0, 0.3), st.floats(1.0, 2.5), st.integers(50, 400))
def test_what_never_holds_costs_next_to_nothing(seed: int, held: float, slope: float, tokens: int) -> None:
    random, pace, balance, spent = Random(seed), CostModel(), Balance(), 0.0
    pace.costs.saw(1, 0.01)
    said = 0
    while said < tokens:
        guess = Guess(tuple(range(7)), random.choice([3, 5, 8, 15, 32]))
        count = pace.count(guess, 1, 1.0, balance, said)
        cost = 1 + slope * count / 7
        right = 0
        while right < count and random.random() < held:
            right += 1
        spent += cost
        said += 1 + right
        pace.costs.saw(1 + count, 0.01 * cost)
        if count:
            pace.acceptance.saw(guess, count, right)
            balance.saw(1 + right - cost)
    # The first failures may cost more than was believed of a row.
    assert spent <= said * (1 + SHARE) + CREDIT + slope


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts()
    costs.saw(4, 1.0)
    assert costs.unit_s == 0.0
    for _ in range(60):
        costs.saw(1, 0.02)
        costs.saw(4, 0.05)
    assert costs.of(4) == pytest.approx(2.5, rel=0.05)
    assert costs.of(8) >= costs.of(4) >= costs.of(2) >= costs.of(1) == 1.0


def test_a_few_steps_that_were_interrupted_say_nothing() -> None:
    costs = StepCosts()
    for slow in (1, 1, 9, 1, 9, 1, 1):
        costs.saw(1, 0.02 * slow)
        costs.saw(4, 0.04 * slow)
    assert costs.unit_s == pytest.approx(0.02)
    assert costs.of(4) == pytest.approx(2.0)


def test_what_was_dear_for_a_while_is_tried_again() -> None:
    costs = StepCosts()
    for _ in range(ENOUGH):
        costs.saw(1, 0.01)
    before = costs.of(4)
    costs.saw(4, 1.0)
    assert costs.of(4) == before, "once says nothing"
    for _ in range(LATEST):
        costs.saw(4, 1.0)
    assert costs.of(4) == 4.0
    assert costs.of(8) == 8.0
    for _ in range(FADES * LATEST):
        costs.saw(1, 0.01)
    assert costs.of(4) == before


def test_now_and_then_a_step_has_one_row_for_others_to_be_compared_with() -> None:
    pace, sure = CostModel(), Guess(tuple(range(7)), 32)
    pace.turn_to(100)
    counts = []
    for _ in range(100):
        counts.append(pace.count(sure, 1, 1.0, Balance(), 0))
        pace.costs.saw(1 + counts[-1], 0.01)
    assert counts[:ENOUGH] == [0] * ENOUGH
    plain = [at for at in range(ENOUGH, 100) if not counts[at]]
    assert len(plain) == 2
    assert plain[1] - plain[0] == AGAIN + 1


@pytest.mark.parametrize("alone", [0, 10])
def test_several_answers_go_on_being_guessed(alone: int) -> None:
    """No step has one row as long as they are answered."""
    pace, sure = CostModel(), Guess(tuple(range(7)), 32)
    pace.turn_to(100)
    for _ in range(alone):
        pace.costs.saw(1, 0.01)
    rows = list[int]()
    for _ in range(300):
        guesses = 0
        for _ in range(2):
            guesses += pace.count(sure, 2 + guesses, 2.0 + guesses, Balance(), 0)
        rows.append(2 + guesses)
        pace.costs.saw(rows[-1], 0.01 + 0.001 * guesses, 2)
    assert rows[-100:].count(2) <= 100 // AGAIN + 1
    assert max(rows[-100:]) == MOST_ROWS


def test_what_was_dear_for_several_answers_is_tried_again() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.saw(2, 0.01, 2)
    for _ in range(LATEST):
        costs.saw(6, 0.06, 2)
    dear = costs.of(6)
    for _ in range(FADES * LATEST):
        costs.saw(2, 0.01, 2)
    assert costs.of(6) < dear / 2


def test_guesses_that_failed_in_one_text_are_tried_again_in_another() -> None:
    pace, guess = CostModel(), Guess(tuple(range(7)), 5)
    for rows in range(1, MOST_ROWS + 1):
        for _ in range(40):
            pace.costs.saw(rows, 0.01 + 0.001 * (rows - 1))
    pace.costs.saw(1, 0.01)
    while pace.count(guess, 1, 1.0, Balance(), 0):
        pace.acceptance.saw(guess, 1, 0)
    tried = [pace.count(guess, 1, 1.0, Balance(), 0) for _ in range(300)]
    assert not any(tried[:3])
    assert any(tried)


def test_another_context_is_believed_to_cost_what_the_nearest_one_does() -> None:
    pace = CostModel()
    pace.turn_to(3000)
    for _ in range(9):
        pace.costs.saw(1, 0.01)
        pace.costs.saw(8, 0.05)
    pace.turn_to(100)
    near = pace.costs
    pace.turn_to(6000)
    assert pace.costs.of(8) == pytest.approx(5.0)
    assert pace.costs.unit_s == 0.0
    pace.turn_to(400)
    assert pace.costs is near


SIZES: dict[str, Any] = {"vocab_size": 272, "hidden_size": 64, "max_position_embeddings": 512}


@pytest.fixture(scope="module", params=["int8", "none", "recurrences"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Network:
    if (reason := native.problem()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("speculation")
    if request.param == "recurrences":
        write_checkpoint(folder, tiny_qwen3_5(**SIZES, linear_value_head_dim=32))
    else:
        write_checkpoint(folder, tiny_qwen3(**SIZES))
    quantize = "none" if request.param == "none" else "int8"
    return load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize=quantize)


@pytest.fixture(scope="module")
def engine(model: Network) -> Iterator[Engine]:
    with a_native_engine(model, context=300, num_blocks=600) as engine:
        yield engine


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {97: 4.0, 98: 4.0}]),
    logprobs=st.sampled_from([None, None, 2]),
    constraint=st.sampled_from([None, None, Constraint("regex", "(abc|[a-d]{2}xyz| )*")]),
    seed=st.integers(0, 1000),
    max_tokens=st.integers(1, 60),
    stop=st.sampled_from([(), ("a",), ("bc", "\n")]),
    speculation=st.just("auto"),
)


def asked(engine: Engine, number: int, params: SamplingParams) -> Sequence:
    ids = [*b"abcabd xyz ", *Random(number).choices(range(256), k=number % 30)]
    return engine.start(Rows.of(ids), params)


def heard(engine: Engine, sequences: list[Sequence]) -> list[list[TokenEvent]]:
    events = [list(engine.events(sequence)) for sequence in sequences]
    check_blocks(engine)
    assert engine.figures().blocks_held == 0
    return events


def told(sequence: Sequence) -> list[Any]:
    """All that is known of an answer but its times and what was guessed."""
    stats = replace(
        sequence.stats(),
        guessed_tokens=0,
        accepted_tokens=0,
        drafted_tokens=0,
        accepted_drafts=0,
        saved_s=0.0,
        ttft_s=0,
        prefill_s=0,
        decode_s=0,
    )
    return [sequence.finish_reason, sequence.tail, sequence.generated, sequence.rows.keys, stats]


@examples(12, *HealthCheck)
@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(0, 1000))
def test_an_answer_is_the_same_whatever_is_guessed(
    engine: Engine, several: list[SamplingParams], seed: int
) -> None:
    if not engine.pieces.runner.all_native:
        del several[
            1:
        ]  # torch computes the prompts, and others whose prompts are beside change their last bits
    engine.engine_step.speculating = None
    evict_all(engine)
    plain, events, cached = list[Sequence](), list[list[TokenEvent]](), list[int]()
    for number, params in enumerate(several):
        plain.append(asked(engine, seed + number, params))
        events += heard(engine, plain[-1:])
        cached.append(engine.cached_rows(plain[-1].rows))
    evict_all(engine)
    texts = Oracle(
        answers={number: list(one.rows.token_ids) for number, one in enumerate(plain)}, random=Random(seed)
    )
    speculate(engine, texts)
    again = [asked(engine, seed + number, params) for number, params in enumerate(several)]
    failed = f"seed {seed}"
    for number, (one, other) in enumerate(zip(events, heard(engine, again), strict=True)):
        for step, (event, same) in enumerate(zip_longest(one, other)):
            assert event == same, f"{failed}, answer {number}, token {step}"
    assert [told(one)[:4] for one in again] == [told(one)[:4] for one in plain], failed
    assert [engine.cached_rows(one.rows) for one in again] == cached, failed
    for one, before in zip(again, plain, strict=True):
        # Neighbours may have what a prompt begins with.
        assert told(one)[4].generated_tokens == told(before)[4].generated_tokens


def test_most_guesses_of_one_who_knows_hold_and_some_do_not(engine: Engine) -> None:
    params = SamplingParams(speculation="auto", temperature=1.0, seed=4, max_tokens=60)
    engine.engine_step.speculating = None
    (expected,) = heard(engine, [plain := asked(engine, 1, params)])
    speculate(engine, Oracle(answers={0: list(plain.rows.token_ids)}))
    (found,) = heard(engine, [sequence := asked(engine, 1, params)])
    assert found == expected
    stats = sequence.stats()
    assert 10 < stats.accepted_tokens < stats.guessed_tokens
    assert sum(event.guessed for event in found) == stats.accepted_tokens
    assert not any(event.guessed for event in expected)
    assert told(sequence)[:4] == told(plain)[:4]


def test_who_wants_no_guesses_gets_none(engine: Engine) -> None:
    speculating: Speculating = speculate(engine)
    params = SamplingParams(temperature=0.0, max_tokens=60, speculation="off")
    heard(engine, [sequence := asked(engine, 1, params)])
    assert (sequence.guessed, speculating._known) == (0, {})


def test_what_is_computed_at_once_because_it_is_forced_is_no_step_of_one_row(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculate(engine)
    steps, run, told = list[int](), engine.pieces.runner.run, list[int]()

    def watched(batch: StepBatch) -> list[torch.Tensor]:
        steps.append(sum(span.count for span in batch.spans))
        return run(batch)

    monkeypatch.setattr(engine.pieces.runner, "run", watched)
    monkeypatch.setattr(StepCosts, "saw", lambda self, rows, seconds, texts: told.append(rows))
    constraint, sober = Constraint("regex", "(yes|no), because [a-z]{9}[.]"), {259: -100.0}
    params = SamplingParams(temperature=0.0, max_tokens=20, constraint=constraint, logit_bias=sober)
    assert len(list(engine.stream([*b"xyz"], params))) == 20
    assert max(steps[1:]) > 4
    assert told == [rows for rows in steps[1:] if rows == 1]


def test_guesses_take_free_blocks_only(model: Network) -> None:
    with ExitStack() as stack:
        small = stack.enter_context(a_native_engine(model, context=60, num_blocks=15))
        params = SamplingParams(speculation="auto", temperature=0.0, max_tokens=200)
        small.engine_step.speculating = None
        plain = list(small.stream([*b"abcabc"], params))
        evict_all(small)
        speculate(small, Oracle(answers={0: [*b"abcabc", *(event.token_id for event in plain)]}))
        assert list(small.stream([*b"abcabc"], params)) == plain
        check_blocks(small)


def test_another_kind_of_speculation_is_refused() -> None:
    with pytest.raises(EngineError, match="speculation is 'on'; it must be one of auto, off, suffix, draft"):
        SamplingParams(speculation="on")  # type: ignore[arg-type]
