"""The fused kernels of a decode step against the plain modules, in fp32 and in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.tiles import Tile, choose_chunking
from engine.kernels.triton.linear import linear_kernel
from engine.kernels.triton.pointwise import Gate
from models.loading.load import load_model
from models.reference.decoder import Decoder
from tests.covering import each_value_once
from tests.models.checkpoints import files_of, tiny_llama, tiny_qwen3, write_checkpoint

DEVICE = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)


@pytest.mark.parametrize(
    ("outputs", "inputs", "tile"),
    [(32, 256, (2, 1, 1, 1)), (30, 700, (1, 2, 1, 2)), (24, 768, (2, 2, 2, 4)), (8, 1024, (4, 2, 1, 1))],
)
@pytest.mark.parametrize("part", ["plain", "norm", "bias", "gated", "gated norm", "residual"])
def test_a_product_with_what_stands_around_it(
    outputs: int, inputs: int, tile: tuple[int, int, int, int], part: str
) -> None:
    generator = torch.Generator().manual_seed(outputs)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    gated = part.startswith("gated")
    lines = 2 * outputs if gated else outputs
    x, weight, scale = random(8, inputs), random(lines, inputs), random(inputs)
    bias, residual = random(lines), random(8, outputs)
    out = torch.full((8, outputs), 7.0)
    cut = Tile(*tile)
    linear_kernel[(-(-outputs // cut.outputs(gated)),)](
        x,
        weight,
        bias,
        scale,
        residual,
        out,
        COUNT=3,
        N=outputs,
        K=inputs,
        EPS=1e-6,
        NORM=part.endswith("norm"),
        BIAS=part in ("bias", "gated"),
        GATED=gated,
        RESIDUAL=part == "residual",
        FOLDS=cut.folds,
        WARPS=cut.warps,
        TILES=cut.tiles,
        AHEAD=cut.ahead,
        PDL=False,
        num_warps=cut.warps,
    )
    y = F.linear(F.rms_norm(x, (inputs,), scale, 1e-6) if part.endswith("norm") else x, weight)
    if part in ("bias", "gated"):
        y = y + bias
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    if part == "residual":
        y = y + residual
    torch.testing.assert_close(out[:3], y[:3], rtol=1e-4, atol=1e-3)
    assert (out[3:] == 7.0).all()  # of rows that are not of the step, nothing is written


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu"])
def test_a_gated_product_with_another_activation_a_scale_and_a_cap(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((2, 256), (32, 256)))
    out = torch.empty(2, 16)
    linear_kernel[(2,)](
        *(x, weight, weight, weight, x, out),
        COUNT=2,
        N=16,
        K=256,
        EPS=0.0,
        NORM=False,
        BIAS=False,
        GATED=True,
        RESIDUAL=False,
        FOLDS=1,
        WARPS=1,
        TILES=1,
        AHEAD=2,
        PDL=False,
        GATE=Gate(kind),
        SCALE=0.1,
        CAP=5.0,
        num_warps=1,
    )
    gate, up = F.linear(x, weight).chunk(2, -1)
    activated = {
        "gelu": F.gelu(gate),
        "gelu_tanh": F.gelu(gate, approximate="tanh"),
        "relu": F.relu(gate),
    }
    expected = 5.0 * torch.tanh(activated[kind] * up * 0.1 / 5.0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@each_value_once
@pytest.mark.parametrize(
    "config",
    [
        tiny_qwen3(num_hidden_layers=1, head_dim=64),
        tiny_llama(
            num_hidden_layers=1,
            hidden_size=192,
            num_attention_heads=3,
            num_key_value_heads=1,
            attention_bias=True,
        ),
    ],
    ids=["qwen3", "llama"],
)
@pytest.mark.parametrize("row", [0, 5, 130])
def test_a_step_gives_the_logits_and_the_cache_of_the_plain_modules(
    tmp_path_factory: pytest.TempPathFactory, config: PretrainedConfig, row: int
) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("fused"), config)
    network = load_model(files_of(folder), dtype=torch.float32, device=DEVICE)
    model, shape = Decoder(network), network.spec.attention
    kv_heads, dim = shape.kv_heads, shape.head_dim
    plain, fused = (KVCache.uniform(1, 40, 16, kv_heads, dim, torch.float32, DEVICE) for _ in range(2))
    table = [7, 3, 4, 5, 20, 1, 2, 9, 11, 30, 31, 32]
    ids = torch.randint(160, (row + 1,), generator=torch.Generator().manual_seed(row)).to(DEVICE)
    backend = SdpaBackend(plain)
    plain.kv.zero_()
    with torch.inference_mode():
        if row:
            spans = StepBatch((Span(tuple(table), 0, row),))
            model.forward(ids[:-1], torch.arange(row, device=DEVICE), backend.plan(spans))
        fused.kv.fill_(float("nan"))  # rows that were never written must not matter
        written = torch.tensor(
            [table[i // 16] * 16 + i % 16 for i in range(row)], dtype=torch.int64, device=DEVICE
        )
        fused.kv[:, :, written] = plain.kv[:, :, written]
        step = backend.plan(StepBatch((Span(tuple(table), row, 1),)))
        expected = model.logits(model.forward(ids[-1:], torch.tensor([row], device=DEVICE), step))[0]
        slots = Slots(2, 1, len(table), torch.cat((ids[-1:], ids[-1:])))
        slots.put(1, row, row)
        slots.show(1, table)
        slots.activate([1], 1)
        slots.send()
        decoder = FusedDecoder(network, fused, slots.given, pdl=False)
        (logits,) = decoder.run(1, 640)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    slot = table[row // 16] * 16 + row % 16
    torch.testing.assert_close(fused.kv[:, :, slot], plain.kv[:, :, slot], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 640, 1280, 2560, 10240, 20480, 40960, 131072])
def test_the_chunks_cover_every_row_and_fit_the_buffers(limit: int) -> None:
    for heads in (1, 2, 4, 8):
        cut = choose_chunking(limit, heads)
        assert cut.rows * cut.chunks >= limit
        assert cut.chunks <= 80


@pytest.mark.parametrize("inputs", [64, 576, 1024, 1536, 2048, 2560, 3072, 4096, 8192, 9728, 12288, 28672])
@pytest.mark.parametrize("gated", [True, False])
def test_tiles_are_powers_of_two_and_fit_a_multiprocessor(inputs: int, gated: bool) -> None:
    for outputs in (96, 1024, 4096, 151936):
        tile = KernelConfigs().product(16, outputs, inputs, gated, None)
        for size in (tile.folds, tile.warps, tile.tiles, tile.outputs(gated)):
            assert size >= 1
            assert size & (size - 1) == 0
        spans = -(-inputs // (tile.warps * tile.folds * 128))
        # A tile takes 4 KB of shared memory a warp; the smallest GPUs with tensor cores have 100 KB.
        assert 4096 * tile.tiles * tile.warps * min(tile.ahead, spans) <= 99 * 1024
