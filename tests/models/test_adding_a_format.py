"""docs/adding-a-weight-format.md: the format in its example works."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.errors import ModelError
from models.hub.inspect import describe
from models.loading.load import load_model
from models.network import Network, Weight
from models.weights.block_formats import Kind
from models.weights.formats import registry
from models.weights.formats.format import Scheme
from tests.models.checkpoints import files_of, run, run_reference
from tests.models.quantized_models import Case, Tensors, in_groups, write

PAGE = Path(__file__).parents[2] / "docs/adding-a-weight-format.md"
CPU = torch.device("cpu")
TOKENS = list(range(3, 40))


def turned_bytes(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    found = in_groups(weight, 8, 64, symmetric=True)
    codes = (found.digits - 128).to(torch.int8)
    return {"codes": codes.T, "steps": found.scales.T}, found.numbers


CASE = Case({"quant_method": "turned-bytes", "group_size": 64}, turned_bytes, "Q8_0")


@pytest.fixture
def scheme() -> Callable[..., Scheme]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, Any] = {"__name__": "models.weights.formats.turned_bytes"}
    exec(code, found)
    made: Callable[..., Scheme] = found["scheme"]
    return made


def load(folder: Path, **options: Any) -> Network:
    return load_model(files_of(folder), dtype=torch.float32, device=CPU, **options)


def test_the_format_of_the_page_gives_the_logits_of_what_the_weights_stand_for(
    scheme: Callable[..., Scheme], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path, CASE)
    with pytest.raises(ModelError, match="quantised by turned-bytes"):
        load(tmp_path)
    monkeypatch.setitem(registry.SCHEMES, "turned-bytes", scheme)
    expected = run_reference(model, TOKENS)
    far = expected.abs().max()
    assert (run(load(tmp_path, quantize="none"), TOKENS) - expected).abs().max() < 1e-4 * far
    for options in {}, {"packs": lambda spec: True}:
        network = load(tmp_path, **options)
        down = network.layers[0].feed_forward.down  # type: ignore[union-attr]
        assert {part.format for part in down.parts} == {Kind.Q8_0}
        assert any(weight.planes is not None for weight in network.parts(Weight)) == bool(options)
        assert (run(network, TOKENS) - expected).abs().max() < 0.05 * far
    facts = describe(files_of(tmp_path))
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (facts.dtypes[0][0], facts.is_quantized) == ("INT8", True)


def test_what_the_page_refuses_is_named(
    scheme: Callable[..., Scheme], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.SCHEMES, "turned-bytes", scheme)
    part = "model.layers.1.mlp.down_proj"
    write(tmp_path / "short", CASE, {f"{part}.steps": torch.ones(5, 256)})
    with pytest.raises(
        ModelError, match=rf"{part}\.steps has scales of 5 groups, but 384 columns have 6 of 64"
    ):
        load(tmp_path / "short")
    write(tmp_path / "alone", CASE, {f"{part}.steps": None})
    with pytest.raises(ModelError, match=rf"{part}\.codes has no {part}\.steps beside it"):
        load(tmp_path / "alone")
    with pytest.raises(ModelError, match="turned bytes of version 2, which chatterm does not read"):
        registry.read_scheme({"quantization_config": CASE.config | {"version": 2}})
