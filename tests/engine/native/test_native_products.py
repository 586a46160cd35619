"""Families that the native kernels do not know as a whole: they compute the products with quantised weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.execute.build_options import BuildOptions
from engine.execute.compatibility import not_native
from engine.execute.cpu.products import ROWS, NativeProduct
from engine.kernels.native.library import Pool
from engine.schedule.loop import Loop
from models.loading.load import load_model
from models.network import ExpertWeights, Linear
from models.reference.decoder import Decoder
from tests.engine.tiny import TinyEngine, tiny_tokenizer
from tests.models.checkpoints import files_of, run, write_checkpoint
from tests.models.families import tiny_ernie_moe, tiny_gemma2, tiny_gpt2, tiny_gpt_oss, tiny_qwen3_moe
from tests.models.test_gpt_oss import write_quantized

CPU = torch.device("cpu")
HEADS: dict[str, Any] = {"head_dim": 12, "num_attention_heads": 8, "num_key_value_heads": 4}
"""No native kernels attend with these."""
CONFIGS = {
    "gemma2": tiny_gemma2(hidden_size=64, intermediate_size=96, num_attention_heads=8, head_dim=12),
    "gpt2": tiny_gpt2(n_embd=96, n_head=8),
    "qwen3 moe": tiny_qwen3_moe(hidden_size=64, intermediate_size=96, moe_intermediate_size=64, **HEADS),
    "ernie moe": tiny_ernie_moe(hidden_size=64, intermediate_size=96, moe_intermediate_size=64, **HEADS),
    "gpt-oss moe": tiny_gpt_oss(**HEADS),
}
TOKENS = torch.randint(150, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(2)


def a_network(config: Any, folder: Path) -> Any:
    in_mxfp4 = config.model_type == "gpt_oss"
    files = files_of(write_quantized(folder, **HEADS) if in_mxfp4 else write_checkpoint(folder, config))
    network = load_model(files, dtype=torch.float32, device=CPU, quantize="auto" if in_mxfp4 else "int8")
    assert not_native(network.spec) is not None
    return network


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_products_are_as_near_as_rounding_their_input_allows(config: Any, tmp_path: Path, pool: Pool) -> None:
    network = a_network(config, tmp_path)
    plain, native = Decoder(network), NativeProduct(network, pool)
    layers = [layer for layer in network.parts(Linear) if not layer.is_plain]
    assert len(layers) >= 9
    for layer in layers:
        x = torch.randn(ROWS + 3, layer.columns, generator=torch.Generator().manual_seed(layer.rows))
        expected = plain._linear(layer, x)
        found = native(x, layer.parts, layer.bias)
        assert (found - expected).norm() < 0.02 * expected.norm()
        # Bit by bit what a row gets alone, also where they are multiplied in groups.
        for i in (0, 7, ROWS - 1, ROWS, ROWS + 2):
            assert torch.equal(native(x[i : i + 1], layer.parts, layer.bias)[0], found[i])
        half = native(x.bfloat16(), layer.parts, layer.bias)
        assert half.dtype == torch.bfloat16
        assert (half.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("name", [name for name in CONFIGS if "moe" not in name])
def test_a_network_with_native_products_says_the_same(name: str, tmp_path: Path, pool: Pool) -> None:
    """Of a mixture the rounding may choose other experts, so its products are compared one by one only."""
    network = a_network(CONFIGS[name], tmp_path)
    expected = run(network, TOKENS)
    assert (
        run(Decoder(network, NativeProduct(network, pool)), TOKENS) - expected
    ).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_engine_picks_them(config: Any, tmp_path: Path) -> None:
    network, tokenizer = a_network(config, tmp_path), tiny_tokenizer()
    tokenizer.stop_ids = frozenset()
    if any(isinstance(layer.feed_forward, ExpertWeights) for layer in network.layers):
        assert all(not expert.down.is_plain for expert in network.layers[1].feed_forward.experts)
    engine = TinyEngine(
        Loop(),
        network,
        tokenizer,
        BuildOptions(block_size=4, max_chunk=8, threads=2),
        name="tiny",
        device=CPU,
    )
    try:
        figures = engine.figures()
        assert figures.decode == "plain modules, native products"
        (note,) = figures.notes
        assert note.startswith("Computed by native kernels for products and PyTorch for the rest: ")
        greedy = SamplingParams(temperature=0.0, max_tokens=20)
        texts = [[event.token_id for event in engine.stream(TOKENS, greedy)] for _ in range(2)]
        assert texts[0] == texts[1]
        assert len(texts[0]) == 20
    finally:
        engine.close()
