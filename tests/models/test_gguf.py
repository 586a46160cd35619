"""GGUF: the header against the gguf package, values, logits, the real default model, damaged files."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from models.errors import ModelError
from models.families.registry import load_spec
from models.files import ModelFiles
from models.hub.inspect import describe
from models.loading.load import fill_network, load_model
from models.loading.plan import Target, plan_load, plan_tensors, read_tensors
from models.network import ExpertWeights, LatentWeights
from models.progress import Progress
from models.weights import block_formats
from models.weights.formats.blocks import chunks
from models.weights.gguf import read_gguf
from models.weights.matching import match
from models.weights.slots import slots
from models.weights.staging import Staging
from tests.covering import each_value_once
from tests.models.checkpoints import (
    files_of,
    random_model,
    run,
    run_reference,
    tiny_llama,
    tiny_qwen3,
    write_gguf,
)
from tests.models.families import (
    ALL_CHOSEN,
    DEEPSEEK_GGUF,
    FAMILIES,
    GGUF,
    GGUF_FACTORS,
    GRANITE_HYBRID_GGUF,
    RECURRENT_GGUF,
    tiny_deepseek,
    tiny_deepseek_v2,
    tiny_ernie,
    tiny_ernie_moe,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gpt2,
    tiny_gpt_oss,
    tiny_qwen3_moe,
)

CPU = torch.device("cpu")
TOKENS = list(range(3, 40))
QUANTS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.MXFP4)
K_QUANTS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(files_of(path), dtype=dtype, device=CPU, quantize="none")


def refusal(path: Path) -> str:
    """Return the one-line error that loading a file ends with."""
    with pytest.raises(ModelError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", random_model(tiny_llama(num_hidden_layers=1)))


GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
CONFIGS = {
    "llama": tiny_llama(),
    "llama tied": tiny_llama(tie_word_embeddings=True),
    "llama bias": tiny_llama(attention_bias=True),
    **{name: FAMILIES[name] for name in GGUF},
    **RECURRENT_GGUF,
    "qwen3": tiny_qwen3(),
    "gemma2": tiny_gemma2(query_pre_attn_scalar=16),
    "gemma2 27B": tiny_gemma2(num_hidden_layers=46, query_pre_attn_scalar=12),
    "gemma3": tiny_gemma3(query_pre_attn_scalar=16, **GEMMA3_ROPE),
    "gpt2": tiny_gpt2(),
    "gpt2 untied": tiny_gpt2(tie_word_embeddings=False),
    "ernie": tiny_ernie(),
    "ernie untied": tiny_ernie(tie_word_embeddings=False),
    "ernie moe": tiny_ernie_moe(),
    "qwen3 moe": tiny_qwen3_moe(decoder_sparse_step=1),
    "qwen3 moe renormalised": tiny_qwen3_moe(decoder_sparse_step=1, norm_topk_prob=True),
    "qwen3 untied": tiny_qwen3(tie_word_embeddings=False),
}


def told(config: Any) -> dict[str, Any]:
    """Return the metadata of a file of this config besides its sizes."""
    name = next((name for name, known in CONFIGS.items() if known is config), "")
    known = GRANITE_HYBRID_GGUF if name.startswith("granite hybrid") else GGUF.get(name)
    return {"metadata": known, **GGUF_FACTORS.get(name, {})}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_those_of_the_checkpoint(config: Any, tmp_path: Path) -> None:
    model = random_model(config)
    ours = run(load(write_gguf(tmp_path / "model.gguf", model, **told(config))), TOKENS)
    expected = run_reference(model, TOKENS)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q5_0, Kind.F16])
def test_packed_parts_are_parts_of_one_layer(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(CONFIGS["phi3"]), kind)
    plain, ours = load(path), load_model(files_of(path), dtype=torch.float32, device=CPU)
    qkv, gate_up = (
        [part.rows for part in layer.parts]
        for layer in (ours.layers[0].attention.qkv, ours.layers[0].feed_forward.gate_up)
    )
    assert (qkv, gate_up) == (([160], [320]) if kind == Kind.F16 else ([96, 32, 32], [160, 160]))
    expected = run(plain, TOKENS)
    assert (run(ours, TOKENS) - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("kind", [*QUANTS, Kind.F16, Kind.BF16])
def test_logits_of_quantized_files_are_those_of_the_rounded_weights(kind: Kind, tmp_path: Path) -> None:
    model = random_model(tiny_llama())
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                rounded = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(rounded))
    expected = run_reference(model, TOKENS)
    torch.testing.assert_close(
        run(load(path), TOKENS), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
    )


@pytest.mark.parametrize("is_old", [False, True], ids=["two tensors", "one tensor"])
def test_what_expands_latents_may_be_quantised(tmp_path: Path, is_old: bool) -> None:
    """The part that makes keys is stored with its rows and columns exchanged, but not in old files."""
    sizes = {
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "hidden_size": 96,
    }
    tiny = tiny_deepseek_v2 if is_old else tiny_deepseek
    model = random_model(tiny(moe_intermediate_size=64, **sizes, **ALL_CHOSEN))
    expected = run(load(write_gguf(tmp_path / "plain.gguf", model)), TOKENS)
    path = write_gguf(tmp_path / "model.gguf", model, Kind.Q8_0)
    assert read_gguf(path).tensors[f"blk.0.attn_k{'v' * is_old}_b.weight"].kind == Kind.Q8_0
    plain = run(load(path), TOKENS)
    assert 0 < (plain - expected).abs().max() < 0.1 * expected.abs().max()
    network = load_model(files_of(path), dtype=torch.float32, device=CPU)
    mixer = network.layers[0].mixer
    assert isinstance(mixer, LatentWeights)
    for (part,) in (mixer.k_b.parts, mixer.v_b.parts):
        assert (part.format, part.is_mapped) == (Kind.Q8_0, not is_old)
    assert mixer.rotary is not None
    plan = plan_load(files_of(path), Target(torch.float32, CPU))
    assert plan.nbytes == network.nbytes + mixer.rotary.nbytes
    assert (run(network, TOKENS) - plain).abs().max() < 0.05 * expected.abs().max()


def test_deepseek_files_may_have_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    model = random_model(CONFIGS["deepseek v3"])
    more = DEEPSEEK_GGUF | {"deepseek2.nextn_predict_layers": 1}
    expected = run(load(write_gguf(tmp_path / "plain.gguf", model, metadata=DEEPSEEK_GGUF)), TOKENS)
    # The last layer is taken for one that predicts further tokens.
    fewer = load(write_gguf(tmp_path / "more.gguf", model, metadata=more))
    assert len(fewer.layers) == 2
    assert (run(fewer, TOKENS) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"deepseek2.attention.temperature_scale": 0.1}, "queries are scaled by their positions"),
        ({"deepseek2.nextn_predict_layers": 3}, "nextn_predict_layers"),
    ],
)
def test_deepseek_files_that_cannot_be_run(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = random_model(CONFIGS["deepseek v3"])
    assert words in refusal(write_gguf(tmp_path / "model.gguf", model, metadata=DEEPSEEK_GGUF | change))


def test_rope_factors_of_llama3_are_honoured(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = random_model(tiny_llama(rope_parameters=rope))
    plain = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).tolist()
    assert max(factors) == pytest.approx(8.0)
    ours = run(load(write_gguf(tmp_path / "model.gguf", model, rope_factors=factors)), TOKENS)
    without = run(load(write_gguf(tmp_path / "plain.gguf", model)), TOKENS)
    expected = run_reference(model, TOKENS)
    tolerance = 1e-4 * expected.abs().max().item()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=tolerance)
    assert (without - expected).abs().max() > 100 * tolerance


@pytest.mark.parametrize("kind", [*QUANTS, *K_QUANTS, Kind.IQ4_NL])
def test_values_are_those_of_the_gguf_package(kind: Kind) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(4)
    # Random bytes may encode infinite scales, which must agree as well.
    data = rng.integers(0, 256, (2500, 2 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, kind)
        parts = list(chunks(data, block_formats.Kind(kind)))
        order = rng.permutation(len(data))
        shuffled = torch.cat([rows for _, rows in chunks(data, block_formats.Kind(kind), order)])
    assert [start for start, _ in parts] == np.cumsum([0, *(len(rows) for _, rows in parts)])[:-1].tolist()
    values = torch.cat([rows for _, rows in parts]).numpy()
    assert values.shape == (2500, 2 * block)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(shuffled.numpy(), expected[order])


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "<f4"), (Kind.F16, "<f2")])
def test_plain_floats_keep_their_values(kind: Kind, dtype: str) -> None:
    values = np.random.default_rng(5).standard_normal((7, 96)).astype(dtype)
    ((start, rows),) = chunks(values.view(np.uint8), block_formats.Kind(kind))
    assert start == 0
    np.testing.assert_array_equal(rows.numpy(), values)


def test_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    for kind, value in {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -9, "uint32": 2**31}.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    for kind, number in {"int32": -(2**30), "uint64": 2**60, "int64": -(2**60), "float32": 0.5}.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", number)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "Grüße, 世界")
    writer.add_array("test.strings", ["a", "", "ö"])
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.5, 2.0])
    writer.add_custom_alignment(64)
    writer.add_tensor("odd", np.arange(5, dtype=np.float32))
    writer.add_tensor("matrix", np.arange(12, dtype=np.float16).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    reader = gguf.GGUFReader(tmp_path / "all.gguf")
    file = read_gguf(tmp_path / "all.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == fields
    assert file.metadata["test.strings"] == ["a", "", "ö"]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(tensor.shape.tolist()[::-1])
        assert ours.kind == tensor.tensor_type
        assert ours.data.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_tensor_names(config: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(config), **told(config))
    stored = [name for name in read_gguf(path).tensors if not name.startswith("rope_")]
    spec, tensors, names, _ = read_tensors(files_of(path))
    assert len(match(spec, tensors, names)) == len(list(slots(spec))) >= len(stored)


PACKED = {
    "gpt2": tiny_gpt2(n_embd=64),
    "gemma2": tiny_gemma2(hidden_size=64),
    "ernie moe": tiny_ernie_moe(hidden_size=64, moe_intermediate_size=64),
    "phi3": FAMILIES["phi3"],
    "gpt-oss": tiny_gpt_oss(),
}


@each_value_once
@pytest.mark.parametrize("config", PACKED.values(), ids=PACKED.keys())
@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0])
def test_streamed_weights_are_the_same(config: Any, kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(config), kind)
    spec, tensors, names, _ = read_tensors(files_of(path))
    streamed = fill_network(
        plan_tensors(spec, tensors, Target(torch.float32, CPU), names), staging=Staging(1024)
    )
    assert torch.equal(run(streamed, TOKENS), run(load(path), TOKENS))


@pytest.mark.parametrize("config", PACKED.values(), ids=PACKED.keys())
def test_blocks_that_are_cut_out_of_a_tensor_stay_blocks(config: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(config), Kind.Q8_0)
    network = load_model(files_of(path), dtype=torch.float32, device=CPU)
    assert [part.format for part in network.layers[0].attention.qkv.parts] == [Kind.Q8_0] * 3
    expected = run(load(path), TOKENS)
    error = (run(network, TOKENS) - expected).abs().max() / expected.abs().max()
    assert error < 0.05


def test_quantized_experts_stay_quantized(tmp_path: Path) -> None:
    model = random_model(tiny_qwen3_moe(hidden_size=64, moe_intermediate_size=64, decoder_sparse_step=1))
    path = write_gguf(tmp_path / "model.gguf", model, Kind.Q8_0)
    network = load_model(files_of(path), dtype=torch.float32, device=CPU)
    assert network.is_quantized
    layer = network.layers[0].feed_forward
    assert isinstance(layer, ExpertWeights)
    for expert in layer.experts:
        assert [part.format for part in expert.gate_up.parts] == [Kind.Q8_0] * 2
        assert [part.format for part in expert.down.parts] == [Kind.Q8_0]
    assert layer.router.is_plain
    expected = run(load(path), TOKENS)
    torch.testing.assert_close(
        run(network, TOKENS), expected, rtol=0.1, atol=0.05 * expected.abs().max().item()
    )


def test_progress_counts_the_bytes_and_ends_full(path: Path) -> None:
    reports: list[Progress] = []
    load_model(files_of(path), dtype=torch.bfloat16, device=CPU, on_progress=reports.append)
    done = [report.done for report in reports]
    assert done == sorted(done)
    total = sum(tensor.data.nbytes for tensor in read_gguf(path).tensors.values())
    assert done[-1] == reports[-1].total == total


def test_the_real_default_model(smollm2: Path) -> None:
    file = read_gguf(smollm2)
    model = load(smollm2, torch.bfloat16)
    assert model.spec.tied
    assert len(file.metadata["tokenizer.ggml.tokens"]) == model.spec.vocab_size == 49152
    assert load_spec(files_of(smollm2)) == model.spec
    ids = {text: index for index, text in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    prompt = [ids[text] for text in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
    assert run(model, prompt)[-1].argmax().item() == ids["ĠParis"]


def test_a_tensor_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    model = random_model(tiny_llama(num_hidden_layers=1))
    path = write_gguf(tmp_path / "model.gguf", model, metadata={"x": 1})
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (Kind.F32,)
    for number, words in ((Kind.I32, "I32"), (9999, "9999")):
        struct.pack_into("<I", data, at, number)
        path.write_bytes(data)
        assert words in refusal(path)


def test_a_missing_tensor_is_named(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_UP.weight"))
    message = refusal(path)
    assert "blk.0.ffn_UP.weight" in message


def test_a_wrong_shape_is_told_with_the_right_one(tmp_path: Path) -> None:
    model = random_model(tiny_llama(num_hidden_layers=1))
    model.config.intermediate_size = 96
    message = refusal(write_gguf(tmp_path / "model.gguf", model))
    assert "[160, 96]" in message
    assert "[96, 96]" in message


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"split.count": 3}, "its name does not say which"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"general.alignment": 48}, "alignment 48"),
    ],
)
def test_metadata_that_asks_for_too_much(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = random_model(tiny_llama(num_hidden_layers=1))
    assert words in refusal(write_gguf(tmp_path / "model.gguf", model, metadata=metadata))


def in_parts(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "parts"
    folder.mkdir()
    model = random_model(tiny_llama(num_hidden_layers=1))
    write_gguf(folder / "tiny.gguf", model, Kind.Q8_0, most_tensors=5)
    return sorted(folder.iterdir())


def test_a_model_in_several_files_is_the_same_as_in_one(tmp_path: Path) -> None:
    model = random_model(tiny_llama(num_hidden_layers=1))
    whole = write_gguf(tmp_path / "model.gguf", model, Kind.Q8_0)
    parts = in_parts(tmp_path)
    assert [part.name for part in parts] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    expected = load_model(ModelFiles("one", gguf=whole), dtype=torch.float32, device=CPU)
    for part in parts:  # any part names the model
        found = load_model(ModelFiles("some", gguf=part), dtype=torch.float32, device=CPU)
        assert torch.equal(run(found, TOKENS), run(expected, TOKENS))
    described = describe(ModelFiles("some", gguf=parts[1]))
    assert described.supported
    assert [name for name, _ in described.files] == [part.name for part in parts]
    assert described.parameters == describe(ModelFiles("one", gguf=whole)).parameters


def test_parts_that_do_not_make_a_model_are_refused(tmp_path: Path) -> None:
    first, second, third = in_parts(tmp_path)
    kept = {path: path.read_bytes() for path in (first, second, third)}
    third.unlink()
    assert f"{third.name} is missing" in refusal(first)
    third.write_bytes(kept[second])
    assert f"{third} does not belong to {first.name}" in refusal(second)
    third.write_bytes(kept[third][: len(kept[third]) // 2])
    assert "damaged or incomplete" in refusal(second)
    third.rename(third.with_name("other.gguf"))
    third.with_name("other.gguf").write_bytes(kept[third])
    assert "its name does not say which" in refusal(third.with_name("other.gguf"))


def test_impossible_rope_factors(tmp_path: Path) -> None:
    model = random_model(tiny_llama(num_hidden_layers=1))
    path = write_gguf(tmp_path / "model.gguf", model, rope_factors=[0.0] * 8)
    assert "rope_freqs.weight" in refusal(path)
    path = write_gguf(tmp_path / "short.gguf", model, rope_factors=[1.0] * 3)
    assert "needs 8" in refusal(path)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "is empty"),
        (b"GGU", "not a GGUF file"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version"),
        (b"GGUF" + struct.pack(">I", 2) + bytes(16), "is a big-endian GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "architecture"),
    ],
)
def test_what_is_no_gguf_file(contents: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(contents)
    assert words in refusal(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "cannot be read" in refusal(tmp_path / "folder.gguf")


def test_a_file_cut_anywhere_is_damaged(path: Path) -> None:
    data = path.read_bytes()
    lengths = {*range(64), *range(64, len(data), len(data) // 60), len(data) // 2, len(data) - 1}
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        assert "download it again" in refusal(path) or length < 4, length


def test_damaged_bytes_in_the_header_are_never_a_traceback(path: Path) -> None:
    data = path.read_bytes()
    end = data.index(b"ffn_down") + 200
    generator = torch.Generator().manual_seed(6)
    refused = 0
    for _ in range(400):
        at = int(torch.randint(end, (), generator=generator))
        value = int(torch.randint(256, (), generator=generator))
        path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
        try:
            load(path)
        except ModelError:
            refused += 1
    assert refused > 100


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    kinds = [kind for kind in block_formats.Kind if not kind.is_own]
    ours = {int(kind): (kind.name, (kind.block, kind.block_bytes)) for kind in kinds}
    assert ours.items() <= theirs.items()
    assert len(ours) == 32


def test_a_line_break_in_a_name_is_none_in_the_message(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.f\nn\x1eup.weight"))
    message = refusal(path)
    assert "blk.0.f n up.weight" in message
    assert len(message.splitlines()) == 1
