"""Latent attention on a GPU, by plain PyTorch: against transformers, for prompts and for answers after many rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.engines import DEVICE, SIZES, an_engine, random_tokens
from tests.gpu.test_logits import errors, logits_of, prefilled_logits
from tests.models.checkpoints import reference_model, write_checkpoint
from tests.models.families import tiny_deepseek, tiny_glm_lite

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16 = torch.bfloat16
COUNT = 24
TEXTS = [random_tokens(length, length) for length in (70, 500, 900)]
LATENT: dict[str, Any] = SIZES | {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
"""Rows of 576 numbers, as in the published models."""
DENSE = {"first_k_dense_replace": 4, "mlp_layer_types": ["dense"] * 4}
"""Without experts: their choice would magnify every difference."""
CONFIGS = {
    "glm": tiny_glm_lite(**LATENT | DENSE, qk_nope_head_dim=192, v_head_dim=256),
    "deepseek": tiny_deepseek(**LATENT | DENSE, qk_nope_head_dim=128, v_head_dim=128),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), CONFIGS[request.param], dtype=BF16)


def no_larger(found: list[Tensor], wanted: list[Tensor], rounded: list[Tensor]) -> None:
    """Assert that logits are no further from `wanted` than transformers' are in the same dtype."""
    ours, theirs = (
        torch.cat([errors(*pair) for pair in zip(each, wanted, strict=True)]) for each in (found, rounded)
    )
    assert ours.median() <= 1.05 * theirs.median()
    assert ours.max() <= 1.5 * theirs.max()


def cuts_in(text: list[int]) -> list[int]:
    """Where chunks begin: some expand the latents; the last ones are single rows, which absorb them."""
    last = range(len(text) - COUNT, len(text))
    return [0, *(cut for cut in (17, 170, 300) if cut < last.start), *last]


def test_no_error_is_larger_than_that_of_transformers(folder: Path) -> None:
    exact, less = reference_model(folder).to(DEVICE), reference_model(folder, BF16).to(DEVICE)
    wanted, rounded = ([logits_of(model, text) for text in TEXTS] for model in (exact, less))
    with an_engine(folder, num_blocks=120) as engine:
        assert engine.figures().decode.startswith("plain modules"), engine.figures().notes
        found = [prefilled_logits(engine, text, cuts_in(text)) for text in TEXTS]
        no_larger(found, wanted, rounded)
        no_larger(*([logits[-COUNT:] for logits in each] for each in (found, wanted, rounded)))


@pytest.mark.parametrize("make", [tiny_glm_lite, tiny_deepseek], ids=["glm", "deepseek"])
def test_with_experts_logits_in_fp32_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make(**LATENT))
    model = reference_model(folder).to(DEVICE)
    with an_engine(folder, torch.float32, num_blocks=120) as engine:
        for text in TEXTS:
            wanted = logits_of(model, text)
            found = prefilled_logits(engine, text, cuts_in(text))
            assert (found - wanted).norm() / wanted.norm() < 1e-4
