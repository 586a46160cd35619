"""A draft model: what it reads and computes, what it costs, and that an answer is the same with any of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from engine import Engine, SamplingParams
from engine.batch import StepBatch
from engine.cache.kv_needs import KVNeeds, kv_needs
from engine.cache.kv_rows import token_bytes
from engine.cache.layer_groups import LayerGroup, layer_groups
from engine.cache.rows import Rows
from engine.cache.sizing import USEFUL_CONTEXT, KVPlan, _least_bytes, plan_with_draft
from engine.errors import OutOfRoomError
from engine.events import TokenEvent
from engine.kernels.native import library as native
from engine.schedule.drafting import Drafting
from engine.schedule.drafting_in_slots import ChainTime
from engine.schedule.sequence import Priority, Sequence
from engine.schedule.speculating import Guessing, Speculating
from engine.speculation.cost_model import (
    AGAIN,
    DRAFT_CREDIT,
    DRAFTED,
    FADES,
    LATEST,
    MOST_ROWS,
    Acceptance,
    AcceptanceRate,
    Balance,
    CostModel,
    StepCosts,
)
from engine.speculation.sources import NOTHING, DraftRequest, Guess
from models.loading.load import load_model
from models.network import Network
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_parts import TokenizerParts
from tests.counting import until
from tests.covering import each_value_once
from tests.engine.inside import evict_all
from tests.engine.speculation import Eager
from tests.engine.test_native_engine import CPU, a_native_engine
from tests.engine.test_speculation import PARAMS, asked, heard, told
from tests.engine.tiny import tiny_parts, tiny_tokenizer
from tests.fresh import examples
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint
from tests.models.families import tiny_gpt_oss
from tests.models.hybrids import tiny_qwen3_5

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, speculation="draft")


def tiny_hybrid(**changes: Any) -> Any:
    """Two layers, the first of them recurrent, with matrices that can be quantised."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return tiny_qwen3_5(**changes | kinds, linear_key_head_dim=32, linear_value_head_dim=32)


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "windows": (tiny_gpt_oss, tiny_gpt_oss),
    "hybrid": (tiny_hybrid, tiny_hybrid),
    "hybrid model": (tiny_hybrid, tiny_qwen3),
    "hybrid draft": (tiny_qwen3, tiny_hybrid),
}


@pytest.fixture(scope="module", params=["int8", "none", *KINDS])
def models(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Network, Network]:
    """A network, and one that has nothing in common with it but the tokens: more of them, even. "windows": most layers
    of both have one, which is short. "hybrid": most layers of one of them or both are recurrent."""
    if (reason := native.problem()) is not None:
        pytest.skip(reason)

    make, make_small = KINDS.get(request.param, (tiny_qwen3, tiny_qwen3))
    quantize = request.param if request.param not in KINDS else "int8"

    def network(name: str, seed: int, config: Any) -> Network:
        folder = tmp_path_factory.mktemp(name)
        write_checkpoint(folder, config, seed=seed)
        return load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize=quantize)

    given = {"max_position_embeddings": 512}
    large = network("large", 0, make(**given, vocab_size=272, hidden_size=64))
    layers = 1 + (make_small is not tiny_qwen3)
    small = make_small(**given, vocab_size=288, hidden_size=32, num_hidden_layers=layers)
    return large, network("small", 1, small)


@pytest.fixture(scope="module", params=["random", "itself"])
def engine(models: tuple[Network, Network], request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Drafts are almost never right, or almost always."""
    large, small = models
    draft = small if request.param == "random" else large
    with a_native_engine(
        large, context=300, num_blocks=600, drafter=draft, draft_name=request.param
    ) as engine:
        yield engine


def drafting(engine: Engine) -> Drafting:
    drafts = engine.drafts
    assert isinstance(drafts, Drafting)
    return drafts


def draft(engine: Engine, pace: CostModel | None = None) -> Speculating:
    """Have all that is drafted checked from now on, or as `pace` says."""
    speculating = Speculating(engine.pieces.scheduler, pace or Eager(), drafts=drafting(engine))
    engine.engine_step.speculating = speculating
    return speculating


@each_value_once
@examples(8, *HealthCheck)
@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(0, 1000))
def test_an_answer_is_the_same_whatever_is_drafted(
    engine: Engine, several: list[SamplingParams], seed: int
) -> None:
    if not engine.pieces.runner.all_native:
        del several[1:]  # torch computes the prompts, and others beside change their last bits
    engine.engine_step.speculating = None
    evict_all(engine)
    plain, events = list[Sequence](), list[list[TokenEvent]]()
    for number, params in enumerate(several):
        plain.append(asked(engine, seed + number, params))
        events += heard(engine, plain[-1:])
    evict_all(engine)
    speculating = draft(engine)
    again = [asked(engine, seed + number, params) for number, params in enumerate(several)]
    for number, (one, other) in enumerate(zip(events, heard(engine, again), strict=True)):
        for step, (event, same) in enumerate(zip_longest(one, other)):
            assert event == same, f"seed {seed}, answer {number}, token {step}"
    assert [told(one)[:4] for one in again] == [told(one)[:4] for one in plain], f"seed {seed}"
    assert speculating.notes == ()
    engine.loop.call(drafting(engine).blocks.check)


@each_value_once
@pytest.mark.parametrize("sampled", [False, True])
def test_a_model_that_is_its_own_draft_is_nearly_always_right(
    models: tuple[Network, Network], sampled: bool
) -> None:
    large, small = models
    more = (
        {"temperature": 1.0, "seed": 5, "top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.2}
        if sampled
        else {}
    )
    rates, tokenizer = {}, tiny_tokenizer()
    tokenizer.stop_ids = frozenset()
    for name, network in (("itself", large), ("random", small)):
        with a_native_engine(
            large, tokenizer, context=300, num_blocks=600, drafter=network, draft_name=name
        ) as engine:
            draft(engine)
            params = replace(GREEDY, **more)
            heard(engine, [sequence := engine.start(Rows.of([*b"abcabd xyz"]), params)])
            stats = sequence.stats()
            assert stats.drafted_tokens == stats.guessed_tokens > 20
            assert stats.accepted_drafts == stats.accepted_tokens
            rates[name] = stats.accepted_drafts / stats.drafted_tokens
    assert rates["itself"] > 0.9
    assert rates["random"] < 0.4


def test_what_was_accepted_is_not_computed_again(models: tuple[Network, Network]) -> None:
    large, _ = models
    with a_native_engine(large, context=300, num_blocks=600, drafter=large, draft_name="itself") as engine:
        drafts, rows = drafting(engine), list[int]()
        run = drafts.runner.run

        def counted(batch: StepBatch) -> list[torch.Tensor]:
            rows.extend(span.count for span in batch.spans)
            return run(batch)

        drafts.runner.run = counted  # type: ignore[method-assign]
        draft(engine)
        heard(engine, [sequence := engine.start(Rows.of([*b"abc"]), GREEDY)])
        assert sequence.stats().accepted_drafts > 0
        # A row for each token of the text and each guess that was wrong; of the last chain's, twice.
        wrong = sequence.drafted - sequence.drafts_accepted
        assert sum(rows) < len(sequence.rows) + wrong + MOST_ROWS


def test_its_layers_with_a_window_keep_only_the_rows_of_windows(models: tuple[Network, Network]) -> None:
    large, small = models
    with a_native_engine(large, context=500, num_blocks=600, drafter=small, draft_name="small") as engine:
        drafts, groups = drafting(engine), layer_groups(small.spec, small.dtype)
        rows = 600 * drafts.blocks.block_size
        every = token_bytes(small.spec, small.dtype) * rows
        assert (drafts.nbytes - small.nbytes < every) is bool(groups)
        assert groups or drafts.nbytes - small.nbytes == every


def test_drafts_are_for_those_who_want_them(engine: Engine) -> None:
    draft(engine)
    for how, wants in (("off", False), ("suffix", False), ("draft", True), ("auto", True)):
        params = SamplingParams(temperature=0.0, max_tokens=30, speculation=how)  # type: ignore[arg-type]
        heard(engine, [sequence := engine.start(Rows.of([*b"abc"]), params)])
        assert bool(sequence.drafted) is wants, how


def test_a_draft_model_that_fails_ends_its_drafts_and_nothing_else(models: tuple[Network, Network]) -> None:
    large, small = models
    with a_native_engine(large, context=300, num_blocks=600, drafter=small, draft_name="small") as engine:
        speculating = engine.engine_step.speculating
        assert speculating is not None
        assert "draft model small (" in engine.figures().speculation
        assert engine.figures().draft_bytes > 0
        engine.engine_step.speculating = None
        (plain,) = heard(engine, [engine.start(Rows.of([*b"abc"]), GREEDY)])
        engine.engine_step.speculating = speculating
        speculating.pace = Eager()
        drafts, run, steps = drafting(engine), drafting(engine).runner.run, iter(range(100))

        def fails(batch: StepBatch) -> list[torch.Tensor]:
            if next(steps) == 9:
                raise RuntimeError("out of luck\nand more")
            return run(batch)

        drafts.runner.run = fails  # type: ignore[method-assign]
        (found,) = heard(engine, [sequence := engine.start(Rows.of([*b"abc"]), GREEDY)])
        assert found == plain
        assert 0 < sequence.drafted < 9
        (note,) = [note for note in engine.figures().notes if "draft" in note]
        assert note.startswith("The draft model small (")
        assert note.endswith(") is no longer used, because it failed: out of luck.")
        assert engine.figures().speculation == "suffix matching"
        assert engine.figures().draft_bytes == 0
        (found,) = heard(engine, [sequence := engine.start(Rows.of([*b"abc"]), GREEDY)])
        assert (found, sequence.drafted) == (plain, 0)


def test_it_reads_while_nobody_waits_what_was_said_last(engine: Engine) -> None:
    drafts = drafting(engine)
    draft(engine)
    for text in (b"the first text, which is longer than a block ", b"another one "):
        rows = Rows.of([*text])
        engine.warm_rows(rows)
        until(lambda: engine.loop.call(lambda: drafts.blocks.match(list(text))) == len(text))  # noqa: B023
    assert engine.loop.call(lambda: drafts.blocks.num_held) == 0
    heard(engine, [sequence := engine.start(Rows.of([*b"another one, then"]), GREEDY)])
    whole = sequence.rows.token_ids
    until(lambda: engine.loop.call(lambda: drafts.blocks.match(whole)) == len(whole))


def test_a_long_text_is_read_in_part_before_each_step(engine: Engine) -> None:
    drafts, text = drafting(engine), Random(3).choices(range(256), k=200)

    def job() -> None:
        drafts.blocks.evict_all()
        steps, guesses = 0, [NOTHING]
        while not guesses[0].tokens:
            guesses = drafts.guess(
                [DraftRequest("me", text, 5)], lambda at, guess, texts: len(guess.tokens) < 5, saw
            )
            steps += 1
            assert drafts.blocks.num_held * drafts.blocks.block_size >= min(steps, len(text))
        assert len(guesses[0].tokens) == len(guesses[0].chances) == 5
        assert steps > 1
        again = drafts.guess(
            [DraftRequest("me", text, 5)], lambda at, guess, texts: len(guess.tokens) < 5, saw
        )
        assert again[0].tokens == guesses[0].tokens
        drafts.end("me")
        drafts.blocks.check()
        assert drafts.blocks.num_held == 0

    engine.loop.call(job)


def test_what_it_guesses_does_not_depend_on_what_it_guessed_before(engine: Engine) -> None:
    """Whatever of that held, however much was said since, and wherever an answer was taken back to."""
    if not engine.pieces.runner.all_native:
        pytest.skip("torch computes what it reads, in whatever pieces")
    drafts, rng = drafting(engine), Random(5)
    texts: dict[str, list[int]] = {
        whom: rng.choices(range(256), k=count) for whom, count in (("a", 40), ("b", 9))
    }

    def guess(whom: str, most: int) -> Guess:
        found = NOTHING
        while not found.tokens:  # until all is read
            asked = DraftRequest(whom, texts[whom.strip("*")], most)
            (found,) = drafts.guess([asked], lambda at, guess, texts: len(guess.tokens) < most, saw)
        return found

    def job() -> None:
        for _ in range(30):
            whom, most = rng.choice(list(texts)), rng.randint(1, 7)
            found = guess(whom, most)
            drafts.blocks.check()
            assert guess(f"{whom}*", most) == found, "by one who knows nothing of it"
            drafts.end(f"{whom}*")
            text = texts[whom]
            if rng.random() < 0.2:
                del text[rng.randint(5, len(text)) :]
            else:
                text += [
                    *found.tokens[: rng.randint(0, most)],
                    *rng.choices(range(256), k=rng.choice([1, 1, 12])),
                ]
        for whom in texts:
            drafts.end(whom)
        drafts.blocks.check()
        assert drafts.blocks.num_held == 0

    engine.loop.call(job)


def saw(texts: int, seconds: float) -> None:
    """Nobody counts."""


def test_a_text_that_takes_long_to_read_is_left_for_when_nobody_waits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, asked = iter(range(10_000)), list[int]()

    def reads(self: Drafting, asking: list[DraftRequest], *_: object) -> list[Guess]:
        asked.append(len(asking))
        return [NOTHING]

    monkeypatch.setattr("engine.schedule.speculating.perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(Drafting, "guess", reads)
    speculating = draft(engine)
    for _ in range(2):
        asked.clear()
        heard(engine, [engine.start(Rows.of([*b"abc"]), GREEDY)])
        assert 1 <= len(asked) < 10
    assert speculating.notes == ()


def test_one_whose_output_is_no_number_is_let_go_of(models: tuple[Network, Network]) -> None:
    large, small = models
    with a_native_engine(large, context=300, num_blocks=600, drafter=small, draft_name="small") as engine:
        drafts, run = drafting(engine), drafting(engine).runner.run
        drafts.runner.run = lambda batch: [row.fill_(torch.nan) for row in run(batch)]  # type: ignore[method-assign]
        speculating = draft(engine)
        for temperature in (0.0, 1.0):
            speculating.drafts = drafts
            assert len(list(engine.stream([*b"abc"], replace(GREEDY, temperature=temperature, seed=3)))) > 9
            assert speculating.notes[0].endswith("failed: its output is not a number.")


def test_texts_that_it_cannot_read_are_left_alone(engine: Engine) -> None:
    drafts = drafting(engine)

    def guess(tokens: list[int]) -> Guess:
        return engine.loop.call(
            lambda: drafts.guess(
                [DraftRequest("me", tokens, 5)], lambda at, guess, texts: len(guess.tokens) < 5, saw
            )[0],
        )

    assert guess([1, 2, drafts.vocab_size]) == NOTHING
    assert guess([1] * drafts.most_rows) == NOTHING
    assert len(guess([1, 2, 3]).tokens) == 5
    engine.loop.call(lambda: drafts.end("me"))


def test_where_its_cache_is_full_answers_go_on(models: tuple[Network, Network]) -> None:
    large, small = models
    with a_native_engine(large, context=60, num_blocks=40, drafter=small, draft_name="small") as engine:
        drafts = drafting(engine)
        drafts.blocks.reserve(drafts.blocks.open([]), 4 * (drafts.blocks.num_free - 3), is_bare=True)
        speculating = draft(engine)
        events = list(engine.stream([*b"abc"], GREEDY))
        assert len(events) == len(list(engine.stream([*b"abc"], GREEDY)))
        assert speculating.notes == ()


def test_a_draft_model_that_does_not_fit_is_left_out() -> None:
    def plan(most: int, least: int = 16) -> Callable[[KVNeeds], KVPlan]:
        def of(needs: KVNeeds) -> KVPlan:
            tokens = most // needs.token_bytes
            if tokens < least:
                raise OutOfRoomError("no room")
            return KVPlan(min(tokens, 100_000), tokens, needs, slots=tuple(range(1, 1 + len(needs.groups))))

        return of

    own = KVNeeds(100, 1, groups=(LayerGroup(8, (0,), 10),))
    more = KVNeeds(101, 1)
    draft = KVNeeds(100, 1, groups=(LayerGroup(4, (0,), 1), LayerGroup(2, (1,), 1)))
    plenty = plan(200 * 100_000)
    assert plan_with_draft(plenty, own, None) == (plenty(own), None)
    tokens = 100_000
    both = (KVPlan(tokens, tokens, own, slots=(1,)), KVPlan(tokens, tokens, draft, slots=(2, 3)))
    assert plan_with_draft(plenty, own, draft) == both
    some = plan(200 * USEFUL_CONTEXT)
    enough, drafts = plan_with_draft(some, own, draft)
    assert (enough.context_length, drafts is None) == (USEFUL_CONTEXT, False), "enough for both"
    assert plan_with_draft(some, own, more) == (some(own), None), "the conversation would be too short"
    exact = plan(100 * 500, 400)
    assert plan_with_draft(exact, own, draft) == (exact(own), None)


def test_one_line_says_that_there_is_no_room(models: tuple[Network, Network]) -> None:
    large, small = models
    needs = kv_needs(large.spec, large.dtype, step=16, block_size=4)
    room = {"context": 200, "num_blocks": None, "free": 2 * _least_bytes(needs, 250)}
    with a_native_engine(large, **room, drafter=small, draft_name="small") as engine:
        assert engine.figures().notes == (
            "No draft model is used: there is too little memory for the KV cache of a draft model.",
        )
        assert engine.figures().speculation == "suffix matching"
        assert len(list(engine.stream([*b"abc"], GREEDY))) == 60


# -- how many pay


def measured(costs: StepCosts, row: float, drafting_s: float) -> None:
    for rows in range(1, MOST_ROWS + 1):
        for _ in range(40):
            costs.saw(rows, 0.1 + 0.1 * row * (rows - 1))
    for _ in range(9):
        costs.drafted(1, 0.1 * drafting_s)
        costs.saw(1, 0.1)


def chain(pace: CostModel, chance: float = 0.8) -> int:
    """How many tokens are drafted of which each has this chance."""
    guess = NOTHING
    while pace.drafts_more(guess, 1, 1.0, 7, 1, pace.best(NOTHING, 1, 1.0, Balance(), 0)[0]):
        guess = Guess((*guess.tokens, 0), chances=(*guess.chances, chance))
    return len(guess.tokens)


def test_drafts_are_as_many_as_pay() -> None:
    counts = []
    for rate, drafting_s in ((0.9, 0.05), (0.8, 0.2), (0.7, 0.2), (0.5, 0.2), (0.2, 0.2), (0.9, 1.0)):
        pace = CostModel()
        measured(pace.costs, 0.05, drafting_s)
        known = [AcceptanceRate(rate, seen=60.0) for _ in range(6)]
        pace.acceptance = Acceptance(drafts=known[1:], drafted=known[0])
        counts.append(chain(pace))
    assert counts[0] == 7
    assert counts == sorted(counts, reverse=True)
    assert 1 <= counts[3] < counts[1] < 7
    assert counts[4:] == [0, 0]


def test_a_chain_ends_where_its_model_is_not_sure() -> None:
    pace = CostModel()
    measured(pace.costs, 0.05, 0.1)
    assert chain(pace, 0.95) > chain(pace, 0.6) > chain(pace, 0.1) <= 2


UNREAD = 0.4
"""Of a draft model's step: what another row takes that is read first."""


def played(
    rate: float,
    row: float,
    drafting: float,
    tokens: int,
    seed: int,
    slower: Callable[[int], float] = lambda said: 1.0,
) -> float:
    """Tokens in the time of a step of one row, where every step takes as long as was said, and drafts hold so often.
    The first step of a chain takes longer by a row of the draft model for each that was not read yet. After so many
    tokens the machine is so many times `slower`; this changes what is measured, not what is returned."""
    random, pace, spent, said = Random(seed), CostModel(draft=drafting), 0.0, 0
    behind, read = 0, 0.0
    pace.turn_to(100)
    while said < tokens:
        guess, drafts, unit_s = NOTHING, 0.0, 0.1 * slower(said)
        if not pace.measures:
            while pace.drafts_more(guess, 1, 1.0, 7, 1, pace.best(NOTHING, 1, 1.0, Balance(), 0)[0]):
                read = drafting * (1 if guess.tokens else 1 + UNREAD * behind)
                pace.costs.drafted(1 if guess.tokens else 1 + behind, unit_s * read)
                guess, drafts = Guess((*guess.tokens, 0), chances=(*guess.chances, rate)), drafts + read
            if not guess.tokens:
                pace.relax()
        count = pace.count(guess, 1, 1.0, pace.drafts, 0, spent=drafts)
        held = next((at for at in range(count) if random.random() >= rate), count)
        behind = int(held == len(guess.tokens)) if guess.tokens else min(behind + 1, MOST_ROWS)
        step = 1 + row * count
        spent, said = spent + step + drafts, said + 1 + held
        pace.acceptance.saw(guess, count, held)
        pace.drafts.saw(held - (step - 1) - drafts)
        pace.costs.saw(1 + count, unit_s * step)
    return said / spent


def most(rate: float, row: float, drafting: float) -> float:
    """The same with the same number of guesses in each step, where that is the best one."""
    expected = [1.0]
    for count in range(1, 8):
        step = 1 + count * (row + drafting) + rate**count * UNREAD * drafting
        tokens = sum(rate**n for n in range(1 + count))
        expected.append((AGAIN * tokens + 1) / (AGAIN * step + 1))  # now and then a step has one row
    return max(expected)


@each_value_once
@pytest.mark.parametrize("drafting", [0.05, 0.15, 0.4])
@pytest.mark.parametrize("row", [0.02, 0.1, 0.3])
def test_the_rate_is_nearly_what_the_best_number_of_guesses_gives(row: float, drafting: float) -> None:
    for rate in (0.5, 0.6, 0.7, 0.8, 0.9):
        found = sum(played(rate, row, drafting, 1000, seed) for seed in range(3)) / 3
        assert 0.92 < found / most(rate, row, drafting) < 1.07, f"acceptance {rate}"


@pytest.mark.parametrize("period", [20, 200])
@pytest.mark.parametrize(("row", "drafting"), [(0.02, 0.4), (0.1, 0.15), (0.3, 0.15)])
def test_the_rate_is_nearly_that_on_a_machine_whose_speed_changes(
    row: float, drafting: float, period: int
) -> None:
    def slower(said: int) -> float:
        return 1.4 if said // period % 2 else 1.0

    for rate in (0.5, 0.7, 0.9):
        found = sum(played(rate, row, drafting, 1000, seed, slower) for seed in range(3)) / 3
        assert 0.92 < found / most(rate, row, drafting) < 1.07, f"acceptance {rate}"


@pytest.mark.parametrize("row", [0.02, 0.1, 0.3])
def test_drafts_that_hardly_hold_cost_an_answer_next_to_nothing(row: float) -> None:
    for rate in (0.0, 0.1, 0.2):
        found = sum(played(rate, row, 0.3, 300, seed) for seed in range(5)) / 5
        assert found >= 0.97, f"acceptance {rate}"


def test_drafts_that_never_hold_end_soon_and_are_tried_now_and_then() -> None:
    pace, spent, tried = CostModel(), 0.0, list[int]()
    measured(pace.costs, 0.15, 0.15)
    for token in range(2000):
        count = chain(pace, 0.95)
        if not count:
            pace.relax()
            continue
        guess = Guess((0,) * count, chances=(0.95,) * count)
        cost = count * 0.15 + pace.costs.of(1 + count) - 1
        pace.acceptance.saw(guess, count, 0)
        pace.drafts.saw(-cost)
        spent += cost
        tried.append(token)
    assert DRAFT_CREDIT / 2 < spent <= DRAFT_CREDIT + 0.01 * 2000 + 1
    assert 0 < sum(token >= 32 for token in tried) < 0.05 * 2000
    assert sum(16 <= token < 48 for token in tried) <= 2


def test_drafts_that_hold_again_are_found_out() -> None:
    pace, counts = CostModel(), []
    measured(pace.costs, 0.05, 0.1)
    for held in [False] * 200 + [True] * 2000:
        count = chain(pace, 0.8)
        counts.append(count)
        if not count:
            pace.relax()
            continue
        pace.acceptance.saw(Guess((0,) * count, chances=(0.8,) * count), count, count * held)
        pace.drafts.saw(count * held - count * 0.1 - pace.costs.of(1 + count) + 1)
    assert sum(counts[:10]) > sum(counts[100:200])
    assert counts[-1] == 7


def test_the_time_of_a_draft_counts_once(engine: Engine) -> None:
    speculating = Speculating(engine.pieces.scheduler)
    measured(speculating.pace.costs, 0.1, 0.1)
    sequence = Sequence(Rows.of([1, 2, 3]), Priority.PERSON, GREEDY)
    known = Guessing(speculating.texts.take(None, [1, 2, 3]))
    known.drafting_s = 0.05
    speculating._known[sequence] = known
    for _ in range(3):
        speculating.saw([(sequence, 0, 0)], 0.1)
    assert speculating.pace.drafts.saved == pytest.approx(-0.5)
    assert sequence.saved_s == pytest.approx(-0.05)


def test_what_a_chain_takes_besides_its_steps_is_found_out() -> None:
    time = ChainTime()
    for length in (2, 2, 2, 5, 5):
        time.saw(1, length, 0.003 + 0.002 * length)
        assert time.start_s is None
    assert time.split(5, 0.013) == pytest.approx((0.0, 0.0026)), "not known yet"
    time.saw(1, 5, 0.003 + 0.002 * 5)
    assert time.split(7, 0.017) == pytest.approx((0.003, 0.002))
    for _ in range(40):
        time.saw(1, 4, 0.011)
    assert time.split(7, 0.017) == pytest.approx((0.003, 0.002)), "no two lengths say anything else"
    for length in (1, 4) * 20:
        time.saw(2, length, 0.004 * length)
    assert time.split(4, 0.016) == pytest.approx((0.0, 0.004))
    for length in (1, 4) * 20:
        time.saw(2, length, 0.1 - 0.01 * length)
    start_s, each = time.split(4, 0.06)
    assert 0.0 <= start_s <= 0.06
    assert each >= 0.0


def test_a_long_chain_is_worth_more_if_it_must_be_started() -> None:
    counts = []
    for start in (0.0, 0.3, 0.6, 5.0):
        pace = CostModel()
        measured(pace.costs, 0.02, 0.2)
        for _ in range(9):
            pace.costs.drafted(0, 0.1 * start)
        pace.acceptance = Acceptance(
            drafts=[AcceptanceRate(0.7, seen=60.0) for _ in range(5)], drafted=AcceptanceRate(0.7, seen=60.0)
        )
        counts.append(chain(pace, 0.95))
        assert pace.costs.of_draft(1) == pytest.approx(0.2)
        assert pace.costs.of_chain == pytest.approx(start)
    assert 0 < counts[0] < counts[2]
    assert counts[0] <= counts[1] <= counts[2]
    assert counts[3] == 0


def test_what_a_draft_takes_is_measured() -> None:
    costs = StepCosts(draft=0.3)
    assert costs.of_draft(1) == 0.3
    measured(costs, 0.1, 0.12)
    assert costs.of_draft(1) == pytest.approx(0.12)
    assert 0.12 < costs.of_draft(2) < 2 * 0.12, "by the nearest number of rows"
    for _ in range(LATEST):
        costs.drafted(2, 0.1 * 0.15)
    assert costs.of_draft(2) == pytest.approx(0.15)
    assert costs.of_draft(1) == pytest.approx(0.12)
    for _ in range(FADES * LATEST):
        costs.saw(1, 0.1)
    assert costs.of_draft(1) == 0.3, "it may take something else by now"
    pace = CostModel(draft=0.25)
    pace.turn_to(100)
    assert pace.costs.of_draft(1) == 0.25
    measured(pace.costs, 0.1, 0.12)
    pace.turn_to(5000)
    assert pace.costs.of_draft(1) == pytest.approx(0.12)
    assert pace.acceptance.drafted.now == DRAFTED


def test_what_is_drafted_is_believed_as_its_model_does() -> None:
    pace = CostModel()
    guess = Guess((1, 2, 3), chances=(0.95, 0.6, 0.1))
    first, second, third = pace.acceptance.hold(guess)
    assert first > second / first > third / second
    for _ in range(50):
        pace.acceptance.saw(guess, 3, 1)
    assert pace.acceptance.of(guess, 0) > 0.95
    assert pace.acceptance.of(guess, 1) < 0.15
    assert pace.acceptance.of(guess, 2) == third / second, "what came after a wrong one says nothing"


# -- which models


def altered(change: Callable[[Tokenizer], None]) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    change(tokenizer)
    return tokenizer


def test_tokenizers_are_compared_by_what_they_do() -> None:
    one = tiny_tokenizer()
    assert one.difference(tiny_tokenizer()) is None

    def padded(unused: frozenset[int]) -> Tokenizer:
        backend = tiny_parts().backend
        backend.add_tokens([AddedToken("[PAD1]")])
        return Tokenizer(TokenizerParts(backend, {}, frozenset(), None, unused_ids=unused))

    size = one.vocab_size
    assert one.difference(padded(frozenset([size]))) is None
    assert padded(frozenset([size])).difference(one) is None
    assert one.difference(padded(frozenset())) == f"special token {size} is '[PAD1]' and not missing"
    other = tiny_tokenizer(special=("<|more|>",))
    assert one.difference(other) == f"special token {size - 2} is '<|more|>' and not '<think>'"


def test_tokenizers_with_other_merges_differ() -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    def tokenizer(*merges: tuple[str, str]) -> Tokenizer:
        letters = {letter: id for id, letter in enumerate([*"abc", "ab", "bc", "abc"])}
        backend = tokenizers.Tokenizer(models.BPE(letters, list(merges)))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return Tokenizer(TokenizerParts(backend, {}, frozenset(), None))

    one = tokenizer(("a", "b"), ("b", "c"), ("a", "bc"))
    assert one.difference(tokenizer(("a", "b"), ("b", "c"), ("a", "bc"))) is None
    assert one.difference(tokenizer(("b", "c"), ("a", "b"), ("a", "bc"))) == "merge 1 is 'b c' and not 'a b'"
    assert one.difference(tokenizer(("a", "b"), ("b", "c"))) == "merge 3 is missing and not 'a bc'"
