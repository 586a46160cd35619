"""Weights that stay quantised: in place, in order, and their product compared with dequantising all of them."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

import models.loading.load
from models.errors import ModelError
from models.families.family import NAMES
from models.families.registry import spec_of_hf
from models.loading.load import _Filling, fill_network, load_model
from models.loading.plan import Target, needed_bytes, plan_tensors, read_tensors
from models.network import LayerWeights, Network, Weight
from models.progress import Progress
from models.reference.decoder import Decoder
from models.reference.tiled import TiledProduct
from models.units import bytes_text
from models.weights.block_formats import Kind as BlockKind
from models.weights.checkpoint import Blocks, StoredTensor, read_safetensors
from models.weights.formats.blocks import dequantize
from models.weights.gguf import GGUFFile, read_gguf
from models.weights.matching import match
from models.weights.quantize import choose_kinds, packed_rows, quantize
from models.weights.quantized import KINDS
from models.weights.slots import Slot, slots
from tests.models.checkpoints import (
    files_of,
    random_blocks,
    random_model,
    run,
    tensors_in,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)

CPU = torch.device("cpu")
TOKENS = list(range(3, 40))
LLAMA = tiny_llama(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=2, attention_bias=True
)
QWEN3 = tiny_qwen3(hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=2)
MIXED = {
    "token_embd": Kind.Q6_K,
    "attn_q": Kind.Q4_K,
    "attn_k": Kind.Q4_0,
    "attn_v": Kind.Q6_K,
    "attn_output": Kind.Q8_0,
    "ffn_gate": Kind.Q5_K,
    "ffn_up": Kind.Q4_1,
    "ffn_down": Kind.Q6_K,
    "output": Kind.Q8_0,
}
"""Every type, with different ones side by side in a packed layer."""


def load(path: Path, quantize: str = "auto", dtype: torch.dtype = torch.float32) -> Any:
    return load_model(files_of(path), dtype=dtype, device=CPU, quantize=quantize)


def random_weight(kind: Kind, rows: int, columns: int, seed: int = 0) -> Weight:
    data = torch.from_numpy(random_blocks(kind, rows, columns, seed))
    return Weight(data, BlockKind(kind), rows, columns)


def numbers(weight: Weight) -> Tensor:
    """Dequantise with the gguf package."""
    return torch.from_numpy(gguf.dequantize(weight.data.numpy(), Kind(weight.format)))


def in_blocks(network: Network) -> list[Weight]:
    return [weight for weight in network.parts(Weight) if not weight.is_plain]


def matrices_of(layer: LayerWeights) -> list[Weight]:
    linears = (layer.attention.qkv, layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down)
    return [part for linear in linears for part in linear.parts]


def assert_close(ours: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


# -- the product


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [1, 700, 3000, 1 << 20])
@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
def test_the_product_is_that_of_the_numbers(kind: Kind, tile: int, tokens: int) -> None:
    weight = random_weight(kind, 37, 512)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(1))
    expected = F.linear(x, numbers(weight))
    ours = TiledProduct(torch.float32, tile)(x, [weight], None)
    assert ours.shape == expected.shape
    if tokens:
        assert_close(ours, expected)


@pytest.mark.parametrize("tile", [256 * 5, 256 * 19, 1 << 20])
def test_weights_of_several_types_lie_side_by_side(tile: int) -> None:
    weights = [random_weight(kind, 11 + index, 256, index) for index, kind in enumerate(KINDS)]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 256, generator=generator)
    bias = torch.randn(sum(weight.rows for weight in weights), generator=generator)
    product = TiledProduct(torch.float32, tile)
    expected = F.linear(x, torch.cat([numbers(weight) for weight in weights]), bias)
    for _ in range(2):  # the second call reuses the buffer
        assert_close(product(x, weights, bias), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_gives_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    weight = random_weight(Kind.Q4_1, 40, 256)
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    ours = TiledProduct(dtype, 2048)(x, [weight], torch.ones(40, dtype=dtype))
    assert ours.dtype == dtype
    assert relative_error(ours.float(), F.linear(x.float(), numbers(weight)) + 1) < 1e-2


def test_the_buffer_is_no_larger_than_a_tile() -> None:
    product = TiledProduct(torch.float32, 4096)
    product(torch.ones(2, 256), [random_weight(Kind.Q6_K, 1000, 256)], None)
    assert product._buffer.numel() == 4096


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_blocks_may_lie_at_any_address(kind: Kind, shift: int) -> None:
    for rows, columns in ((3, 512), (1, BlockKind(kind).block)):
        weight = random_weight(kind, rows, columns)
        memory = torch.zeros(weight.nbytes + shift, dtype=torch.uint8)
        data = memory[shift:].view(weight.data.shape).copy_(weight.data)
        out = torch.empty(rows, columns)
        dequantize(data, weight.format, out)
        assert torch.equal(out, numbers(weight))


# -- GGUF files


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_logits_of_a_file_of_all_types(config: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(config), MIXED)
    model = load(path)
    assert_close(run(model, TOKENS), run(load(path, "none"), TOKENS), 1e-4)
    attention = model.layers[0].attention.qkv
    assert [Kind(weight.format) for weight in attention.parts] == [Kind.Q4_K, Kind.Q4_0, Kind.Q6_K]
    assert len(in_blocks(model)) == 7 * 2 + (1 if config.tie_word_embeddings else 2)
    if config.tie_word_embeddings:
        assert model.head.parts[0] is model.embedding


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_logits_in_bfloat16(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(LLAMA), kind)
    ours, expected = (run(load(path, way, torch.bfloat16), TOKENS) for way in ("auto", "none"))
    assert ours.dtype == torch.bfloat16
    assert relative_error(ours.float(), expected.float()) < 0.03


def test_blocks_are_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[GGUFFile] = []
    monkeypatch.setattr(
        "models.weights.gguf.read_gguf", lambda path: (files.append(read_gguf(path)), files[0])[1]
    )
    model = load(write_gguf(tmp_path / "model.gguf", random_model(LLAMA), MIXED))
    stored = {tensor.data.ctypes.data: tensor for tensor in files[0].tensors.values()}
    copied = []
    for weight in in_blocks(model):
        tensor = stored.get(weight.data.data_ptr())
        if tensor is None:
            copied.append(id(weight))
        else:
            assert weight.data.shape == tensor.data.shape
    # Only tensors whose order differs in Llama files are copied.
    assert copied == [id(part) for layer in model.layers for part in layer.attention.qkv.parts[:2]]


def test_the_mapping_lives_as_long_as_the_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(QWEN3), Kind.Q8_0)
    model = load(path)
    expected = run(model, TOKENS)
    path.unlink()
    assert torch.equal(run(model, TOKENS), expected)


def test_other_types_become_q8_0(tmp_path: Path) -> None:
    kinds = MIXED | {"attn_q": Kind.Q5_0, "attn_v": Kind.Q5_1, "ffn_down": Kind.F16, "ffn_up": Kind.Q3_K}
    path = write_gguf(tmp_path / "model.gguf", random_model(QWEN3), kinds)
    notes: list[str] = []
    model = load_model(files_of(path), dtype=torch.float32, device=CPU, on_note=notes.append)
    plain = load(path, "none")
    layer, other = model.layers[1], plain.layers[1]
    q, k, v = layer.attention.qkv.parts
    assert [Kind(weight.format) for weight in (q, k, v)] == [Kind.Q8_0, Kind.Q4_0, Kind.Q8_0]
    exact = other.attention.qkv.weight
    assert torch.equal(numbers(q), exact[: q.rows])  # Q5_0 is Q8_0 with fewer digits
    assert 0 < relative_error(numbers(v), exact[-v.rows :]) < 0.01
    up = layer.feed_forward.gate_up.parts[1]
    assert 0 < relative_error(numbers(up), other.feed_forward.gate_up.weight[-up.rows :]) < 0.01
    (down,) = layer.feed_forward.down.parts
    assert 0 < relative_error(numbers(down), other.feed_forward.down.weight) < 0.01
    assert relative_error(run(model, TOKENS), run(plain, TOKENS)) < 0.05
    changed = len(model.layers) * (q.nbytes + v.nbytes + up.nbytes + down.nbytes)
    (note,) = notes
    assert note.startswith(
        f"The Q3_K, Q5_0, Q5_1 and unquantised weights of this file take {bytes_text(changed)} of memory as Q8_0,"
    )


def test_weights_that_stay_in_their_blocks_are_no_news(tmp_path: Path) -> None:
    notes: list[str] = []
    path = write_gguf(tmp_path / "model.gguf", random_model(QWEN3), MIXED)
    load_model(files_of(path), dtype=torch.float32, device=CPU, on_note=notes.append)
    assert notes == []


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_a_file_of_plain_numbers_keeps_them(kind: Kind, tmp_path: Path) -> None:
    model = load(write_gguf(tmp_path / "model.gguf", random_model(LLAMA), kind), dtype=torch.bfloat16)
    assert in_blocks(model) == []
    assert model.head.weight.dtype == torch.bfloat16


def test_a_model_that_does_not_fit_is_told_what_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = write_gguf(tmp_path / "packed.gguf", random_model(LLAMA), Kind.Q8_0)
    plain = write_gguf(tmp_path / "plain.gguf", random_model(LLAMA), Kind.F16)
    for free, path, words, others in (
        (1_000_000, packed, "choose a model of at most 1.0 MB", "--dtype"),
        (2_000_000, plain, "use --quantize int4", "--dtype"),
        (200_000, plain, "choose a smaller model", "--quantize"),
    ):
        monkeypatch.setattr(models.loading.load, "available_bytes", lambda _, free=free: free)
        with pytest.raises(ModelError) as caught:
            load(path, dtype=torch.bfloat16)
        assert words in str(caught.value)
        assert others not in str(caught.value)


def test_what_a_model_weighs(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(QWEN3), MIXED)
    model = load(path)
    stored = read_gguf(path).tensors.values()
    matrices = sum(tensor.data.nbytes for tensor in stored if len(tensor.shape) == 2)
    # Norms and the table in fp32; the norm of a head is stored once per head.
    rest = sum(t.nbytes for name, t in tensors_in(model) if "norm" in name)
    assert model.nbytes == matrices + rest
    spec, tensors, names, _ = read_tensors(files_of(path))
    places = match(spec, tensors, names)
    kinds = {places[tensor.name]: tensor.blocks.kind for tensor in tensors if tensor.blocks is not None}
    assert needed_bytes(spec, torch.float32, 256, kinds) == matrices + rest + 256 * 64 * 4


def test_progress_ends_full(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(LLAMA), MIXED)
    reports: list[Progress] = []
    load_model(files_of(path), dtype=torch.float32, device=CPU, on_progress=reports.append)
    done = [report.done for report in reports]
    assert done == sorted(done)
    assert done[-1] == reports[-1].total == sum(t.data.nbytes for t in read_gguf(path).tensors.values())


def test_all_layers_can_be_given_another_product(tmp_path: Path) -> None:
    model = load(write_gguf(tmp_path / "model.gguf", random_model(QWEN3), MIXED))
    expected = run(model, TOKENS)
    plain, calls = TiledProduct(torch.float32), []

    def counted(x: Tensor, weights: Any, bias: Tensor | None) -> Tensor:
        calls.append(len(weights))
        return plain(x, weights, bias)

    assert torch.equal(run(Decoder(model, counted), TOKENS), expected)
    assert calls == [3, 1, 2, 1] * 2 + [1]


def test_the_real_default_model(smollm2: Path) -> None:
    model, plain = load(smollm2), load(smollm2, "none")
    assert len(in_blocks(model)) == len(model.parts(Weight))
    assert model.nbytes < 100e6
    assert_close(run(model, TOKENS[:6]), run(plain, TOKENS[:6]), 1e-4)


# -- quantising at load


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_blocks_are_as_good_as_those_of_the_gguf_package(kind: Kind, shift: float) -> None:
    values = torch.randn(300, 96, generator=torch.Generator().manual_seed(4)) + shift
    packed = quantize(values, kind)
    assert packed.shape == (300, BlockKind(kind).row_bytes(96))
    assert packed.dtype == torch.uint8
    ours = gguf.dequantize(packed.numpy(), kind)
    theirs = gguf.dequantize(gguf.quantize(values.numpy(), kind), kind)
    error = relative_error(torch.from_numpy(ours), values)
    assert error <= relative_error(torch.from_numpy(theirs), values)
    assert error < (0.006 if kind == Kind.Q8_0 else 0.09)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-7, -1e-9, 3e4])
def test_a_block_of_one_number(kind: Kind, value: float) -> None:
    ours = gguf.dequantize(quantize(torch.full((1, 32), value), kind).numpy(), kind)
    np.testing.assert_allclose(ours, value, rtol=2e-3, atol=5e-6)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_extreme_numbers_stay_finite_and_others_leave_them_be(kind: Kind) -> None:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    values[1, 3], values[2, 40], values[2, 41] = 1e30, -1e30, 1e30
    packed = quantize(values, kind).numpy()
    assert np.isfinite(gguf.dequantize(packed, kind)).all()
    np.testing.assert_array_equal(packed[[0, 3]], quantize(values[[0, 3]], kind).numpy())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_checkpoint(folder, LLAMA, dtype=torch.bfloat16, max_shard_size="900KB")


@pytest.mark.parametrize(("name", "most"), [("int8", 0.03), ("int4", 0.3)])
def test_safetensors_become_blocks(name: str, most: float, folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    model, plain = load(folder, name), load(folder)
    kinds = {Kind(weight.format) for layer in model.layers for weight in matrices_of(layer)}
    assert kinds == ({Kind.Q8_0} if name == "int8" else {Kind.Q8_0, Kind.Q4_1})
    assert model.embedding.format == model.head.parts[0].format == Kind.Q8_0
    assert in_blocks(plain) == []
    assert 0 < relative_error(run(model, TOKENS), run(plain, TOKENS)) < most
    # The parts of a packed layer are in their places, and the bias is that of all parts.
    whole = plain.layers[1].attention.qkv
    ours = model.layers[1].attention.qkv
    assert ours.parts[2].format == Kind.Q8_0  # the values
    assert relative_error(torch.cat([numbers(w) for w in ours.parts]), whole.weight) < 0.09
    assert torch.equal(ours.bias, whole.bias)


def test_a_gguf_file_of_plain_numbers_can_be_quantized(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(LLAMA), Kind.F16)
    model, plain = load(path, "int8"), load(path)
    assert len(in_blocks(model)) == 16
    assert relative_error(run(model, TOKENS), run(plain, TOKENS)) < 0.03


def test_quantizing_reads_a_tensor_in_parts(folder: Path) -> None:
    for tensor in read_safetensors(folder):
        if len(tensor.shape) == 2:
            assert tensor.parts is not None
            whole = torch.empty(tensor.shape, dtype=torch.bfloat16)
            tensor.copy_into(whole)
            parts = list(tensor.parts())
            assert max(part.numel() for _, part in parts) <= 1 << 15
            assert [start for start, _ in parts] == np.cumsum([0, *(len(p) for _, p in parts)])[:-1].tolist()
            assert torch.equal(torch.cat([part for _, part in parts]), whole)


def test_a_file_that_ends_while_it_is_quantized(folder: Path, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, LLAMA) / "model.safetensors"
    last = [tensor for tensor in read_safetensors(tmp_path) if len(tensor.shape) == 2][-1]
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="it ended too early"):
        packed_rows(last, BlockKind.Q8_0)


class CancelledError(Exception):
    pass


@pytest.mark.parametrize("way", ["auto", "int4"])
def test_a_load_that_failed_leaves_nothing_and_can_be_tried_again(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(LLAMA), MIXED) if way == "auto" else folder
    held: list[Any] = []
    fill = _Filling.fill

    def watched(filling: _Filling, *given: Any) -> None:
        held.extend(map(weakref.ref, filling.store.plain.values()))
        try:
            fill(filling, *given)
        finally:
            parts = (part for group in filling.store.blocks.values() for part in group.values())
            held.extend(weakref.ref(part.data) for part in parts)

    monkeypatch.setattr(_Filling, "fill", watched)

    def fail(report: Progress) -> None:
        assert report.total is not None
        if report.done > report.total // 2:
            raise CancelledError

    spec, tensors, names, _ = read_tensors(files_of(path))
    kinds = choose_kinds(tensors, match(spec, tensors, names), way, CPU)
    plan = plan_tensors(spec, tensors, Target(torch.float32, CPU), names, kinds=kinds)
    with pytest.raises(CancelledError) as caught:
        fill_network(plan, fail)
    gc.collect()
    assert len(held) > 10
    # Even while the error is still held, as it is while a user reads it.
    assert caught.value.__traceback__ is not None
    assert [ref() for ref in held if ref() is not None] == []
    model = fill_network(plan)
    assert torch.equal(run(model, TOKENS), run(load(path, way), TOKENS))


def refusals(folder: Path, tmp_path: Path) -> Iterator[tuple[str, Path, str, torch.device]]:
    packed = write_gguf(tmp_path / "packed.gguf", random_model(LLAMA), Kind.Q8_0)
    odd = write_checkpoint(tmp_path / "odd", tiny_qwen3(intermediate_size=72))
    yield "'int3'", folder, "int3", CPU
    yield "--device cpu", folder, "int8", torch.device("cuda")
    yield "quantised already (Q8_0)", packed, "int4", CPU
    yield "not a multiple of 32", odd, "int8", CPU


def test_what_cannot_be_quantized_is_told(folder: Path, tmp_path: Path) -> None:
    for words, path, way, device in refusals(folder, tmp_path):
        with pytest.raises(ModelError) as caught:
            load_model(files_of(path), dtype=torch.float32, device=device, quantize=way)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_with_rows_of_odd_length_is_dequantized() -> None:
    tensors = [named("a", (4, 48), None), named("b", (4, 64), Kind.Q8_0)]
    places = {t.name: Slot("up", "weight", "up.weight", 0, 4, t.shape, layer=0) for t in tensors}
    assert choose_kinds(tensors, places, "auto", CPU) == {}
    assert choose_kinds(tensors[1:], places, "auto", CPU) == {"b": Kind.Q8_0}
    assert choose_kinds(tensors[1:], places, "auto", torch.device("cuda")) == {}
    assert choose_kinds(tensors[1:], places, "none", CPU) == {}


def test_what_stays_in_eight_bits_among_four() -> None:
    _, spec = spec_of_hf(tiny_llama(hidden_size=96, num_hidden_layers=16).to_dict())
    places = {slot.name(NAMES): slot for slot in slots(spec)}
    tensors = [named(name, slot.shape, None) for name, slot in places.items()]
    kinds = choose_kinds(tensors, places, "int4", CPU)
    assert set(kinds) == {name for name in places if "norm" not in name}
    wide = {name for name, kind in kinds.items() if kind == Kind.Q8_0}
    expected = {f"model.layers.{layer}.self_attn.v_proj.weight" for layer in range(16)}
    expected |= {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1, 14, 15)}
    assert wide == expected | {"lm_head.weight", "model.embed_tokens.weight"}
    assert set(kinds.values()) == {Kind.Q8_0, Kind.Q4_1}
    assert set(choose_kinds(tensors, places, "int8", CPU).values()) == {Kind.Q8_0}


def named(name: str, shape: tuple[int, ...], kind: Kind | None) -> Any:
    blocks = None if kind is None else Blocks(BlockKind(kind), lambda _: torch.empty(0))
    return StoredTensor(name, shape, 0, lambda _: None, None, None, blocks)


def test_a_tied_head_has_the_type_of_the_embedding(tmp_path: Path) -> None:
    kinds = dict.fromkeys(MIXED, Kind.Q4_1) | {"token_embd": Kind.Q6_K}
    model = load(write_gguf(tmp_path / "model.gguf", random_model(QWEN3), kinds))
    (head,) = model.head.parts
    assert head is model.embedding
    assert head.format == Kind.Q6_K
    assert {Kind(w.format) for layer in model.layers for w in matrices_of(layer)} == {Kind.Q4_1}
