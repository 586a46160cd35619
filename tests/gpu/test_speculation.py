"""Guesses on a GPU: an answer is the same to the token with any of them, alone and beside others."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from engine import Engine, SamplingParams
from engine.cache.rows import Rows
from engine.schedule.sequence import Sequence
from tests.engine.inside import check_blocks
from tests.engine.speculation import Oracle, speculate
from tests.gpu.engines import CONFIGS, SIZES, an_engine, forget
from tests.gpu.test_structured import CONSTRAINTS, SOBER
from tests.models.checkpoints import tiny_qwen3, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

WIDE = tiny_qwen3(**SIZES, hidden_size=512, head_dim=64, num_attention_heads=16, num_key_value_heads=2)
"""Eight query heads per KV head, so that attention uses tensor cores."""
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (CONFIGS["qwen3"], {}),
    "llama": (CONFIGS["llama"], {}),
    "wide": (WIDE, {}),
    "int8 rows": (CONFIGS["qwen3"], {"kv_dtype": "int8"}),
    "fp8 rows, wide": (WIDE, {"kv_dtype": "fp8"}),
    "flash": (CONFIGS["qwen3"], {"attention": "flash", "block_size": None}),
}
CASES = 24


@pytest.fixture(scope="module", params=list(KINDS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config, options = KINDS[request.param]
    if options.get("attention") == "flash":
        pytest.importorskip("flash_attn")
    folder = write_checkpoint(tmp_path_factory.mktemp("guesses"), config, dtype=torch.bfloat16)
    # Deterministic: prompts have the same bits beside others as alone.
    with an_engine(folder, ends=True, streams=8, deterministic=True, **options) as engine:
        engine.engine_step.jumps = False  # when an answer jumps depends on the other streams
        yield engine


def drawn(random: Random) -> SamplingParams:
    constraint = random.choice([None, None, None, *CONSTRAINTS[1:3]])
    return SamplingParams(
        constraint=constraint,
        temperature=random.choice([0.0, 0.7, 1.0]),
        top_k=random.choice([0, 5]),
        top_p=random.choice([1.0, 0.9]),
        repetition_penalty=random.choice([1.0, 1.2]),
        presence_penalty=random.choice([0.0, 0.5]),
        frequency_penalty=random.choice([0.0, 0.5]),
        logit_bias=SOBER if constraint else random.choice([{}, {97: 4.0, 98: 4.0}]),
        logprobs=random.choice([None, None, 2]),
        seed=random.randrange(1000),
        max_tokens=random.randint(1, 90),
        stop=random.choice([(), ("a",), ("bc", "\n")]),
        speculation="auto",
    )


def asked(engine: Engine, number: int, params: SamplingParams) -> Sequence:
    random = Random(number)
    length = random.choice([3, 20, 31, 32, 300, 636, 1270])
    return engine.start(Rows.of([*b"abcabd xyz ", *random.choices(range(256), k=length)]), params)


def told(sequence: Sequence) -> list[Any]:
    stats = sequence.stats()
    return [
        sequence.finish_reason,
        sequence.tail,
        sequence.generated,
        sequence.rows.keys,
        stats.generated_tokens,
    ]


def test_an_answer_is_the_same_whatever_is_guessed(engine: Engine) -> None:
    assert engine.pieces.decode_runner is not None
    assert engine.pieces.decode_runner.checks_guesses
    guessed = accepted = 0
    for seed in range(CASES):
        random = Random(seed)
        several = [drawn(random) for _ in range(random.choice([1, 1, 1, 2, 3, 7, 8]))]
        engine.engine_step.speculating = None
        forget(engine)
        plain, events = list[Sequence](), []
        for number, params in enumerate(several):
            plain.append(asked(engine, seed + number, params))
            events.append(list(engine.events(plain[-1])))
        forget(engine)
        answers = {number: list(one.rows.token_ids) for number, one in enumerate(plain)}
        speculate(engine, Oracle(answers=answers, random=random))
        again = [asked(engine, seed + number, params) for number, params in enumerate(several)]
        for one, sequence, before in zip(events, again, plain, strict=True):
            assert list(engine.events(sequence)) == one, f"seed {seed}"
            assert told(sequence) == told(before), f"seed {seed}"
            guessed, accepted = guessed + sequence.guessed, accepted + sequence.accepted
            cached = [engine.cached_rows(each.rows) for each in (sequence, before)]
            assert cached[0] == cached[1], f"seed {seed}"
        check_blocks(engine)
    assert 50 < accepted < guessed


def test_an_answer_that_has_to_match_something_is_the_same_whatever_is_guessed(engine: Engine) -> None:
    """Also where it jumps: alone, it jumps at the same places."""
    accepted = 0
    engine.engine_step.jumps = True
    try:
        for seed in range(CASES):
            temperature = (0.0, 1.0)[seed % 2]
            params = SamplingParams(
                constraint=CONSTRAINTS[1 + seed % 2],
                logit_bias=SOBER,
                temperature=temperature,
                seed=seed,
                max_tokens=90,
                speculation="auto",
            )
            engine.engine_step.speculating = None
            forget(engine)
            plain = asked(engine, seed, params)
            events = list(engine.events(plain))
            forget(engine)
            speculate(engine, Oracle(answers={0: list(plain.rows.token_ids)}, random=Random(seed)))
            sequence = asked(engine, seed, params)
            assert list(engine.events(sequence)) == events, f"seed {seed}"
            assert told(sequence) == told(plain), f"seed {seed}"
            accepted += sequence.accepted
    finally:
        engine.engine_step.jumps = False
    assert accepted > 20


def test_an_answer_is_the_same_where_the_engine_knows_what_pays(engine: Engine) -> None:
    """With the engine's own pace, which after some steps knows what they cost."""
    params = SamplingParams(temperature=0.0, max_tokens=400, speculation="auto")
    forget(engine)
    assert engine.engine_step.speculating is not None
    plain = asked(engine, 1, replace(params, speculation="off"))
    events = list(engine.events(plain))
    forget(engine)
    with_guesses = asked(engine, 1, params)
    assert list(engine.events(with_guesses)) == events
