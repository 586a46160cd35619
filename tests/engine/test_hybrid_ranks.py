"""Networks with recurrent layers that several processes compute: the text is that of one, and so is what is kept."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import build
from engine.batch import NONE, Span, StateMoves, StepBatch
from engine.cache import kv_needs
from engine.cache.copies import Logged, OffloadStates, RestoreStates
from engine.cache.kv_cache import KVCache
from engine.cache.rows import Rows
from engine.engine import Engine
from engine.execute.build_options import BuildOptions
from engine.parallel.messages import GivenStates, GivenStep, of_host, of_step, read_message
from engine.params import SamplingParams
from tests.engine.divided import GREEDY, PROMPT, loaded, text, write_model
from tests.engine.inside import offload
from tests.engine.keeping import answer
from tests.models.families import tiny_bamba, tiny_falcon_h1, tiny_granite_hybrid, tiny_nemotron_h
from tests.models.hybrids import tiny_qwen3_5, tiny_qwen3_5_moe

SIZES: dict[str, Any] = {"vocab_size": 272, "max_position_embeddings": 2048}
FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3.5 moe": tiny_qwen3_5_moe,
    "granite, one group": partial(tiny_granite_hybrid, mamba_n_groups=1),
    "bamba": tiny_bamba,
    "falcon": tiny_falcon_h1,
    "nemotron": tiny_nemotron_h,
}


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of its four layers are delta nets."""
    return write_model(tmp_path_factory.mktemp("nets"), tiny_qwen3_5(**SIZES))


def told(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """The tokens of an answer, and how many rows of the prompt were computed."""
    found, computed = answer(engine, prompt, params)
    return [token for token, _ in found], computed


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, FAMILIES[name](**SIZES))
    found = []
    for ranks in (1, 2):
        with loaded(folder, ranks) as engine:
            first = text(engine, PROMPT)
            found.append([first, text(engine, [*PROMPT, *first, 7]), text(engine, [*PROMPT[:-5], 9])])
    assert found[0] == found[1]


def test_a_prefix_is_reused_to_the_row_on_every_rank(nets: Path) -> None:
    prompt, found = [*PROMPT, *range(50)], []
    for ranks in (1, 3):
        with loaded(nets, ranks, streams=2) as engine:
            first, _ = told(engine, prompt)
            after = [*prompt, *first[:-1]]
            asked = [prompt, [*after, 7], [*after[:-4], 7, 8], [*prompt[:-9], 1, 2, 3]]
            asked += [[*prompt[:40], *more] for more in ([1, 2], [3, 4], [5, 6])]
            found.append([told(engine, each) for each in asked])
            with ThreadPoolExecutor(2) as threads:
                found[-1] += list(threads.map(lambda each: told(engine, each), (asked[1], asked[-1])))
            engine.loop.call(engine.pieces.blocks.check)
    assert found[0] == found[1]
    assert [computed for _, computed in found[0][:4]] == [0, 1, 2, 3]


@pytest.mark.parametrize("marks", [1, 48])
def test_a_conversation_is_that_of_one_process(
    nets: Path, marks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is typed and taken back, answers that are drawn again, turns that are undone, and other branches."""
    monkeypatch.setattr(kv_needs, "MOST_MARKS", marks)
    found: list[list[list[int]]] = []
    for ranks in (1, 2):
        with loaded(nets, ranks, context=700) as engine:
            chat, said = engine.chat("Be brief."), list[list[int]]()
            for number, message in enumerate(("Why?", "And why that?", "Tell me more.", "Go on.")):
                for typed in (message[:3], message, message[:-2]):
                    chat.prepare(typed, wait=True)
                said.append([event.token_id for event in chat.send(message, GREEDY)])
                if number % 2:
                    said.append([event.token_id for event in chat.retry(GREEDY)])
                chat.settle(wait=True)
                if number == 2:
                    chat.undo()
            assert engine.figures().marks > 0
            engine.loop.call(engine.pieces.blocks.check)
            found.append(said)
    assert found[0] == found[1]


def test_a_text_without_a_span_is_continued_on_every_rank(nets: Path) -> None:
    found = []
    for ranks in (1, 2):
        with loaded(nets, ranks) as engine:
            text(engine, PROMPT)
            hidden = engine.hide(Rows.of(PROMPT), [(40, 50)])
            for token in b" So?":
                hidden.append(token)
            found.append([event.token_id for event in engine.events(engine.start(hidden, GREEDY))])
    assert found[0] == found[1]


def test_what_comes_back_from_host_memory_is_what_every_rank_had(
    nets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_memory = build._host_memory

    def on_cpu(cache: KVCache, options: BuildOptions, *rest: Any) -> Any:
        return host_memory(cache, replace(options, offload=1 << 24), *rest)

    monkeypatch.setattr(build, "_host_memory", on_cpu)
    monkeypatch.setattr(kv_needs, "MOST_MARKS", 2)
    rng = Random(0)
    prompts = [[rng.randrange(250) for _ in range(200)] for _ in range(4)]
    with loaded(nets, 2) as engine:
        first, _ = told(engine, prompts[0])
        after = [*prompts[0], *first, 5, 6, 7]
        expected, few = told(engine, after)
        assert few <= 4
        for prompt in prompts[1:]:
            told(engine, prompt)
        engine.loop.call(lambda: offload(engine.pieces.blocks))
        assert not engine.pieces.blocks.num_cached
        assert told(engine, after) == (expected, few)
        figures = engine.figures().offload
        assert figures is not None
        assert figures.restored_tokens >= 200


MOVES = st.builds(
    StateMoves,
    st.integers(NONE, 9),
    st.integers(0, 2**40),
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 9)), max_size=3).map(tuple),
)


@given(st.lists(st.none() | MOVES, max_size=4))
def test_what_a_step_does_with_states_is_told_as_it_is(moves: list[StateMoves | None]) -> None:
    spans = tuple(Span((0, 1), 3, 2, (5, 6), (3, 4), 1, 4, each) for each in moves)
    step = GivenStep(StepBatch(spans), [{0: 2, 1: 3}])
    assert read_message(of_step(step)) == step


@pytest.mark.parametrize(
    "given",
    [
        GivenStates(OffloadStates(Logged(3, (7, 2**40), 90), (1, 2, 3)), {7: 0, 2**40: 5}),
        GivenStates(RestoreStates((4,), Logged(0, (NONE, 7), 2**40)), {7: 1}),
    ],
)
def test_states_from_or_to_host_memory_are_told_as_they_are(given: GivenStates) -> None:
    assert read_message(of_host(given)) == given
