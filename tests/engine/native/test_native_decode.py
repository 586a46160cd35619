"""The decode step of the native kernels, token by token, against the plain modules over the whole sequence."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PretrainedConfig

from engine.cache.group_pool import GroupPool
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows
from engine.execute.cpu.executor import NativeDecoder, unsupported
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.loading.load import load_model
from models.network import FeedForwardWeights, LayerWeights, Linear, Network, Weight
from models.reference.decoder import Decoder
from models.spec import kv_sources
from models.weights import block_formats
from models.weights.formats.blocks import dequantize
from tests.engine.native.spans import a_span
from tests.models.checkpoints import PlainAttention, files_of, tiny_llama, tiny_qwen3, write_checkpoint

CPU = torch.device("cpu")
BLOCK = 16
CONFIGS = {
    "qwen3": tiny_qwen3(hidden_size=256, intermediate_size=512, head_dim=64, max_position_embeddings=512),
    "llama": tiny_llama(
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=512,
    ),
}


class RoundedAttention(PlainAttention):
    """What a cache of `dtype` keeps of k and v."""

    def __init__(self, dtype: torch.dtype, network: Network | None = None) -> None:
        super().__init__(network)
        self.dtype = dtype

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().__call__(layer_index, q, k.to(self.dtype).float(), v.to(self.dtype).float())


class RoundedProduct:
    """The product of the native kernels in plain torch: the activation rounded to int8, block by block."""

    def __call__(self, x: Tensor, weights: Sequence[Weight], bias: Tensor | None) -> Tensor:
        outputs = []
        for weight in weights:
            blocks = x.view(len(x), -1, 32)
            step = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
            rounded = (blocks / step).round().mul(step).view_as(x)
            numbers = torch.empty(weight.rows, weight.columns)
            dequantize(weight.data, weight.format, numbers)
            outputs.append(F.linear(rounded, numbers))
        out = torch.cat(outputs, -1)
        return out if bias is None else out + bias


def plain_model(folder: Path, config: PretrainedConfig) -> Network:
    if not (folder / "config.json").exists():
        write_checkpoint(folder, config)
    return load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize="none")


def rounded(model: Network) -> Decoder:
    """The plain modules with products that round as the native kernels do."""
    return Decoder(model, RoundedProduct())


def random_blocks(kind: int, rows: int, columns: int, seed: int) -> Weight:
    """Random digits; scales that make the numbers as large as those of a trained layer."""
    random = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[Kind(kind)]
    blocks = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    # scale, and minimum where there is one, so that the mean is about zero
    halves = {Kind.Q6_K: (208,), Kind.Q8_0: (0,), Kind.Q4_0: (0,)}.get(Kind(kind), (0, 2))
    minimum = {Kind.Q4_1: -7.5, Kind.Q4_K: 7.5, Kind.Q5_K: 15.5}.get(Kind(kind), 0.0)

    def put(scale: float) -> np.ndarray[Any, Any]:
        for at, value in zip(halves, (scale, minimum * scale), strict=False):
            blocks[..., at : at + 2] = np.frombuffer(np.float16(value).tobytes(), dtype=np.uint8)
        numbers: np.ndarray[Any, Any] = gguf.dequantize(blocks.reshape(rows, -1), Kind(kind))
        return numbers

    put(columns**-0.5 * 2.0**-8 / put(2.0**-8).std())
    return Weight(torch.from_numpy(blocks.reshape(rows, -1)), block_formats.Kind(kind), rows, columns)


def quantized_model(folder: Path, config: PretrainedConfig) -> Network:
    """Norms and biases of the checkpoint, random blocks of all types, another one for every matrix."""
    return in_blocks(plain_model(folder, config))


def in_blocks(plain: Network) -> Network:
    """The same with random blocks: of all types that fit, another one for every matrix; a router stays as it is."""
    kinds = cycle((Kind.Q4_K, Kind.Q8_0, Kind.Q6_K, Kind.Q4_1, Kind.Q5_K, Kind.Q4_0))
    seeds, attention = count(), plain.spec.attention
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim

    def blocks(given: Linear, *rows: int) -> Linear:
        fitting = (kind for kind in kinds if given.columns % gguf.GGML_QUANT_SIZES[kind][0] == 0)
        parts = tuple(random_blocks(next(fitting), size, given.columns, next(seeds)) for size in rows)
        return Linear(parts, given.bias)

    def feed_forward(feed: FeedForwardWeights) -> FeedForwardWeights:
        gate_up = blocks(feed.gate_up, *[feed.gate_up.rows // 2] * 2)
        return replace(feed, gate_up=gate_up, down=blocks(feed.down, feed.down.rows))

    def layer(given: LayerWeights) -> LayerWeights:
        weights, feed = given.attention, given.feed_forward
        qkv, out = blocks(weights.qkv, q, kv, kv), blocks(weights.out, weights.out.rows)
        attention = replace(weights, qkv=qkv, out=out)
        if isinstance(feed, FeedForwardWeights):
            return replace(given, mixer=attention, feed_forward=feed_forward(feed))
        experts = tuple(map(feed_forward, feed.experts))
        shared = None if feed.shared is None else feed_forward(feed.shared)
        mixture = replace(feed, experts=experts, shared=shared)
        return replace(given, mixer=attention, feed_forward=mixture)

    head = blocks(plain.head, plain.head.rows)
    tied = plain.head.parts[0] is plain.embedding
    embedding = head.parts[0] if tied else blocks(plain.head, plain.head.rows).parts[0]
    return replace(plain, embedding=embedding, layers=tuple(map(layer, plain.layers)), head=head)


def cache_for(
    model: Network,
    dtype: torch.dtype,
    blocks: int = 40,
    pools: Sequence[tuple[Sequence[int], GroupPool]] = (),
) -> KVCache:
    rows, sources = layer_rows(model.spec, dtype, CPU), kv_sources(model.spec)
    cache = KVCache(rows, blocks, BLOCK, dtype, CPU, sources=sources, pools=pools)
    for part in cache.parts:
        part.fill_(float("nan"))  # what was never written must not matter
    return cache


def step(decoder: NativeDecoder, token: int, row: int, position: int, blocks: list[int]) -> Tensor:
    """One token by itself; fp32 [vocab_size]."""
    return decoder.run([a_span([token], row, [position], blocks)])[0]


def errors(
    model: Network,
    pool: Pool,
    variant: int,
    rows: Sequence[int],
    dtype: torch.dtype,
    truth: Decoder | None = None,
) -> list[float]:
    """The relative error of the logits of steps at `rows`, against one pass of `truth` over the whole sequence.

    Before each step the cache holds what that pass gave for the rows before, as far as the window of a layer reaches;
    what the step writes is checked here. The positions have a gap in them, and the blocks lie in no order.
    """
    cache = cache_for(model, dtype)
    decoder = NativeDecoder(model, cache, pool, variant)
    generator = torch.Generator().manual_seed(len(rows))
    table = torch.randperm(40, generator=generator).tolist()
    length = max(rows) + 1
    ids = torch.randint(model.spec.vocab_size, (length,), generator=generator)
    positions = torch.arange(length) + 7 * (torch.arange(length) > length // 2)
    slots = torch.tensor([table[row // BLOCK] * BLOCK + row % BLOCK for row in range(length)])
    attention = RoundedAttention(dtype, model)
    with torch.inference_mode():
        plain = truth or Decoder(model)
        expected = plain.logits(plain.forward(ids, positions, attention))
    exact = [
        (layer.mixer.window, kept, numbers.view(-1, *kept.shape[1:]))
        for index, layer in enumerate(model.spec.layers)
        if kv_sources(model.spec)[index] == index
        for kept, numbers in zip((cache.k[index], cache.v[index]), attention.kv[index], strict=True)
    ]
    found = []
    for row in rows:
        for window, kept, numbers in exact:
            kept.fill_(float("nan"))
            seen = slice(0 if window is None else max(0, row + 1 - window), row)
            kept[slots[seen]] = numbers[seen].to(dtype)
        logits = step(decoder, int(ids[row]), row, int(positions[row]), table[: row // BLOCK + 1])
        found.append(float((logits - expected[row]).norm() / expected[row].norm()))
        written = torch.cat([kept[slots[row]].float().flatten() for _, kept, _ in exact])
        right = torch.cat([numbers[row].flatten() for *_, numbers in exact])
        found.append(float((written - right).norm() / right.norm()))
        for _, kept, _ in exact:
            kept[slots[: row + 1]] = float("nan")
            assert kept.isnan().all(), "rows of others were written"
    return found


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> PretrainedConfig:
    return CONFIGS[request.param]


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory, config: PretrainedConfig) -> Path:
    return tmp_path_factory.getbasetemp() / f"native-{config.model_type}"


def test_plain_weights_give_the_logits_and_the_cache_of_the_plain_modules(
    checkpoint: Path, config: PretrainedConfig, pool: Pool, library: NativeLibrary
) -> None:
    model = plain_model(checkpoint, config)
    for variant in library.variants.values():
        assert max(errors(model, pool, variant, (0, 1, 15, 16, 69), torch.float32)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_long_sequence_in_a_cache_of_any_dtype(
    checkpoint: Path, config: PretrainedConfig, pool: Pool, library: NativeLibrary, dtype: torch.dtype
) -> None:
    rows = (0, 63, 64, 65, 127, 128, 129, 191, 192, 300, 400)
    # A number next to the middle of two bf16 numbers may go either way, and then everything after it moves a little.
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    assert max(errors(plain_model(checkpoint, config), pool, library.best, rows, dtype)) < limit


def test_quantized_weights_give_what_rounding_the_activations_does_to_the_plain_modules(
    checkpoint: Path, config: PretrainedConfig, pool: Pool, library: NativeLibrary
) -> None:
    model = quantized_model(checkpoint, config)
    for variant in library.variants.values():
        found = errors(model, pool, variant, range(20), torch.float32, rounded(model))
        # A number next to the middle of two steps may go either way; most rows of the cache have none.
        assert sorted(found)[len(found) // 4] < 1e-5
        assert max(found) < 0.05


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_any_number_of_threads(
    checkpoint: Path, config: PretrainedConfig, library: NativeLibrary, threads: int
) -> None:
    model = plain_model(checkpoint, config)
    assert max(errors(model, Pool(threads, library), library.best, (0, 5, 150), torch.float32)) < 1e-5


@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 128])
@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (14, 2)], ids=str)
def test_heads_of_many_sizes(
    tmp_path: Path, pool: Pool, library: NativeLibrary, head_dim: int, heads: tuple[int, int]
) -> None:
    config = tiny_qwen3(
        hidden_size=40,
        intermediate_size=52,
        num_hidden_layers=1,
        head_dim=head_dim,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
    )
    assert max(errors(plain_model(tmp_path, config), pool, library.best, (0, 3, 69), torch.float32)) < 1e-5


def test_a_table_may_change_from_step_to_step(checkpoint: Path, config: PretrainedConfig, pool: Pool) -> None:
    model = plain_model(checkpoint, config)
    cache = cache_for(model, torch.float32)
    decoder = NativeDecoder(model, cache, pool)
    first, other = step(decoder, 3, 0, 0, [5]), step(decoder, 4, 0, 0, [9])
    assert not torch.equal(first, other)
    torch.testing.assert_close(step(decoder, 3, 0, 0, [5]), first, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("token", "row", "position", "blocks"),
    [
        (-1, 0, 0, [0]),
        (160, 0, 0, [0]),
        (0, -1, 0, [0]),
        (0, BLOCK, BLOCK, [0]),
        (0, 0, -1, [0]),
        (0, 0, 512, [0]),
        (0, 0, 0, []),
        (0, 0, 0, [40]),
        (0, 0, 0, [-1]),
    ],
)
def test_values_out_of_range_are_refused(
    checkpoint: Path,
    config: PretrainedConfig,
    pool: Pool,
    token: int,
    row: int,
    position: int,
    blocks: list[int],
) -> None:
    model = plain_model(checkpoint, config)
    decoder = NativeDecoder(model, cache_for(model, torch.float32), pool)
    with pytest.raises(NativeError):
        step(decoder, token, row, position, blocks)


def test_weights_that_are_no_numbers_show_in_the_logits(
    checkpoint: Path, config: PretrainedConfig, pool: Pool
) -> None:
    model = plain_model(checkpoint, config)
    feed = model.layers[1].feed_forward
    assert isinstance(feed, FeedForwardWeights)
    feed.down.weight[3, 5] = float("nan")
    logits = step(NativeDecoder(model, cache_for(model, torch.float32), pool), 1, 0, 0, [0])
    assert logits.isnan().all()


def test_what_has_no_kernels_is_refused(checkpoint: Path, config: PretrainedConfig, pool: Pool) -> None:
    model = plain_model(checkpoint, config)
    with pytest.raises(NativeError, match="KV cache"):
        NativeDecoder(model, cache_for(model, torch.float64), pool)
    with pytest.raises(NativeError, match="variant"):
        NativeDecoder(model, cache_for(model, torch.float32), pool, variant=99)
    assert unsupported(model.spec) is None


def test_what_is_too_large_for_fp16_becomes_its_largest_number(
    tmp_path: Path, library: NativeLibrary, pool: Pool
) -> None:
    model = plain_model(tmp_path, CONFIGS["qwen3"])
    for layer in model.layers:
        assert layer.attention.head_norm is not None
        layer.attention.head_norm.mul_(1e6)
    for variant in library.variants.values():
        cache = cache_for(model, torch.float16)
        logits = step(NativeDecoder(model, cache, pool, variant), 5, 0, 0, [0])
        keys = cache.kv[0][:, 0].float()
        assert keys.max() == 65504
        assert keys.min() == -65504
        assert logits.isfinite().all()
