"""Rows of a decode step: each gets bit for bit what it gets alone, in Triton's interpreter."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from engine.cache.kv_cache import KVCache
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.plain_program import PlainDecoder
from engine.execute.cuda.prefix_groups import choose_sharing
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.tiles import (
    FEW,
    MOST_CHUNKS,
    SMALLEST,
    AttentionSplit,
    Tile,
    choose_chunkings,
    context_limit,
    most_chunks,
)
from engine.execute.tuning.store import load_table
from engine.kernels.triton.linear import linear_kernel
from models.loading.load import load_model
from models.network import Network
from tests.models.checkpoints import files_of, tiny_llama, tiny_qwen3, write_checkpoint

SPLITS = [AttentionSplit(bool(cores), *cut) for cores, *cut in load_table().candidates["attention"]]
DEVICE = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)
SLOTS, BLOCK, BLOCKS = 9, 16, 17
LIMITS = [640 << i for i in range(9)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("part", "outputs", "inputs", "tile"),
    [
        ("norm", 16, 512, (1, 4, 1, 2)),
        ("gated norm", 14, 300, (2, 1, 1, 1)),
        ("residual", 14, 700, (2, 2, 1, 1)),
    ],
)
def test_a_product_of_a_row_is_what_it_is_alone(
    part: str, outputs: int, inputs: int, tile: tuple[int, int, int, int]
) -> None:
    cut, gated = Tile(*tile), part.startswith("gated")
    weight = random(2 * outputs if gated else outputs, inputs, seed=1)
    scale, bias = random(inputs, seed=2), random(weight.shape[0], seed=3)

    def product(x: torch.Tensor, residual: torch.Tensor, rows: int) -> torch.Tensor:
        out = torch.full((rows, outputs), 7.0, device=DEVICE)
        linear_kernel[(-(-outputs // cut.outputs(gated)),)](
            x,
            weight,
            bias,
            scale,
            residual,
            out,
            COUNT=rows,
            N=outputs,
            K=inputs,
            EPS=1e-6,
            NORM=part.endswith("norm"),
            BIAS=True,
            GATED=gated,
            RESIDUAL=part == "residual",
            FOLDS=cut.folds,
            WARPS=cut.warps,
            TILES=cut.tiles,
            AHEAD=cut.ahead,
            PDL=False,
            num_warps=cut.warps,
        )
        return out

    x, residual = random(16, inputs, seed=4), random(16, outputs, seed=5)
    alone = [product(x[i : i + 1], residual[i : i + 1], 1)[0] for i in range(8)]
    x[5] = float("nan")  # a row without a sequence may hold anything
    for rows in (2, 8):
        together = product(x[:rows].contiguous(), residual, rows)
        for i in set(range(rows)) - {5}:
            assert torch.equal(together[i], alone[i])
    more = product(x[:11].contiguous(), residual, 11)
    torch.testing.assert_close(more[6:8], torch.stack(alone[6:]), rtol=1e-3, atol=1e-3)
    for i in range(8, 11):
        one = product(x[i : i + 1], residual[i : i + 1], 1)[0]
        torch.testing.assert_close(more[i], one, rtol=1e-3, atol=1e-3)


class Case:
    """A model, and sequences of different lengths in slots, their earlier rows filled at random."""

    def __init__(self, model: Network, lengths: list[int]) -> None:
        shape = model.spec
        self.model, self.lengths = model, lengths
        self.cache = KVCache.uniform(
            len(shape.layers),
            SLOTS * BLOCKS,
            BLOCK,
            shape.attention.kv_heads,
            shape.attention.head_dim,
            torch.float32,
            DEVICE,
        )
        self.cache.kv.copy_(random(*self.cache.kv.shape, seed=6))
        self.before = self.cache.kv.clone()
        self.token = torch.randint(shape.vocab_size, (SLOTS,), generator=torch.Generator().manual_seed(7)).to(
            DEVICE
        )
        self.slots = Slots(SLOTS, 16, BLOCKS, self.token)
        shuffled = torch.randperm(SLOTS * BLOCKS, generator=torch.Generator().manual_seed(8)).tolist()
        self.tables = [shuffled[i * BLOCKS : (i + 1) * BLOCKS] for i in range(SLOTS)]
        for slot, length in enumerate(lengths):
            self.slots.put(slot, length, length + slot)
            self.slots.show(slot, self.tables[slot])

    @torch.inference_mode()
    def run(
        self, decoder: FusedDecoder | PlainDecoder, slots: list[int], rows: int, own: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of these slots, and the cache after that."""
        self.cache.kv.copy_(self.before)
        self.slots.activate(slots, rows)
        self.slots.send()
        logits = decoder.run(rows, context_limit(max(self.lengths[slot] for slot in slots)), own)
        return logits[: len(slots)].clone(), self.cache.kv.clone()

    def places(self, slots: list[int]) -> list[int]:
        rows = [(slot, self.lengths[slot]) for slot in slots]
        return [self.tables[slot][row // BLOCK] * BLOCK + row % BLOCK for slot, row in rows]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    config = {
        "qwen3": tiny_qwen3(num_hidden_layers=1, head_dim=64, vocab_size=24),
        "llama": tiny_llama(
            num_hidden_layers=1,
            hidden_size=192,
            num_attention_heads=3,
            num_key_value_heads=1,
            attention_bias=True,
            vocab_size=24,
        ),
    }[request.param]
    folder = write_checkpoint(tmp_path_factory.mktemp("rows"), config)
    return load_model(files_of(folder), dtype=torch.float32, device=DEVICE)


def fused(case: Case, network: Network) -> FusedDecoder:
    return FusedDecoder(network, case.cache, case.slots.given, pdl=False)


# In the interpreter one is enough: a bias is added in the products, which are tested above.
@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_a_row_of_a_step_gets_the_logits_and_the_cache_that_it_gets_alone(model: Network) -> None:
    case = Case(model, [0, 130, 17, 5, 70, 64, 1, 33, 31])
    decoder = fused(case, model)
    alone = {slot: case.run(decoder, [slot], 1) for slot in range(3)}
    for slots, rows in (([2, 0, 1], 8),):
        logits, cache = case.run(decoder, slots, rows)
        assert torch.equal(logits, torch.cat([alone[slot][0] for slot in slots]))
        expected = case.before.clone()
        for slot in slots:
            (place,) = case.places([slot])
            expected[:, :, place] = alone[slot][1][:, :, place]
        assert torch.equal(cache, expected)  # and nobody else's rows were written to


def test_many_rows_give_what_the_plain_modules_give(model: Network) -> None:
    case = Case(model, [0, 130, 17, 5, 70, 64, 1, 33, 31])
    decoder = fused(case, model)
    plain = PlainDecoder(model, case.cache, case.slots.given, "triton")
    for slots, rows in (([*range(9)], 16), ([1], 1)):
        logits, cache = case.run(decoder, slots, rows)
        expected, written = case.run(plain, slots, rows)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cache, written, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_many_rows_that_share_a_prefix_give_what_they_give_without_sharing(model: Network) -> None:
    case = Case(model, [258, 3, 2, 256, 1, 6, 262, 5, 4])
    alike, common, slots = [0, 3, 6], 256, [8, *range(8)]
    decoder = fused(case, model)

    def show(some: list[int], first: list[int]) -> None:
        blocks = common // BLOCK
        for slot in some:
            case.slots.put(slot, case.lengths[slot], 100 + slot)  # the model knows 256 positions
            case.slots.show(slot, first[:blocks] + case.tables[slot][blocks:])

    show(alike, case.tables[0])
    expected, written = case.run(decoder, slots, 16)
    assert decoder.kv is not None
    sharing = choose_sharing(16, decoder.kv.group)
    assert sharing is not None
    tile = [slots.index(slot) for slot in alike]
    shared = [common if row in tile else 0 for row in range(len(slots))]
    case.slots.share(shared, [[*tile, *[-1] * (sharing.members - len(tile))]])
    show(alike[1:], case.tables[1])  # only the first one's table is looked at
    logits, cache = case.run(decoder, slots, 16, own=SMALLEST)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(cache, written)


def ways(rows: int) -> list[tuple[int, AttentionSplit | None]]:
    """Return the numbers of KV heads, and the splits, that matter for so many rows."""
    if rows > FEW:
        return [(8, None)]
    return [*((heads, None) for heads in (1, 2, 4, 8, 32)), *((8, split) for split in SPLITS)]


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 64, 256])
@pytest.mark.parametrize("window", [1, 12, 639, 640, 4096, 10_240, 40_000])
def test_every_row_of_a_window_belongs_to_one_chunk_of_one_launch(rows: int, window: int) -> None:
    for (heads, split), limit in itertools.product(ways(rows), LIMITS):
        cuts = choose_chunkings(rows, limit, heads, window, split)
        assert all(cut.chunks <= most_chunks(rows) for cut in cuts)
        for row in {0, 1, window - 1, window, 2 * window + 63, 10239, 10240, limit - 1}:
            if row >= limit:
                continue
            (cut,) = (cut for cut in cuts if not cut.end or cut.first <= row < cut.end)
            assert row // cut.rows - max(row - window + 1, 0) // cut.rows < cut.chunks
            if 1 < rows <= FEW:  # as alone, in a step of the context that it needs by itself
                (alone,) = choose_chunkings(1, context_limit(row), heads, window, split)
                assert (cut.warps, cut.tile, cut.tiles) == (alone.warps, alone.tile, alone.tiles)


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 64, 256])
def test_every_row_of_a_sequence_belongs_to_one_chunk_of_one_launch(rows: int) -> None:
    for (heads, split), limit in itertools.product(ways(rows), LIMITS):
        cuts = choose_chunkings(rows, limit, heads, None, split)
        for row in {0, 1, 639, 640, 1279, 1280, 10239, 10240, limit // 2, limit - 1}:
            if row >= limit:
                continue
            (cut,) = (cut for cut in cuts if not cut.end or cut.first <= row < cut.end)
            assert row // cut.rows < cut.chunks <= 80
            if 1 < rows <= FEW:  # as alone
                (alone,) = choose_chunkings(1, context_limit(row), heads, None, split)
                size = cuts[0].rows  # as `combine_kernel` counts
                while row >= size * MOST_CHUNKS:
                    size *= 2
                assert size == cut.rows
                assert (cut.warps, cut.tile, cut.tiles) == (alone.warps, alone.tile, alone.tiles)


def test_deterministic_rows_of_a_large_step_get_what_they_get_alone(model: Network) -> None:
    case = Case(model, [3, 17, 40, 1, 90, 5, 33, 16, 70])
    decoder = FusedDecoder(model, case.cache, case.slots.given, pdl=False, deterministic=True)
    slots = [8, 2, 4, 0, 6, 1, 7, 3, 5]
    together, cache = case.run(decoder, slots, 16)
    for at, slot in enumerate(slots):
        if at in (7, 8):  # the last of a group, and the one of the next
            alone, other = case.run(decoder, [slot], 1)
            assert torch.equal(together[at], alone[0])
            places = case.places([slot])
            assert torch.equal(cache[:, :, places], other[:, :, places])
