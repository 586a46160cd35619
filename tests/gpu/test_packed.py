"""Weights that stay quantised on a GPU, in bf16: kernels compared with dequantised weights in fp32; whole engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import starmap
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
from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.build_options import BuildOptions
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.packed import ordered_plane_args, packed_embedding, packed_product
from engine.execute.cuda.tiles import LANES, Tile
from engine.execute.loading import gpu_room, load_here, plan_here
from engine.execute.tuning.store import load_table
from engine.kernels.triton.packed_linear import packed_linear_kernel
from engine.params import LoadOptions
from engine.schedule.loop import Loop
from models.loading.load import load_model
from models.network import Network, Weight
from models.reference.decoder import Decoder
from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS
from models.weights.packing import empty_planes, pack, unpack
from tests.engine.tiny import tiny_tokenizer
from tests.gpu.engines import DEVICE, GpuEngine, random_tokens
from tests.gpu.test_logits import errors, prefilled_logits
from tests.models.checkpoints import files_of, random_model, tiny_llama, tiny_qwen3, write_gguf
from tests.models.quantized_models import CASES, write
from tests.models.test_packing import random_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16 = torch.bfloat16


def packed(
    kind: Kind, rows: int, columns: int, seed: int = 0, ordered: bool = False
) -> tuple[Weight, Tensor]:
    """Return a matrix on the GPU, and its numbers in fp32 as unpacked by the CPU."""
    data = random_blocks(kind, rows, columns // kind.block, seed)
    near, far = (empty_planes(kind, rows, columns, torch.device(on)) for on in ("cpu", "cuda"))
    pack(data, near)
    pack(data.cuda(), far)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(near.tensors, far.tensors, strict=True))
    if ordered:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)).int()
        near, far = replace(near, order=order), replace(far, order=order.cuda())
    numbers = unpack(near, torch.arange(rows)).cuda()
    return Weight.packed(far), numbers


def product(weight: Weight, x: Tensor, norm: Tensor, residual: Tensor, tile: Tile, part: str) -> Tensor:
    gated = part == "gated"
    outputs, out = weight.rows // (2 if gated else 1), torch.full_like(residual, float("nan"))
    packed_linear_kernel[(-(-outputs // tile.outputs(gated)),)](
        x,
        bias=x,
        norm_weight=norm,
        residual=residual,
        out=out,
        **ordered_plane_args(weight),
        COUNT=len(x),
        N=outputs,
        K=weight.columns,
        STRIDE=outputs,
        EPS=1e-6,
        NORM=part != "residual",
        BIAS=False,
        GATED=gated,
        RESIDUAL=part == "residual",
        WARPS=tile.warps,
        TILES=tile.tiles,
        AHEAD=tile.ahead,
        LANES=tile.lanes,
        PDL=torch.cuda.get_device_capability() >= (9, 0),
        num_warps=tile.warps,
        launch_pdl=torch.cuda.get_device_capability() >= (9, 0),
    )
    return out


def expected(numbers: Tensor, x: Tensor, norm: Tensor, residual: Tensor, part: str) -> Tensor:
    """Compute the expected result in fp64; multiplied rows are rounded to the dtype of the numbers, as in a product of
    that dtype."""
    x = x.double()
    if part != "residual":
        x = F.rms_norm(x, x.shape[1:], eps=1e-6) * norm.double()
    y = F.linear(x.to(numbers.dtype).double(), numbers.double())
    if part == "gated":
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    return y + residual.double() if part == "residual" else y


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("part", "rows", "columns"),
    [("norm", 1000, 1024), ("gated", 3072, 1280), ("residual", 1029, 3072), ("residual", 512, 12288)],
)
def test_products_of_one_to_sixteen_rows(kind: Kind, part: str, rows: int, columns: int) -> None:
    """No less exact than a bf16 product with the numbers rounded to bf16, and every row has the same bits as alone."""
    check_product(kind, part, rows, columns)


@pytest.mark.parametrize(("part", "columns"), [("norm", 1024), ("gated", 1280), ("residual", 12288)])
def test_columns_in_another_order(part: str, columns: int) -> None:
    check_product(Kind.INT4_128, part, 1024, columns, ordered=True)
    weight, numbers = packed(Kind.INT4_64, 300, 1280, ordered=True)
    x = torch.randn(70, 1280, device="cuda").to(BF16)
    found = packed_product(x, [weight], None)
    assert errors(found, F.linear(x.double(), numbers.to(BF16).double())).max() < 6e-3


def check_product(kind: Kind, part: str, rows: int, columns: int, ordered: bool = False) -> None:
    weight, numbers = packed(kind, rows, columns, ordered=ordered)
    outputs, generator = rows // (2 if part == "gated" else 1), torch.Generator("cuda").manual_seed(3)
    x = torch.randn(16, columns, generator=generator, device="cuda").to(BF16)
    norm = torch.rand(columns, generator=generator, device="cuda").to(BF16) + 0.5
    residual = torch.randn(16, outputs, generator=generator, device="cuda").to(BF16)
    truth = expected(numbers.double(), x, norm, residual, part)
    rounded = expected(numbers.to(BF16), x, norm, residual, part).to(BF16)
    theirs = errors(rounded, truth)
    tile = KernelConfigs().product(16, outputs, columns, part == "gated", kind)
    for lanes in (1, LANES) if BLOCKS[kind].shared == 1 else (1,):
        tile = replace(tile, lanes=lanes)
        alone = torch.cat(
            [product(weight, x[i : i + 1], norm, residual[i : i + 1], tile, part) for i in range(8)]
        )
        for count in (1, 2, 3, 4, 5, 8):
            found = product(weight, x[:count], norm, residual[:count], tile, part)
            assert torch.equal(found, alone[:count])
        for each in (alone, product(weight, x, norm, residual, tile, part)):
            ours = errors(each, truth[: len(each)])
            assert ours.max() <= 1.5 * theirs.max(), (ours.max(), theirs.max())


@pytest.mark.parametrize("tile", starmap(Tile, load_table().candidates["quantised"]), ids=str)
def test_every_tile_that_may_be_chosen(tile: Tile) -> None:
    for kind, part in ((Kind.Q4_0, "gated"), (Kind.Q6_K, "residual"), (Kind.Q8_0, "norm")):
        weight, numbers = packed(kind, 208, 2560)
        outputs, generator = 208 // (2 if part == "gated" else 1), torch.Generator("cuda").manual_seed(3)
        x = torch.randn(2, 2560, generator=generator, device="cuda").to(BF16)
        norm, residual = (
            torch.ones(2560, device="cuda", dtype=BF16),
            torch.zeros(2, outputs, device="cuda", dtype=BF16),
        )
        found = product(weight, x, norm, residual, tile, part)
        assert errors(found, expected(numbers, x, norm, residual, part)).max() < 6e-3
        assert torch.equal(found[1:], product(weight, x[1:], norm, residual[1:], tile, part))


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_expanded_numbers_are_the_rounded_ones(kind: Kind) -> None:
    weight, numbers = packed(kind, 300, 1280)
    ids = torch.tensor([299, 0, 7, 7], device="cuda")
    assert torch.equal(packed_embedding(weight, ids, BF16), numbers[ids].to(BF16))
    x = torch.randn(70, 1280, device="cuda").to(BF16)
    assert torch.equal(packed_product(x, [weight], None), F.linear(x, numbers.to(BF16)))


CHECKPOINT = tiny_llama(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=272, max_position_embeddings=2048, tie_word_embeddings=False,
)  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "qwen3 Q4_K_M": (
        tiny_qwen3(hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16,
                   num_key_value_heads=8, head_dim=128, vocab_size=272, max_position_embeddings=2048),
        {"token_embd": GGUF.Q6_K, "attn_q": GGUF.Q4_K, "attn_k": GGUF.Q4_K, "attn_v": GGUF.Q6_K,
         "attn_output": GGUF.Q4_K, "ffn_gate": GGUF.Q4_K, "ffn_up": GGUF.Q4_K, "ffn_down": GGUF.Q6_K},
    ),
    "llama Q4_0": (
        tiny_llama(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
                   vocab_size=272, max_position_embeddings=2048),
        GGUF.Q4_0,
    ),
    "llama mixed": (
        tiny_llama(hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4,
                   vocab_size=272, max_position_embeddings=2048, attention_bias=True),
        {"token_embd": GGUF.Q8_0, "attn_q": GGUF.Q5_0, "attn_k": GGUF.Q5_1, "attn_v": GGUF.Q8_0,
         "attn_output": GGUF.Q4_1, "ffn_gate": GGUF.Q5_K, "ffn_up": GGUF.Q5_K, "ffn_down": GGUF.Q4_1,
         "output": GGUF.Q6_K},
    ),
    "qwen3 few bits": (
        tiny_qwen3(hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16,
                   num_key_value_heads=8, head_dim=128, vocab_size=272, max_position_embeddings=2048),
        {"token_embd": GGUF.Q3_K, "attn_q": GGUF.Q2_K, "attn_k": GGUF.Q2_K, "attn_v": GGUF.IQ4_XS,
         "attn_output": GGUF.IQ4_NL, "ffn_gate": GGUF.IQ4_XS, "ffn_up": GGUF.IQ4_XS, "ffn_down": GGUF.Q3_K},
    ),
    "gptq, act-order": (CHECKPOINT, None),
    "awq": (CHECKPOINT, None),
    "fp8, blocks": (CHECKPOINT, None),
    "int8, asymmetric": (CHECKPOINT, None),
}  # fmt: skip
TEXTS = [random_tokens(60 + 67 * n % 401, n) for n in range(20)]
COUNT = 24


@pytest.fixture(scope="module", params=list(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, kinds = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    if kinds is None:
        write(folder, CASES[request.param], config=config)
        return folder
    return write_gguf(folder / "model.gguf", random_model(config), kinds)


@contextmanager
def engine_of(path: Path, expanded: bool = False, **options: Any) -> Iterator[GpuEngine]:
    """Provide an engine whose weights stay quantised, or are expanded to bf16."""
    loop, tokenizer = Loop(), tiny_tokenizer()
    tokenizer.stop_ids = frozenset()

    def read() -> Network:
        if expanded:
            return load_model(files_of(path), dtype=BF16, device=DEVICE, quantize="none")
        return load_here(
            plan_here(files_of(path), BF16, DEVICE, LoadOptions(), room=gpu_room(BF16, DEVICE, None))
        )

    network = loop.call(read)
    given = BuildOptions(**({"context": 1500, "num_blocks": 600, "streams": len(TEXTS)} | options))
    engine = loop.call(lambda: GpuEngine(loop, network, tokenizer, given, name="packed", device=DEVICE))
    engine.network = network
    try:
        yield engine
    finally:
        engine.close()


def exact_logits(network: Network, text: list[int]) -> Tensor:
    """Return the reference's logits [COUNT, vocab] of the last tokens of a text."""
    heads, blocks = network.spec.attention, len(text) // 32 + 2
    cache = KVCache.uniform(
        len(network.layers), blocks, 32, heads.kv_heads, heads.head_dim, network.dtype, network.device
    )
    plan = SdpaBackend(cache).plan(StepBatch((Span((*range(1, blocks),), 0, len(text)),)))
    decoder, ids = Decoder(network), torch.tensor(text, device=network.device)
    with torch.inference_mode():
        hidden = decoder.forward(ids, torch.arange(len(text), device=network.device), plan)
        return decoder.logits(hidden[-COUNT:])


@pytest.fixture(scope="module")
def truth(path: Path) -> tuple[list[Tensor], float]:
    """Return the fp32 logits of each text's last tokens with dequantised weights, and the largest error of bf16."""
    wide = load_model(files_of(path), dtype=torch.float32, device=DEVICE, quantize="none")
    found = [exact_logits(wide, text) for text in TEXTS]
    with engine_of(path, expanded=True) as engine:
        rounded = forced_logits(engine, TEXTS[:8], COUNT)
    return found, float(errors(rounded, torch.stack(found[:8])).max())


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 20])
def test_no_error_is_larger_than_that_of_the_expanded_weights(
    path: Path, truth: tuple[list[Tensor], float], rows: int
) -> None:
    wanted, worst = truth
    with engine_of(path) as engine:
        assert engine.network.is_packed
        assert engine.figures().decode.startswith("fused kernels"), engine.figures().notes
        groups = [TEXTS[first : first + rows] for first in range(0, len(TEXTS), rows)]
        found = torch.cat([forced_logits(engine, texts, COUNT) for texts in groups])
    ours = errors(found, torch.stack(wanted))
    print(f"{path.parent.name}, {rows} rows: maximum {ours.max():.3e} of {worst:.3e}")
    assert ours.max() <= 1.5 * worst


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_up_to_eight_rows_have_the_bits_that_each_has_alone(path: Path, rows: int) -> None:
    with engine_of(path) as engine:
        alone = torch.cat([forced_logits(engine, [text], COUNT) for text in TEXTS[:rows]])
        assert torch.equal(forced_logits(engine, TEXTS[:rows], COUNT), alone)


def test_prompts_and_answers_are_those_of_the_expanded_weights_but_for_ties(
    path: Path, truth: tuple[list[Tensor], float]
) -> None:
    params, (wanted, worst) = SamplingParams(temperature=0.0, max_tokens=256), truth
    with engine_of(path) as engine, engine_of(path, expanded=True) as other:
        assert engine.figures().weight_bytes < 0.7 * other.figures().weight_bytes
        prompted = prefilled_logits(engine, TEXTS[3], [0])
        assert errors(prompted[-COUNT:], wanted[3]).max() <= 1.5 * worst
        answers = [[e.token_id for e in each.stream(TEXTS[3], params)] for each in (engine, other)]
        if answers[0] != answers[1]:
            common = next(i for i, pair in enumerate(zip(*answers, strict=True)) if pair[0] != pair[1])
            row = prefilled_logits(other, TEXTS[3] + answers[0][:common], [0])[-1].float()
            assert abs(row[answers[0][common]] - row[answers[1][common]]) <= 4 * worst * row.norm()
