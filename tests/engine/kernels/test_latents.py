"""Latent attention in the kernels of a decode step against plain torch, in Triton's interpreter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGUF

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.prefill import FusedPrefill
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.step_products import StepProducts
from engine.execute.cuda.tiles import context_limit
from engine.kernels.triton.linear import HeadInputs
from models.loading.load import load_model
from models.network import LatentWeights, Linear, Network, Weight
from models.reference.decoder import Decoder
from models.weights.block_formats import Kind
from tests.engine.kernels.test_packed import packed
from tests.models.checkpoints import files_of, random_model, write_checkpoint, write_gguf
from tests.models.families import ALL_CHOSEN, tiny_deepseek

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)


@pytest.mark.parametrize("kind", [None, Kind.Q4_0, Kind.Q8_0, Kind.Q6_K])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_each_head_has_a_product_of_its_own_columns(kind: Kind | None, count: int) -> None:
    heads, outputs, inputs, size = 3, 48, 256 if kind is Kind.Q6_K else 192, 272
    generator = torch.Generator().manual_seed(count)
    if kind is None:
        numbers = torch.randn(heads * outputs, inputs, generator=generator)
        weight = Weight.plain(numbers)
    else:
        planes, numbers = packed(kind, heads * outputs, inputs, 3)
        weight = Weight.packed(planes)
    x = torch.randn(count, heads, size, generator=generator)
    out = torch.full((count + 1, heads * outputs), 7.0)
    network: Any = SimpleNamespace(
        spec=SimpleNamespace(hidden_size=64, layers=()), dtype=torch.float32, device=CPU, layer_inputs=None
    )
    products = StepProducts(network, 16, False, KernelConfigs(), None)
    products.run(count, x, Linear((weight,)), out[:count], heads=HeadInputs(outputs, size, heads * size))
    wanted = torch.einsum("thk,hnk->thn", x[..., :inputs], numbers.view(heads, outputs, inputs))
    torch.testing.assert_close(out[:count], wanted.flatten(1), rtol=1e-3, atol=1e-2)
    assert (out[count:] == 7.0).all()


CONFIG = tiny_deepseek(
    vocab_size=24,
    hidden_size=128,
    intermediate_size=64,
    num_hidden_layers=2,
    moe_intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    **ALL_CHOSEN,
)


def backend_of(network: Network, blocks: int = 4) -> tuple[KVCache, SdpaBackend]:
    cache = KVCache(layer_rows(network.spec, torch.float32, CPU), blocks, 16, torch.float32, CPU)
    return cache, SdpaBackend(cache)


@pytest.mark.parametrize("kind", [GGUF.Q4_0, GGUF.Q8_0])
def test_steps_and_prompts_read_packed_weights(kind: GGUF, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(CONFIG), kind)
    network = load_model(files_of(path), dtype=torch.float32, device=CPU, packs=lambda _: True)
    mixer = network.layers[0].mixer
    assert isinstance(mixer, LatentWeights)
    for layer in (mixer.q, mixer.kv_a, mixer.k_b, mixer.v_b, mixer.out):
        assert all(part.planes is not None for part in layer.parts)
    ids, table = torch.randint(24, (41,), generator=torch.Generator().manual_seed(1)), (2, 0, 3)
    wide = load_model(files_of(path), dtype=torch.float32, device=CPU, quantize="none")
    with torch.inference_mode():
        _, backend = backend_of(wide)
        plain = Decoder(wide)
        hidden = plain.forward(ids, torch.arange(41), backend.plan(StepBatch((Span(table, 0, 41),))))
        wanted = plain.logits(hidden[-2:])
        cache, backend = backend_of(network)
        prompt = FusedPrefill(network)
        hidden = prompt.forward(ids[:40], torch.arange(40), backend.plan(StepBatch((Span(table, 0, 40),))))
        torch.testing.assert_close(prompt.logits(hidden[-1:]), wanted[:1], rtol=1e-3, atol=1e-3)
        held = Slots(1, 8, 4, ids[-1:].clone())
        held.put(0, 40, 40)
        held.show(0, table)
        held.activate([0], 2)
        held.send()
        program = FusedDecoder(network, cache, held.given, pdl=False)
        step, both = program.run(1, 640).clone(), program.run(2, 640)
    assert torch.equal(step[0], both[0])  # a single row has its chunks combined by the product with v_b
    torch.testing.assert_close(step, wanted[1:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("row", [639, 1100, 5000])
def test_a_step_after_many_rows(row: int, tmp_path: Path) -> None:
    """In chunks that the product with v_b combines, or a kernel of its own, or that are twice as long."""
    network = load_model(files_of(write_checkpoint(tmp_path, CONFIG)), dtype=torch.float32, device=CPU)
    blocks, random = row // 16 + 1, torch.Generator().manual_seed(row)
    cache, backend = backend_of(network, blocks)
    table = tuple(torch.randperm(blocks, generator=random).tolist())
    for part in cache.parts:
        part.normal_(generator=random)
    token, plain = torch.tensor([7]), Decoder(network)
    held = Slots(1, 16, blocks, token.clone())
    held.put(0, row, row % 50)
    held.show(0, table)
    held.activate([0], 12)
    held.send()
    with torch.inference_mode():
        program = FusedDecoder(network, cache, held.given, pdl=False)
        found = [program.run(rows, context_limit(row))[0].clone() for rows in (1, 2, 12)]
        step = backend.plan(StepBatch((Span(table, row, 1),)))
        wanted = plain.logits(plain.forward(token, torch.tensor([row % 50]), step))[0]
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[2], wanted, rtol=1e-3, atol=1e-3)
