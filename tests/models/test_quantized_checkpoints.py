"""Quantised safetensors checkpoints: their logits, the blocks that hold them, and those that are refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config

from models.errors import ModelError
from models.families.registry import spec_of_hf
from models.hub.inspect import describe
from models.loading.load import load_model
from models.network import LatentWeights, Network, Weight
from models.weights.block_formats import Kind
from models.weights.formats.blocks import dequantize
from models.weights.formats.registry import read_scheme
from tests.covering import each_value_once
from tests.models.checkpoints import files_of, run, run_reference, tiny_qwen3
from tests.models.families import ALL_CHOSEN, tiny_deepseek, tiny_glm_lite, tiny_qwen3_moe
from tests.models.quantized_models import CASES, Case, write

CPU = torch.device("cpu")
TOKENS = list(range(3, 40))


def load(folder: Path, quantize: str = "none", notes: list[str] | None = None) -> Network:
    tell = (lambda _: None) if notes is None else notes.append
    return load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize=quantize, on_note=tell)


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((ours - expected).abs() / expected.abs().amax(-1, keepdim=True)).max())


Written = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return a function from a case's name to its folder and transformers model, written once and not to be changed."""

    @cache
    def one(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("case")
        return folder, write(folder, CASES[name])

    return one


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_what_the_weights_stand_for(name: str, written: Written) -> None:
    case = CASES[name]
    folder, model = written(name)
    expected = run_reference(model, TOKENS)
    assert error(run(load(folder), TOKENS), expected) < 1e-4
    notes: list[str] = []
    network = load(folder, "auto", notes)
    linears = [
        part for layer in network.layers for part in layer.attention.qkv.parts + layer.feed_forward.down.parts
    ]
    if case.held is None:
        assert not network.is_quantized
        assert [note for note in notes if "are expanded" in note]
    else:
        assert {part.format for part in linears} == {Kind[case.held]}
        # Tensors that were not quantised are held as Q8_0, which causes most of this error.
        assert error(run(network, TOKENS), expected) < 0.05
        assert not [note for note in notes if "are expanded" in note]
    assert bool([note for note in notes if "activations" in note]) == (
        "w8a8" in name or (case.config["quant_method"] == "fp8")
    )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.held])
def test_blocks_hold_the_numbers(name: str, written: Written) -> None:
    """Bit-identical if there is only one scale per row, otherwise within the rounding of bf16."""
    folder, _ = written(name)
    whole, blocks = load(folder), load(folder, "auto")
    for layer, own in zip(whole.layers, blocks.layers, strict=True):
        for plain, parts in (
            (layer.attention.out, own.attention.out),
            (layer.feed_forward.down, own.feed_forward.down),
        ):
            (part,) = parts.parts
            assert part.split == "columns"
            out = torch.empty(part.rows, part.columns)
            dequantize(part.data, part.format, out)
            if part.format == Kind.Q4_1:
                bound = plain.weight.abs().amax(-1, keepdim=True) * 2**-9
                assert ((out - plain.weight).abs() <= bound).all()
            else:
                assert torch.equal(out, plain.weight)


def test_packed_rows_of_a_layer_are_cut(tmp_path: Path) -> None:
    """Phi-3 stores q, k and v in one matrix, gate and up in another."""
    config = Phi3Config(
        vocab_size=160,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    for name in ("awq", "gptq, act-order", "fp8, blocks"):
        expected = run_reference(write(tmp_path / name, CASES[name], config=config), TOKENS)
        assert error(run(load(tmp_path / name), TOKENS), expected) < 1e-4


@each_value_once
@pytest.mark.parametrize("name", ["awq", "fp8, blocks", "packed, 4 bits, 32"])
@pytest.mark.parametrize("make", [tiny_deepseek, tiny_glm_lite])
def test_what_expands_latents_may_be_quantised(make: Callable[..., Any], name: str, tmp_path: Path) -> None:
    config = make(
        **ALL_CHOSEN,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=96,
        v_head_dim=64,
    )
    expected = run_reference(write(tmp_path, CASES[name], config=config), TOKENS)
    assert error(run(load(tmp_path), TOKENS), expected) < 1e-4
    network, held = load(tmp_path, "auto"), CASES[name].held
    assert error(run(network, TOKENS), expected) < 0.1
    mixer = network.layers[0].mixer
    assert isinstance(mixer, LatentWeights)
    # What makes keys is transposed, so its blocks are others.
    names = tuple(linear.parts[0].format.name for linear in (mixer.k_b, mixer.v_b))
    assert names == (("Q8_0", held) if held else ("F32", "F32"))


Q = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("awq", "scales", None),
        ("awq", "qzeros", None),
        ("awq", "qzeros", torch.zeros(3, 31, dtype=torch.int32)),
        ("awq", "qweight", torch.zeros(256, 32, dtype=torch.int32)),
        ("awq", "scales", torch.ones(2, 256)),
        ("awq", "scales", torch.ones(256)),
        ("awq", "qzeros", torch.zeros(3, 32)),
        ("gptq1, 4 bits", "scales", None),
        ("gptq1, 4 bits", "scales", torch.ones(6, 256, dtype=torch.int32)),
        ("gptq1, 4 bits", "scales", torch.full((6, 256), float("nan"))),
        ("gptq1, 4 bits", "qzeros", torch.zeros(6, 30, dtype=torch.int32)),
        ("gptq1, 4 bits", "g_idx", torch.zeros(256, dtype=torch.int32)),
        ("gptq1, 4 bits", "g_idx", torch.full((384,), 6, dtype=torch.int32)),
        ("gptq1, 4 bits", "g_idx", torch.full((384,), -1, dtype=torch.int32)),
        ("packed, 4 bits, 32", "weight_scale", None),
        ("packed, 4 bits, 32", "weight_shape", None),
        ("packed, 4 bits, 32", "weight_shape", torch.tensor([256, 385])),
        ("packed, 4 bits, 32", "weight_shape", torch.tensor([-1, 384])),
        ("packed, 4 bits, 32", "weight_scale", torch.ones(256, 7)),
        ("w8a8", "weight_scale", None),
        ("w8a8", "weight_scale", torch.ones(255, 1)),
        ("fp8, blocks", "weight_scale_inv", None),
        ("fp8, blocks", "weight_scale_inv", torch.ones(3, 2)),
        ("fp8, tensor", "weight_scale", torch.ones(2)),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named_in_one_line(
    name: str, part: str, change: torch.Tensor | None, tmp_path: Path
) -> None:
    write(tmp_path, CASES[name], {f"{Q}.{part}": change})
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert Q in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "2 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": "four"}, "four"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [0]}, "blocks"),
        ({"quant_method": "fp8", "weight_block_size": [float("inf"), 1]}, "blocks of"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "how weights"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "4-bit float",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"a": 1}, "config_groups": {}},
            "rotates",
        ),
        ({"quant_method": ["awq"]}, "quantised"),
        ([], "quantised"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        read_scheme({"quantization_config": config})
    assert "\n" not in str(caught.value)
    raw = tiny_qwen3().to_dict() | {"architectures": ["Qwen3ForCausalLM"], "quantization_config": config}
    with pytest.raises(ModelError, match=said):
        spec_of_hf(raw)


def test_a_folder_of_mlx_is_called_so() -> None:
    said = {"group_size": 64, "bits": 4}
    for more in {}, {"quantization_config": said}:
        raw = tiny_qwen3().to_dict() | {"architectures": ["Qwen3ForCausalLM"], "quantization": said} | more
        with pytest.raises(ModelError, match=r"quantised by MLX .* use the original checkpoint, a GGUF file"):
            spec_of_hf(raw)
    assert read_scheme({"quantization": None}) is None


@pytest.mark.parametrize(
    ("name", "digits"),
    [("gptq1, 4 bits", "qweight"), ("packed, 4 bits, 32", "weight_packed")],
)
def test_missing_digits_are_named(name: str, digits: str, tmp_path: Path) -> None:
    write(tmp_path, CASES[name], {f"{Q}.{digits}": None})
    with pytest.raises(ModelError, match=rf"{Q}\.{digits} of type I32 beside it; .* incomplete"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "config"),
    [("awq, rows", {"group_size": 10**30}), ("fp8, tensor", {"weight_block_size": [10**30, 10**30]})],
)
def test_groups_wider_than_the_matrix_are_the_whole_matrix(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    case = CASES[name]
    model = write(tmp_path, replace(case, config=case.config | config))
    assert error(run(load(tmp_path), TOKENS), run_reference(model, TOKENS)) < 1e-4


def test_scales_without_dimensions_are_described(tmp_path: Path) -> None:
    write(tmp_path, CASES["gptq1, 4 bits"], {f"{Q}.scales": torch.tensor(1.0)})
    assert describe(files_of(tmp_path)).dtypes
    with pytest.raises(ModelError, match=r"scales has the shape \[\], but needs 2 dimensions"):
        load(tmp_path)


def test_quantizing_again_is_refused(tmp_path: Path) -> None:
    for name in ("awq", "fp8, tensor"):
        write(tmp_path / name, CASES[name])
        with pytest.raises(ModelError, match="quantised already"):
            load(tmp_path / name, "int4")


def test_a_bias_of_zeros_that_no_layer_has_is_left_out(tmp_path: Path) -> None:
    """Older GPTQ checkpoints have such biases."""
    case = CASES["gptq1, 4 bits"]
    expected = run_reference(write(tmp_path, case, {f"{Q}.bias": torch.zeros(256)}), TOKENS)
    assert error(run(load(tmp_path), TOKENS), expected) < 1e-4
    write(tmp_path, case, {f"{Q}.bias": torch.ones(256)})
    with pytest.raises(ModelError, match=r"down_proj\.bias"):
        load(tmp_path)


def test_integers_in_a_checkpoint_that_is_not_quantized_are_refused(tmp_path: Path) -> None:
    write(tmp_path, Case(None, CASES["w8a8"].quantize, None))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="type I8"):
        load(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_facts_of_a_quantized_folder(name: str, written: Written) -> None:
    case = CASES[name]
    folder, model = written(name)
    facts = describe(files_of(folder))
    assert facts.supported
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.scheme is not None
    assert facts.scheme.held == case.held
    assert facts.is_quantized == (case.held is not None)
    assert facts.dtypes[0][0] in ("INT4", "INT8", "FP8")
    assert ("8" in facts.dtypes[0][0]) == any(words in name for words in ("8 bits", "fp8", "int8", "w8a8"))


def test_experts_are_quantized_one_by_one(tmp_path: Path) -> None:
    config = tiny_qwen3_moe(hidden_size=128, moe_intermediate_size=64)
    for name in ("gptq, rows", "fp8, blocks"):
        expected = run_reference(write(tmp_path / name, CASES[name], config=config), TOKENS)
        assert error(run(load(tmp_path / name), TOKENS), expected) < 1e-4


def test_parts_of_blocks(written: Written) -> None:
    parts = load(written("gptq1, 4 bits")[0], "auto").parts(Weight)
    assert {part.split for part in parts if part.columns == 384} == {"columns"}


OF_COMPRESSED = [
    name
    for name, case in CASES.items()
    if case.config["quant_method"] == "compressed-tensors"
    and "act-order" not in name  # it no longer supports that
]


@pytest.mark.parametrize("name", OF_COMPRESSED)
def test_the_numbers_are_those_of_compressed_tensors(name: str) -> None:
    """Compare with the package itself, if it is installed."""
    theirs = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    case = CASES[name]
    scheme = QuantizationScheme(**case.config["config_groups"]["group_0"])
    parts, numbers = case.quantize(torch.randn(128, 384, generator=torch.Generator().manual_seed(0)))
    compressor = theirs.BaseCompressor.get_value_from_registry(case.config["format"])
    found = compressor.decompress(parts, scheme)["weight"]
    assert float((found.float() - numbers).abs().max()) <= float(numbers.abs().max()) * 2**-8
