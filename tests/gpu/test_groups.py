"""Layers with a window keep only its rows: the answers are, bit by bit, those of an engine that keeps all rows."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.cache.host_memory import PromptCosts
from engine.engine import Engine
from tests.engine.inside import check_blocks, offload
from tests.engine.keeping import answer, keep, saved
from tests.gpu.engines import an_engine, random_tokens, started_apart
from tests.models.checkpoints import write_checkpoint
from tests.models.families import FUSED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

BLOCK = 32
PARAMS = SamplingParams(temperature=0.0, max_tokens=150, logprobs=0)
TEXTS = [random_tokens(count, count) for count in (600, 310, 64, 7)]
OPTIONS: dict[str, Any] = {"attention": "triton", "block_size": BLOCK, "max_chunk": 256, "streams": 4}


@pytest.fixture(scope="module", params=["gemma3", "gemma4", "gpt-oss", "lfm2 biases"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = deepcopy(FUSED[request.param])
    config.vocab_size, config.max_position_embeddings = 272, 2048
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = config.vocab_size
    if hasattr(config, "sliding_window"):
        config.sliding_window = 100
    name = request.param.replace(" ", "_")
    return write_checkpoint(tmp_path_factory.mktemp(name), config, dtype=torch.bfloat16)


def drawn(engine: Engine, texts: list[list[int]]) -> list[list[tuple[int, float | None]]]:
    """The tokens of streams that decode at once, with their log-probabilities except for the first."""
    streams = started_apart(engine, [(text, PARAMS) for text in texts])
    return [
        [(first, None), *((event.token_id, event.logprob) for event in engine.events(sequence))]
        for sequence, first in streams
    ]


def test_answers_have_the_bits_that_they_have_with_all_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for in_groups in (True, False):
        if not in_groups:
            monkeypatch.setattr("engine.cache.kv_needs.layer_groups", lambda *_: [])
        with an_engine(folder, **OPTIONS) as engine:
            cache = engine.pieces.cache
            pools = cache.pools
            assert bool(pools) is in_groups
            assert engine.figures().decode.startswith("fused kernels"), engine.figures().notes
            assert all(pool.num_slots < engine.pieces.blocks.num_blocks / 2 for pool in pools)

            def spoil(engine: Engine = engine) -> None:
                for part in engine.pieces.cache.parts:
                    part[:, :, :-BLOCK] = float("nan")  # which nobody has written

            engine.loop.call(spoil)
            answers = drawn(engine, TEXTS)
            told = [*TEXTS[1], *(token for token, _ in answers[1]), *random_tokens(20, 5)]
            found.append([*answers, *drawn(engine, [told])])
            blanks = [part[:, :, -BLOCK:] for part in cache.parts]
            own = [blank for blank, group in zip(blanks, cache._group_of_part, strict=True) if group]
            assert not any(bool(blank.any()) for blank in own), "nothing writes to the blank block"
    assert found[0] == found[1]


def test_a_network_that_is_not_fused_finds_the_rows_of_windows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS | {"fused": False}
    found = []
    for in_groups in (True, False):
        if not in_groups:
            monkeypatch.setattr("engine.cache.kv_needs.layer_groups", lambda *_: [])
        with an_engine(folder, **options) as engine:
            assert bool(engine.pieces.cache.pools) is in_groups
            # One after the other: the library's products round as the number of rows asks for.
            found.append([drawn(engine, [text]) for text in TEXTS[1:]])
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"deterministic": True}, {"kv_dtype": "fp8"}], ids=str)
def test_other_ways_of_prompts_and_of_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    found = []
    for in_groups in (True, False):
        if not in_groups:
            monkeypatch.setattr("engine.cache.kv_needs.layer_groups", lambda *_: [])
        with an_engine(folder, **OPTIONS | options) as engine:
            found.append(drawn(engine, TEXTS[1:3]))
    assert found[0] == found[1]


def test_after_a_restart_the_same_bits(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptCosts, "worth_it", True)
    told, prompt = TEXTS[0][:512], [*TEXTS[0][:512], 7, 8, 9]
    with an_engine(folder, **OPTIONS) as engine:
        keep(engine, tmp_path / "kv")
        engine.warm(told)
        saved(engine, "talk", told)
        expected = answer(engine, prompt, PARAMS)[0]
    with an_engine(folder, **OPTIONS) as engine:
        tier = keep(engine, tmp_path / "kv")
        assert answer(engine, prompt, PARAMS) == (expected, 3)
        assert (tier.restored, tier.problem) == (512, "")


def test_what_was_offloaded_continues_with_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptCosts, "worth_it", True)
    texts = [random_tokens(600, 40 + at) for at in range(12)]
    with an_engine(folder, **OPTIONS, num_blocks=80, offload=1 << 28) as engine:
        cache, blocks = engine.pieces.cache, engine.pieces.blocks
        assert cache.host is not None
        cache.host.prepare(wait=True)
        first, _ = answer(engine, texts[0], PARAMS)
        told = [*texts[0], *(token for token, _ in first), 7, 8, 9]
        expected, few = answer(engine, told, PARAMS)
        for most in (0, 8, None):  # what is lost first: only slots, or blocks at the end, or all
            for text in texts[1:]:
                engine.warm(text)
            engine.loop.call(lambda most=most: offload(blocks, most))
            found, computed = answer(engine, told, PARAMS)
            assert (found, computed <= few) == (expected, True)
            check_blocks(engine)
        figures = engine.figures().offload
        assert figures is not None
        assert figures.restored_tokens > 600
