"""How the work of a decode step is cut into programs of its kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from models.weights.block_formats import Kind
from models.weights.packing import INTEGERS, PACKINGS

HELD = 80 * 1024
"""The most bytes of weights that a program copies ahead; the smallest GPUs with tensor cores have 100 KB for it."""
FEW = 8
"""Up to this many rows, a step reads each weight once and gives each row the bits that it has alone."""
FUSED = 16
"""Up to this many rows, products of a small or quantised network are fused with the operations around them."""
FUSED_MOST = 8 << 20
"""The most weights in a layer's largest product of a small network; in larger ones only FEW rows are fused."""
WIDE_MOST, WIDE_LINES = 128 << 20, 1 << 15
"""The largest products, in weights and in lines of them, in which our kernel can be faster than the library's."""
MOST_CHUNKS = 80
"""The most partial results per sequence that the attention leaves; combining them stays cheap."""
SMALLEST = 640
"""Rows of the smallest context that steps are made for; each further context is twice as long. It leaves a prompt whose
length is a power of two room to go on."""


LANES = 4
"""Into how many sums the groups of columns of quantised weights may go in turn (see `kernels/triton/lanes.py`)."""
SMALLEST_OUTPUTS = 8
"""The fewest outputs that a program of a product without a gate computes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut (see `linear_kernel`)."""

    folds: int
    warps: int
    tiles: int
    ahead: int

    def outputs(self, gated: bool) -> int:
        """Return the number of outputs of a program."""
        return 16 * self.tiles // (self.folds * (2 if gated else 1))

    def shared(self, inputs: int) -> int:
        """Return the bytes of shared memory in which a program holds weights."""
        spans = _parts(inputs, 128 * self.warps * self.folds)
        return 4096 * self.warps * self.tiles * min(self.ahead, spans)


TILES = tuple(
    Tile(*cut)
    for cut in (
        *((1, 4, 1, ahead) for ahead in (2, 3, 4, 6)),
        *((1, 8, 1, ahead) for ahead in (2, 3, 4)),
        *((2, 4, 1, ahead) for ahead in (2, 4)),
        *((1, 4, 2, ahead) for ahead in (2, 4)),
        *((1, 2, 1, 4), (1, 2, 2, 4), (1, 16, 1, 2), (2, 8, 1, 3), (2, 4, 2, 4), (2, 2, 1, 4), (1, 8, 2, 2)),
        *((2, 2, 2, 2), (2, 4, 2, 2), (1, 2, 2, 3), (1, 2, 4, 2), (2, 8, 2, 2), (1, 8, 4, 1)),
    )
)
"""The cuts worth measuring. Which is best depends on the GPU."""


FEW_TILES: Mapping[tuple[int, int, bool], Tile] = MappingProxyType(
    {
        (4096, 1024, False): Tile(1, 4, 2, 2),
        (1024, 2048, False): Tile(1, 16, 1, 2),
        (3072, 1024, True): Tile(1, 8, 2, 2),
        (1024, 3072, False): Tile(1, 8, 1, 3),
        (4096, 2048, False): Tile(2, 4, 2, 4),
        (3072, 2048, False): Tile(1, 8, 2, 2),
        (2048, 2048, False): Tile(1, 16, 1, 2),
        (2048, 4096, False): Tile(1, 16, 1, 2),
        (2048, 6144, False): Tile(1, 16, 1, 2),
        (2048, 8192, False): Tile(1, 16, 1, 2),
        (2560, 9728, False): Tile(2, 4, 1, 2),
        (3072, 4096, False): Tile(2, 4, 2, 2),
        (5120, 4096, False): Tile(2, 4, 2, 2),
        (5120, 12800, False): Tile(2, 2, 1, 4),
        (6144, 4096, True): Tile(1, 2, 2, 3),
        (12800, 5120, True): Tile(2, 4, 2, 2),
        (6144, 2048, True): Tile(1, 2, 2, 3),
        (8192, 2048, True): Tile(1, 2, 4, 2),
    }
)
"""Keys are outputs, inputs and whether gated: products of Qwen3-0.6B, 1.7B and 4B, of Llama-3.2-1B, and of Qwen3-8B and
32B divided among two GPUs, for up to FEW rows. Their gain in whole steps is in benchmarks/results/decode-speed.md."""


def choose_tile(outputs: int, inputs: int, gated: bool, few: bool = False) -> Tile:
    """Return the tile that was fastest on an H200 for `outputs` rows (pairs of rows if gated) of `inputs` columns.

    It was measured in whole steps of Qwen3-0.6B and 8B: timing a product alone says little about how it runs between
    its neighbours. `few` is for up to FEW rows of the batch.
    """
    if few:
        found = FEW_TILES.get((outputs, inputs, gated))
        if found is not None:
            return found
        if (inputs >= 2048 and outputs > 1 << 15) or (inputs >= 2560 and gated):
            return Tile(2, 2, 2, 2)
        if inputs > 8192 and outputs >= 4096:
            return Tile(2, 4, 2, 2)
    if (
        inputs > 3072 and outputs < 2048 and not gated
    ):  # otherwise there would be fewer programs than multiprocessors
        return Tile(2, 8, 1, 3)
    if inputs > 3072:
        return Tile(1, 4 if not gated and 4096 < outputs <= 8192 else 8, 1, 3)
    if gated:
        return Tile(1, 4, 2, 4) if inputs <= 1152 and outputs > 4096 else Tile(1, 8, 1, 4)
    if outputs > 1 << 15:  # two folds span 1,024 columns, so the last span may be nearly empty
        return Tile(1, 4, 1, 4) if 1024 < inputs <= 1536 else Tile(2, 4, 2, 4)
    return Tile(2 if outputs <= 2048 else 1, 4, 1, 4)


@dataclass(frozen=True, slots=True)
class WideTile:
    """How a product of many rows is cut (see `wide_linear_kernel`)."""

    outputs: int
    """Lines of weights per program."""
    columns: int
    stages: int
    split: int
    """The number of parts that the columns are split into."""
    down: int
    warps: int


def rounded(rows: int) -> int:
    """Return the number of rows that a kernel multiplies for `rows`: a power of two."""
    return max(1 << (rows - 1).bit_length(), 16)


def choose_wide_tile(rows: int, outputs: int, inputs: int, gated: bool, apart: bool) -> WideTile | None:
    """Return the fastest tile on an H200 for powers of two of rows, outputs (pairs of lines if gated) and inputs.

    With `apart`, sums may stay unreduced. None means the library's product is as fast. A program reads all rows, so the
    more rows there are, the fewer weights a product may have; sums that stay unreduced have to be few beside them.
    """
    lines = outputs * (2 if gated else 1)
    weights = lines * inputs
    if lines > WIDE_LINES or weights > WIDE_MOST:
        return None
    if rows == 16:
        if gated:
            return WideTile(64, 128, 3, 1, 1, 4)
        if not apart:
            return None
        return WideTile(32, 256, 3, 4, 1, 4) if lines <= 2048 else WideTile(64, 128, 4, 2, 1, 4)
    if rows == 32:
        if gated and lines >= 1 << 14:  # enough programs even with larger tiles
            return WideTile(64, 128, 3, 1, 2, 4)
        if not gated and weights > 32 << 20:
            return None
        # Larger tiles are faster alone, but leave less shared memory to the attention that runs beside them.
        return WideTile(32, 128, 4, 1 if not apart else 4 if lines < 4096 else 2, 2, 4)
    if rows == 64 and not gated:
        if weights <= 8 << 20 and not (apart and lines > 2048):
            return WideTile(32, 128, 4, 4 if apart else 1, 2, 4)
        if 8 << 20 < weights <= 64 << 20 and apart and inputs >= 3 * lines and lines % 2048 == 0:
            return WideTile(64, 128, 3, 4, 2, 4)  # as many programs as multiprocessors, or twice as many
    return None


@dataclass(frozen=True, slots=True)
class WarpgroupTile:
    """How a product of many rows is cut (see `warpgroup_linear_kernel`)."""

    columns: int
    stages: int
    split: int
    """The number of parts that the columns are split into."""


_MULTIPROCESSORS, _LINES = 132, 64
"""Those of an H200 and an H100; the outputs of a program, as in `warpgroup_linear.py`."""
_ONE_EACH, _TWO_EACH = 200 << 10, 104 << 10
"""Bytes of shared memory of a program of which a multiprocessor runs one, or two. Norms find room beside it."""


def choose_warpgroup_tile(
    count: int, outputs: int, inputs: int, gated: bool, apart: bool
) -> WarpgroupTile | None:
    """Return the fastest tile on an H200 for `count` rows; None means that what `choose_wide_tile` returns is as fast.

    Other arguments are as for `choose_wide_tile`. The gain in whole steps is in benchmarks/results/decode-speed.md.
    """
    rows, lines = rounded(count), outputs * (2 if gated else 1)
    weights = lines * inputs
    if rows > 128 or 64 < count <= 96 or lines > 2 * WIDE_LINES or inputs % 8:
        return None
    if rows == 16 and inputs < 2048:
        return None
    programs, spans = _parts(outputs, _LINES), _parts(inputs, 128)
    held = 2 * (rows + _LINES * (2 if gated else 1))  # bytes per column
    one = WarpgroupTile(128, _ONE_EACH // (128 * held), 1)
    two = WarpgroupTile(64, _TWO_EACH // (64 * held), 1)
    if gated:
        if rows == 128:
            return None
        if programs > _MULTIPROCESSORS:
            large = weights > 112 << 20 if rows == 32 else rows == 64 and inputs <= 4096
            return two if large and programs <= 2 * _MULTIPROCESSORS else None
        return one if (inputs > 2048) == (rows == 64) else None
    if not apart:
        split = 1
        slow = rows == 32 and outputs > 5120 and weights >= 24 << 20
    else:
        split = max(1, min(_MULTIPROCESSORS // programs, spans // 6))
        small = rows == 64 and inputs >= 3 * outputs and weights <= 20 << 20
        slow = small or (rows == 16 and spans < 12 * split) or (rows == 32 and spans > 64 * split)
    if slow or (rows == 128 and programs * split < 96 and spans > 24 * split):
        return None
    return replace(one, split=split)


@dataclass(frozen=True, slots=True)
class PackedTile:
    """How a product with quantised weights is cut (see `packed_linear_kernel`)."""

    warps: int
    tiles: int
    ahead: int
    lanes: int = 1
    """Into how many sums the groups of columns go in turn: 1 or LANES."""

    def outputs(self, gated: bool) -> int:
        """Return the number of outputs of a program."""
        return 8 * self.tiles if gated else 16 * self.tiles

    def shared(self, inputs: int, kind: Kind) -> int:
        """Return the approximate bytes of shared memory in which a program holds weights."""
        stages = min(self.ahead, _parts(inputs, 256 * self.warps))
        return 4096 * kind.block_bytes // kind.block * self.warps * self.tiles * stages


_PLAIN = (
    *((warps, tiles, ahead) for warps in (2, 4, 8) for tiles in (1, 2) for ahead in (2, 4)),
    *((8, 1, 1), (4, 1, 3), (8, 1, 3), (4, 4, 1), (4, 4, 2), (2, 4, 1), (16, 1, 2), (16, 2, 2)),
)
_IN_LANES = (
    (2, 1, 2),
    (2, 2, 2),
    (4, 1, 2),
    (4, 2, 2),
    (4, 4, 2),
    (8, 1, 1),
    (8, 1, 2),
    (8, 1, 3),
    (8, 1, 4),
    (16, 1, 2),
)
PACKED_TILES = (
    *(PackedTile(*cut) for cut in _PLAIN),
    *(PackedTile(*cut, LANES) for cut in _IN_LANES),
)
"""The cuts worth measuring. Which is best depends on the GPU."""


FEW_PACKED_TILES: Mapping[tuple[int, int, bool, Kind], PackedTile] = MappingProxyType(
    {
        (4096, 1024, False, Kind.Q4_0): PackedTile(4, 1, 2, LANES),
        (1024, 2048, False, Kind.Q4_0): PackedTile(8, 1, 2, LANES),
        (3072, 1024, True, Kind.Q4_0): PackedTile(4, 1, 2, LANES),
        (151936, 1024, False, Kind.Q6_K): PackedTile(2, 2, 2, LANES),
        (6144, 4096, False, Kind.Q4_0): PackedTile(8, 1, 2, LANES),
        (12288, 4096, True, Kind.Q4_0): PackedTile(4, 2, 2, LANES),
        (5120, 4096, False, Kind.Q4_K): PackedTile(8, 1, 2, LANES),
        (6144, 4096, False, Kind.Q4_K): PackedTile(8, 1, 2, LANES),
        (4096, 4096, False, Kind.Q4_K): PackedTile(8, 1, 2, LANES),
        (12288, 4096, True, Kind.Q4_K): PackedTile(4, 2, 2, LANES),
        (4096, 12288, False, Kind.Q4_K): PackedTile(8, 1, 4, LANES),
        (4096, 12288, False, Kind.Q6_K): PackedTile(8, 1, 4, LANES),
        (151936, 4096, False, Kind.Q6_K): PackedTile(2, 2, 2, LANES),
        (12288, 4096, True, Kind.Q8_0): PackedTile(4, 1, 2, LANES),
    }
)
"""The same for quantised weights: products of Qwen3-0.6B and 8B that have lanes."""
MORE_PACKED_TILES: Mapping[tuple[int, int, bool, Kind], tuple[PackedTile, PackedTile]] = MappingProxyType(
    {
        (6144, 4096, False, Kind.Q4_K): (PackedTile(8, 1, 2, LANES), PackedTile(8, 2, 2, LANES)),
        (12288, 4096, True, Kind.Q4_K): (PackedTile(4, 4, 2, LANES), PackedTile(4, 2, 2, LANES)),
        (4096, 12288, False, Kind.Q4_K): (PackedTile(8, 1, 3, LANES), PackedTile(8, 1, 3, LANES)),
        (4096, 12288, False, Kind.Q6_K): (PackedTile(8, 1, 3, LANES), PackedTile(8, 1, 3, LANES)),
        (12288, 4096, True, Kind.Q8_0): (PackedTile(4, 4, 2, LANES), PackedTile(4, 2, 2, LANES)),
    }
)
"""What replaces them for three or four rows, and for more: other tiles and copies ahead. With other warps or lanes, the
bits of a row would depend on the others."""


def choose_packed_tile(outputs: int, inputs: int, gated: bool, kind: Kind, rows: int = FUSED) -> PackedTile:
    """Return the tile that was fastest on an H200 for the products of Qwen3-8B in Q4_0, Q8_0 and Q4_K.

    Up to FEW rows of the batch have the same warps and lanes. Programs compute many outputs from one read of the rows
    if that leaves more programs than multiprocessors. If there are few programs, more warps share the columns.
    """
    key = outputs, inputs, gated, kind
    if 2 < rows <= FEW and key in MORE_PACKED_TILES:
        return MORE_PACKED_TILES[key][rows > 4]
    if rows <= FEW and key in FEW_PACKED_TILES:
        return FEW_PACKED_TILES[key]
    programs = outputs // (8 if gated else 16)
    wide, nested = kind.block_bytes >= kind.block, kind.block > 32
    if gated and programs >= 640 and not nested:
        return PackedTile(4, 4, 1) if wide else PackedTile(2, 2, 2)
    tiles = 4 if programs >= 640 else 2 if gated and programs >= 320 and not wide else 1
    warps = 4 if programs >= 320 else 8
    while warps > 1 and 256 * warps > inputs:
        warps //= 2
    return PackedTile(warps, tiles, 3 if inputs >= 8192 and not nested and tiles == 1 else 2)


def choose_expert_tile(outputs: int, inputs: int, chosen: int, gated: bool, kind: Kind) -> PackedTile:
    """Return how the expert products of a row are cut: gate and up of each expert, or down of all experts side by side.

    It was the fastest choice on an H200 for Qwen3-30B-A3B in Q4_0, Q4_K, Q8_0 and MXFP4, and for gpt-oss-20b.
    """
    spans = _parts(inputs, 128) * (1 if gated else chosen)
    warps, tiles, ahead = (4, 2, 2) if gated else (16, 1, 2) if spans <= 64 else (8, 1, 6)
    while warps > 1 and warps > spans:
        warps //= 2
    packing = PACKINGS[kind]
    held = 2 * packing.tile_bytes * warps * tiles
    # A program computes one row, so lanes take no registers for others. Codes that are the numbers gain nothing.
    in_lanes = packing.shared == 1 and packing.planes != (8,) and packing.floats == INTEGERS
    return PackedTile(
        warps, tiles, min(ahead, _parts(spans, warps), max(1, HELD // held)), LANES if in_lanes else 1
    )


@dataclass(frozen=True, slots=True)
class AttentionSplit:
    """How the attention of up to FEW short sequences is cut; a longer sequence is cut into as many parts."""

    tensor_cores: bool
    """Whether `parts_kernel` computes the attention; otherwise `attention_kernel` does."""
    tile: int
    """Rows that a program holds at once."""
    tiles: int
    """Tiles per program."""

    @property
    def rows(self) -> int:
        """Rows per program."""
        return self.tile * self.tiles


IN_ORDER, IN_ORDER_DIM = 16, 128
"""Up to this many parts of a sequence, with heads of this size, are added up one after the other. That is faster, and
the output projection can do the same."""
LATE_WIDTH = 2048
"""The most inputs and outputs of an output projection that combines the parts of a single sequence, which saves a
launch: each of its programs reads all parts."""
SPLITS = (
    *(AttentionSplit(False, *cut) for cut in ((32, 1), (32, 2), (64, 1), (64, 2), (64, 4))),
    *(AttentionSplit(True, 64, tiles) for tiles in (1, 2, 4)),
)
"""The cuts worth measuring. A part has a power of two of rows, or the other sequences would change how one is cut."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How the rows of a sequence are cut into programs of the attention."""

    warps: int
    tile: int
    """Rows that a program holds at once."""
    tiles: int
    """Tiles per program."""
    chunks: int
    """Programs per KV head."""
    first: int = 0
    end: int = 0
    """Applies to tokens in rows `first` to `end` of their sequences; with `end` 0, to all tokens."""

    @property
    def rows(self) -> int:
        """Rows per program."""
        return self.tile * self.tiles


def context_limit(row: int) -> int:
    """Return the smallest context limit above `row`. Steps exist for few limits; a sequence is cut by its own limit."""
    limit = SMALLEST
    while limit <= row:
        limit *= 2
    return limit


def choose_chunking(limit: int, heads: int, split: AttentionSplit | None = None) -> Chunking:
    """Return the fastest cut on an H200 for a sequence of up to `limit` rows with `heads` KV heads, or that of `split`.

    Sequences with few heads are cut into shorter parts, or there would be too few programs. If that makes too many
    parts, they are cut like those with many heads.
    """
    if split is not None:
        tiles = split.tiles
        while _parts(limit, split.tile * tiles) > MOST_CHUNKS:
            tiles *= 2
        return Chunking(4, split.tile, tiles, _parts(limit, split.tile * tiles))
    tile, tiles = (32, min(heads, 2)) if heads <= 4 else (64, 2)
    if _parts(limit, tile * tiles) > MOST_CHUNKS:
        # From one context to the next a part at most doubles: `combine_kernel` counts on it.
        tile, tiles = (64, limit // 5120) if limit <= 10240 else (32, _parts(limit, MOST_CHUNKS * 32))
    return Chunking(4, tile, tiles, _parts(limit, tile * tiles))


def choose_chunkings(
    rows: int, limit: int, heads: int, window: int | None = None, split: AttentionSplit | None = None
) -> tuple[Chunking, ...]:
    """Return the attention launches for `rows` sequences of up to `limit` rows with `heads` KV heads.

    `split` says how up to FEW sequences are cut; None is the fastest choice on an H200.

    Each of a few sequences is cut as it is alone, by its length. Each of many is cut into few large parts. With a
    window, sequences are cut as if they were at most twice as long as the window, and only chunks within the window are
    launched.
    """
    if window is not None:
        *cuts, last = choose_chunkings(rows, min(limit, context_limit(2 * window)), heads, None, split)
        cuts.append(replace(last, end=limit) if last.end else last)
        return tuple(
            replace(cut, chunks=min(_parts(cut.end or limit, cut.rows), _parts(window - 1, cut.rows) + 1))
            for cut in cuts
        )
    if rows == 1:
        return (choose_chunking(limit, heads, split),)
    if rows > FEW:
        # Measured on an H200 with sequences of 100 to 2,048 rows.
        most, tiles = most_chunks(rows), 16 if rows >= 128 else 8
        while tiles * 32 * most < limit:
            tiles *= 2
        return (Chunking(4, 32, tiles, _parts(limit, tiles * 32)),)
    found: list[Chunking] = []
    first, end = 0, SMALLEST
    while end <= limit:
        cut = choose_chunking(end, heads, split)
        if found and (found[-1].warps, found[-1].rows) == (cut.warps, cut.rows):
            first = found.pop().first
        found.append(Chunking(cut.warps, cut.tile, cut.tiles, cut.chunks, first, end))
        first, end = end, 2 * end
    if len(found) == 1:
        return (choose_chunking(limit, heads, split),)
    return tuple(found)


def most_chunks(rows: int) -> int:
    """Return the most parts per sequence that the attention of `rows` sequences leaves."""
    return MOST_CHUNKS if rows < 32 else 32 if rows < 128 else 16


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)
