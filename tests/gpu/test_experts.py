"""Mixtures of experts on a GPU: bits, graphs, and errors compared with those of transformers in bf16."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import not_fused
from engine.execute.cuda.prefill import FusedPrefill
from engine.params import SamplingParams
from models.families.common import pre_norm_layer, uniform
from models.loading.assemble import TensorStore, assemble
from models.loading.load import load_model
from models.loading.plan import LoadPlan, Target
from models.network import Network
from models.reference.decoder import Decoder
from models.spec import Attention, Experts, FeedForward, ModelSpec, Norm, Rope, each_layer
from models.weights.slots import group_shapes, slots
from tests.gpu import test_decode_rows as rows_of_steps
from tests.gpu.engines import alone, an_engine, at_once, forget, random_tokens
from tests.models.checkpoints import files_of, write_checkpoint
from tests.models.families import tiny_qwen3_moe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

GPU, BF16 = torch.device("cuda"), torch.bfloat16
QWEN = Experts(128, 8, FeedForward(768))
ERNIE = Experts(
    64,
    6,
    FeedForward(1536),
    exact_router=True,
    selection_bias=True,
    shared=FeedForward(3072),
    router_bias=True,
)
GPT_OSS = Experts(16, 4, FeedForward(2880, bias=True, gain=1.702, limit=1.0, up_offset=1.0), router_bias=True)
ODD = Experts(12, 3, FeedForward(200), renormalise=False, scoring="sigmoid")


def a_spec(hidden: int, *feeds: FeedForward | Experts) -> ModelSpec:
    """Return a spec with a layer for each feed-forward."""
    spec = uniform(
        "Qwen3MoeForCausalLM",
        layers=len(feeds),
        vocab_size=512,
        hidden_size=hidden,
        max_positions=rows_of_steps.MOST,
        layer=pre_norm_layer(
            Attention(16, 4, 128, head_norm=Norm(), rope=Rope(1e6)), FeedForward(1024), Norm()
        ),
        tied=False,
    )
    return each_layer(spec, lambda index, layer: replace(layer, feed_forward=feeds[index]))


SPECS = {
    "qwen": a_spec(2048, QWEN, QWEN),
    "ernie": a_spec(2560, FeedForward(1024), ERNIE),
    "gpt-oss": a_spec(2880, GPT_OSS, GPT_OSS),
    "odd": a_spec(328, ODD, FeedForward(1024), ODD),
}


def drawn(spec: ModelSpec, dtype: torch.dtype) -> Network:
    """Draw random weights that bf16 holds exactly, in any dtype; scores of experts are far apart."""
    generator = torch.Generator(GPU).manual_seed(0)
    exact = {slot.group for slot in slots(spec) if slot.exact}
    plain = {}
    for group, shape in group_shapes(list(slots(spec))).items():
        numbers = torch.randn(shape, generator=generator, device=GPU) / shape[-1] ** 0.5
        if len(shape) == 1 or group.endswith("head_norm.weight"):
            numbers = 1 + 0.1 * torch.randn(shape, generator=generator, device=GPU)
        if "router" in group:
            numbers *= 3
        kept = torch.float32 if group in exact else dtype
        plain[group] = numbers.to(BF16).to(kept)
    return assemble(LoadPlan(Target(dtype, GPU), spec, [], {}), TensorStore(plain))


@pytest.fixture(scope="module", params=list(SPECS))
def network(request: pytest.FixtureRequest) -> Network:
    spec = SPECS[request.param]
    assert not_fused(spec) is None
    return drawn(spec, BF16)


@pytest.fixture(scope="module")
def cache(network: Network) -> KVCache:
    heads = network.spec.attention
    blocks = sum(length // 32 + 40 for length in rows_of_steps.LENGTHS) + rows_of_steps.SLOTS * 60
    cache = KVCache.uniform(len(network.layers), blocks, 32, heads.kv_heads, heads.head_dim, BF16, GPU)
    cache.kv.normal_(generator=torch.Generator(GPU).manual_seed(1))
    return cache


def test_up_to_eight_rows_get_the_bits_that_each_gets_alone(network: Network, cache: KVCache) -> None:
    rows_of_steps.test_up_to_eight_rows_get_the_bits_that_each_gets_alone(network, cache)


def test_rows_without_a_slot_write_nowhere(network: Network, cache: KVCache) -> None:
    rows_of_steps.test_rows_without_a_slot_write_nowhere(network, cache)


@pytest.mark.parametrize("graphs", [True, False])
def test_sequences_that_join_and_leave_get_the_tokens_that_they_get_alone(
    network: Network, cache: KVCache, graphs: bool
) -> None:
    rows_of_steps.test_sequences_that_join_and_leave_get_the_tokens_that_they_get_alone(
        network, cache, graphs
    )


def errors(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return |error| / |truth| of every row."""
    return (found.float() - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("count", [1, 5, 8, 16, 40])
def test_steps_are_no_further_from_the_truth_than_plain_modules(
    network: Network, cache: KVCache, count: int
) -> None:
    """The median counts: if two experts are nearly equal, rounding chooses between them, also in the reference."""
    lengths = (rows_of_steps.LENGTHS[:8] * 5)[:count]
    found = []
    kept = cache.kv.clone()
    for fused in (True, False):
        runner = rows_of_steps.runner_of(network, cache, graphs=fused, fused=fused)
        rows_of_steps.placed(runner, cache, lengths)
        found.append(rows_of_steps.logits_of(runner, list(range(count)), lengths))
        cache.kv.copy_(kept)
    exact = drawn(network.spec, torch.float32)
    wide = KVCache.uniform(len(exact.layers), len(kept[0, 0]) // 32, 32, *kept.shape[-2:], torch.float32, GPU)
    wide.kv.copy_(kept)
    runner = rows_of_steps.runner_of(exact, wide, graphs=False, fused=False)
    rows_of_steps.placed(runner, wide, lengths)
    truth = rows_of_steps.logits_of(runner, list(range(count)), lengths)
    ours, theirs = (errors(logits, truth) for logits in found)
    print(f"{count} rows: median {ours.median():.2e} of {theirs.median():.2e}, most {ours.max():.2e}")
    assert ours.median() <= 1.25 * theirs.median()


@pytest.mark.parametrize("tokens", [1, 16, 100, 1500])
def test_prompts_are_no_further_from_the_truth_than_plain_modules(network: Network, tokens: int) -> None:
    ids = torch.arange(tokens, device=GPU) * 7 % 512
    found = []
    heads, exact = network.spec.attention, drawn(network.spec, torch.float32)
    for program, dtype in (
        (FusedPrefill(network), BF16),
        (Decoder(network), BF16),
        (Decoder(exact), torch.float32),
    ):
        cache = KVCache.uniform(
            len(network.layers), tokens // 32 + 1, 32, heads.kv_heads, heads.head_dim, dtype, GPU
        )
        plan = SdpaBackend(cache).plan(StepBatch((Span(tuple(range(tokens // 32 + 1)), 0, tokens),)))
        with torch.inference_mode():
            hidden = program.forward(ids, torch.arange(tokens, device=GPU), plan)
            found.append(program.logits(hidden).float())
    ours, theirs = (errors(logits, found[2]) for logits in found[:2])
    print(f"{tokens} tokens: median {ours.median():.2e} of {theirs.median():.2e}, most {ours.max():.2e}")
    assert ours.median() <= 1.25 * theirs.median()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_qwen3_moe(
        vocab_size=272,
        hidden_size=320,
        intermediate_size=704,
        head_dim=128,
        num_attention_heads=8,
        max_position_embeddings=2048,
        moe_intermediate_size=136,
        num_experts=16,
        num_experts_per_tok=4,
    )
    return write_checkpoint(tmp_path_factory.mktemp("moe"), config, dtype=BF16)


def test_an_engine_decodes_a_checkpoint_in_graphs(folder: Path) -> None:
    jobs = [
        (random_tokens(40 + 50 * i, i), SamplingParams(temperature=0.8, seed=i, max_tokens=40))
        for i in range(6)
    ]
    assert not_fused(load_model(files_of(folder), dtype=BF16, device=GPU).spec) is None
    with an_engine(folder, graphs=True) as engine:
        assert "fused kernels, CUDA graph" in engine.figures().decode
        single = []
        for job in jobs:
            forget(engine)
            single.append(alone(engine, job))
        assert [alone(engine, job) for job in jobs] == single  # from the cache


def test_deterministic_answers_do_not_depend_on_who_else_is_served(folder: Path) -> None:
    jobs = [
        (random_tokens(30 + 120 * i, i), SamplingParams(temperature=0.8, seed=i, max_tokens=40))
        for i in range(12)
    ]
    with an_engine(folder, attention="triton", deterministic=True) as engine:
        single = []
        for job in jobs:
            forget(engine)
            single.append(alone(engine, job))
        forget(engine)
        assert at_once(engine, jobs) == single
