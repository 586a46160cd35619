"""Many streams at once on a GPU: each gets a correct text, and up to eight get the same bits as alone.

Nothing here depends on time: which streams share a step is left to chance, and every claim holds in any case.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import SamplingParams
from engine.cache.host_memory import PromptCosts
from engine.engine import Engine
from engine.execute.build_options import BuildOptions
from tests.gpu.engines import (
    CONFIGS,
    DEVICE,
    Job,
    alone,
    an_engine,
    at_once,
    forget,
    one_after_the_other,
    random_tokens,
    rest,
    start,
    started_apart,
)
from tests.models.checkpoints import reference_model, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

BF16 = torch.bfloat16
deterministic = pytest.mark.skipif(
    "deterministic" not in {field.name for field in fields(BuildOptions)}, reason="there is no such option"
)


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), CONFIGS[request.param], dtype=BF16)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with an_engine(folder, BF16, attention="auto", block_size=None, num_blocks=512, streams=64) as engine:
        yield engine


def a_job(number: int, tokens: int = 60, longest: int = 300) -> Job:
    """Return a job with a prompt of mixed length and parameters of any kind."""
    random = Random(number)
    drawn = [
        SamplingParams(temperature=0.0, max_tokens=tokens),
        SamplingParams(temperature=1.0, seed=number, max_tokens=tokens),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=number, max_tokens=tokens),
        SamplingParams(temperature=1.1, min_p=0.02, presence_penalty=0.7, seed=number, max_tokens=tokens),
        SamplingParams(temperature=0.9, repetition_penalty=1.3, seed=number, max_tokens=tokens),
    ]
    return random_tokens(random.randint(1, longest), number), drawn[number % len(drawn)]


# -- the same bits


def texts_alone(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    """Return every answer without other streams, after a prompt of which only the last row is not cached."""
    for prompt, _ in jobs:
        engine.warm(prompt)
    return [alone(engine, job) for job in jobs]


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_up_to_eight_streams_say_what_each_says_alone(engine: Engine, count: int) -> None:
    forget(engine)
    # Long sequences beside short ones: the layout of a step depends on its longest sequence.
    jobs = [a_job(100 * count + n, 40 + 11 * n, 1300 if n % 3 == 1 else 200) for n in range(count)]
    expected = texts_alone(engine, jobs)
    assert len({tuple(text) for text in expected}) == count
    assert one_after_the_other(engine, jobs) == expected
    assert one_after_the_other(engine, jobs[::-1]) == expected[::-1]


def test_a_stream_does_not_see_others_come_and_go(engine: Engine) -> None:
    forget(engine)
    random = Random(5)
    jobs = [a_job(n, tokens=300 if n == 0 else random.randint(1, 40)) for n in range(20)]
    expected = texts_alone(engine, jobs)
    ((longest, first),) = started_apart(engine, jobs[:1])
    for n in range(1, 20, 5):
        beside = started_apart(engine, jobs[n : n + 5])
        cancelled = beside[2][0]
        cancelled.cancelled = True
        for (each, token), text in zip(beside, expected[n : n + 5], strict=False):
            found = [token, *rest(engine, each)]
            assert found == text[: len(found)]
            assert len(found) == len(text) or each is cancelled
    assert [first, *rest(engine, longest)] == expected[0]


def test_preempted_streams_go_on_as_if_nothing_had_been(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether offloading pays is measured, so it depends on other users of the GPU and the bus.
    monkeypatch.setattr(PromptCosts, "worth_it", True)
    jobs = [
        (random_tokens(100, n), SamplingParams(temperature=1.0, seed=n, max_tokens=220)) for n in range(6)
    ]
    with an_engine(folder, BF16, streams=8) as engine:
        expected = texts_alone(engine, jobs)
    with an_engine(folder, BF16, streams=8, context=400, num_blocks=30, offload=1 << 30) as engine:
        assert engine.pieces.cache.host is not None
        engine.pieces.cache.host.prepare(wait=True)
        for prompt, _ in jobs:
            engine.warm(prompt)
        started = started_apart(engine, jobs)
        assert [[token, *rest(engine, each)] for each, token in started] == expected
        assert sum(each.preemptions for each, _ in started) > 0


@deterministic
@pytest.mark.parametrize("options", [{}, {"max_chunk": 64}, {"max_chunk": 97}, {"graphs": False}])
def test_with_deterministic_nothing_changes_a_text(folder: Path, options: dict[str, Any]) -> None:
    """Alone, partly cached, split, all at once, more than eight of them, preempted and computed again."""
    jobs = [a_job(n) for n in range(20)]
    with an_engine(folder, BF16, deterministic=True, streams=32) as engine:
        expected = []
        for job in jobs:
            forget(engine)
            expected.append(alone(engine, job))
        assert at_once(engine, jobs) == expected  # their prompts are cached
        forget(engine)
        for n, (prompt, _) in enumerate(jobs):
            engine.warm(prompt[: (n * 37) % len(prompt)])
        assert [alone(engine, job) for job in jobs] == expected
    with an_engine(folder, BF16, deterministic=True, streams=32, **options) as engine:
        assert at_once(engine, jobs) == expected
    with an_engine(
        folder, BF16, deterministic=True, streams=32, context=400, num_blocks=40, offload=0, **options
    ) as engine:
        assert at_once(engine, jobs) == expected


# -- the right text


class Truth:
    """The logits of transformers in fp32, and the largest error of its bf16 logits on a text of its own."""

    def __init__(self, folder: Path) -> None:
        self._exact = reference_model(folder).to(DEVICE)
        rounded = reference_model(folder, BF16).to(DEVICE)
        text = random_tokens(400, 999)
        with torch.inference_mode():
            ids = torch.tensor([text], device=DEVICE)
            self._error = float((rounded(ids).logits.float() - self._exact(ids).logits).abs().max())

    def after(self, job: Job, answer: list[int]) -> Tensor:
        """Return the logits fp32 [len(answer), vocab] that every token was drawn from."""
        with torch.inference_mode():
            logits = self._exact(torch.tensor([job[0] + answer], device=DEVICE)).logits[0]
        return logits[len(job[0]) - 1 : -1]

    def check(self, job: Job, answer: list[int], exactly: bool) -> None:
        """Assert that every token is allowed by its parameters; tokens closer than the rounding may change places."""
        prompt, params = job
        assert len(answer) == params.max_tokens
        logits = self.after(job, answer)
        slack = 1e-3 if exactly else 2 * self._error
        if params.repetition_penalty != 1.0 or params.presence_penalty:
            slack *= max(params.repetition_penalty, 1 / params.repetition_penalty)
        for n, (row, token) in enumerate(zip(penalised(logits, prompt, answer, params), answer, strict=True)):
            least = lowest_allowed(row, params)
            assert row[token] >= least - slack, f"token {n} of {len(answer)}: {row[token]} is below {least}"


def penalised(logits: Tensor, prompt: list[int], answer: list[int], params: SamplingParams) -> list[Tensor]:
    """Return the logits of every step with the penalties of the preceding text."""
    rows = []
    for n, row in enumerate(logits):
        row = row.clone()
        seen = torch.tensor(sorted({*prompt, *answer[:n]}), device=row.device)
        said = torch.tensor(sorted(set(answer[:n])), dtype=torch.int64, device=row.device)
        penalty = params.repetition_penalty
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        row[said] -= params.presence_penalty
        rows.append(row)
    return rows


def lowest_allowed(row: Tensor, params: SamplingParams) -> float:
    """Return the logit below which nothing may be drawn."""
    if params.temperature == 0.0:
        return float(row.max())
    least = float(row.min())
    if params.top_k:
        least = max(least, float(row.topk(params.top_k).values[-1]))
    if params.min_p:
        least = max(least, float(row.max()) + params.temperature * float(torch.tensor(params.min_p).log()))
    return least


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    return Truth(folder)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_sixty_four_streams_all_end_with_the_right_text(
    folder: Path, truth: Truth, dtype: torch.dtype
) -> None:
    random = Random(1)
    jobs = [
        (
            random_tokens(random.randint(1, 250), n),
            SamplingParams(temperature=0.0, max_tokens=random.randint(1, 120)),
        )
        for n in range(64)
    ]
    with an_engine(folder, dtype, num_blocks=900, streams=64) as engine:
        answers = at_once(engine, jobs)
    for job, answer in zip(jobs, answers, strict=True):
        truth.check(job, answer, exactly=dtype == torch.float32)


def test_every_stream_keeps_to_its_own_parameters(engine: Engine, truth: Truth) -> None:
    """Penalties are used with greedy decoding: an effect of another stream's text would show at once."""
    forget(engine)
    changes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.0, "presence_penalty": 1.5},
        {"temperature": 0.0, "presence_penalty": -1.0},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.1},
    ]
    random = Random(2)
    jobs = [
        (random_tokens(random.randint(1, 200), n), SamplingParams(max_tokens=30 + n, **changes[n % 8]))
        for n in range(40)
    ]
    for job, answer in zip(jobs, at_once(engine, jobs), strict=True):
        truth.check(job, answer, exactly=False)


@pytest.mark.parametrize("num_blocks", [512, 64], ids=["roomy", "crowded"])
def test_cancelling_half_of_them_leaves_the_others_right(folder: Path, truth: Truth, num_blocks: int) -> None:
    random = Random(3)
    greedy = SamplingParams(temperature=0.0, max_tokens=80)
    jobs = [(random_tokens(random.randint(1, 200), n), greedy) for n in range(32)]
    with an_engine(folder, BF16, context=400, num_blocks=num_blocks, streams=32) as engine:
        started = [start(engine, job) for job in jobs]
        cancelled = started[::2]
        for n, each in enumerate(cancelled):
            events = engine.events(each)
            for _ in range(n % 5):
                next(events)
            each.cancelled = True
        for job, each in zip(jobs, started, strict=True):
            found = rest(engine, each)
            if each not in cancelled:
                truth.check(job, found, exactly=False)
        assert engine.figures().blocks_held == 0
        truth.check(jobs[0], alone(engine, jobs[0]), exactly=False)
