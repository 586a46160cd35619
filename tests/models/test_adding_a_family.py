"""docs/adding-a-model-family.md: the family in its example works."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from models.errors import ModelError
from models.families import qwen2, registry
from models.families.family import Family
from models.loading.load import load_model
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
def code() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


@pytest.fixture
def family(code: str) -> Family:
    found: dict[str, Any] = {}
    exec(code, found)
    made = found["FAMILY"]
    assert isinstance(made, Family)
    return made


def test_the_page_shows_the_file(code: str) -> None:
    assert code == Path(qwen2.__file__).read_text(encoding="utf-8")


def test_the_family_of_the_page_gives_the_logits_of_transformers(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(known for known in registry.FAMILIES if known.architectures != family.architectures)
    monkeypatch.setattr(registry, "FAMILIES", others)
    write_checkpoint(tmp_path, Qwen2Config(**tiny_llama().to_dict() | {"model_type": "qwen2"}))
    with pytest.raises(ModelError, match="Qwen2ForCausalLM is not supported"):
        load_model(files_of(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(registry, "FAMILIES", (*others, family))
    network = load_model(files_of(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert network.spec.attention.qkv_bias
    expected = run_reference(reference_model(tmp_path), TOKENS)
    assert (run(network, TOKENS) - expected).abs().max() < 1e-4 * expected.abs().max()
