"""A KV cache of several groups gives the attention of a cache that keeps every row in every layer."""

import random
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from engine.attention.sdpa import SdpaBackend
from engine.attention.unusual import Unusual
from engine.batch import Span, StepBatch
from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.group_pool import GroupPool
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import KVRow
from engine.cache.window import Window
from models.reference.attention import Attention, ConvolutionRows
from models.spec import Attention as AttentionSpec

SIZE, STEP, WINDOW, WIDTH, DIM = 4, 6, 7, 3, 8
CPU = torch.device("cpu")
ROWS = [*[KVRow(2, DIM, torch.float32)] * 3, KVRow(1, 5, torch.float32, has_v=False)]
"""Layer 0 sees all rows, 1 and 2 see a window, and 3 is a convolution."""
UNUSUAL = dict.fromkeys((1, 2), Unusual(AttentionSpec(4, 2, DIM, window=WINDOW)))


class Cache:
    """A cache and its blocks; what nobody wrote is NaN."""

    def __init__(self, blocks: int, pools: list[tuple[tuple[int, ...], GroupPool]]) -> None:
        self.kv = KVCache(ROWS, blocks, SIZE, torch.float32, CPU, pools=pools)
        for part in self.kv.parts:
            part[part != 0] = float("nan")
            part[:, :, : -SIZE if pools else None] = float("nan")
        self.manager = BlockManager(blocks, SIZE, self.kv.carry_out, pools=[pool for _, pool in pools])
        self.backend = SdpaBackend(self.kv, UNUSUAL)

    def computed(self, spans: list[tuple[BlockTable, list[int]]]) -> Attention:
        return self.backend.plan(
            StepBatch(tuple(Span(tuple(table.blocks), table.length, len(keys)) for table, keys in spans))
        )


def numbers(before: list[int], keys: list[int], layer: int, shape: tuple[int, ...]) -> Tensor:
    """What depends on the layer and on everything up to each row."""
    found = []
    for end in range(len(before) + 1, len(before) + len(keys) + 1):
        seed = hash((layer, *[*before, *keys][:end])) % 2**31
        found.append(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(found)


def outputs(step: Attention, spans: list[tuple[list[int], list[int]]]) -> list[Tensor]:
    """What each layer gives for the rows of keys after those before them."""
    found = []
    for layer in range(3):
        q, k, v = (
            torch.cat([numbers(*span, 10 * layer + i, (heads, DIM)) for span in spans])
            for i, heads in enumerate((4, 2, 2))
        )
        found.append(step(layer, q, k, v))
    assert isinstance(step, ConvolutionRows)
    x = torch.cat([numbers(*span, 40, (5,)) for span in spans])
    return [*found, torch.stack(step.last_rows(3, x, WIDTH))]


@pytest.mark.parametrize("seed", range(12))
def test_any_program_gives_what_a_cache_of_one_group_gives(seed: int) -> None:
    choose = random.Random(seed)
    pools = [
        ((1, 2), GroupPool(choose.randint(12, 16), Window(WINDOW, STEP))),
        ((3,), GroupPool(choose.randint(9, 12), Window(WIDTH, STEP))),
    ]
    small, large = Cache(40, pools), Cache(400, [])
    tables: list[tuple[BlockTable, BlockTable, list[int]]] = []
    known: list[list[int]] = [[]]
    resumed = 0
    for _ in range(120):
        match choose.choice(["open", "step", "step", "close"]):
            case "open" if len(tables) < 2:
                begin = choose.choice(known)
                keys = begin[: choose.randint(0, len(begin))]
                keys = keys + [choose.randrange(2) for _ in range(choose.randint(1, 30))]
                known.append(keys)
                table = small.manager.open(keys)
                resumed += table.length
                tables.append((table, large.manager.open(keys[: table.length]), keys))
                assert tables[-1][1].length == table.length
            case "step" if tables:
                spans = [
                    (mine, theirs, keys[mine.length : mine.length + choose.randint(1, STEP)], keys)
                    for mine, theirs, keys in tables
                    if mine.length < len(keys)
                ]
                with suppress(OutOfBlocksError):
                    for mine, _, new, _ in spans:
                        small.manager.reserve(mine, len(new))
                spans = [s for s in spans if len(s[0].blocks) * SIZE >= s[0].length + len(s[2])]
                if not spans:
                    continue
                for _, theirs, new, _ in spans:
                    large.manager.reserve(theirs, len(new))
                told = [(keys[: mine.length], new) for mine, _, new, keys in spans]
                found = outputs(small.computed([(mine, new) for mine, _, new, _ in spans]), told)
                expected = outputs(large.computed([(theirs, new) for _, theirs, new, _ in spans]), told)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
                for mine, theirs, new, _ in spans:
                    small.manager.commit(mine, new)
                    large.manager.commit(theirs, new)
            case "close" if tables:
                mine, theirs, _ = tables.pop(choose.randrange(len(tables)))
                small.manager.close(mine)
                large.manager.close(theirs)
        small.manager.check()
    assert resumed


def test_the_parts_of_a_group_are_as_small_as_its_pool() -> None:
    kv = Cache(40, [((1, 2), GroupPool(9, Window(WINDOW, STEP)))]).kv
    assert [tuple(part.shape[:3]) for part in kv.parts] == [(2, 1, 160), (2, 2, 40), (1, 1, 160)]
    assert kv.groups == [0, 1, 1, 0]
    assert (kv.token_bytes, kv.group_bytes(1)) == (2 * 2 * DIM * 4 + 20, 2 * 2 * 2 * DIM * 4)
    assert kv.nbytes == 160 * kv.token_bytes + 40 * kv.group_bytes(1)
