"""Mixtures of experts in the fused kernels against the plain modules, in fp32 and in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import not_fused
from engine.execute.cuda.experts import GroupTile, apart, choose_group_tile
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.plain_program import PlainDecoder
from engine.execute.cuda.prefill import FusedPrefill
from engine.kernels.triton.experts import down_kernel
from engine.kernels.triton.grouped_gemm import count_kernel, place_kernel
from engine.kernels.triton.routing import choose_kernel
from models.families.common import pre_norm_layer, uniform
from models.loading.assemble import TensorStore, assemble
from models.loading.plan import LoadPlan, Target
from models.network import ExpertWeights, Network
from models.reference.decoder import Decoder
from models.spec import Attention, Experts, FeedForward, ModelSpec, Norm, Rope, each_layer
from models.weights.slots import group_shapes, slots
from tests.engine.kernels.test_rows import Case, random

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"),
    pytest.mark.usefixtures("few_programs"),
]
QWEN = Experts(4, 2, FeedForward(24))
ERNIE = Experts(
    5, 1, FeedForward(8), exact_router=True, selection_bias=True, shared=FeedForward(8), router_bias=True
)
SIGMOID = Experts(4, 2, FeedForward(8), renormalise=False, scoring="sigmoid")
CLAMPED = FeedForward(16, bias=True, gain=1.7, limit=0.5, up_offset=1.0)
GPT_OSS = Experts(4, 2, CLAMPED, router_bias=True, shared=replace(CLAMPED, size=8))
GEMMA = Experts(
    4, 2, FeedForward(16, "gelu_tanh"), shared=FeedForward(8, "gelu_tanh"), router_norm=Norm(), router_scale=0.2,
    expert_scales=True, expert_norm=Norm(), expert_post_norm=Norm(), shared_norm=Norm(), shared_post_norm=Norm(),
)  # fmt: skip
"""Experts with norms of their own, as those beside the MLP of Gemma 4."""
GEMMA_LAYER = {"feed_forward_norm": None, "feed_forward_post_norm": Norm(), "scalar": True}


def a_spec(*feeds: FeedForward | Experts, hidden: int = 40) -> ModelSpec:
    """A layer for each feed-forward."""
    spec = uniform(
        "Qwen3MoeForCausalLM",
        layers=len(feeds),
        vocab_size=24,
        hidden_size=hidden,
        max_positions=256,
        layer=pre_norm_layer(Attention(1, 1, 64, head_norm=Norm(), rope=Rope()), FeedForward(8), Norm()),
        tied=True,
    )
    return each_layer(spec, lambda index, layer: replace(layer, feed_forward=feeds[index]))


def a_network(spec: ModelSpec) -> Network:
    """Its weights are random."""
    plain = {
        group: random(*shape, seed=seed) / shape[-1] ** 0.5
        for seed, (group, shape) in enumerate(group_shapes(list(slots(spec))).items())
    }
    return assemble(LoadPlan(Target(torch.float32, CPU), spec, [], {}), TensorStore(plain))


@pytest.fixture(scope="module")
def network() -> Network:
    """Layers with all kinds of experts, and one without."""
    spec = a_spec(QWEN, FeedForward(8), ERNIE, SIGMOID, GPT_OSS, CLAMPED, GEMMA)
    spec = each_layer(spec, lambda index, layer: replace(layer, residual_scale=0.5) if index > 3 else layer)
    after = {"feed_forward_post_norm": Norm(), "scalar": True}
    changes = {2: after, 5: after, 6: GEMMA_LAYER}
    spec = each_layer(spec, lambda index, layer: replace(layer, **changes.get(index, {})))
    assert not_fused(spec) is None
    return a_network(spec)


def test_experts_of_a_network_lie_in_one_tensor(network: Network) -> None:
    assert not apart(network)
    feed = network.layers[0].feed_forward
    assert isinstance(feed, ExpertWeights)
    turned = replace(feed, experts=feed.experts[::-1])
    assert apart(replace(network, layers=(replace(network.layers[0], feed_forward=turned),)))


def test_a_step_gives_what_the_plain_modules_give_and_each_row_what_it_gets_alone(network: Network) -> None:
    case = Case(network, [0, 3, 17, 5, 1, 2, 1, 33, 31])
    decoder = FusedDecoder(network, case.cache, case.slots.given, pdl=False)
    plain = PlainDecoder(network, case.cache, case.slots.given, "triton")
    slots = [2, 0]  # of three rows one has no sequence
    logits, cache = case.run(decoder, slots, 3)
    expected, written = case.run(plain, slots, 3)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, written, rtol=1e-4, atol=1e-4)
    for row, slot in enumerate(slots[1:], 1):
        assert torch.equal(case.run(decoder, [slot], 1)[0][0], logits[row])


@pytest.mark.parametrize("tokens", [1, 37])
def test_a_prompt_gives_what_the_plain_modules_give(network: Network, tokens: int) -> None:
    ids, found = torch.arange(tokens) * 7 % 24, []
    for program in (Decoder(network), FusedPrefill(network)):
        cache = KVCache.uniform(len(network.layers), 4, 16, 1, 64, torch.float32, CPU)
        plan = SdpaBackend(cache).plan(StepBatch((Span((3, 1, 2), 0, tokens),)))
        with torch.inference_mode():
            found.append(program.forward(ids, torch.arange(tokens), plan))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("chosen", "size", "tile"), [(4, 256, (1, 8, 2)), (3, 40, (2, 2, 1)), (1, 136, (4, 1, 3))]
)
def test_the_sum_over_the_chosen_experts(chosen: int, size: int, tile: tuple[int, int, int]) -> None:
    experts, rows, hidden = 5, 3, 36
    weight, inner = random(experts, hidden, size, seed=1), random(rows, chosen, size, seed=2)
    shares, x = random(rows, chosen, seed=3), random(rows, hidden, seed=4)
    ids = torch.stack([random(experts, seed=row).topk(chosen).indices for row in range(rows)]).int()
    ids[1] = -1
    out = torch.full_like(x, 7.0)
    folds, warps, ahead = tile
    down_kernel[(-(-hidden // (16 // folds)), rows)](
        inner,
        ids,
        shares,
        weight[0],
        x,
        out,
        CHOSEN=chosen,
        N=hidden,
        K=size,
        FOLDS=folds,
        WARPS=warps,
        AHEAD=ahead,
        PDL=False,
        num_warps=warps,
    )
    for row in (0, 2):
        expected = x[row] + sum(shares[row, j] * (weight[ids[row, j]] @ inner[row, j]) for j in range(chosen))
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-3)
    assert (out[1] == 7.0).all()  # a row without a sequence


@pytest.mark.parametrize(("renormalise", "factor"), [(True, 1.0), (False, 1.0), (True, 1.8)])
def test_the_best_experts_are_chosen_and_of_equal_ones_the_first(renormalise: bool, factor: float) -> None:
    logits = torch.tensor(
        [[0.0, 3.0, 1.0, 3.0, 1.0], [2.0] * 5, [float("nan")] * 5, [-200.0, 0.0, -300.0, -1e30, -2e30]]
    )
    ids, shares = torch.zeros(4, 3, dtype=torch.int32), torch.zeros(4, 3)
    choose_kernel[(4,)](
        logits,
        logits,
        ids,
        shares,
        COUNT=5,
        CHOSEN=3,
        SELECTION_BIAS=False,
        SIGMOID=False,
        RENORMALISE=renormalise,
        FACTOR=factor,
    )
    assert ids[:2].tolist() == [[1, 3, 2], [0, 1, 2]]
    assert ids[3, 0] == 1
    assert ((ids >= 0) & (ids < 5)).all()  # of what is no number, too: an address is made of them
    assert shares[2].isnan().all()
    for row in (0, 1, 3):
        expected = logits[row].softmax(-1)[ids[row].long()]
        expected *= factor / expected.sum() if renormalise else factor
        torch.testing.assert_close(shares[row], expected)


@pytest.mark.parametrize("count", [60, 128, 256, 300])
def test_experts_are_ranked_however_many_there_are(count: int) -> None:
    """Every second score comes again, in another place."""
    random = torch.Generator().manual_seed(count)
    logits = torch.randn(2, count, generator=random)
    logits[:, count // 2 :] = logits[:, : (count + 1) // 2].flip(-1)
    ids, shares = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 8)
    how = {"SELECTION_BIAS": False, "SIGMOID": False, "RENORMALISE": False}
    choose_kernel[(2,)](logits, logits, ids, shares, COUNT=count, CHOSEN=8, **how)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(ids.long(), expected)
    torch.testing.assert_close(shares, logits.softmax(-1).gather(1, expected))


@pytest.mark.parametrize(("pairs", "experts"), [(1, 8), (37, 8), (100, 3), (64, 1), (90, 128)])
def test_pairs_are_sorted_and_every_tile_belongs_to_one_expert(pairs: int, experts: int) -> None:
    height = 16
    ids = torch.randint(experts, (pairs,), generator=torch.Generator().manual_seed(pairs), dtype=torch.int32)
    most = min(pairs, pairs // height + experts)
    counts, order = torch.full((experts,), -7, dtype=torch.int32), torch.full((pairs,), -7, dtype=torch.int32)
    tiles = torch.full((most, 3), -7, dtype=torch.int32)
    count_kernel[(experts,)](ids, counts, pairs, BLOCK=32)
    place_kernel[(experts,)](ids, counts, order, tiles, pairs, most, COUNT=experts, HEIGHT=height, BLOCK=32)
    assert counts.tolist() == ids.bincount(minlength=experts).tolist()
    assert order.tolist() == ids.sort(stable=True).indices.tolist()
    covered = []
    for expert, first, end in tiles.tolist():
        assert expert >= -1
        if expert >= 0:
            rows = order[first : min(first + height, end)].long()
            assert len(rows)
            assert (ids[rows] == expert).all()
            covered += rows.tolist()
    assert covered == order.tolist()


def test_tiles_of_groups_fit_a_multiprocessor() -> None:
    for pairs in (8, 128, 1024, 8192, 32_768):
        tile: GroupTile = choose_group_tile(pairs, 128)
        for gated in (True, False):
            # The smallest GPUs with tensor cores have 100 KB.
            width = tile.width * (1 + gated)
            stages = tile.stages(gated, 99 * 1024)
            assert 1 <= stages <= 4
            assert 2 * tile.depth * (tile.height + width) * stages <= 99 * 1024
