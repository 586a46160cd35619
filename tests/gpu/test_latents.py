"""Latent attention on a GPU: decode steps in fused kernels, and prompts, against transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.stepping import forced_logits
from engine import SamplingParams
from engine.engine import Engine
from tests.gpu.engines import (
    DEVICE,
    SIZES,
    alone,
    an_engine,
    check_guesses,
    forget,
    one_after_the_other,
    random_tokens,
)
from tests.gpu.test_logits import errors, logits_of, prefilled_logits
from tests.models.checkpoints import reference_model, write_checkpoint
from tests.models.families import tiny_deepseek, tiny_glm_lite

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

BF16 = torch.bfloat16
COUNT = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, speculation="auto")
TEXTS = [random_tokens(length, length) for length in (70, 500, 900)]
LATENT: dict[str, Any] = SIZES | {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
}
"""Rows of 576 numbers, as in the published models."""
DENSE = {"first_k_dense_replace": 4, "mlp_layer_types": ["dense"] * 4}
"""Without experts: their choice would magnify every difference."""
GLM = {"qk_nope_head_dim": 192, "v_head_dim": 256, "hidden_size": 320, "num_attention_heads": 20}
DEEPSEEK = {"qk_nope_head_dim": 128, "v_head_dim": 128}
CONFIGS = {
    "glm": tiny_glm_lite(**LATENT | DENSE | GLM | {"num_key_value_heads": 20}),
    "deepseek": tiny_deepseek(**LATENT | DENSE | DEEPSEEK),
}
"""With heads of the published sizes, and in one case as many of them."""


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), CONFIGS[request.param], dtype=BF16)


@pytest.fixture(scope="module")
def logits(folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return the logits of each text by transformers, in fp32 and in bf16."""
    exact, less = reference_model(folder).to(DEVICE), reference_model(folder, BF16).to(DEVICE)
    wanted, rounded = ([logits_of(model, text) for text in TEXTS] for model in (exact, less))
    return wanted, rounded


def no_larger(found: list[Tensor], wanted: list[Tensor], rounded: list[Tensor]) -> None:
    """Assert that logits are no further from `wanted` than transformers' are in the same dtype."""
    ours, theirs = (
        torch.cat([errors(*pair) for pair in zip(each, wanted, strict=True)]) for each in (found, rounded)
    )
    print(
        f"median {ours.median():.3e} of {theirs.median():.3e}, maximum {ours.max():.3e} of {theirs.max():.3e}"
    )
    assert ours.median() <= 1.05 * theirs.median()
    assert ours.max() <= 1.5 * theirs.max()


def cuts_in(text: list[int]) -> list[int]:
    """Where chunks begin: some expand the latents; the last ones are single rows, which absorb them."""
    last = range(len(text) - COUNT, len(text))
    return [0, *(cut for cut in (17, 170, 300) if cut < last.start), *last]


def test_no_error_of_prompts_is_larger_than_that_of_transformers(
    folder: Path, logits: tuple[list[Tensor], list[Tensor]]
) -> None:
    with an_engine(folder, num_blocks=120) as engine:
        found = [prefilled_logits(engine, text, cuts_in(text)) for text in TEXTS]
    no_larger(found, *logits)
    no_larger(*([logits[-COUNT:] for logits in each] for each in (found, *logits)))


@pytest.mark.parametrize("rows", [1, 3, 12, 24])
def test_no_error_of_decode_steps_is_larger_either(
    folder: Path, logits: tuple[list[Tensor], list[Tensor]], rows: int
) -> None:
    with an_engine(folder, num_blocks=1000, streams=24) as engine:
        assert engine.figures().decode.startswith("fused kernels"), engine.figures().notes
        if rows == 1:
            found = [forced_logits(engine, [text], COUNT)[0] for text in TEXTS]
        else:
            found = list(forced_logits(engine, TEXTS * (rows // 3), COUNT)[-3:])
    no_larger(found, *([each[-COUNT:] for each in some] for some in logits))


def test_up_to_eight_rows_have_the_bits_that_each_has_alone(folder: Path) -> None:
    texts = [random_tokens(60 + 131 * number, number) for number in range(8)]
    with an_engine(folder, num_blocks=400) as engine:
        each = torch.cat([forced_logits(engine, [text], COUNT) for text in texts])
        for rows in (2, 5, 8):
            assert torch.equal(forced_logits(engine, texts[:rows], COUNT), each[:rows])


@pytest.fixture(scope="module", params=["glm", "deepseek"])
def with_experts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    make = {"glm": tiny_glm_lite, "deepseek": tiny_deepseek}[request.param]
    folder = write_checkpoint(tmp_path_factory.mktemp("experts"), make(**LATENT | DEEPSEEK), dtype=BF16)
    with an_engine(folder, num_blocks=400) as engine:
        assert engine.figures().decode.startswith("fused kernels"), engine.figures().notes
        yield engine


def test_answers_beside_each_other_are_those_alone(with_experts: Engine) -> None:
    """The prompts are so short that none is cut, whatever decodes beside it."""
    jobs = [(random_tokens(count, count), GREEDY) for count in (16, 9, 7, 13)]
    found = one_after_the_other(with_experts, jobs)
    forget(with_experts)
    assert [alone(with_experts, job) for job in jobs] == found


def test_right_and_wrong_guesses_change_nothing(with_experts: Engine) -> None:
    engine, jobs = with_experts, [(text, GREEDY) for text in TEXTS]
    check_guesses(engine, jobs)


def test_quantised_latents_are_left_to_pytorch(folder: Path) -> None:
    with an_engine(folder, num_blocks=120, kv_dtype="int8") as engine:
        assert engine.figures().decode.startswith("plain modules")
        assert any("no fused kernels for latents in int8" in note for note in engine.figures().notes)
        assert len(alone(engine, (TEXTS[0], SamplingParams(temperature=0.0, max_tokens=8)))) == 8


@pytest.mark.parametrize("make", [tiny_glm_lite, tiny_deepseek], ids=["glm", "deepseek"])
def test_with_experts_logits_in_fp32_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make(**LATENT))
    model = reference_model(folder).to(DEVICE)
    with an_engine(folder, torch.float32, num_blocks=120) as engine:
        for text in TEXTS:
            wanted = logits_of(model, text)
            found = prefilled_logits(engine, text, cuts_in(text))
            assert (found - wanted).norm() / wanted.norm() < 1e-4
