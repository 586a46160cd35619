"""Chunks of a prompt by the native kernels, against the plain modules and against the same prompt split otherwise."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from engine.cache.kv_cache import KVCache
from engine.execute.cpu.executor import NativeDecoder, NativeSpan
from engine.kernels.native.library import PARTS, Library, NativeError, Pool, Times
from models.network import Network
from models.reference.decoder import Decoder
from tests.counting import until
from tests.engine.native.test_native_decode import (
    BLOCK,
    CONFIGS,
    RoundedAttention,
    cache_for,
    plain_model,
    quantized_model,
    rounding,
    step,
)

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
            chunk = slice(start, end)
            blocks = self.table[: -(-end // BLOCK)]
            span = NativeSpan(self.ids[chunk], start, self.positions[chunk], blocks, end == ends[-1])
            logits = decoder.run([span])
            assert len(logits) == (end == ends[-1])
        return logits[0]


def run(
    model: Network, prompt: Prompt, pool: Pool, variant: int, dtype: torch.dtype, ends: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Logits after the last row, and K and V of all rows [2, layers, rows, heads, head_dim]."""
    cache: KVCache = cache_for(model, dtype)
    logits = prompt.run(NativeDecoder(model, cache, pool, variant), ends)
    kv = cache.kv[:, :, prompt.slots].clone()
    cache.kv[:, :, prompt.slots] = float("nan")
    assert cache.kv.isnan().all(), "rows of others were written"
    return logits, kv


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> PretrainedConfig:
    return CONFIGS[request.param]


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory, config: PretrainedConfig) -> Network:
    return quantized_model(tmp_path_factory.getbasetemp() / f"native-{config.model_type}", config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_is_within_what_rounding_the_activations_does(
    model: Network, pool: Pool, library: Library, dtype: torch.dtype
) -> None:
    prompt = Prompt(model)
    attention, exact = RoundedAttention(dtype), RoundedAttention(dtype)
    ids, positions = torch.tensor(prompt.ids), torch.tensor(prompt.positions)
    with torch.inference_mode():
        found = []
        for reference, kv in ((Decoder(model), exact), (rounding(model), attention)):
            found.append(reference.logits(reference.forward(ids, positions, kv))[-1])
        expected, rounded = found
    explained = relative(rounded, expected)
    for variant in library.variants.values():
        logits, kv = run(model, prompt, pool, variant, dtype, [COUNT])
        assert relative(logits, expected) < 2 * explained
        for layer in range(len(model.layers)):
            stored = torch.stack(exact.kv[layer])
            same = torch.stack(attention.kv[layer])
            assert relative(kv[:, layer].float(), stored) < 2 * relative(same, stored) + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_prompt_that_is_split_otherwise_is_the_same_to_the_bit(
    model: Network, pool: Pool, library: Library, dtype: torch.dtype
) -> None:
    prompt = Prompt(model)
    for variant in library.variants.values():
        logits, kv = run(model, prompt, pool, variant, dtype, [COUNT])
        for ends in ([1, 3, 20, 83, COUNT], [64, 129, COUNT], [COUNT - 1, COUNT]):
            again, kv_again = run(model, prompt, pool, variant, dtype, ends)
            torch.testing.assert_close(kv_again, kv, rtol=0, atol=0)
            torch.testing.assert_close(again, logits, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_any_number_of_threads_gives_the_same(
    model: Network, pool: Pool, library: Library, threads: int
) -> None:
    prompt = Prompt(model, 37)
    expected, _ = run(model, prompt, pool, library.best, torch.bfloat16, [37])
    found, _ = run(model, prompt, Pool(threads, library), library.best, torch.bfloat16, [5, 37])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_one_thread_of_several_gives_the_same(model: Network, library: Library) -> None:
    prompt, expected = Prompt(model, 37), []
    for alone in (False, True):
        pool = Pool(3, library)
        cache = cache_for(model, torch.float32)
        decoder = NativeDecoder(model, cache, pool)
        # The first chunk and every other one after it, by all threads and by one.
        for start, end in pairwise(range(0, 37, 6)):
            pool.set_alone(alone and start % 12 == 0)
            chunk = slice(start, end)
            span = NativeSpan(prompt.ids[chunk], start, prompt.positions[chunk], prompt.table)
            expected.append(decoder.run([span]))
        pool.set_alone(alone)
        expected.append(step(decoder, prompt.ids[36], 36, prompt.positions[36], prompt.table))
        expected.append(cache.kv[:, :, prompt.slots].clone())
    half = len(expected) // 2
    for ours, theirs in zip(expected[half:], expected[:half], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


THREADS = Path("/proc/self/task")


@pytest.mark.skipif(not THREADS.exists(), reason="only Linux tells what a thread does")
def test_alone_means_that_the_other_threads_do_nothing(model: Network, library: Library) -> None:
    before = set(THREADS.iterdir())
    pool = Pool(2, library)
    (other,) = set(THREADS.iterdir()) - before
    prompt, decoder = Prompt(model), NativeDecoder(model, cache_for(model, torch.float32), pool)

    def wakes() -> int:
        """How often the other thread has gone to sleep so far; it spins for a moment before it does."""
        until(lambda: "State:\tS" in (other / "status").read_text())
        return int((other / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0])

    for alone in (False, True, False):
        pool.set_alone(alone)
        asleep = wakes()
        for _ in range(3):
            prompt.run(decoder, [40])
        if alone:
            assert wakes() == asleep
        else:
            until(lambda asleep=asleep: wakes() > asleep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_token_by_token_is_the_same_to_the_bit_as_in_chunks(
    model: Network, pool: Pool, library: Library, dtype: torch.dtype
) -> None:
    prompt = Prompt(model)
    for name, variant in library.variants.items():
        if name == "portable":  # its chunks are never used
            continue
        expected, kv = run(model, prompt, pool, variant, dtype, [COUNT])
        for threads, before in ((1, 0), (2, 30), (7, COUNT - 1)):
            cache = cache_for(model, dtype)
            decoder = NativeDecoder(model, cache, Pool(threads, library), variant)
            if before:
                prompt.run(decoder, [before])
            logits = expected
            for row in range(before, COUNT):
                blocks = prompt.table[: row // BLOCK + 1]
                logits = step(decoder, prompt.ids[row], row, prompt.positions[row], blocks)
            torch.testing.assert_close(cache.kv[:, :, prompt.slots], kv, rtol=0, atol=0)
            torch.testing.assert_close(logits, expected, rtol=0, atol=0)


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
        decoder.run([NativeSpan(ids, start, positions, blocks)])


def test_prompts_of_plain_weights_are_left_to_torch(
    tmp_path_factory: pytest.TempPathFactory, config: PretrainedConfig, pool: Pool
) -> None:
    folder: Path = tmp_path_factory.getbasetemp() / f"native-{config.model_type}"
    model = plain_model(folder, config)
    decoder = NativeDecoder(model, cache_for(model, torch.float32), pool)
    assert not decoder.takes_prompts


def test_only_the_portable_kernels_leave_chunks_to_torch(
    model: Network, pool: Pool, library: Library
) -> None:
    for name, variant in library.variants.items():
        decoder = NativeDecoder(model, cache_for(model, torch.float32), pool, variant)
        assert decoder.takes_prompts == (name != "portable")


def test_the_parts_of_a_chunk_are_timed(model: Network, pool: Pool) -> None:
    decoder = NativeDecoder(model, cache_for(model, torch.float32), pool)
    times = Times()
    decoder.run([NativeSpan([1, 2, 3], 0, [0, 1, 2], [0])], times)
    assert all(getattr(times, name) > 0 for name in PARTS)


def test_sequences_side_by_side_are_each_the_same_to_the_bit_as_alone(
    model: Network, pool: Pool, library: Library
) -> None:
    for variant in library.variants.values():
        together = NativeDecoder(model, cache_for(model, torch.float32), pool, variant)
        spans = [
            NativeSpan(list(range(first, first + count)), 0, list(range(count)), [block])
            for first, count, block in ((3, 7, 0), (50, 1, 4), (90, 13, 9), (20, 2, 2))
        ]
        logits = together.run(spans)
        for span, row in zip(spans, logits, strict=True):
            alone = NativeDecoder(model, cache_for(model, torch.float32), pool, variant)
            torch.testing.assert_close(alone.run([span])[0], row, rtol=0, atol=0)
