"""Every way to write the rotation into config.json means what it means to transformers."""

import importlib
import json
import math
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from models.errors import ModelError
from models.families.family import GGUFConfig
from models.families.fields import Fields
from models.families.registry import spec_of_gguf, spec_of_hf
from models.families.rope import rope_from_gguf
from models.loading.load import load_model
from models.network import Network
from models.reference.rope import inverse_frequencies
from models.spec import Rope, ShortConvolution
from models.weights.gguf import read_gguf
from tests.models.checkpoints import (
    files_of,
    random_model,
    reference_model,
    run,
    run_reference,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)
from tests.models.families import FAMILIES

CONFIGS = {
    type(config).__name__: config
    for config in (*FAMILIES.values(), tiny_qwen3(), tiny_llama())
    if config.model_type != "gpt2"
    and getattr(config, "position_embedding_type", "rope") is not None
    and not config.model_type.startswith(("gemma4", "lfm3", "muse"))
}
"""Those of Gemma 4, LFM3 and Muse Glimmer are written in one way only (see test_gemma4.py)."""
BY_LAYER = ("gemma3_text", "gemma3n_text", "olmo3")
"""The families that have parameters for each kind of layer."""
OF_LAYERS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 3e4, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
ORIGINAL = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_parameters": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 2e5}},
    {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    {"rope_parameters": OF_LAYERS},
    {"rope_parameters": {"full_attention": {"rope_theta": 7e4}}},
)
SCALINGS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_scaling": {}},
    {"rope_scaling": {"type": "linear", "factor": 8.0}},
    {"rope_scaling": YARN | {"rope_theta": 4e4}},
    {"rope_scaling": YARN},
    {"rope_scaling": {"type": "su", "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0] * 8}},
)
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 6e4},
    {"rope_theta": 6e4, "original_max_position_embeddings": 8 * ORIGINAL, "rope_local_base_freq": 300.0},
)


def rotations(config: Any) -> dict[str, tuple[Tensor, float]]:
    """Return what transformers makes of a config: frequencies and attention factor by kind of layer."""
    kind = config.model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = next(name for name in dir(module) if name.endswith("RotaryEmbedding"))
    rotary = getattr(module, name)(config)
    parts = ("full_attention_", "sliding_attention_") if config.model_type in BY_LAYER else ("",)
    return {
        part.removesuffix("_"): (
            getattr(rotary, f"{part}inv_freq"),
            getattr(rotary, f"{part}attention_scaling"),
        )
        for part in parts
    }


def ours(raw: dict[str, Any]) -> dict[str, Rope]:
    """Return the rotations of a config by kind of layer, named as by `rotations`."""
    spec = spec_of_hf(raw)[1]
    if raw["model_type"] not in BY_LAYER:
        mixers = [layer.mixer for layer in spec.layers if not isinstance(layer.mixer, ShortConvolution)]
        return {"": next(mixer.rope for mixer in mixers if mixer.rope is not None)}
    found = {}
    for layer in spec.layers:
        assert layer.attention.rope is not None
        found["full_attention" if layer.attention.window is None else "sliding_attention"] = (
            layer.attention.rope
        )
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shape_of_the_keys_means_what_it_means_to_transformers(name: str) -> None:
    config = CONFIGS[name]
    kept = ("qk_rope_head_dim",)  # a size, not a rotation
    plain = {key: value for key, value in config.to_dict().items() if "rope" not in key or key in kept}
    plain = {key: value for key, value in plain.items() if key != "original_max_position_embeddings"}
    compared = 0
    for parameters, scaling, beside in product(PARAMETERS, SCALINGS, BESIDE):
        raw = plain | parameters | scaling | beside
        if config.model_type not in BY_LAYER and _is_by_layer(raw):
            continue  # refused: transformers fails, or ignores the values
        told = deepcopy(raw)
        if config.model_type in BY_LAYER and "type" in (told.get("rope_scaling") or {}):
            # transformers 5 overlooks this older name here; transformers 4 did not.
            told["rope_scaling"]["rope_type"] = told["rope_scaling"]["type"]
        try:
            expected = rotations(type(config).from_dict(told))
        except (KeyError, AttributeError, TypeError, ValueError, StrictDataclassError):
            continue  # transformers cannot run it
        found = ours(raw)
        assert found.keys() == expected.keys()
        for part, (frequencies, factor) in expected.items():
            rope, dims = found[part], 2 * len(frequencies)
            result = inverse_frequencies(rope, dims, ORIGINAL, ORIGINAL)
            assert torch.allclose(result, frequencies, rtol=1e-5), raw
            assert rope.attention_factor == pytest.approx(factor), raw
        compared += 1
    assert compared >= 12


def _is_by_layer(raw: dict[str, Any]) -> bool:
    return not raw.get("rope_scaling") and "full_attention" in (raw.get("rope_parameters") or {})


def test_a_scaling_that_a_user_adds_reaches_the_logits(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_qwen3())
    path, plain = folder / "config.json", load(folder)
    raw = json.loads(path.read_text())
    assert raw["rope_parameters"]["rope_theta"] == 1e6
    path.write_text(json.dumps(raw | {"rope_scaling": YARN | {"rope_theta": 1e6}}))
    tokens = [*range(3, 120)]
    expected = run_reference(reference_model(folder), tokens)
    torch.testing.assert_close(run(load(folder), tokens), expected, atol=1e-4, rtol=1e-4)
    assert (run(plain, tokens) - expected).abs().max() > 0.1


def test_a_theta_that_no_longer_counts_is_told(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_qwen3())
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for theta, told in ({}, 1), ({"rope_theta": 1e6}, 0):
        path.write_text(json.dumps(raw | {"rope_scaling": YARN | theta}))
        notes: list[str] = []
        load(folder, notes.append)
        assert len(notes) == told
        assert all("rope_theta is 10000 and not 1e+06" in note for note in notes)


def test_parameters_by_layer_are_refused_where_all_layers_rotate_alike() -> None:
    raw = tiny_qwen3().to_dict() | {"rope_parameters": OF_LAYERS}
    with pytest.raises(ModelError, match="'full_attention', but all layers of this model rotate alike"):
        spec_of_hf(raw)


LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
SCALED = YARN | {"rope_theta": 1e6}
AT = "qwen3.rope.scaling."
YARN_KEYS = {f"{AT}type": "yarn", f"{AT}factor": 4.0, f"{AT}original_context_length": ORIGINAL}
ATTENTION = 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({f"{AT}factor": 4.0}, LINEAR),
        ({"qwen3.rope.scale_linear": 4.0}, LINEAR),
        ({f"{AT}factor": 4.0, "qwen3.rope.scale_linear": 8.0}, LINEAR),
        ({f"{AT}type": "linear", "qwen3.rope.scale_linear": 4.0}, LINEAR),
        (YARN_KEYS | {f"{AT}yarn_ext_factor": 0.0}, LINEAR),
        (YARN_KEYS, SCALED),
        (YARN_KEYS | {f"{AT}attn_factor": 1.5}, SCALED | {"attention_factor": 1.5 * ATTENTION}),
        (
            YARN_KEYS | {f"{AT}attn_factor": 1.5, f"{AT}yarn_attn_factor": 0.5},
            SCALED | {"attention_factor": 0.75},
        ),
    ],
)
def test_the_keys_of_gguf_files_reach_the_logits_as_in_llama_cpp(
    metadata: dict[str, Any], rope: dict[str, Any], tmp_path: Path
) -> None:
    tokens = [*range(3, 120)]
    path = write_gguf(tmp_path / "model.gguf", random_model(tiny_qwen3()), metadata=metadata)
    expected = run_reference(random_model(tiny_qwen3(rope_parameters=rope)), tokens)
    torch.testing.assert_close(run(load(path), tokens), expected, atol=1e-4, rtol=1e-4)


FACTORS = {"rope_factors": (1.0, 2.0), "long_factors": (3.0, 5.0)}


@pytest.mark.parametrize(
    ("metadata", "rope", "factors"),
    [
        ({f"{AT}type": "none", f"{AT}factor": 4.0}, Rope(), {}),
        ({f"{AT}type": "linear"}, Rope(), {}),
        ({f"{AT}type": "linear", f"{AT}factor": 0.0}, Rope(), {}),
        ({f"{AT}attn_factor": 1.5}, Rope(attention_factor=1.5), {}),
        ({f"{AT}type": "none", f"{AT}attn_factor": 1.5}, Rope(attention_factor=1.5), {}),
        (
            {f"{AT}factor": 4.0, f"{AT}attn_factor": 1.5, f"{AT}yarn_log_multiplier": 0.1},
            Rope(kind="linear", factor=4.0, attention_factor=1.5),
            {},
        ),
        (
            {f"{AT}type": "longrope", f"{AT}factor": 2.0, f"{AT}attn_factor": 1.5},
            Rope(
                kind="longrope",
                original_positions=64,
                frequency_factors=(2.0, 4.0),
                long_factors=(6.0, 10.0),
                attention_factor=1.5,
            ),
            FACTORS,
        ),
    ],
)
def test_what_the_keys_of_gguf_files_mean(
    metadata: dict[str, Any], rope: Rope, factors: dict[str, Any]
) -> None:
    raw = {"qwen3.context_length": 64} | metadata
    assert rope_from_gguf(GGUFConfig(Fields(raw, "the GGUF file"), {}, **factors), "qwen3", 4) == rope


@pytest.mark.parametrize("name", ["gemma3", "olmo2"])
def test_the_attention_factor_of_a_gguf_file_is_that_of_all_layers(name: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[name.replace("olmo2", "olmo3")])
    metadata: dict[str, Any] = {"olmo2.attention.sliding_window": 12} if name == "olmo2" else {}
    metadata = metadata | {f"{name}.rope.scaling.attn_factor": 1.5}
    spec = spec_of_gguf(read_gguf(write_gguf(tmp_path / "model.gguf", model, metadata=metadata)))[1]
    ropes = {layer.attention.rope for layer in spec.layers}
    assert {rope.attention_factor for rope in ropes if rope is not None} == {1.5}
    assert None in {layer.attention.window for layer in spec.layers} != {None}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({f"{AT}type": "longrope"}, "has no tensors rope_factors_long.weight"),
        (YARN_KEYS | {f"{AT}yarn_ext_factor": 0.5}, "yarn_ext_factor .* is 0.5; supported: 0 and 1"),
        ({f"{AT}attn_factor": -1.0}, "attn_factor"),
    ],
)
def test_keys_of_gguf_files_that_cannot_be_honoured_are_refused(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        rope_from_gguf(GGUFConfig(Fields(metadata, "the GGUF file"), {}), "qwen3", 4)


def load(path: Path, on_note: Callable[[str], None] | None = None) -> Network:
    return load_model(files_of(path), dtype=torch.float32, device=torch.device("cpu"), on_note=on_note)
