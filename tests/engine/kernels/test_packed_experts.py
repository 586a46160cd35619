"""Mixtures of experts whose weights are packed, against their dequantised twins, in Triton's interpreter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as GGUF

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda import experts as launching
from engine.execute.cuda.experts import ExpertStep, GroupTile, apart, mix
from engine.execute.cuda.fused_program import FusedDecoder, unsupported
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.prefill import FusedPrefill
from engine.execute.cuda.tiles import Tile
from models.families.common import pre_norm_layer, uniform
from models.loading.assemble import TensorStore, assemble
from models.loading.load import load_model
from models.loading.plan import LoadPlan, Target
from models.network import ExpertWeights, FeedForwardWeights, Linear, Network, NormWeights, Weight
from models.reference.decoder import Decoder
from models.spec import Attention, Experts, FeedForward, Norm, Rope
from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS
from models.weights.packing import empty_planes, pack, unpack
from models.weights.slots import group_shapes, slots
from tests.engine.kernels.test_rows import Case, random
from tests.models.checkpoints import files_of, random_model, write_gguf
from tests.models.families import tiny_gpt_oss, tiny_qwen3_moe
from tests.models.test_packing import random_blocks

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)
CLAMPED = FeedForward(256, bias=True, gain=1.7, limit=0.5, up_offset=1.0)
TILES = Tile(1, 2, 4, 1), Tile(1, 4, 4, 1)
UNUSUAL = {
    "one": (Kind.Q4_0, Experts(3, 1, FeedForward(64)), 96, Tile(1, 1, 2, 4, 4), Tile(1, 1, 4, 4)),
    "uneven": (Kind.Q8_0, Experts(3, 2, FeedForward(160)), 96, Tile(1, 1, 4, 4), Tile(1, 2, 2, 2, 4)),
    "clamped": (
        Kind.MXFP4,
        Experts(4, 3, replace(CLAMPED, size=160), router_bias=True),
        288,
        Tile(1, 2, 4, 2),
        Tile(1, 4, 4, 1),
    ),
    "squared": (
        Kind.Q8_0,
        Experts(5, 2, FeedForward(160, "relu2", gated=False), scale=2.5),
        96,
        Tile(1, 1, 2, 2),
        Tile(1, 2, 2, 2),
    ),
    "supers": (
        Kind.Q6_K,
        Experts(3, 2, CLAMPED, router_bias=True),
        512,
        Tile(1, 4, 4, 1),
        Tile(1, 2, 4, 1),
    ),
}
"""By what is special: a type, the experts, the size of what they are given, and the tiles."""


def usual(kind: Kind) -> tuple[Experts, int]:
    """Experts, and the size of what they are given, as small as the type allows."""
    size = kind.block if kind.block > 32 else 64
    return Experts(4, 2, FeedForward(size)), size


def stack(kind: Kind, experts: int, rows: int, columns: int, seed: int) -> tuple[list[Weight], torch.Tensor]:
    """Packed matrices one behind the other, and their numbers [experts, rows, columns]."""
    planes = empty_planes(kind, experts * rows, columns, CPU)
    pack(random_blocks(kind, experts * rows, columns // kind.block, seed), planes)
    numbers = unpack(planes, torch.arange(experts * rows))
    weights = [Weight.packed(planes.cut(i * rows, rows)) for i in range(experts)]
    return weights, numbers.view(experts, rows, columns)


def packed_experts(spec: Experts, hidden: int, kind: Kind) -> tuple[ExpertWeights, list[torch.Tensor]]:
    """The experts of a layer, and their numbers: gate above up, and down, [experts, rows, columns]."""
    size, count = spec.expert.size, spec.count
    lines = 2 * size if spec.expert.gated else size
    sides = stack(kind, count, lines, hidden, 1), stack(kind, count, hidden, size, 2)
    biases = [random(count, len(numbers[0]), seed=3) for _, numbers in sides]
    if not spec.expert.bias:
        biases = [torch.zeros_like(bias) for bias in biases]
    linears = [
        [Linear((weights[i],), bias[i] if spec.expert.bias else None) for i in range(count)]
        for (weights, _), bias in zip(sides, biases, strict=True)
    ]
    router = Linear((Weight.plain(random(count, hidden, seed=5) / hidden**0.5),), None)
    if spec.router_bias:
        router = replace(router, bias=random(count, seed=6))
    experts = tuple(FeedForwardWeights(*pair) for pair in zip(*linears, strict=True))
    return ExpertWeights(router, experts), [numbers for _, numbers in sides]


def given_by(
    spec: Experts, weights: ExpertWeights, numbers: list[torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """What they give for normed rows: the reference, with plain numbers."""
    experts = tuple(
        FeedForwardWeights(
            *(
                Linear((Weight.plain(side[i]),), linear.bias)
                for side, linear in zip(numbers, (expert.gate_up, expert.down), strict=True)
            )
        )
        for i, expert in enumerate(weights.experts)
    )
    decoder = Decoder(a_network(spec, x.shape[1]))
    return decoder._mix(0, spec, replace(weights, experts=experts), x)


def check_steps(
    kind: Kind,
    spec: Experts,
    hidden: int,
    gate_up: Tile,
    down: Tile,
    patch: pytest.MonkeyPatch,
    rows: int = 3,
) -> None:
    patch.setattr(KernelConfigs, "experts", lambda *given: gate_up if given[-2] else down)
    weights, numbers = packed_experts(spec, hidden, kind)
    network, norm = a_network(spec, hidden), (Norm(1e-6), NormWeights(random(hidden, seed=7)))
    active, x = torch.tensor([0, -1, 2], dtype=torch.int32), random(3, hidden, seed=8)

    def step(rows: list[int]) -> torch.Tensor:
        program, given = ExpertStep(network, 3, False), x[rows].clone()
        program.route(spec, weights, norm, active[rows], given, len(rows))
        program.begin(spec, weights, norm, given, len(rows))
        program.add(spec, weights, given, given, len(rows), 0.5)
        return given

    every = list(range(rows))
    found = step(every)
    added = 0.5 * given_by(spec, weights, numbers, F.rms_norm(x[every], (hidden,), norm[1].weight, 1e-6))
    torch.testing.assert_close(
        (found - x[every])[::2], added[::2], rtol=1e-4, atol=1e-4 * float(added.abs().max())
    )
    assert torch.equal(found[1], x[1])  # a row without a sequence
    if rows > 2:
        assert torch.equal(step([2])[0], found[2])


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_a_row_gets_what_its_experts_give(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    check_steps(kind, *usual(kind), *TILES, monkeypatch, rows=2)


@pytest.mark.parametrize("case", UNUSUAL)
def test_experts_of_other_shapes_and_rows_with_their_own_bits(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_steps(*UNUSUAL[case], monkeypatch, rows=2 if case == "supers" else 3)


def check_groups(kind: Kind, spec: Experts, hidden: int, tile: GroupTile, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launching, "choose_group_tile", lambda pairs, experts: tile)
    weights, numbers = packed_experts(spec, hidden, kind)
    x = random(9, hidden, seed=8)
    expected = given_by(spec, weights, numbers, x)
    torch.testing.assert_close(
        mix(spec, weights, x, None), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_groups_of_tokens_get_what_their_experts_give(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    check_groups(kind, *usual(kind), GroupTile(16, 128, 128, 4), monkeypatch)


@pytest.mark.parametrize("case", UNUSUAL)
def test_groups_of_experts_of_other_shapes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_groups(*UNUSUAL[case][:3], GroupTile(32, 128, 64, 4), monkeypatch)


def a_network(spec: Experts, hidden: int) -> Network:
    """One that has such experts."""
    whole = uniform(
        "Qwen3MoeForCausalLM",
        layers=1,
        vocab_size=8,
        hidden_size=hidden,
        max_positions=64,
        layer=pre_norm_layer(Attention(1, 1, 64, head_norm=Norm(), rope=Rope()), spec, Norm()),
        tied=True,
    )
    plain = {group: torch.zeros(shape) for group, shape in group_shapes(list(slots(whole))).items()}
    return assemble(LoadPlan(Target(torch.float32, CPU), whole, [], {}), TensorStore(plain))


QWEN = tiny_qwen3_moe(
    num_hidden_layers=1,
    decoder_sparse_step=1,
    head_dim=64,
    vocab_size=24,
    hidden_size=256,
    moe_intermediate_size=256,
    num_attention_heads=4,
    num_experts=4,
    num_experts_per_tok=2,
)
GPT_OSS = tiny_gpt_oss(
    num_hidden_layers=1,
    head_dim=64,
    vocab_size=24,
    hidden_size=96,
    intermediate_size=96,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=4,
    num_experts_per_tok=2,
)
KINDS = {"token_embd": GGUF.Q6_K, "attn_q": GGUF.Q4_K, "attn_k": GGUF.Q4_K, "attn_v": GGUF.Q6_K,
         "attn_output": GGUF.Q5_K, "ffn_gate_exps": GGUF.Q4_K, "ffn_up_exps": GGUF.Q4_K,
         "ffn_down_exps": GGUF.Q6_K}  # fmt: skip
SMALL = {"token_embd": GGUF.Q8_0, "attn_q": GGUF.Q8_0, "attn_k": GGUF.Q8_0, "attn_v": GGUF.Q8_0,
         "attn_output": GGUF.Q8_0, "ffn_gate_exps": GGUF.MXFP4, "ffn_up_exps": GGUF.MXFP4,
         "ffn_down_exps": GGUF.MXFP4, "output": GGUF.Q8_0}  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3-moe", "gpt-oss"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, kinds = {"qwen3-moe": (QWEN, KINDS), "gpt-oss": (GPT_OSS, SMALL)}[request.param]
    return write_gguf(tmp_path_factory.mktemp("packed") / "model.gguf", random_model(config), kinds)


def load(path: Path, **options: Any) -> Network:
    return load_model(files_of(path), dtype=torch.float32, device=CPU, **options)


@pytest.fixture(scope="module")
def model(path: Path) -> Network:
    notes: list[str] = []
    network = load(path, packs=lambda spec: True, on_note=notes.append)
    assert not notes
    assert unsupported(network) is None
    assert all(weight.planes is not None for weight in network.parts(Weight) if weight.format.block > 1)
    return network


def test_packed_experts_of_a_file_lie_in_one_tensor(model: Network) -> None:
    assert not apart(model)
    layer = model.layers[-1]
    feed = layer.feed_forward
    assert isinstance(feed, ExpertWeights)
    assert all(expert.down.parts[0].planes is not None for expert in feed.experts)
    turned = replace(feed, experts=feed.experts[::-1])
    assert apart(replace(model, layers=(*model.layers[:-1], replace(layer, feed_forward=turned))))


def test_the_packed_network_is_the_expanded_one(path: Path, model: Network) -> None:
    ids, found = torch.arange(9), []
    for network in (model, load(path, quantize="none")):
        spec = network.spec.attention
        cache = KVCache.uniform(1, 4, 16, spec.kv_heads, spec.head_dim, torch.float32, CPU)
        plan = SdpaBackend(cache).plan(StepBatch((Span((1, 2), 0, 9),)))
        decoder = Decoder(network)
        with torch.inference_mode():
            found.append(decoder.logits(decoder.forward(ids, ids, plan)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_steps_give_what_they_give_with_expanded_weights_and_rows_their_own_bits(
    path: Path, model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelConfigs, "experts", lambda *given: TILES[0] if given[-2] else TILES[1])
    monkeypatch.setattr(KernelConfigs, "product", lambda *given: TILES[0])
    case = Case(model, [17, 5, 0, 3, 1, 2, 1, 1, 1])
    decoder = FusedDecoder(model, case.cache, case.slots.given, pdl=False)
    alone, _ = case.run(decoder, [1], 1)
    logits, cache = case.run(decoder, [1, 0], 2)
    assert torch.equal(logits[:1], alone)
    case.model = load(path, quantize="none")
    other = FusedDecoder(case.model, case.cache, case.slots.given, pdl=False)
    expected, written = case.run(other, [1, 0], 2)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, written, rtol=1e-4, atol=1e-4)


def test_a_prompt_gives_what_the_plain_modules_give(model: Network) -> None:
    spec = model.spec.attention
    ids, found = torch.arange(21) * 7 % 24, []
    for program in (Decoder(model), FusedPrefill(model)):
        cache = KVCache.uniform(1, 4, 16, spec.kv_heads, spec.head_dim, torch.float32, CPU)
        plan = SdpaBackend(cache).plan(StepBatch((Span((1, 2), 0, 21),)))
        with torch.inference_mode():
            found.append(program.logits(program.forward(ids, torch.arange(21), plan)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
