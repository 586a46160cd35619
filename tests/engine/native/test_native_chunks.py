"""Chunks of a prompt by the native kernels, against the plain modules and against the same prompt split otherwise."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config, PretrainedConfig

from engine.batch import Span
from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import not_native
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.loading.load import load_model
from models.network import FeedForwardWeights, Network
from models.reference.decoder import Decoder
from tests.counting import until
from tests.covering import each_value_once
from tests.engine.native.spans import a_span
from tests.engine.native.test_native_decode import (
    BLOCK,
    CONFIGS,
    RoundedAttention,
    cache_for,
    plain_model,
    quantized_model,
    rounded,
)
from tests.engine.test_compatibility import a_network, a_spec
from tests.models.checkpoints import files_of, write_checkpoint
from tests.models.families import tiny

COUNT = 150
"""Tokens of the prompt: more than the library computes at once."""


def relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


class Prompt:
    """A prompt in blocks that lie in no order, with a gap in its positions."""

    def __init__(self, model: Network, count: int = COUNT) -> None:
        generator = torch.Generator().manual_seed(count)
        self.ids: list[int] = torch.randint(model.spec.vocab_size, (count,), generator=generator).tolist()
        self.positions = [row + 7 * (row > count // 2) for row in range(count)]
        self.table: list[int] = torch.randperm(40, generator=generator).tolist()
        self.slots = torch.tensor([self.table[row // BLOCK] * BLOCK + row % BLOCK for row in range(count)])

    def run(self, decoder: NativeDecoder, ends: Sequence[int]) -> Tensor:
        """The logits after the last row, in chunks that end before the rows `ends`."""
        logits = torch.empty(0)
        for start, end in pairwise((0, *ends)):
            logits = decoder.run([self.span(start, end, wanted=end == ends[-1])])
            assert len(logits) == (end == ends[-1])
        return logits[0]

    def span(self, start: int, end: int, *, wanted: bool = True) -> Span:
        chunk, blocks = slice(start, end), self.table[: -(-end // BLOCK)]
        return a_span(self.ids[chunk], start, self.positions[chunk], blocks, wanted)


def run(
    model: Network, prompt: Prompt, pool: Pool, variant: int, dtype: torch.dtype, ends: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Logits after the last row, and all numbers that the cache keeps, part by part."""
    cache: KVCache = cache_for(model, dtype)
    logits = prompt.run(NativeDecoder(model, cache, pool, variant), ends)
    kv = torch.cat([part[:, :, prompt.slots].flatten() for part in cache.parts])
    for part in cache.parts:
        part[:, :, prompt.slots] = float("nan")
        assert part.isnan().all(), "rows of others were written"
    return logits, kv


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> PretrainedConfig:
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, config: PretrainedConfig) -> Network:
    return quantized_model(tmp_path_factory.getbasetemp() / f"native-{config.model_type}", config)


def test_parts_that_a_checkpoint_packs_are_cut_into_blocks(
    pool: Pool, library: NativeLibrary, tmp_path: Path
) -> None:
    config = tiny(Phi3Config, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    model = load_model(
        files_of(write_checkpoint(tmp_path, config)),
        dtype=torch.float32,
        device=torch.device("cpu"),
        quantize="int8",
    )
    assert not_native(model.spec) is None
    layer = model.layers[0]
    assert isinstance(layer.feed_forward, FeedForwardWeights)
    assert [part.rows for part in layer.attention.qkv.parts] == [64, 32, 32]
    assert [part.rows for part in layer.feed_forward.gate_up.parts] == [96, 96]
    prompt, plain, rounding = Prompt(model), Decoder(model), rounded(model)
    ids, positions = torch.tensor(prompt.ids), torch.tensor(prompt.positions)
    with torch.inference_mode():
        expected, found = (
            each.logits(each.forward(ids, positions, RoundedAttention(torch.float32)))[-1]
            for each in (plain, rounding)
        )
    for variant in library.variants.values():
        for ends in ([COUNT], [COUNT - 1, COUNT]):
            logits, _ = run(model, prompt, pool, variant, torch.float32, ends)
            assert relative(logits, expected) < 2 * relative(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_is_within_what_rounding_the_activations_does(
    model: Network, pool: Pool, library: NativeLibrary, dtype: torch.dtype
) -> None:
    prompt = Prompt(model)
    attention, exact = RoundedAttention(dtype), RoundedAttention(dtype)
    ids, positions = torch.tensor(prompt.ids), torch.tensor(prompt.positions)
    plain, rounding = Decoder(model), rounded(model)
    with torch.inference_mode():
        expected = plain.logits(plain.forward(ids, positions, exact))[-1]
        found = rounding.logits(rounding.forward(ids, positions, attention))[-1]
    explained = relative(found, expected)
    for variant in library.variants.values():
        logits, kept = run(model, prompt, pool, variant, dtype, [COUNT])
        kv = kept.view(2, len(model.layers), *exact.kv[0][0].shape)
        assert relative(logits, expected) < 2 * explained
        for layer in range(len(model.layers)):
            stored = torch.stack(exact.kv[layer])
            same = torch.stack(attention.kv[layer])
            assert relative(kv[:, layer].float(), stored) < 2 * relative(same, stored) + 1e-3


@each_value_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_prompt_that_is_split_otherwise_is_the_same_to_the_bit(
    model: Network, pool: Pool, library: NativeLibrary, dtype: torch.dtype
) -> None:
    prompt = Prompt(model)
    for variant in library.variants.values():
        logits, kv = run(model, prompt, pool, variant, dtype, [COUNT])
        for ends in ([1, 3, 20, 83, COUNT], [64, 129, COUNT - 1, COUNT]):
            again, kv_again = run(model, prompt, pool, variant, dtype, ends)
            torch.testing.assert_close(kv_again, kv, rtol=0, atol=0)
            torch.testing.assert_close(again, logits, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_any_number_of_threads_gives_the_same(
    model: Network, pool: Pool, library: NativeLibrary, threads: int
) -> None:
    prompt = Prompt(model, 37)
    expected, _ = run(model, prompt, pool, library.best, torch.bfloat16, [37])
    found, _ = run(model, prompt, Pool(threads, library), library.best, torch.bfloat16, [5, 37])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_fewer_threads_of_several_give_the_same(model: Network, library: NativeLibrary) -> None:
    prompt, expected = Prompt(model, 37), []
    for fewer in (False, True):
        pool = Pool(3, library)
        cache = cache_for(model, torch.float32)
        decoder = NativeDecoder(model, cache, pool)
        # By all threads, and by one, two and three in turns.
        for start, end in pairwise(range(0, 37, 6)):
            pool.set_working(1 + start // 6 % 3 if fewer else 3)
            expected.append(decoder.run([prompt.span(start, end)]))
        pool.set_working(1 if fewer else 3)
        expected.append(decoder.run([prompt.span(36, 37)]))
        expected.append(cache.kv[:, :, prompt.slots].clone())
    half = len(expected) // 2
    for ours, theirs in zip(expected[half:], expected[:half], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


THREADS = Path("/proc/self/task")


@pytest.mark.skipif(not THREADS.exists(), reason="only Linux tells what a thread does")
def test_alone_means_that_the_other_threads_do_nothing(model: Network, library: NativeLibrary) -> None:
    before = set(THREADS.iterdir())
    pool = Pool(2, library)
    (other,) = set(THREADS.iterdir()) - before
    prompt, decoder = Prompt(model), NativeDecoder(model, cache_for(model, torch.float32), pool)

    def wakes() -> int:
        """How often the other thread has gone to sleep so far; it spins for a moment before it does."""
        until(lambda: "State:\tS" in (other / "status").read_text())
        return int((other / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0])

    for alone in (False, True, False):
        pool.set_working(1 if alone else 2)
        asleep = wakes()
        for _ in range(3):
            prompt.run(decoder, [40])
        if alone:
            assert wakes() == asleep
        else:
            until(lambda asleep=asleep: wakes() > asleep)


@pytest.mark.parametrize(
    ("ids", "start", "positions", "blocks"),
    [
        ([], 0, [], [0]),
        ([1, 2], 0, [0], [0]),
        ([1, -1], 0, [0, 1], [0]),
        ([1, 160], 0, [0, 1], [0]),
        ([1, 2], -1, [0, 1], [0]),
        ([1, 2], BLOCK - 1, [0, 1], [0]),
        ([1, 2], 0, [0, 512], [0]),
        ([1, 2], 0, [-1, 0], [0]),
        ([1, 2], BLOCK, [0, 1], [0, 40]),
        ([1, 2], 2**31 - 1, [0, 1], [0]),
    ],
)
def test_values_out_of_range_are_refused(
    model: Network, pool: Pool, ids: list[int], start: int, positions: list[int], blocks: list[int]
) -> None:
    decoder = NativeDecoder(model, cache_for(model, torch.float32), pool)
    with pytest.raises(NativeError):
        decoder.run([a_span([3], 0, [0], [1]), a_span(ids, start, positions, blocks)])


def test_torch_is_faster_for_prompts_of_plain_weights_and_than_the_portable_kernels(
    tmp_path_factory: pytest.TempPathFactory, model: Network, config: PretrainedConfig, pool: Pool
) -> None:
    folder: Path = tmp_path_factory.getbasetemp() / f"native-{config.model_type}"
    plain = plain_model(folder, config)
    for name, variant in pool.library.variants.items():
        decoder = NativeDecoder(model, cache_for(model, torch.float32), pool, variant)
        assert decoder.takes_prompts == (name != "portable")
        decoder = NativeDecoder(plain, cache_for(plain, torch.float32), pool, variant)
        assert not decoder.takes_prompts
    halves = a_network(a_spec(), torch.bfloat16)
    for name, variant in pool.library.variants.items():
        decoder = NativeDecoder(halves, cache_for(halves, torch.float16), pool, variant)
        assert decoder.takes_prompts == (name == "avx512bf16" and not torch.cpu._is_amx_tile_supported())
