"""The facts about a model, from headers alone."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from models.errors import ModelError
from models.hub.inspect import describe
from models.hub.sources import local_files
from models.weights.safetensors_files import tensor_shapes
from tests.models.hub_world import CONFIG

_PARTS = {"Llama4ForConditionalGeneration": {"num_local_experts": 2, "num_experts_per_tok": 1}}
"""What the configs of some families need besides."""


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Write a safetensors file of zeros by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape)) * (2 if dtype == "BF16" else 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def folder(tmp_path: Path, **config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    return tmp_path


def test_a_folder(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": ("BF16", [64, 16]),
        "model.norm.weight": ("F32", [16]),
        "lm_head.weight": ("BF16", [64, 16]),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    facts = describe(local_files(folder(tmp_path)))
    assert (facts.architecture, facts.supported, facts.reason) == ("Qwen3ForCausalLM", True, None)
    assert (facts.parameters, facts.dtypes, facts.dtype) == (2064, (("BF16", 2048), ("F32", 16)), "BF16, F32")
    assert (facts.context_length, facts.has_chat_template) == (128, False)
    assert dict(facts.files) == {path.name: path.stat().st_size for path in tmp_path.iterdir()}

    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    facts = describe(local_files(folder(tmp_path, tie_word_embeddings=True)))
    assert (facts.parameters, facts.has_chat_template) == (1040, True), "tied weights count once"


@pytest.mark.parametrize(
    ("architecture", "text", "tower"),
    [
        ("MuseGlimmerForConditionalGeneration", "model.language_model.", "model.vision_tower."),
        ("Gemma3ForConditionalGeneration", "language_model.model.", "vision_tower."),
        ("Mistral3ForConditionalGeneration", "language_model.model.", "multi_modal_projector."),
        ("Llama4ForConditionalGeneration", "language_model.model.", "vision_model."),
    ],
)
def test_what_only_pictures_need_is_not_counted(
    tmp_path: Path, architecture: str, text: str, tower: str
) -> None:
    tensors = {f"{text}embed_tokens.weight": ("BF16", [64, 16]), f"{tower}weight": ("F32", [1000])}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    path = folder(
        tmp_path, architectures=[architecture], text_config={**CONFIG, **_PARTS.get(architecture, {})}
    )
    facts = describe(local_files(path))
    assert (facts.reason, facts.parameters, facts.dtype) == (None, 1024, "BF16")


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, name in enumerate(names):
        write_safetensors(tmp_path / name, {f"w{number}": ("BF16", [10, 10])})
    write_safetensors(tmp_path / "consolidated.safetensors", {"w": ("BF16", [20, 10])})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w0": names[0], "w1": names[1]}}))
    files = local_files(folder(tmp_path))
    assert describe(files).parameters == 200
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors named by .* is missing"):
        describe(files)


def test_what_cannot_be_run_is_still_described(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": ("F32", [3, 5])})
    facts = describe(local_files(folder(tmp_path, architectures=["BertModel"])))
    assert (facts.architecture, facts.supported, facts.parameters) == ("BertModel", False, 15)
    assert facts.reason is not None
    assert "BertModel" in facts.reason


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "is damaged or incomplete"),
        (lambda data: data[:20], "is damaged or incomplete"),
        (lambda data: b"", "is damaged or incomplete"),
        (lambda data: b"\xff" * 8 + data[8:], "is damaged or incomplete"),
        (lambda data: data[:8] + b"[" + data[9:], "is damaged or incomplete"),
        (lambda data: data.replace(b"[3,", b"[x,").replace(b"[3, 5]", b"[-3,5]"), "is damaged or incomplete"),
        (lambda data: data.replace(b'"shape"', b'"shapx"'), "is damaged or incomplete"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"w": ("F32", [3, 5])})
    assert tensor_shapes(path) == {"w": ("F32", (3, 5))}
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        describe(local_files(folder(tmp_path)))


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(512)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("w", np.zeros((4, 32), dtype=np.float32))
    writer.add_tensor("v", np.zeros((2, 32), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    facts = describe(local_files(path))
    assert (facts.architecture, facts.supported) == ("bert", False)
    assert (facts.parameters, facts.dtype, facts.context_length) == (192, "F32, F16", 512)
    assert facts.has_chat_template
    assert facts.files == (("tiny.gguf", path.stat().st_size),)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="damaged or incomplete"):
        describe(local_files(path))


def test_the_default_model(smollm2: Path) -> None:
    facts = describe(local_files(smollm2))
    assert (facts.architecture, facts.supported) == ("LlamaForCausalLM", True)
    assert (facts.parameters, facts.context_length) == (134_515_008, 8192)
    assert facts.dtypes[0][0] == "Q4_1"
    assert facts.has_chat_template
