"""Quantised safetensors checkpoints, and plain ones quantised at load, as a GPU holds and computes them, in Triton's
interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.fused_program import FusedDecoder, unsupported
from engine.execute.cuda.plain_program import PlainDecoder
from engine.execute.cuda.prefill import FusedPrefill
from models.loading.load import load_model
from models.network import Network, Weight
from models.reference.decoder import Decoder
from models.weights.block_formats import Kind
from models.weights.packing import unpack
from tests.engine.kernels.test_rows import Case
from tests.models.checkpoints import files_of, tiny_llama, write_checkpoint
from tests.models.quantized_models import CASES, write

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)
CONFIG = tiny_llama(
    num_hidden_layers=1,
    hidden_size=256,
    intermediate_size=384,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=27,
    tie_word_embeddings=False,
)
KINDS = {
    "awq": {Kind.INT4_128},
    "awq, rows": {Kind.INT4_128},
    "gptq1, 4 bits": {Kind.INT4_64},
    "gptq1, 8 bits": {Kind.Q8_0},
    "gptq1, 8 bits, asymmetric": {Kind.INT8_32},
    "gptq2, 4 bits, asymmetric": {Kind.INT4_64},
    "gptq, rows": {Kind.INT4_128},
    "gptq, act-order": {Kind.INT4_64},
    "gptq, 8 bits, act-order, asymmetric": {Kind.INT8_32},
    "packed, 4 bits, 32": {Kind.Q4_0},
    "packed, 4 bits, 128, asymmetric": {Kind.INT4_128},
    "packed, act-order": {Kind.INT4_64},
    "w8a8": {Kind.Q8_0},
    "int8, asymmetric": {Kind.INT8_32},
    "fp8, tensor": {Kind.FP8_128},
    "fp8, rows": {Kind.FP8_128},
    "fp8, blocks": {Kind.FP8_128},
    "fp8, compressed blocks": {Kind.FP8_128},
}
"""What each becomes on a GPU."""


def load(folder: Path, **options: Any) -> Network:
    return load_model(files_of(folder), dtype=torch.float32, device=CPU, **options)


def packs(_: object) -> bool:
    return True


def matrices(network: Network) -> list[torch.Tensor]:
    """The numbers of a layer's matrices."""
    (layer,) = network.layers
    feed: Any = layer.feed_forward
    found = []
    for linear in (layer.attention.qkv, layer.attention.out, feed.gate_up, feed.down):
        found.append(torch.cat([numbers(weight) for weight in linear.parts]))
    return found


def numbers(weight: Weight) -> torch.Tensor:
    if weight.planes is None:
        return weight.data
    return unpack(weight.planes, torch.arange(weight.rows))


def kinds(network: Network) -> set[Kind]:
    return {weight.format for weight in network.parts(Weight) if weight.planes is not None}


@pytest.mark.parametrize("name", KINDS)
def test_a_quantized_checkpoint_stays_quantized(name: str, tmp_path: Path) -> None:
    write(tmp_path, CASES[name], config=CONFIG)
    notes: list[str] = []
    network, plain = load(tmp_path, packs=packs, on_note=notes.append), load(tmp_path, quantize="none")
    assert kinds(network) == KINDS[name]
    assert unsupported(network) is None
    assert not [note for note in notes if "expanded" in note]
    for held, whole in zip(matrices(network), matrices(plain), strict=True):
        # What bf16 would round, or less: fp8 and symmetric integers are the numbers themselves.
        assert ((held - whole).abs() <= whole.abs().amax(-1, keepdim=True) * 2**-9).all()
        if name.startswith("fp8") or KINDS[name] == {Kind.Q8_0}:
            torch.testing.assert_close(held, whole, rtol=1e-6, atol=0)


def test_blocks_that_are_no_multiple_of_the_tiles_are_expanded_and_named(tmp_path: Path) -> None:
    write(tmp_path, CASES["fp8, uneven blocks"], config=CONFIG)
    notes: list[str] = []
    network = load(tmp_path, packs=packs, on_note=notes.append)
    assert not network.is_packed
    assert [note for note in notes if "fp8, blocks of 96x160" in note and "expanded" in note]


@pytest.mark.parametrize("name", ["gptq, act-order", "fp8, blocks", "awq", "gptq1, 8 bits, asymmetric"])
def test_steps_and_prompts_give_what_the_plain_modules_give(name: str, tmp_path: Path) -> None:
    write(tmp_path, CASES[name], config=CONFIG)
    model = load(tmp_path, packs=packs)
    case = Case(model, [17, 5, 0, 3, 1, 2, 1, 1, 1])
    decoder = FusedDecoder(model, case.cache, case.slots.given, pdl=False)
    logits, _ = case.run(decoder, [1, 0], 2)
    expected, _ = case.run(PlainDecoder(model, case.cache, case.slots.given, "triton"), [1, 0], 2)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    ids, found = torch.arange(3, 24), []
    for program in (Decoder(load(tmp_path, quantize="none")), FusedPrefill(model)):
        cache = KVCache.uniform(1, 4, 16, 2, 64, torch.float32, CPU)
        plan = SdpaBackend(cache).plan(StepBatch((Span((1, 2), 0, 21),)))
        with torch.inference_mode():
            found.append(program.logits(program.forward(ids, torch.arange(21), plan)))
    assert float((found[1] - found[0]).abs().max()) <= 2e-3 * float(found[0].abs().max())


@pytest.mark.parametrize(
    ("quantize", "held"), [("int8", {Kind.Q8_0}), ("int4", {Kind.Q8_0, Kind.Q4_1})], ids=["int8", "int4"]
)
def test_plain_checkpoints_are_quantized_at_load(quantize: str, held: set[Kind], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    network, near = load(tmp_path, packs=packs, quantize=quantize), load(tmp_path, quantize=quantize)
    assert kinds(network) == held
    assert unsupported(network) is None
    ids, found = torch.arange(3, 24), []
    for model in (network, near):
        cache = KVCache.uniform(1, 4, 16, 2, 64, torch.float32, CPU)
        plan = SdpaBackend(cache).plan(StepBatch((Span((1, 2), 0, 21),)))
        decoder = Decoder(model)
        with torch.inference_mode():
            found.append(decoder.logits(decoder.forward(ids, torch.arange(21), plan)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)  # the same blocks as on a CPU
