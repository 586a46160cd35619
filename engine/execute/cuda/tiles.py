"""How the work of a decode step is cut into programs of its kernels."""

from dataclasses import dataclass, replace

from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS

FEW = 8
"""Up to this many rows, a step reads each weight once and gives each row the bits that it has alone."""
FUSED = 16
"""Up to this many rows, products of a small or quantised network are fused with the operations around them."""
FUSED_MOST = 8 << 20
"""The most weights in a layer's largest product of a small network; in larger ones only FEW rows are fused."""
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
    """How a product is cut (see `linear_kernel` and, for quantised weights, `packed_linear_kernel`)."""

    folds: int
    """Rows of weights side by side in a line; 1 if quantised."""
    warps: int
    tiles: int
    ahead: int
    lanes: int = 1
    """Into how many sums the groups of columns go in turn: 1, or LANES if quantised."""

    def outputs(self, gated: bool) -> int:
        """Return the number of outputs of a program."""
        return 16 * self.tiles // (self.folds * (2 if gated else 1))

    def columns(self, kind: Kind | None) -> int:
        """Return the columns that the warps read at once; `kind` is None for plain weights."""
        return (128 if kind is None else 256) * self.warps * self.folds

    def shared(self, inputs: int, kind: Kind | None) -> int:
        """Return the (for quantised weights approximate) bytes of shared memory in which a program holds weights."""
        each = 4096 if kind is None else 4096 * kind.block_bytes // kind.block
        return each * self.warps * self.tiles * min(self.ahead, _parts(inputs, self.columns(kind)))


def by_head(tile: Tile, outputs: int, inputs: int, kind: Kind | None) -> Tile:
    """Return `tile` for products of each head's own `inputs` by `outputs` lines, a multiple of 16. Not yet measured.

    Warps without columns compute more outputs instead, all of one head. Quantised weights go in lanes where they can,
    so that a product can combine the parts of its input.
    """
    while tile.warps > 1 and tile.columns(kind) >= 2 * inputs:
        tile = replace(tile, warps=tile.warps // 2, tiles=2 * tile.tiles)
    while outputs % tile.outputs(False):
        tile = replace(tile, tiles=tile.tiles // 2)
    return replace(tile, lanes=LANES) if kind is not None and BLOCKS[kind].shared == 1 else tile


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


@dataclass(frozen=True, slots=True)
class WarpgroupTile:
    """How a product of many rows is cut (see `warpgroup_linear_kernel`)."""

    columns: int
    stages: int
    split: int
    """The number of parts that the columns are split into."""


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


def query_splits(group: int, dim: int) -> int:
    """Return how many programs divide the `group` query heads of a KV head, for heads of `dim` numbers, a power of two.

    A thread holds two fp32 numbers for each of the dim / 32 numbers that it reads of each query head. With more than 64
    of them, wide heads would leave too few registers.
    """
    most = group if dim < 256 else 1024 // dim
    return next(splits for splits in range(1, group + 1) if group % splits == 0 and group // splits <= most)


def most_chunks(rows: int) -> int:
    """Return the most parts per sequence that the attention of `rows` sequences leaves."""
    return MOST_CHUNKS if rows < 32 else 32 if rows < 128 else 16


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)
