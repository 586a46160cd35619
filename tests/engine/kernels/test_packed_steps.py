"""A network from a quantised GGUF file, its weights packed for a GPU, in Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGUF

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.fused_program import FusedDecoder, unsupported
from engine.execute.cuda.plain_program import PlainDecoder
from engine.execute.cuda.prefill import FusedPrefill
from models.loading.load import load_model
from models.network import Network
from models.reference.decoder import Decoder
from tests.engine.kernels.test_rows import Case
from tests.models.checkpoints import files_of, random_model, tiny_llama, tiny_qwen3, write_gguf
from tests.models.families import tiny_gemma3

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)
QWEN3 = tiny_qwen3(
    num_hidden_layers=1,
    head_dim=64,
    vocab_size=24,
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=4,
)
LLAMA = tiny_llama(
    num_hidden_layers=1,
    hidden_size=192,
    intermediate_size=256,
    num_attention_heads=3,
    num_key_value_heads=1,
    attention_bias=True,
    vocab_size=27,
)
SUPERS = {
    "token_embd": GGUF.Q6_K,
    "attn_q": GGUF.Q4_K,
    "attn_k": GGUF.Q4_K,
    "attn_v": GGUF.Q6_K,
    "attn_output": GGUF.Q5_K,
    "ffn_gate": GGUF.Q4_K,
    "ffn_up": GGUF.Q4_K,
    "ffn_down": GGUF.Q8_0,
}
SMALL = {
    "token_embd": GGUF.Q8_0,
    "attn_q": GGUF.Q4_0,
    "attn_k": GGUF.Q5_1,
    "attn_v": GGUF.Q5_1,
    "attn_output": GGUF.Q4_1,
    "ffn_gate": GGUF.Q5_0,
    "ffn_up": GGUF.Q5_0,
    "ffn_down": GGUF.TQ2_0,
    "output": GGUF.F16,
}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, kinds = {"qwen3": (QWEN3, SUPERS), "llama": (LLAMA, SMALL)}[request.param]
    return write_gguf(tmp_path_factory.mktemp("packed") / "model.gguf", random_model(config), kinds)


def load(path: Path, **options: Any) -> Network:
    return load_model(files_of(path), dtype=torch.float32, device=CPU, **options)


@pytest.fixture(scope="module")
def model(path: Path) -> Network:
    return load(path, packs=lambda spec: True)


def test_what_kernels_read_is_packed_and_what_they_do_not_is_told(path: Path) -> None:
    notes: list[str] = []
    network = load(path, packs=lambda spec: True, on_note=notes.append)
    layer = network.layers[0]
    packed = [weight.planes is not None for linear in layer_of(network) for weight in linear.parts]
    assert network.is_packed
    assert unsupported(network) is None
    if network.spec.tied:
        assert packed == [True] * 5
        assert [len(linear.parts) for linear in layer_of(network)] == [2, 1, 1, 1]
        assert network.head.parts[0] is network.embedding
        assert not notes
    else:
        assert packed == [True] * 4 + [False]
        assert [len(linear.parts) for linear in layer_of(network)] == [2, 1, 1, 1]
        assert layer.feed_forward.down.is_plain  # type: ignore[union-attr]
        assert network.head.is_plain
        assert len(notes) == 1
        assert "down (TQ2_0)" in notes[0], notes


def layer_of(network: Network) -> list[Any]:
    layer = network.layers[0]
    feed: Any = layer.feed_forward
    return [layer.attention.qkv, layer.attention.out, feed.gate_up, feed.down]


def test_the_packed_network_is_the_expanded_one(path: Path, model: Network) -> None:
    expanded = load(path, quantize="none")
    ids = torch.arange(9)

    def logits(network: Network) -> torch.Tensor:
        spec = network.spec.attention
        cache = KVCache.uniform(1, 4, 16, spec.kv_heads, spec.head_dim, torch.float32, CPU)
        plan = SdpaBackend(cache).plan(StepBatch((Span((1, 2), 0, 9),)))
        decoder = Decoder(network)
        with torch.inference_mode():
            return decoder.logits(decoder.forward(ids, ids, plan))

    torch.testing.assert_close(logits(model), logits(expanded), rtol=1e-5, atol=1e-5)


def test_steps_give_what_the_plain_modules_give_and_rows_their_own_bits(model: Network) -> None:
    case = Case(model, [17, 5, 0, 3, 1, 2, 1, 1, 1])
    decoder = FusedDecoder(model, case.cache, case.slots.given, pdl=False)
    alone, _ = case.run(decoder, [0], 1)
    logits, cache = case.run(decoder, [1, 0], 2)
    assert torch.equal(logits[1:], alone)
    expected, written = case.run(PlainDecoder(model, case.cache, case.slots.given, "triton"), [1, 0], 2)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, written, rtol=1e-4, atol=1e-4)


def test_products_add_norms_behind_others_to_what_they_read_in_several_formats(tmp_path: Path) -> None:
    """Gemma 3, whose q and k have another format than v: the first product stores the sum, and both use it."""
    config = tiny_gemma3(
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=256,
        head_dim=64,
        vocab_size=24,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"],
    )
    network = load(write_gguf(tmp_path / "model.gguf", random_model(config), SUPERS), packs=lambda spec: True)
    assert len(network.layers[1].projections.parts) == 2
    case = Case(network, [17, 5, 0, 3, 1, 2, 1, 1, 1])
    decoder = FusedDecoder(network, case.cache, case.slots.given, pdl=False)
    alone, _ = case.run(decoder, [0], 1)
    pair, cache = case.run(decoder, [1, 0], 2)
    eight, _ = case.run(decoder, [1, 0], 8)
    assert torch.equal(pair[1:], alone)
    assert torch.equal(eight[:2], pair)
    expected, written = case.run(PlainDecoder(network, case.cache, case.slots.given, "triton"), [1, 0], 2)
    torch.testing.assert_close(pair, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, written, rtol=1e-4, atol=1e-4)


def test_a_prompt_gives_what_the_plain_modules_give(model: Network) -> None:
    spec = model.spec.attention
    ids = torch.randint(24, (21,), generator=torch.Generator().manual_seed(1))
    found = []
    for program in (Decoder(model), FusedPrefill(model)):
        cache = KVCache.uniform(1, 4, 16, spec.kv_heads, spec.head_dim, torch.float32, CPU)
        plan = SdpaBackend(cache).plan(StepBatch((Span((1, 2), 0, 21),)))
        with torch.inference_mode():
            found.append(program.logits(program.forward(ids, torch.arange(21), plan)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
