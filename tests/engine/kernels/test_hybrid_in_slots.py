"""An engine whose answers come from slots of a decode runner, for networks with gated delta nets."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine import SamplingParams, build
from engine.attention import sdpa
from engine.attention.walks import WalkStep
from engine.cache import kv_needs
from engine.cache.rows import Rows
from engine.execute import compatibility
from engine.execute.runner import Runner
from tests.engine.hybrid import hybrid_network
from tests.engine.keeping import heard
from tests.engine.kernels.test_delta_steps import SPECS
from tests.engine.kernels.test_groups_in_slots import BLOCK, CONTEXT, in_slots
from tests.engine.speculation import Oracle, speculate
from tests.engine.test_hybrid_engine import expected, text
from tests.engine.tiny import TinyEngine, tiny_engine
from tests.models.families import tiny_falcon_h1, tiny_granite_hybrid, tiny_nemotron_h
from tests.models.hybrids import tiny_qwen3_5_moe, tiny_qwen3_next

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_hybrid.py does the same"),
    pytest.mark.usefixtures("few_programs"),
]

SPEC = replace(SPECS["usual"], layers=SPECS["usual"].layers[:2])


OPTIONS: dict[str, Any] = {
    "context": CONTEXT, "max_chunk": 32, "block_size": BLOCK, "streams": 3, "fused": True
}  # fmt: skip


KINDS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
QWEN: dict[str, Any] = KINDS | {
    "vocab_size": 272, "head_dim": 64, "num_key_value_heads": 1,
    "linear_value_head_dim": 16, "linear_num_value_heads": 4,
}  # fmt: skip
GRANITE: dict[str, Any] = KINDS | {
    "vocab_size": 272, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "shared_intermediate_size": 48,
}  # fmt: skip
HEADS = {"vocab_size": 272, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
NEMOTRON: dict[str, Any] = HEADS | {"ssm_state_size": 16, "n_group": 1, "topk_group": 1}
FALCON: dict[str, Any] = HEADS | {"num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_d_state": 16}
FAMILIES: dict[str, Any] = {
    "qwen3.5 moe": tiny_qwen3_5_moe(**QWEN),
    "qwen3 next": tiny_qwen3_next(**QWEN),
    "granite": tiny_granite_hybrid(**GRANITE),
    "nemotron 3": tiny_nemotron_h(**NEMOTRON),
    "falcon h1": tiny_falcon_h1(**FALCON),
}


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "not_native", lambda spec: "as on a GPU")
    monkeypatch.setattr(Runner, "go_native", lambda *_: None)
    monkeypatch.setattr(build, "_tell", in_slots)
    monkeypatch.setattr(sdpa, "recurrence_step", lambda device: WalkStep)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyEngine]:
    """Its memory is NaN wherever nobody has written, and it has few marks."""
    monkeypatch.setattr(kv_needs, "BRANCH_WINDOWS", (1, 0))
    monkeypatch.setattr(kv_needs, "MOST_MARKS", 6)
    as_on_a_gpu(monkeypatch)
    with tiny_engine(Path(), network=hybrid_network(SPEC), **OPTIONS) as engine:
        engine.tokenizer.stop_ids = frozenset()
        cache = engine.pieces.cache
        assert cache.states is not None
        for part in cache.parts:
            part[:, :, :-BLOCK] = float("nan")
        for states in cache.states.layers.values():
            states.fill_(float("nan"))
        yield engine


def params(most: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=most, speculation="auto")


def test_streams_beside_each_other_say_what_they_say_alone(engine: TinyEngine) -> None:
    """They pass the marks within answers, end at different times, and go on from each other's ends."""
    stem = text(4, 58)
    prompts = [stem, [*stem[:25], 7], text(5, 9)]
    for _ in range(2):
        asked = [
            engine.start(Rows.of(prompt), params(most))
            for prompt, most in zip(prompts, (9, 3, 7), strict=True)
        ]
        found = [[token for token, _ in heard(engine, sequence)] for sequence in asked]
        for prompt, answer in zip(prompts, found, strict=True):
            assert answer == expected(engine, prompt, len(answer))
        engine.check()
        prompts = [[*prompt, *answer[:-2]] for prompt, answer in zip(prompts, found, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_answer_as_the_reference_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    as_on_a_gpu(monkeypatch)
    with tiny_engine(tmp_path, FAMILIES[name], **OPTIONS) as engine:
        engine.tokenizer.stop_ids = frozenset()
        assert engine.pieces.decode_runner is not None
        prompt = text(3, 20)
        answer = [token for token, _ in heard(engine, engine.start(Rows.of(prompt), params(4)))]
        assert answer == expected(engine, prompt, 4)


def test_an_answer_goes_on_at_its_last_row(engine: TinyEngine) -> None:
    prompt = text(6, 50)
    answer = [token for token, _ in heard(engine, engine.start(Rows.of(prompt), params(18)))]
    for taken in (1, 16):
        given = [*prompt, *answer[:-taken]]
        sequence = engine.start(Rows.of(given), params(2))
        assert [token for token, _ in heard(engine, sequence)] == expected(engine, given, 2)
        assert sequence.prompt_tokens - sequence.hit.rows == 1, "one row is computed, the others are known"
    engine.check()


def test_after_an_end_token_only_what_follows_is_computed(engine: TinyEngine) -> None:
    prompt = text(6, 20)
    answer = expected(engine, prompt, 14)
    end = next(at for at in range(9, 14) if answer[at] not in answer[:at])
    engine.engine_step.answers.stop_ids = frozenset({answer[end]})
    given = [*prompt, *answer[: end + 1]]
    assert [token for token, _ in heard(engine, engine.start(Rows.of(prompt), params(14)))] == given[20:]
    marks = engine.pieces.blocks.marks
    assert marks is not None
    assert max(mark.row for mark in marks) == len(given), (
        "the step in flight has computed the end token's row"
    )
    engine.engine_step.answers.stop_ids = frozenset()
    sequence = engine.start(Rows.of([*given, 1, 2]), params(2))
    assert [token for token, _ in heard(engine, sequence)] == expected(engine, [*given, 1, 2], 2)
    assert sequence.hit.rows == len(given)
    engine.check()


def test_a_prompt_is_answered_again_from_its_logits(engine: TinyEngine) -> None:
    prompt = text(6, 50)
    for rows in (0, 50, 50):
        sequence = engine.start(Rows.of(prompt), params(5))
        assert [token for token, _ in heard(engine, sequence)] == expected(engine, prompt, 5)
        assert sequence.hit.rows == rows
    engine.check()


@pytest.mark.parametrize("seed", range(2))
def test_right_and_wrong_guesses_change_no_token(engine: TinyEngine, seed: int) -> None:
    rng = Random(seed)
    prompts = [text(seed + 7, 30), text(seed + 8, 12)]
    wanted = [expected(engine, prompt, 16) for prompt in prompts]
    texts = {at: [*prompt, *wanted[at]] for at, prompt in enumerate(prompts)}
    speculate(engine, Oracle(answers=dict(texts), random=rng))
    asked = [engine.start(Rows.of(prompt), params(16)) for prompt in prompts]
    assert [[token for token, _ in heard(engine, sequence)] for sequence in asked] == wanted
    assert any(sequence.accepted for sequence in asked)
    engine.check()


def test_tokens_that_are_drawn_again_are_those_that_were_reported(engine: TinyEngine) -> None:
    """A sequence loses its slot and all rows. It leaves the slot again where another token is drawn than before."""
    prompt, scheduler = text(9, 40), engine.pieces.scheduler
    sequence = engine.start(Rows.of(prompt), params(14))

    def lose() -> list[int]:
        if len(sequence.generated) < 9 or not sequence.joined:
            return []
        scheduler.preempt(sequence)
        engine.pieces.blocks.evict_all()
        told = sequence.rows.rewind(len(prompt) + 3)
        told[2] = (told[2] + 1) % 250
        sequence.rows.extend(told)
        sequence.generated[3:] = told
        return list(sequence.generated)

    while not (told := engine.loop.call(lose)):
        pass
    list(engine.events(sequence))
    answer = sequence.generated
    assert answer[: len(told)] == told
    assert answer == [*told, *expected(engine, [*prompt, *told], 14 - len(told))]
    engine.check()
