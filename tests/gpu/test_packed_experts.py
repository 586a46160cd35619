"""Packed experts on a GPU, in bf16: kernels compared with dequantised weights in fp32; whole engines."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as GGUF
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.stepping import forced_logits
from engine import SamplingParams
from engine.execute.cuda.experts import ExpertStep, apart, mix
from models.loading.load import load_model
from models.network import ExpertWeights, FeedForwardWeights, Linear, Network, NormWeights, Weight
from models.reference.decoder import Decoder
from models.spec import Experts, FeedForward, Norm
from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS
from models.weights.packing import empty_planes, pack, unpack
from tests.engine.kernels.test_packed_experts import a_network
from tests.gpu.engines import DEVICE, random_tokens
from tests.gpu.test_logits import errors, prefilled_logits
from tests.gpu.test_packed import engine_of, exact_logits
from tests.models.checkpoints import files_of, random_model, write_gguf
from tests.models.families import tiny_gpt_oss, tiny_qwen3_moe
from tests.models.test_packing import random_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16, PDL = torch.bfloat16, torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
CLAMPED = FeedForward(2880, bias=True, gain=1.702, limit=7.0, up_offset=1.0)
SHAPES = {
    "A3B": (Experts(16, 8, FeedForward(768)), 2048),
    "gpt-oss": (Experts(8, 4, CLAMPED, router_bias=True), 2880),
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def packed_experts(spec: Experts, hidden: int, kind: Kind) -> tuple[ExpertWeights, ExpertWeights]:
    """Return the experts of a layer in bf16, and their numbers in fp64."""
    found: list[list[Linear]] = []
    exact: list[list[Linear]] = []
    count, size = spec.count, spec.expert.size
    for rows, columns in ((2 * size, hidden), (hidden, size)):
        data = random_blocks(kind, count * rows, columns // kind.block, rows).cuda()
        planes = empty_planes(kind, count * rows, columns, DEVICE)
        pack(data, planes)
        lines = torch.arange(count * rows, device="cuda")
        # Sums of about one, so that activations are neither off nor saturated.
        deviation = unpack(planes, lines[:rows]).std() * columns**0.5
        (planes.scales if planes.supers is None else planes.supers).mul_(
            2.0 ** -round(float(deviation.log2()))
        )
        numbers = unpack(planes, lines).double().view(count, rows, columns)
        bias = drawn(count, rows, seed=columns).to(BF16)
        biases = [bias[i] if spec.expert.bias else None for i in range(count)]
        weights = [Weight.packed(planes.cut(i * rows, rows)) for i in range(count)]
        found.append([Linear((weights[i],), biases[i]) for i in range(count)])
        wide = [None if one is None else one.double() for one in biases]
        exact.append([Linear((Weight(numbers[i], Kind.F32, rows, columns),), wide[i]) for i in range(count)])
    router, bias = (
        drawn(count, hidden, seed=5) / hidden**0.5,
        drawn(count, seed=6) if spec.router_bias else None,
    )
    router, bias = (None if one is None else one.to(BF16) for one in (router, bias))
    assert router is not None
    layers = [
        Linear((Weight(part, Kind.F32, count, hidden),), None if bias is None else bias.to(part.dtype))
        for part in (router, router.double())
    ]
    both = []
    for layer, sides in zip(layers, (found, exact), strict=True):
        experts = tuple(FeedForwardWeights(*pair) for pair in zip(*sides, strict=True))
        both.append(ExpertWeights(layer, experts))
    return both[0], both[1]


def truth_of(spec: Experts, exact: ExpertWeights, x: Tensor) -> Tensor:
    """Return the experts' result for normed rows, in fp64."""
    decoder = Decoder(a_network(spec, 64))
    return decoder._mix(0, spec, exact, x.double())


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_get_what_their_experts_give_and_their_own_bits(kind: Kind, shape: str) -> None:
    spec, hidden = SHAPES[shape]
    if hidden % kind.block or spec.expert.size % kind.block:
        pytest.skip("rows are not whole blocks")
    weights, exact = packed_experts(spec, hidden, kind)
    norm = Norm(1e-6), NormWeights((1 + 0.1 * drawn(hidden, seed=7)).to(BF16))
    active, x = torch.arange(8, dtype=torch.int32, device="cuda"), drawn(8, hidden, seed=8).to(BF16)
    network = a_network(spec, hidden)
    network = Network(network.spec, network.embedding, network.layers, norm[1], network.head, 64)

    def step(rows: slice, active: Tensor) -> Tensor:
        program, given = ExpertStep(network, 8, PDL), x[rows].clone()
        program.route(spec, weights, norm, active, given, len(given))
        program.begin(spec, weights, norm, given, len(given))
        program.add(spec, weights, given, given, len(given))
        return given

    found = step(slice(8), active)
    normed = F.rms_norm(x.double(), (hidden,), norm[1].weight.double(), 1e-6)
    wanted = x.double() + truth_of(spec, exact, normed)
    assert (
        float(errors(found, wanted).median()) < 6e-3
    )  # if two experts are nearly equal, rounding chooses between them
    for row in range(8):
        assert torch.equal(step(slice(row, row + 1), active[:1])[0], found[row])
    none = active.clone()
    none[1] = -1
    assert torch.equal(step(slice(8), none)[1], x[1])


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tokens", [9, 300, 1500])
def test_groups_of_tokens_get_what_their_experts_give(kind: Kind, tokens: int) -> None:
    for spec, hidden in SHAPES.values():
        if hidden % kind.block or spec.expert.size % kind.block:
            continue
        weights, exact = packed_experts(spec, hidden, kind)
        x = drawn(tokens, hidden, seed=8).to(BF16)
        found = mix(spec, weights, x, None)
        assert float(errors(found, truth_of(spec, exact, x)).median()) < 8e-3


MODELS: dict[str, tuple[Any, dict[str, GGUF]]] = {
    "qwen3-moe Q4_K": (
        tiny_qwen3_moe(vocab_size=272, hidden_size=512, head_dim=128, num_attention_heads=8, num_key_value_heads=2,
                       max_position_embeddings=2048, moe_intermediate_size=256, num_experts=16,
                       num_experts_per_tok=4, decoder_sparse_step=1, norm_topk_prob=True),
        {"token_embd": GGUF.Q6_K, "attn_q": GGUF.Q4_K, "attn_k": GGUF.Q4_K, "attn_v": GGUF.Q6_K,
         "attn_output": GGUF.Q4_K, "ffn_gate_exps": GGUF.Q4_K, "ffn_up_exps": GGUF.Q4_K,
         "ffn_down_exps": GGUF.Q6_K, "output": GGUF.Q6_K},
    ),
    "qwen3-moe Q4_0": (
        tiny_qwen3_moe(vocab_size=272, hidden_size=320, head_dim=64, num_attention_heads=8, num_key_value_heads=2,
                       max_position_embeddings=2048, moe_intermediate_size=160, num_experts=8,
                       num_experts_per_tok=2, decoder_sparse_step=1),
        dict.fromkeys(("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_exps", "ffn_up_exps",
                       "ffn_down_exps", "output"), GGUF.Q4_0),
    ),
    "gpt-oss MXFP4": (
        tiny_gpt_oss(vocab_size=272, hidden_size=576, intermediate_size=576, head_dim=64, num_attention_heads=8,
                     num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=4, sliding_window=128,
                     max_position_embeddings=2048),
        {"token_embd": GGUF.Q8_0, "attn_q": GGUF.Q8_0, "attn_k": GGUF.Q8_0, "attn_v": GGUF.Q8_0,
         "attn_output": GGUF.Q8_0, "ffn_gate_exps": GGUF.MXFP4, "ffn_up_exps": GGUF.MXFP4,
         "ffn_down_exps": GGUF.MXFP4, "output": GGUF.Q8_0},
    ),
}  # fmt: skip
TEXTS, COUNT = [random_tokens(60 + 67 * n % 401, n) for n in range(20)], 24


@pytest.fixture(scope="module", params=list(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, kinds = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    return write_gguf(folder / "model.gguf", random_model(config), kinds)


@pytest.fixture(scope="module")
def truth(path: Path) -> tuple[Tensor, Tensor]:
    """Return the fp32 logits of every text's last tokens with dequantised weights, and the errors of bf16."""
    wide = load_model(files_of(path), dtype=torch.float32, device=DEVICE)
    if wide.spec.layers[0].attention.sinks:
        pytest.skip("the plain attention of this test knows no sinks; see the test of answers")
    found = torch.stack([exact_logits(wide, text) for text in TEXTS])
    with engine_of(path, expanded=True) as engine:
        rounded = forced_logits(engine, TEXTS, COUNT)
    return found, errors(rounded, found)


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 20])
def test_no_error_is_larger_than_that_of_the_expanded_weights(
    path: Path, truth: tuple[Tensor, Tensor], rows: int
) -> None:
    """The median and nine of ten count: if two experts are nearly equal, rounding chooses between them."""
    wanted, theirs = truth
    with engine_of(path) as engine:
        assert not apart(engine.network)
        assert all(
            weight.planes is not None for weight in engine.network.parts(Weight) if weight.format.block > 1
        )
        assert engine.figures().decode.startswith("fused kernels"), engine.figures().notes
        groups = [TEXTS[first : first + rows] for first in range(0, len(TEXTS), rows)]
        found = torch.cat([forced_logits(engine, texts, COUNT) for texts in groups])
    ours = errors(found, wanted)
    print(f"{path.parent.name}, {rows} rows: median {ours.median():.2e} of {theirs.median():.2e}")
    for share in (0.5, 0.9):
        assert ours.flatten().quantile(share) <= 1.5 * theirs.flatten().quantile(share)


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_up_to_eight_rows_have_the_bits_that_each_has_alone(path: Path, rows: int) -> None:
    with engine_of(path) as engine:
        alone = torch.cat([forced_logits(engine, [text], COUNT) for text in TEXTS[:rows]])
        assert torch.equal(forced_logits(engine, TEXTS[:rows], COUNT), alone)


def test_prompts_and_steps_are_those_of_the_expanded_weights_but_for_rounding(path: Path) -> None:
    with engine_of(path) as engine, engine_of(path, expanded=True) as other:
        assert engine.figures().weight_bytes < 0.7 * other.figures().weight_bytes
        for found in (
            [prefilled_logits(each, TEXTS[3], [0])[-COUNT:] for each in (engine, other)],
            [forced_logits(each, [TEXTS[3]], COUNT)[0] for each in (engine, other)],
        ):
            assert float(errors(found[0], found[1].float()).median()) < 0.03
        answers = [
            [e.token_id for e in each.stream(TEXTS[3], SamplingParams(temperature=0.0, max_tokens=64))]
            for each in (engine, other)
        ]
        assert answers[0][:4] == answers[1][:4]
