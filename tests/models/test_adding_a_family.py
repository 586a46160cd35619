"""docs/adding-a-model-family.md: its family is one that works."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from models.families import registry
from models.families.family import Family
from models.load import load_model
from tests.models.checkpoints import (
    files_of,
    reference_model,
    run,
    run_reference,
    tiny_llama,
    write_checkpoint,
)

PAGE = Path(__file__).parents[2] / "docs/adding-a-model-family.md"
TOKENS = torch.randint(160, (60,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def family() -> Family:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    made = found["FAMILY"]
    assert isinstance(made, Family)
    return made


def test_the_family_of_the_page_gives_the_logits_of_transformers(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, family))
    write_checkpoint(tmp_path, Qwen2Config(**tiny_llama().to_dict() | {"model_type": "qwen2"}))
    network = load_model(files_of(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert network.spec.attention.qkv_bias
    expected = run_reference(reference_model(tmp_path), TOKENS)
    assert (run(network, TOKENS) - expected).abs().max() < 1e-4 * expected.abs().max()
