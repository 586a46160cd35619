"""Networks that mix windows with layers that see all rows: what is released is never missed."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import PretrainedConfig

from chatterm.conversation.figures import SessionStats
from chatterm.conversation.stats import stats_lines
from chatterm.markdown.lines import line_text
from engine import ContextFullError
from engine.cache import kv_needs
from engine.cache.rows import Rows
from engine.conversation.chat import Turn
from engine.kernels.native import library as native
from models.units import bytes_text
from tests.counting import until
from tests.covering import each_value_once
from tests.engine.inside import offload
from tests.engine.keeping import GREEDY, answer, heard, on_disk, saved
from tests.engine.test_chat_paths import copies
from tests.engine.test_chat_random import OPERATIONS, one
from tests.engine.tiny import TinyEngine, tiny_engine, tiny_tokenizer
from tests.fresh import seeds
from tests.models.families import tiny_gemma4, tiny_gemma4_moe, tiny_gpt_oss, tiny_lfm2, tiny_llama4

STEPS, CONTEXT, CHUNK, SIZE = 30, 420, 16, 4
SIZES: dict[str, Any] = {"vocab_size": 272, "max_position_embeddings": 1024}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma4": lambda: tiny_gemma4(**SIZES, vocab_size_per_layer_input=272, sliding_window=9),
    "gemma4 moe": lambda: tiny_gemma4_moe(**SIZES, sliding_window=30),
    "llama4": lambda: tiny_llama4(**SIZES, attention_chunk_size=22),
    "lfm2": lambda: tiny_lfm2(**SIZES),
    "lfm2 wide": lambda: tiny_lfm2(**SIZES, conv_L_cache=7),
    "gpt-oss": lambda: tiny_gpt_oss(**SIZES, sliding_window=9),
}


@pytest.fixture(params=["native", "plain"])
def kernels(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Have the native kernels compute the network, or plain PyTorch: what to tell the engine for it."""
    if request.param == "native" and (reason := native.problem()) is not None:
        pytest.skip(reason)
    return {"fused": request.param == "native"}


@pytest.fixture(autouse=True)
def few_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have slots taken back soon: branches have room for a window or two."""
    monkeypatch.setattr(kv_needs, "BRANCH_WINDOWS", (2, 1, 0))


def forget_all(engine: TinyEngine) -> None:
    """Make NaN of every number that nobody has written."""
    for part in engine.pieces.cache.parts:
        part[:, :, :-SIZE] = float("nan")


def slots(engine: TinyEngine) -> list[int]:
    return [pool.num_slots for pool in engine.pieces.cache.pools]


@each_value_once
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("think_cache", ["exact", "mask"])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_conversations(folder: Path, name: str, seed: int, think_cache: str) -> None:
    rng = Random(seed)
    blocks = rng.choice([None, 110])
    options: dict[str, Any] = {"context": CONTEXT, "num_blocks": blocks, "max_chunk": CHUNK}
    options["offload"] = rng.choice([None, 1 << 15, 1 << 20])
    with tiny_engine(folder, CONFIGS[name](), tiny_tokenizer(), **options) as engine:
        assert slots(engine)
        forget_all(engine)
        chat = engine.chat(think_cache=think_cache)
        loaded: list[list[Turn]] = [[]]
        for _ in range(STEPS):
            operation = rng.choice(OPERATIONS)
            if operation == "load":
                loaded.append(copies(chat.turns))
                chat.load(copies(rng.choice(loaded)))
            try:
                one(engine, chat, rng, operation)
            except ContextFullError:
                chat.load(copies(chat.turns[: len(chat.turns) // 2]))
            engine.check()


@each_value_once
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_that_share_beginnings_are_answered_as_with_all_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: dict[str, bool], name: str
) -> None:
    rng = Random(name)
    stem = [rng.randrange(250) for _ in range(150)]
    prompts = [stem[: rng.randint(1, 150)] + [rng.randrange(250)] * rng.randint(1, 20) for _ in range(20)]
    answers = []
    options = {"context": CONTEXT, "max_chunk": CHUNK} | kernels
    for in_groups, more in ((True, {}), (True, {"num_blocks": 110, "offload": 1 << 22}), (False, {})):
        if not in_groups:
            monkeypatch.setattr("engine.cache.kv_needs.layer_groups", lambda *_: [])
        with tiny_engine(folder, CONFIGS[name](), **options, **more) as engine:
            assert bool(slots(engine)) is in_groups
            assert engine.pieces.decode_name.startswith("native") is kernels["fused"]
            found = []
            for first in range(0, len(prompts), 4):
                asked = [engine.start(Rows.of(prompt), GREEDY) for prompt in prompts[first : first + 4]]
                found += [heard(engine, sequence) for sequence in asked]
            told = [[*prompt, *(token for token, _ in found[0]), 1, 2] for prompt in prompts[:1]]
            found += [answer(engine, prompt)[0] for prompt in told]
            answers.append(found)
            figures = engine.figures().offload
            assert (figures is not None and figures.restored_tokens > 0) is bool(more)
            engine.check()
    for others in answers[:2]:
        for mine, theirs in zip(others, answers[2], strict=True):
            assert [token for token, _ in mine] == [token for token, _ in theirs]
            assert [chance for _, chance in mine] == pytest.approx([chance for _, chance in theirs], abs=1e-4)


@each_value_once
@pytest.mark.parametrize("name", CONFIGS)
def test_what_comes_back_from_host_memory_has_the_bits_of_what_never_left(
    folder: Path, kernels: dict[str, bool], name: str
) -> None:
    prompts = [[(17 * i + at) % 250 for i in range(150)] for at in range(4)]
    options: dict[str, Any] = {"context": CONTEXT, "max_chunk": CHUNK, "offload": 1 << 22} | kernels
    with tiny_engine(folder, CONFIGS[name](), **options) as engine:
        forget_all(engine)
        first, _ = answer(engine, prompts[0])
        told = [*prompts[0], *(token for token, _ in first), 5, 6, 7]
        expected, few = answer(engine, told)
        restored = [0]
        for most in (0, 10, None):  # what is lost first: only slots, or blocks at the end, or all
            for prompt in prompts[1:]:
                answer(engine, prompt)
            assert lacking_slots(engine, told), "the pools have no room for all of it"
            engine.loop.call(lambda most=most: offload(engine.pieces.blocks, most))
            forget_unheld(engine)
            found, computed = answer(engine, told)
            assert found == expected
            assert computed <= few
            figures = engine.figures().offload
            assert figures is not None
            restored.append(figures.restored_tokens)
            engine.check()
        each = [after - before for before, after in pairwise(restored)]
        assert 0 < each[0] < each[1] < each[2], "no more than needed"
        assert few <= 4


def forget_unheld(engine: TinyEngine) -> None:
    """Make NaN of the rows of all free blocks, and of all free slots of pools."""
    cache, pools = engine.pieces.cache, engine.pieces.cache.pools
    blocks = engine.pieces.blocks
    free = [[block.id for block in blocks.every if not block.keys]]
    free += [[*pool._free] for pool in pools]
    for part, group in zip(cache.parts, cache._group_of_part, strict=True):
        for slot in free[group]:
            part[:, :, slot * SIZE : (slot + 1) * SIZE] = float("nan")


def test_a_prompt_that_turns_off_further_back_than_the_window_is_computed_from_where_it_can_be(
    folder: Path, kernels: dict[str, bool]
) -> None:
    prompt = [(17 * i) % 250 for i in range(200)]
    with tiny_engine(folder, CONFIGS["gemma4"](), context=CONTEXT, max_chunk=CHUNK, **kernels) as engine:
        expected, _ = answer(engine, prompt)
        near, far = [*prompt[:190], 1, 2, 3], [*prompt[:40], 1, 2, 3]
        assert answer(engine, near)[1] == 3
        assert answer(engine, far)[1] == 43, "its rows are there, but not those of the window"
        assert [token for token, _ in answer(engine, prompt)[0]] == [token for token, _ in expected]


@each_value_once
@pytest.mark.parametrize("name", CONFIGS)
def test_after_a_restart_rows_that_were_released_are_not_missed(
    folder: Path, tmp_path: Path, kernels: dict[str, bool], name: str
) -> None:
    prompt = [(17 * i) % 250 for i in range(200)]
    store, options = (
        tmp_path / "kv",
        {"context": CONTEXT, "max_chunk": CHUNK, "config": CONFIGS[name](), **kernels},
    )
    with on_disk(folder, store, **options) as engine:
        first, _ = answer(engine, prompt)
        told = prompt + [token for token, _ in first]
        engine.warm(told)
        saved(engine, "one", told)
        expected = answer(engine, [*told, 5, 6, 7])[0]
        lacking = engine.loop.call(lambda: lacking_slots(engine, told))
        assert lacking, "the pools have no room for all of it"
    with on_disk(folder, store, **options) as engine:
        forget_all(engine)
        again, computed = answer(engine, [*told, 5, 6, 7])
        whole = len(told) // SIZE * SIZE
        assert (again, computed) == (expected, len(told) + 3 - whole)
        assert engine.figures().disk.restored_tokens == whole
        assert engine.loop.call(lambda: lacking_slots(engine, told)) >= lacking


def lacking_slots(engine: TinyEngine, tokens: list[int]) -> int:
    blocks = engine.pieces.blocks
    return sum(not blocks.groups.have(block.id) for block in blocks.index.chain(tokens))


def test_a_path_that_lost_the_rows_of_its_window_comes_back_from_disk(
    folder: Path, tmp_path: Path, kernels: dict[str, bool]
) -> None:
    prompts = [[(17 * i + at) % 250 for i in range(150)] for at in range(4)]
    options = {
        "context": CONTEXT,
        "max_chunk": CHUNK,
        "config": CONFIGS["gemma4"](),
        "num_blocks": 400,
    } | kernels
    with on_disk(folder, tmp_path / "kv", **options) as engine:
        expected = []
        for number, prompt in enumerate(prompts):
            expected.append(answer(engine, prompt)[0])
            saved(engine, f"n{number}", prompt)
        assert engine.kept_tokens(prompts[0]) == 148
        again, computed = answer(engine, prompts[0])
        assert (again, computed) == (expected[0], 2)
        assert 0 < engine.figures().disk.restored_tokens < 20, "no more than its window"
        engine.check()


def test_a_last_block_that_lost_its_rows_of_windows_is_not_written(
    folder: Path, tmp_path: Path, kernels: dict[str, bool]
) -> None:
    prompts = [[at + 1] * 150 for at in range(4)]  # any rows of a prompt look like its last ones
    options = {
        "context": CONTEXT,
        "max_chunk": CHUNK,
        "config": CONFIGS["gemma4"](),
        "num_blocks": 400,
    } | kernels
    with on_disk(folder, tmp_path / "kv", **options) as engine:
        for prompt in prompts:
            answer(engine, prompt)
        assert engine.kept_tokens(prompts[0]) < 148, "the rows of its windows are lost"
        disk, told = engine.disk, prompts[0]
        assert disk is not None
        engine.loop.call(lambda: disk.request_write("one", told, len(told)))
        until(lambda: engine.loop.call(lambda: disk.written) >= 148)
        again, computed = answer(engine, told)
        assert disk.written == 148, "and no other block in place of the last"
        assert (len(again), computed) == (GREEDY.max_tokens, 150)
        engine.check()


def test_people_are_told_what_the_windows_take(folder: Path) -> None:
    with tiny_engine(folder, CONFIGS["gemma4"](), context=CONTEXT, max_chunk=CHUNK) as engine:
        figures, cache = engine.figures(), engine.pieces.cache
        rows = (cache.pools[0].num_slots + 1) * SIZE
        assert figures.kv_window_bytes == rows * cache.group_bytes(1) < figures.kv_bytes == cache.nbytes
        text = " ".join(map(line_text, stats_lines(200, None, SessionStats(), None, figures)))
        assert f"{bytes_text(figures.kv_window_bytes)} of it for layers with a window" in text
