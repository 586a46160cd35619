"""The native kernels find rows by group: the bits are those of a cache that keeps all rows of all layers."""

from pathlib import Path
from random import Random

import pytest
import torch
from transformers import PretrainedConfig

from engine.cache.blocks import BlockManager
from engine.cache.group_pool import GroupPool
from engine.cache.layer_groups import layer_groups
from engine.cache.window import Window
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.loading.load import load_model
from models.network import Network
from tests.covering import each_value_once
from tests.engine.native.spans import a_span
from tests.engine.native.test_native_batches import Sequence, alone
from tests.engine.native.test_native_decode import BLOCK, CPU, cache_for, step
from tests.models.checkpoints import files_of, write_checkpoint
from tests.models.families import tiny_gemma4, tiny_gpt_oss, tiny_lfm2

STEP = 30
LENGTHS = (1, 60, 170)
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "shared": tiny_gemma4(hidden_size=64, hidden_size_per_layer_input=32, sliding_window=25),
    "sinks": tiny_gpt_oss(sliding_window=70),
    "convolutions": tiny_lfm2(**HEADS),
    "wide convolutions": tiny_lfm2(**HEADS, conv_L_cache=20),
}
Pools = list[tuple[tuple[int, ...], GroupPool]]


def model_of(folder: Path, config: PretrainedConfig, quantize: str = "none") -> Network:
    files = files_of(write_checkpoint(folder, config))
    return load_model(files, dtype=torch.float32, device=CPU, quantize=quantize)


def pools_for(model: Network, dtype: torch.dtype) -> Pools:
    """Pools with just the slots that the texts need."""
    windows = [(group.layers, Window(group.window, STEP)) for group in layer_groups(model.spec, dtype)]
    return [
        (layers, GroupPool(sum(window.most_held(length, BLOCK) for length in LENGTHS), window))
        for layers, window in windows
    ]


@each_value_once
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(torch.float32, "none"), (torch.bfloat16, "int8")],
    ids=["float32", "bfloat16-int8"],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_when_others_are_released(
    name: str, dtype: torch.dtype, quantize: str, library: NativeLibrary, pool: Pool, tmp_path: Path
) -> None:
    """What nobody wrote is NaN, the blank block included."""
    model, random = model_of(tmp_path, CONFIGS[name], quantize), Random(0)
    blocks = sum(-(-length // BLOCK) for length in LENGTHS)
    free = list(range(blocks))
    texts = [Sequence.random(random, length, free, model.spec.vocab_size) for length in LENGTHS]
    for variant in library.variants.values():
        whole = cache_for(model, dtype, blocks)
        expected = alone(NativeDecoder(model, whole, pool, variant), texts)
        assert not expected[0].isnan().any()
        cache = cache_for(model, dtype, blocks, pools_for(model, dtype))
        assert [own.num_slots < blocks for own in cache.pools] == [True]
        manager = BlockManager(blocks, BLOCK, pools=cache.pools)
        tables = [manager.open([]) for _ in texts]
        decoder, left = NativeDecoder(model, cache, pool, variant), list(range(len(texts)))
        while left:
            chosen = random.sample(left, random.randint(1, len(left)))
            spans, rows = [], []
            for text in chosen:
                start = tables[text].length
                end = min(start + random.choice((1, 2, STEP)), LENGTHS[text])
                manager.reserve(tables[text], end - start)
                spans.append(a_span(*_part(texts[text], start, end), tables[text].blocks))
                rows.append((text, start, end))
            for (text, start, end), found in zip(rows, decoder.run(spans), strict=True):
                assert torch.equal(found, expected[text][end - 1])
                manager.commit(tables[text], [1000 * text + row for row in range(start, end)])
            left = [text for text in left if tables[text].length < LENGTHS[text]]
        manager.check()


def _part(text: Sequence, start: int, end: int) -> tuple[list[int], int, list[int]]:
    return text.ids[start:end], start, text.positions[start:end]


def test_a_slot_outside_of_its_group_is_refused(library: NativeLibrary, pool: Pool, tmp_path: Path) -> None:
    model = model_of(tmp_path, CONFIGS["shared"])
    pools = pools_for(model, torch.float32)
    cache = cache_for(model, torch.float32, 40, pools)
    decoder = NativeDecoder(model, cache, pool)
    for _, own in pools:
        own.take(39)
    assert not step(decoder, 1, 0, 0, [39]).isnan().any()
    pools[0][1].blank = pools[0][1].num_slots + 1
    with pytest.raises(NativeError, match="there is no such block"):
        step(decoder, 1, 0, 0, [38])
