"""Constrained answers in slots of a GPU, beside unconstrained ones."""

import json
import re
from pathlib import Path

import pytest
import torch

from engine import Constraint, SamplingParams
from tests.gpu.engines import CONFIGS, Job, alone, an_engine, at_once, random_tokens
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "state": {"enum": ["awake", "asleep"]}},
    "required": ["name", "state"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    None,
    Constraint("json_schema", json.dumps(PERSON)),
    Constraint("regex", "(yes|no), because of [a-z]{5,20}[.]"),
    None,
]
SOBER = {259: -100.0}
"""A bias against the token that begins the thinking."""


def a_job(number: int) -> Job:
    constraint = CONSTRAINTS[number % len(CONSTRAINTS)]
    params = SamplingParams(
        temperature=1.0 if number % 3 else 0.0,
        top_k=20 if number % 2 else 0,
        seed=number,
        max_tokens=None if constraint else 60,
        frequency_penalty=0.3 if number % 5 == 1 else 0.0,
        logprobs=2 if number % 7 == 3 else None,
        constraint=constraint,
        logit_bias=SOBER,
    )
    return random_tokens(20 + number, number), params


def matches(text: str, constraint: Constraint) -> object:
    if constraint.kind == "regex":
        return re.fullmatch(constraint.text, text)
    value = json.loads(text)
    return list(value) == ["name", "state"] and len(value["name"]) <= 6


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("graphs", [True, False])
def test_what_has_to_match_does_and_each_says_what_it_says_alone(
    tmp_path: Path, graphs: bool, jumps: bool
) -> None:
    """Forced tokens that are computed together may have other bits beside others; otherwise everything is the same."""
    folder = write_checkpoint(tmp_path, CONFIGS["qwen3"], dtype=torch.bfloat16)
    with an_engine(folder, ends=True, streams=8, graphs=graphs) as engine:
        engine.engine_step.jumps = jumps
        jobs = [a_job(number) for number in range(8)]
        for prompt, _ in jobs:
            engine.warm(prompt)
        before = [alone(engine, job) for job in jobs]
        for _ in range(2):
            found = at_once(engine, jobs)
            assert jumps or found == before
            for tokens, (_, params) in zip(found, jobs, strict=True):
                if params.constraint is not None:
                    text = engine.tokenizer.decode(tokens)
                    assert matches(text, params.constraint), text
                else:
                    assert len(tokens) == 60 or tokens[-1] in engine.tokenizer.stop_ids
