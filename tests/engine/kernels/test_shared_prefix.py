"""Sequences that read a common prefix together get what each gets alone; in Triton's interpreter, or on a GPU."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.covering import each_value_once
from tests.fresh import examples

pytest.importorskip("triton")

import triton.language as tl

from engine.cache.kv_cache import KVCache
from engine.execute.cuda.attend_mma import PartsCut, attend_mma, choose_own_cut, choose_shared_cut
from engine.execute.cuda.decode_attention import AttentionInput, AttentionShape, attend
from engine.execute.cuda.decode_runner import ROWS
from engine.execute.cuda.prefix_groups import (
    LEAST,
    MOST_QUERIES,
    WORTH,
    KVShape,
    Sharing,
    choose_sharing,
    most_members,
    pays,
    share,
)
from engine.execute.cuda.tiles import FEW, Chunking, context_limit, most_chunks
from engine.kernels.triton.attention_bytes import addresses
from engine.kernels.triton.gluon import gl, jit
from models.spec import Attention, Norm, QueryScaling, Rope
from tests.engine.kernels.test_combine import own_size

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, DIM = 32, 64
CUT = PartsCut(4, 1, 256, 0, 1, 32, 2, 4, 1)


@dataclass(frozen=True, slots=True)
class Case:
    """A step of sequences that begin alike in groups, and what plain attention makes of it."""

    shape: AttentionShape
    given: AttentionInput
    tables: list[list[int]]
    rows: list[int]
    cache: KVCache | None = None
    """Of quantised rows."""

    def run(
        self, cut: PartsCut | None, sharing: Sharing | None, shared: list[int], members: list[list[int]]
    ) -> Tensor:
        """Without a cut nothing is shared."""
        rows = len(self.tables)
        out = torch.full((rows, self.shape.spec.heads * DIM), torch.nan, device=DEVICE)
        self.given.partial.fill_(torch.nan)
        if cut is None or sharing is None:
            attend(self.shape, self.given, out, rows, (Chunking(1, 16, 4, 2),))
        else:
            numbers = [torch.tensor(given, dtype=torch.int32, device=DEVICE) for given in (shared, members)]
            attend_mma(self.shape, self.given, out, rows, sharing, cut, *numbers)
        return out

    def plain(self) -> Tensor:
        given, spec = self.given, self.shape.spec
        out = []
        for index, (table, row) in enumerate(zip(self.tables, self.rows, strict=True)):
            heads = given.heads[index].view(-1, DIM)
            q, k, v = torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads])
            if given.norm_weight is not None:
                assert spec.head_norm is not None
                weights = torch.split(given.norm_weight, [spec.heads, spec.kv_heads])
                q = F.rms_norm(q, (DIM,), eps=spec.head_norm.eps) * weights[0]
                k = F.rms_norm(k, (DIM,), eps=spec.head_norm.eps) * weights[1]
            cosine, sine = given.rotary[given.counters[index, 1]].chunk(2)
            q, k = (
                torch.cat([x[:, : DIM // 2] * cosine - x[:, DIM // 2 :] * sine,
                           x[:, DIM // 2 :] * cosine + x[:, : DIM // 2] * sine], 1)
                for x in (q, k)
            )  # fmt: skip
            seen = torch.arange(row)
            places = (torch.tensor(table)[seen // BLOCK] * BLOCK + seen % BLOCK).to(DEVICE)
            keys, values = (
                torch.cat([self.numbers(cache[places]), self.stored(new[None])]).transpose(0, 1)
                for cache, new in ((given.k, k), (given.v, v))
            )
            y = F.scaled_dot_product_attention(q[None, :, None], keys[None], values[None], enable_gqa=True)
            out.append(y.flatten())
        return torch.stack(out)

    def numbers(self, rows: Tensor) -> Tensor:
        """What rows of the cache stand for."""
        return rows if self.cache is None else self.cache.row.decode(rows)

    def stored(self, x: Tensor) -> Tensor:
        """What a new row is once it is stored."""
        return x if self.cache is None else self.cache.row.decode(self.cache.row.encode(x))

    def quantized(self, kind: str) -> "Case":
        """The same with rows of such a cache; new rows are nowhere yet, and no number is where they will be."""
        given, heads = self.given, self.shape.spec.kv_heads
        cache = KVCache.uniform(1, len(given.k) // BLOCK, BLOCK, heads, DIM, torch.float32, DEVICE, kind=kind)
        cache.kv.fill_(255)
        for table, row in zip(self.tables, self.rows, strict=True):
            seen = torch.arange(row)
            places = torch.tensor(table)[seen // BLOCK] * BLOCK + seen % BLOCK
            for rows, plain in ((cache.k[0], given.k), (cache.v[0], given.v)):
                rows[places] = cache.row.encode(plain[places])
        told = replace(given, k=cache.k[0], v=cache.v[0], told=cache.told(0))
        return replace(self, given=told, cache=cache)


def case(groups: list[tuple[int, list[int]]], heads: tuple[int, int], norm: bool = False) -> Case:
    """groups: rows that the members have in common, a multiple of BLOCK, and for each the row of its newest token."""
    generator = torch.Generator().manual_seed(len(groups))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    tables: list[list[int]] = []
    used = 1
    for common, lengths in groups:
        prefix = list(range(used, used + common // BLOCK))
        used += len(prefix)
        for row in lengths:
            own = row // BLOCK + 1 - len(prefix)
            tables.append([*prefix, *range(used, used + own)])
            used += own
    rows = [row for _, lengths in groups for row in lengths]
    order = torch.randperm(len(rows), generator=generator).tolist()  # members do not stand side by side
    tables, rows = [tables[i] for i in order], [rows[i] for i in order]
    width = max(map(len, tables))
    q_heads, kv_heads = heads
    counters = torch.tensor([[row, row % 50] for row in rows], device=DEVICE)
    padded = torch.tensor(
        [[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32, device=DEVICE
    )
    chunks = 80
    given = AttentionInput(
        heads=random(len(rows), (q_heads + 2 * kv_heads) * DIM),
        norm_weight=random(q_heads + kv_heads, DIM) if norm else None,
        rotary=torch.cat([random(50, DIM // 2).cos(), random(50, DIM // 2).sin()], 1),
        k=random(used * BLOCK, kv_heads, DIM),
        v=random(used * BLOCK, kv_heads, DIM),
        active=torch.arange(len(rows), dtype=torch.int32, device=DEVICE),
        tables=padded,
        counters=counters,
        partial=torch.empty(len(rows) * chunks * q_heads * DIM, device=DEVICE),
        lse=torch.empty(len(rows) * chunks * q_heads, device=DEVICE),
    )
    spec = Attention(q_heads, kv_heads, DIM, head_norm=Norm() if norm else None, rope=Rope())
    return Case(AttentionShape(spec, BLOCK, False), given, tables, rows)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are shared that are so short that the interpreter is soon done."""
    monkeypatch.setattr("engine.execute.cuda.prefix_groups.LEAST", 2 * BLOCK)
    monkeypatch.setattr("engine.execute.cuda.prefix_groups.WORTH", 0)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(
    ("heads", "cut"),
    [((1, 1), PartsCut(5, 2, 256, 0, 2, 64, 2, 4, 1)), ((3, 1), PartsCut(40, 1, 256, 0, 1, 32, 4, 4, 2))],
)
def test_many_sequences_share_a_tile(heads: tuple[int, int], cut: PartsCut) -> None:
    """With parts that have one tile, several, or none; tiles that are larger than a block."""
    made = case([(192, [200, 193, 260, 192, 210]), (128, [140, 128, 300]), (0, [30])], heads, norm=True)
    sharing = choose_sharing(FEW + 8, heads[0] // heads[1])
    assert sharing is not None
    shared, members = share(made.tables, made.rows, KVShape(heads[0] // heads[1], BLOCK, 1), sharing)
    assert sorted(shared) == [0, *[128] * 3, *[192] * 5]
    assert len(made.rows) > FEW
    assert most_chunks(len(made.rows)) <= 80
    torch.testing.assert_close(made.run(cut, sharing, shared, members), made.plain(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(
    "features",
    [
        {"rope": Rope(dims=32, interleaved=True, exact=True), "score_cap": 2.0, "scale": 0.3},
        {"rope": None, "head_norm": Norm(offset=1.0)},
        {"norms_all_heads": True, "head_norm": Norm(rounds_last=True)},
        {"norms_rotated": True, "head_norm": Norm()},
        {"query_scaling": QueryScaling(2.0, 16)},
    ],
    ids=["rotation and cap", "no rotation", "one norm", "norms after the rotation", "scaled queries"],
)
def test_what_families_ask_for_is_shared_too(features: dict[str, Any]) -> None:
    """Against the same step without sharing, which has tests against the plain modules."""
    usual = case([(64, [70, 64, 80]), (0, [30, 5, 7, 9, 1, 2])], (2, 1), norm=True)
    spec = replace(usual.shape.spec, **features)
    rotary = usual.given.rotary
    assert rotary is not None
    given = replace(usual.given, rotary=rotary[:, : spec.rotated].contiguous())
    made = replace(usual, shape=replace(usual.shape, spec=spec), given=given)
    sharing = choose_sharing(FEW + 8, 2)
    assert sharing is not None
    shared, members = share(made.tables, made.rows, KVShape(2, BLOCK, 1), sharing)
    assert sum(shared) == 3 * 64
    together, alone = made.run(CUT, sharing, shared, members), made.run(None, None, [], [])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(alone, usual.plain(), rtol=1e-2)


def test_nothing_shared_is_what_it_was() -> None:
    """As a recorded step runs it: with the kernel, and nobody in the tiles."""
    made = case([(0, [64, *range(FEW)])], (1, 1))
    found = made.run(CUT, Sharing(16, 1), [0] * (FEW + 1), [[-1] * 16])
    torch.testing.assert_close(found, made.plain(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [(4, 1), (7, 1), (16, 2), (32, 1)])
def test_few_sequences_get_the_bits_that_they_get_alone(heads: tuple[int, int]) -> None:
    """Whatever the longest of them is, and right ones; with up to as many parts as there are."""
    made = case([(0, [130, 0, 300, 128, 700, 5])], heads, norm=True)
    nothing, nobody = (torch.full((16,), number, dtype=torch.int32, device=DEVICE) for number in (0, -1))

    def run(given: AttentionInput, rows: int, limit: int) -> Tensor:
        out = torch.full((rows, heads[0] * DIM), torch.nan, device=DEVICE)
        given.partial.fill_(torch.nan)
        cut = choose_own_cut(made.shape, rows, limit)
        attend_mma(made.shape, given, out, rows, None, cut, nothing, nobody)
        return out

    together = run(made.given, len(made.rows), 1280)
    torch.testing.assert_close(together, made.plain(), rtol=1e-4, atol=1e-4)
    for index, row in enumerate(made.rows):
        given = replace(made.given, heads=made.given.heads[index:], active=made.given.active[index:])
        assert torch.equal(run(given, 1, 640 if row < 640 else 1280)[0], together[index])


@pytest.mark.parametrize(
    ("heads", "kind"),
    [((4, 1), "auto"), ((4, 2), "auto"), ((6, 2), "auto"), ((4, 1), "fp8"), ((4, 1), "int8")],
)
def test_whole_sequences_need_no_combination(heads: tuple[int, int], kind: str) -> None:
    """The kernel writes the output in its dtype, and nothing for a row without a sequence."""
    usual = case([(0, [130, 0, 300, 637])], heads, norm=True)
    made = usual if kind == "auto" else usual.quantized(kind)
    made.given.active[1] = -1
    nothing, nobody = (torch.full((16,), number, dtype=torch.int32, device=DEVICE) for number in (0, -1))
    out = torch.full((4, heads[0] * DIM), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    made.given.partial.fill_(torch.nan)
    attend_mma(made.shape, made.given, out, 4, None, PartsCut(0, 1, 640, 0, 1, 32, 3, 4, 1), nothing, nobody)
    there = [0, 2, 3]
    torch.testing.assert_close(out[there].float(), made.plain()[there], rtol=2**-7, atol=1e-3)
    assert bool(out[1].isnan().all())
    assert bool(made.given.partial.isnan().all())


def test_when_sequences_stay_whole() -> None:
    """Where there are many short ones, and enough programs."""

    def is_whole(rows: int, limit: int, heads: int = 8, itemsize: int = 2, group: int = 4) -> bool:
        shape = AttentionShape(Attention(group * heads, heads, 128), 256, True, 132, 228 << 10)
        return choose_own_cut(shape, rows, limit, itemsize).own == 1

    assert is_whole(32, 640)
    assert is_whole(64, 1280)
    assert is_whole(32, 640, heads=4)
    assert not is_whole(32, 1280, heads=4)
    assert not is_whole(16, 640)
    assert not is_whole(64, 2560)
    assert not is_whole(64, 640, itemsize=1)
    assert is_whole(64, 640, group=2)
    assert not is_whole(64, 1280, group=2)
    assert is_whole(128, 1280, group=2)


@examples(300)
@given(
    st.integers(0, 200_000),
    st.integers(1, 256),
    st.sampled_from([1, 2, 4, 8, 20, 200]),
    st.sampled_from([1, 2]),
)
def test_parts_of_a_row_reach_it(row: int, rows: int, heads: int, itemsize: int) -> None:
    """In every step that it may be in; of few rows they are the same ones in each."""
    shape = AttentionShape(Attention(16 * heads, heads, 128), 256, True, 132, 228 << 10)
    cuts = []
    for limit in (context_limit(row), 2 * context_limit(row)):
        cut = choose_own_cut(shape, rows, limit, itemsize)
        size = own_size(row, cut.own, cut.least, cut.usual)
        assert -(-row // size) <= cut.programs <= cut.own < most_chunks(rows)
        cuts.append((cut.own, cut.least, cut.usual))
    assert rows > FEW or len(set(cuts)) == 1


@jit
def addresses_kernel(
    cache, table, out, start, end, BLOCK: tl.constexpr, TILE: tl.constexpr, STRIDE: tl.constexpr
):
    """Load the first element of every row of a tile."""
    local = gl.arange(0, TILE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    one, other, at = addresses((cache, cache), table, start, end, local, BLOCK, TILE, STRIDE)
    there = local < end - start
    gl.store(
        out + local, gl.load(one + at, mask=there, other=-1) + 0 * gl.load(other + at, mask=there, other=0)
    )


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("block", [4, 16, 32, 48, 64, 256])
def test_a_tile_finds_its_rows_in_blocks_of_any_size(block: int, tile: int) -> None:
    order = torch.randperm(3 * 256 // block, generator=torch.Generator().manual_seed(block))
    row = torch.arange(len(order) * block)
    cache = torch.empty(len(row), 3, dtype=torch.int32)
    cache[order[row // block] * block + row % block] = row[:, None].int()
    table, out = order.int().to(DEVICE), torch.empty(tile, dtype=torch.int32, device=DEVICE)
    for start, end in ((0, 700), (192, 230), (576, 577)):  # multiples of tiles, and of blocks of 48
        addresses_kernel[(1,)](cache.to(DEVICE), table, out, start, end, block, tile, 3, num_warps=1)
        expected = torch.arange(start, start + tile, dtype=torch.int32)
        assert torch.equal(out.cpu(), expected.where(expected < end, -1))


def test_a_row_that_nobody_has_shares_nothing() -> None:
    made = case([(64, [65 + i for i in range(FEW + 1)])], (1, 1))
    others = [0, *range(2, FEW + 1)]
    active = torch.tensor([0, -1, *others[1:]], dtype=torch.int32, device=DEVICE)
    less = replace(made, given=replace(made.given, active=active))
    found = less.run(CUT, Sharing(16, 1), [64, 0, *[64] * 7], [[*others, *[-1] * 8]])
    torch.testing.assert_close(found[others], made.plain()[others], rtol=1e-4, atol=1e-4)
    assert bool(found[1].isnan().all())


def test_who_shares() -> None:
    blocks = LEAST // BLOCK
    prefix = list(range(100, 100 + blocks))
    other = list(range(500, 500 + 2 * blocks))
    tables = [
        [*prefix, 1, 2],
        [*other, 3],
        [*prefix, 1, 4],
        [*prefix[:-1], 5, 6],
        [*other, 7, 8],
        [*prefix, 1],
    ]
    rows = [len(table) * BLOCK - 1 for table in tables]
    kv = KVShape(2, BLOCK, WORTH // LEAST)
    shared, members = share(tables, rows, kv, Sharing(4, 4))
    assert shared == [LEAST, 2 * LEAST, LEAST, 0, 2 * LEAST, LEAST]  # the newest token's block is not final
    assert members == [[0, 2, 5, -1], [1, 4, -1, -1], [-1] * 4, [-1] * 4]
    # One of three has no partner left; where there are too few tiles, the larger group is served.
    shared, members = share(tables, rows, kv, Sharing(2, 1))
    assert shared == [LEAST, 0, 0, 0, 0, LEAST]
    assert members == [[0, 5]]
    assert share(tables, rows, KVShape(2, BLOCK, WORTH // LEAST // 4), Sharing(4, 4))[0] == [0] * 6


def test_when_it_pays() -> None:
    assert pays(16, 8192, 4096)
    assert not pays(1, 1 << 20, 4096)
    assert not pays(256, LEAST - 1, 4096)


def test_every_size_of_a_step_has_tiles_for_all_or_no_kernel() -> None:
    assert all(choose_sharing(rows, 2) is None for rows in range(1, FEW + 1))
    assert choose_sharing(16, 2) == Sharing(16, 4)
    assert choose_sharing(256, 4) == Sharing(8, 35)
    assert choose_sharing(256, 64) is None  # the heads of two sequences are more than a program takes
    for rows in ROWS[ROWS.index(FEW) + 1 :]:
        for group in range(1, 33):
            sharing = choose_sharing(rows, group)
            assert sharing is not None
            assert sharing.members & (sharing.members - 1) == 0
            assert 16 <= sharing.members << (group - 1).bit_length() <= MOST_QUERIES
            assert rows <= sharing.members * sharing.tiles <= most_members(rows)


def test_some_read_more_together_where_that_is_more_than_all_would() -> None:
    least = LEAST // BLOCK
    prompt, more = list(range(least)), list(range(1000, 1000 + 3 * least))
    tables = [[*prompt, *(more if i < 4 else []), 5000 + i, 6000 + i] for i in range(6)]
    rows = [len(table) * BLOCK - 1 for table in tables]
    kv = KVShape(2, BLOCK, WORTH // LEAST)
    shared, members = share(tables, rows, kv, Sharing(8, 2))
    assert shared == [4 * LEAST] * 4 + [0] * 2
    assert members == [[0, 1, 2, 3, *[-1] * 4], [-1] * 8]
    shared, _ = share(tables[2:], rows[2:], kv, Sharing(8, 2))
    assert shared == [4 * LEAST] * 2 + [0] * 2
    tables, rows = tables + [[*prompt, 7000 + i, 8000 + i] for i in range(20)], rows + [rows[-1]] * 20
    shared, _ = share(tables, rows, kv, Sharing(32, 2))
    assert shared == [LEAST] * 26


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (64, 8), (32, 32), (8, 4)])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_parts_fit_on_the_multiprocessors_and_into_the_results(heads: tuple[int, int], dim: int) -> None:
    machine = AttentionShape(Attention(*heads, dim), 256, True, 132, 228 << 10)
    for rows in ROWS[ROWS.index(FEW) + 1 :]:
        sharing = choose_sharing(rows, heads[0] // heads[1])
        assert sharing is not None
        for own in (640, 5120, 40960):
            cut = choose_shared_cut(machine, rows, sharing, own)
            assert sharing.tiles <= cut.parts
            assert sharing.tiles <= 128
            assert 0 < cut.own < most_chunks(rows)
            assert 2 * cut.stages * cut.tile * machine.dim * 2 <= 112 << 10


@each_value_once
@pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 is known in the interpreter only")
@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("heads", "spread"), [((4, 1), 0), ((2, 2), 0), ((4, 1), 30)])
def test_rows_of_bytes_are_attended_to_as_they_are_stored(
    kind: str, heads: tuple[int, int], spread: int
) -> None:
    """By one launch for shared rows and others, and by the kernel that shares nothing; new rows are written alike.

    V may be of very different sizes, from 2 ** -spread to 1, and 0.
    """
    groups = [(64, [70, 64, 127]), (0, [30, 0])]
    made = case(groups, heads, norm=True)
    made.given.v.mul_(
        2.0 ** -(torch.arange(len(made.given.v), device=DEVICE) % 7 * spread / 6)[:, None, None]
    )
    if spread:
        made.given.v[::5] = 0
    made = made.quantized(kind)
    shared, members = [0] * 5, [[-1] * 16]
    for index, table in enumerate(made.tables):
        if table[0] == 1:
            shared[index] = 64
            members[0][members[0].index(-1)] = index
    assert made.cache is not None
    before, expected = made.cache.kv.clone(), made.plain()
    outs, caches = [], []
    for cut, sharing in ((CUT, Sharing(16, 1)), (None, None)):
        made.cache.kv.copy_(before)
        outs.append(made.run(cut, sharing, shared, members))
        caches.append(made.cache.kv.clone())
    torch.testing.assert_close(outs[0], expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(outs[1], expected, rtol=1e-4, atol=1e-3)
    changed = (caches[0] != before).any(-1)[:, 0]
    ends = {
        table[row // BLOCK] * BLOCK + row % BLOCK for table, row in zip(made.tables, made.rows, strict=True)
    }
    assert {int(slot) for slot in changed.any(0).nonzero()} == ends
    assert torch.equal(*caches)
