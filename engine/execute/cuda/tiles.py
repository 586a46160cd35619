"""How the work of a decode step is cut among the programs of its kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from models.weights.block_formats import Kind
from models.weights.packing import PACKINGS

HELD = 80 * 1024
"""Bytes of weights that a program copies ahead at most; the smallest GPUs with tensor cores have 100 KB for it."""
FEW = 8
"""Up to so many rows a step reads each weight once and gives each row the bits that it gets alone."""
FUSED = 16
"""Up to so many rows its products are fused with what stands before and after them, if the network is small."""
FUSED_MOST = 8 << 20
"""Weights of the largest product of a layer of such a network; in others there are FEW such rows."""
WIDE_MOST = {16: 128 << 20, 32: 32 << 20, 64: 8 << 20}
"""Weights of the largest product of more rows that the library is slower at, by how many rows."""
WIDE_LINES = 1 << 15
"""The same, in lines: those of the vocabulary are more."""
MOST_CHUNKS = 80
"""Parts of a sequence that its attention may leave; combining them stays cheap."""
SMALLEST = 640
"""Rows of the smallest context that steps are made for; the next ones are twice as long each. A prompt of a power of
two has room to go on."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut (see `linear_kernel`)."""

    folds: int
    warps: int
    tiles: int
    ahead: int

    def outputs(self, gated: bool) -> int:
        """Of a program."""
        return 16 * self.tiles // (self.folds * (2 if gated else 1))

    def shared(self, inputs: int) -> int:
        """Bytes of shared memory that a program holds weights in."""
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
"""What is worth a measurement. Which is best depends on the GPU."""


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
        (6144, 2048, True): Tile(1, 2, 2, 3),
        (8192, 2048, True): Tile(1, 2, 4, 2),
    }
)
"""By outputs, inputs and whether gated: products of Qwen3-0.6B, 1.7B and 4B and of Llama-3.2-1B, for up to FEW rows.
What they gain in whole steps is in docs/decode-speed.md."""


def choose_tile(outputs: int, inputs: int, gated: bool, few: bool = False) -> Tile:
    """What was fastest on an H200 for so many rows (pairs of rows where gated) of so many columns.

    Measured in whole steps of Qwen3-0.6B and 8B: alone a product says little of how it gets on with its neighbours.
    `few`: it is for up to FEW rows.
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
    ):  # else there would be fewer programs than multiprocessors
        return Tile(2, 8, 1, 3)
    if inputs > 3072:
        return Tile(1, 4 if not gated and 4096 < outputs <= 8192 else 8, 1, 3)
    if gated:
        return Tile(1, 4, 2, 4) if inputs <= 1152 and outputs > 4096 else Tile(1, 8, 1, 4)
    if outputs > 1 << 15:  # a span of two folds is as wide as 1,024 columns: the last one may be nearly empty
        return Tile(1, 4, 1, 4) if 1024 < inputs <= 1536 else Tile(2, 4, 2, 4)
    return Tile(2 if outputs <= 2048 else 1, 4, 1, 4)


@dataclass(frozen=True, slots=True)
class WideTile:
    """How a product of many rows is cut (see `wide_linear_kernel`)."""

    outputs: int
    """Lines of weights of a program."""
    columns: int
    stages: int
    split: int
    """Parts of the columns."""
    down: int
    warps: int


def choose_wide_tile(rows: int, outputs: int, inputs: int, gated: bool, apart: bool) -> WideTile | None:
    """What was fastest on an H200 for a power of two of rows, outputs (pairs of them where gated) and inputs.

    `apart`: sums may stay apart. None: the library's product is as fast. A program reads all rows, so the more there
    are, the fewer weights a product may have.
    """
    lines = outputs * (2 if gated else 1)
    if lines > WIDE_LINES or lines * inputs > WIDE_MOST.get(rows, 0):
        return None
    if rows == 16:
        if gated:
            return WideTile(64, 128, 3, 1, 1, 4)
        if not apart:
            return None
        return WideTile(32, 256, 3, 4, 1, 4) if lines <= 2048 else WideTile(64, 128, 4, 2, 1, 4)
    if rows == 64 and gated:
        return None
    # Larger tiles are faster alone, but they leave the attention beside them less shared memory.
    return WideTile(32, 128, 4, 4 if apart else 1, 2, 4)


@dataclass(frozen=True, slots=True)
class PackedTile:
    """How a product with quantised weights is cut (see `packed_linear_kernel`)."""

    warps: int
    tiles: int
    ahead: int

    def outputs(self, gated: bool) -> int:
        """Of a program."""
        return 8 * self.tiles if gated else 16 * self.tiles

    def shared(self, inputs: int, kind: Kind) -> int:
        """Bytes of shared memory that a program holds weights in, about."""
        stages = min(self.ahead, _parts(inputs, 256 * self.warps))
        return 4096 * kind.block_bytes // kind.block * self.warps * self.tiles * stages


PACKED_TILES = (
    *(PackedTile(warps, tiles, ahead) for warps in (2, 4, 8) for tiles in (1, 2) for ahead in (2, 4)),
    *(PackedTile(*cut) for cut in ((4, 1, 8), (2, 1, 8), (8, 1, 1), (4, 4, 2), (2, 4, 4), (16, 1, 2))),
    *(PackedTile(*cut) for cut in ((8, 1, 3), (4, 4, 1), (2, 4, 1))),
)
"""What is worth a measurement. Which is best depends on the GPU."""


def choose_packed_tile(outputs: int, inputs: int, gated: bool, kind: Kind) -> PackedTile:
    """What was fastest on an H200 for the products of Qwen3-8B in Q4_0, Q8_0 and Q4_K.

    Many outputs share the reading of the rows where that leaves more programs than multiprocessors; where there are
    few programs, more warps share the columns.
    """
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
    """How the products of a row with quantised experts are cut: gate and up of each, or down of all side by side.

    What was fastest on an H200 for Qwen3-30B-A3B in Q4_0, Q4_K, Q8_0 and MXFP4, and for gpt-oss-20b.
    """
    spans = _parts(inputs, 128) * (1 if gated else chosen)
    warps, tiles, ahead = (4, 2, 2) if gated else (16, 1, 2) if spans <= 64 else (8, 1, 6)
    while warps > 1 and warps > spans:
        warps //= 2
    held = 2 * PACKINGS[kind].tile_bytes * warps * tiles
    return PackedTile(warps, tiles, min(ahead, _parts(spans, warps), max(1, HELD // held)))


@dataclass(frozen=True, slots=True)
class Split:
    """How the attention of up to FEW sequences is cut, where they are short; longer ones are cut into as many parts."""

    tensor_cores: bool
    """`parts_kernel` attends, else `attention_kernel`."""
    tile: int
    """Rows that a program holds at once."""
    tiles: int
    """Tiles of a program."""

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return self.tile * self.tiles


SPLITS = (
    *(Split(False, *cut) for cut in ((32, 1), (32, 2), (64, 1), (64, 2), (64, 4))),
    *(Split(True, 64, tiles) for tiles in (1, 2, 4)),
)
"""What is worth a measurement. Rows of a part are a power of two, or sequences would be cut otherwise in company."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How the rows of a sequence are cut among the programs of the attention."""

    warps: int
    tile: int
    """Rows that a program holds at once."""
    tiles: int
    """Tiles of a program."""
    chunks: int
    """Programs of a KV head."""
    first: int = 0
    end: int = 0
    """It is for tokens in rows `first` to `end` of their sequences; 0: for all."""

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return self.tile * self.tiles


def context_limit(row: int) -> int:
    """The smallest context that has `row`: a step is made for one of few, and a sequence alone is cut as that says."""
    limit = SMALLEST
    while limit <= row:
        limit *= 2
    return limit


def choose_chunking(limit: int, heads: int, split: Split | None = None) -> Chunking:
    """What was fastest on an H200 for one sequence of up to `limit` rows and so many KV heads, or as `split` says.

    Few heads are cut into shorter parts, or there would be few programs; where that makes too many, as many heads are.
    """
    if split is not None:
        tiles = split.tiles
        while _parts(limit, split.tile * tiles) > MOST_CHUNKS:
            tiles *= 2
        return Chunking(4, split.tile, tiles, _parts(limit, split.tile * tiles))
    tile, tiles = (32, min(heads, 2)) if heads <= 4 else (64, 2)
    if _parts(limit, tile * tiles) > MOST_CHUNKS:
        # Twice as long from one context to the next at most: `combine_kernel` counts on it.
        tile, tiles = (64, limit // 5120) if limit <= 10240 else (32, _parts(limit, MOST_CHUNKS * 32))
    return Chunking(4, tile, tiles, _parts(limit, tile * tiles))


def choose_chunkings(
    rows: int, limit: int, heads: int, window: int | None = None, split: Split | None = None
) -> tuple[Chunking, ...]:
    """The launches of the attention of so many sequences of up to `limit` rows, with so many KV heads.

    `split` says how up to FEW are cut; None: as is best on an H200.

    Few sequences are each cut as alone, which depends on how long they are. Of many, each is cut into few large parts.
    With a window they are cut as if they were twice as long as that at most, and only chunks in the window count.
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
    """The most parts that the attention of one of so many rows leaves."""
    return MOST_CHUNKS if rows < 32 else 32 if rows < 128 else 16


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)
