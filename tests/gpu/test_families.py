"""Families whose features the fused kernels support, on a GPU in bf16: against transformers in fp32, and bit by bit."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.stepping import blocks_for, forced_logits
from engine import SamplingParams
from engine.attention.choose import choose_attention
from engine.attention.unusual import kinds
from engine.batch import Span, StepBatch
from engine.errors import EngineError
from models.loading.load import load_model
from tests.gpu.engines import DEVICE, an_engine, random_tokens
from tests.gpu.test_logits import errors, logits_of, prefilled_logits
from tests.models.checkpoints import files_of, reference_model, write_checkpoint
from tests.models.families import FUSED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

BF16 = torch.bfloat16
COUNT = 24
TEXTS = [random_tokens(60 + 67 * n % 401, n) for n in range(20)]
"""Longer than the windows, and than a window and a chunk of the attention together."""


@pytest.fixture(scope="module", params=list(FUSED))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = deepcopy(FUSED[request.param])
    config.vocab_size, config.max_position_embeddings = 272, 2048
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = config.vocab_size
    return write_checkpoint(tmp_path_factory.mktemp(request.param.replace(" ", "_")), config, dtype=BF16)


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return the logits of each text's last tokens in fp32, and the errors of transformers in bf16."""
    exact, rounded = reference_model(folder).cuda(), reference_model(folder, BF16).cuda()
    wanted = [logits_of(exact, text)[-COUNT:] for text in TEXTS]
    found = [
        errors(logits_of(rounded, text)[-COUNT:], logits) for text, logits in zip(TEXTS, wanted, strict=True)
    ]
    return wanted, found


ATTENTION = pytest.mark.parametrize("attention", ["flash", "triton", "sdpa"])


def engine_of(folder: Path, attention: str = "auto", **options: Any) -> Any:
    """Load an engine with the requested attention; skip the test if flash-attn does not support the model's."""
    options = {"attention": attention, "block_size": None, "num_blocks": 600, "streams": len(TEXTS)} | options
    try:
        network = load_model(files_of(folder), dtype=BF16, device=DEVICE)
        asked = kinds(network.spec.attentions.values())
        choose_attention(attention, DEVICE, BF16, network.spec.attention.head_dim, asked)
    except EngineError as error:
        if attention != "flash":
            raise
        pytest.skip(str(error))
    return an_engine(folder, BF16, **options)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 20])
def test_no_error_of_families_is_larger_than_that_of_transformers(
    folder: Path, reference: tuple[list[Tensor], list[Tensor]], rows: int
) -> None:
    with engine_of(folder) as engine:
        assert engine.figures().decode.startswith("fused kernels"), engine.figures().notes
        assert engine.figures().attention in ("flash", "triton"), engine.figures().notes
        groups = [TEXTS[first : first + rows] for first in range(0, len(TEXTS), rows)]
        found = torch.cat([forced_logits(engine, texts, COUNT) for texts in groups])
    wanted, theirs = (torch.stack(each) for each in reference)
    ours = errors(found, wanted)
    print(f"{folder.name}, {rows} rows: median {ours.median():.3e} of {theirs.median():.3e}, ", end="")
    print(f"maximum {ours.max():.3e} of {theirs.max():.3e}")
    assert ours.median() <= 1.05 * theirs.median()  # of 480 positions
    assert ours.max() <= 1.5 * theirs.max()


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_up_to_eight_rows_of_families_have_the_bits_that_each_has_alone(folder: Path, rows: int) -> None:
    with engine_of(folder) as engine:
        alone = torch.cat([forced_logits(engine, [text], COUNT) for text in TEXTS[:rows]])
        assert torch.equal(forced_logits(engine, TEXTS[:rows], COUNT), alone)


@ATTENTION
def test_no_error_of_prompts_of_families_is_larger_either(folder: Path, attention: str) -> None:
    """In chunks of many tokens, and in captured steps of one sequence and of several at once."""
    texts = [random_tokens(400, 77), random_tokens(300, 78), random_tokens(37, 79)]
    exact, rounded = reference_model(folder).cuda(), reference_model(folder, BF16).cuda()
    wanted = [logits_of(exact, text) for text in texts]
    theirs = torch.cat([errors(logits_of(rounded, t), w) for t, w in zip(texts, wanted, strict=True)])
    with engine_of(folder, attention) as engine:
        assert engine.figures().attention == attention
        ours = torch.cat(
            [
                errors(prefilled_logits(engine, text, [0, *(c for c in (170, 300) if c < len(text))]), w)
                for text, w in zip(texts, wanted, strict=True)
            ]
        )
        assert ours.median() <= 1.05 * theirs.median()
        assert ours.max() <= 1.5 * theirs.max()
        padded = engine.pieces.runner._padded
        assert (padded is None) == (attention == "sdpa")
        for cuts in ([(0, 170, 200, 216, 400)], [(0, 170, 400), (0, 130, 300), (0, 20, 37)]):
            steps = [
                [(number, each[part], each[part + 1]) for number, each in enumerate(cuts)]
                for part in range(len(cuts[0]) - 1)
            ]
            for _ in range(3):  # run, captured, replayed
                for step, rows in zip(steps, run_steps(engine, texts, steps), strict=True):
                    for row, (number, _, stop) in zip(rows, step, strict=True):
                        found = errors(row, wanted[number][stop - 1])
                        assert found <= 1.5 * theirs.max(), (attention, number, stop)
        assert padded is None or padded._graphs.problem is None
    print(f"{folder.name}, prompt, {attention}: median {ours.median():.3e} of {theirs.median():.3e}")


def run_steps(
    engine: Any, texts: list[list[int]], steps: list[list[tuple[int, int, int]]]
) -> list[list[Tensor]]:
    """Return the logits of each part (text, first token, end) of each step, starting with empty blocks."""

    def job() -> list[list[Tensor]]:
        engine.pieces.blocks.evict_all()
        found = []
        with blocks_for(engine, [[] for _ in texts], max(map(len, texts))) as tables:
            for step in steps:
                spans = tuple(
                    Span(
                        tuple(tables[number]), start, stop - start, texts[number][start:stop],
                        range(start, stop), True,
                    )
                    for number, start, stop in step
                )  # fmt: skip
                found.append([row.float().clone() for row in engine.pieces.runner.run(StepBatch(spans))])
        return found

    return engine.loop.call(job)


@pytest.mark.parametrize(
    "options",
    [{"graphs": False}, {"deterministic": True}, {"attention": "triton"}, {"attention": "sdpa"}],
    ids=str,
)
def test_answers_of_families_are_those_of_other_ways_but_for_ties(
    folder: Path, reference: tuple[list[Tensor], list[Tensor]], options: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    prompt = TEXTS[3]
    with engine_of(folder) as engine:
        answer = [event.token_id for event in engine.stream(prompt, params)]
        assert [event.token_id for event in engine.stream(prompt, params)] == answer  # from a cached prefix
    with engine_of(folder, **options) as engine:
        other = [event.token_id for event in engine.stream(prompt, params)]
    if other != answer:
        common = next(i for i, pair in enumerate(zip(answer, other, strict=True)) if pair[0] != pair[1])
        row = logits_of(reference_model(folder).cuda(), prompt + answer[:common])[-1]
        worst = max(float(error.max()) for error in reference[1])
        assert row[answer[common]] - row[other[common]] <= 2 * worst * row.norm()
