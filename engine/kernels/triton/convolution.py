"""Short convolutions of decode steps and prompts, whose earlier inputs are rows of the KV cache.

The plain twins are `Decoder._convolve` in `models/reference/decoder.py` and `ConvolvingStep.last_rows` in
`engine/attention/convolving.py`. Everything is rounded where these round. A row is computed by itself, so its bits do
not depend on the other rows.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels import convolution_rows
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait

_NONE = tl.constexpr(convolution_rows.NONE)
_COMPUTED_HERE = tl.constexpr(convolution_rows.COMPUTED_HERE)


@triton.jit(do_not_specialize=["table_stride"])
def seen_kernel(active, counters, tables, seen, table_stride, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """Write `seen_rows` for the rows of a decode step. The grid is [rows].

    active int32 [rows], counters int64 [slots, 2] and tables int32 [slots, table_stride] are those of a `StepInput`,
    with blocks of BLOCK rows. seen int32 [rows, MOST]; MOST is a power of two. Rows of one sequence are adjacent.
    """
    row = tl.program_id(0)
    back = tl.arange(0, MOST)
    slot = tl.load(active + row).to(tl.int64)
    earlier = tl.load(counters + 2 * slot, mask=slot >= 0, other=-1) - back
    there = earlier >= 0
    block = tl.load(tables + slot * table_stride + earlier // BLOCK, mask=there, other=0)
    at = tl.where(there, block * BLOCK + (earlier % BLOCK).to(tl.int32), _NONE)
    # Another row of the step writes it if it is the newest of that row.
    other = tl.load(active + (row - back), mask=(back > 0) & (back <= row), other=-1).to(tl.int64)
    newest = tl.load(counters + 2 * other, mask=other >= 0, other=0)
    block = tl.load(tables + other * table_stride + newest // BLOCK, mask=other >= 0, other=0)
    written = tl.where(other >= 0, block * BLOCK + (newest % BLOCK).to(tl.int32), _NONE)
    tl.store(seen + row * MOST + back, tl.where(there & (written == at), _COMPUTED_HERE, at))


@triton.jit
def _input(at, inside, SIZE: tl.constexpr):
    """Return b * x of a row whose b is at `at`, rounded to its dtype."""
    b, x = tl.load(at, mask=inside, other=0.0), tl.load(at + 2 * SIZE, mask=inside, other=0.0)
    return (b.to(tl.float32) * x.to(tl.float32)).to(b.dtype)


@triton.jit
def convolve_kernel(
    projected,
    filters,
    bias,
    kept,
    seen,
    out,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute c * conv(b * x) of projected [rows, 3 SIZE]: b, c and x side by side.

    filters [SIZE, WIDTH] and bias [SIZE] or None; kept [slots, SIZE] has the inputs b * x of earlier rows and receives
    those of this step; seen int32 [rows, MOST] is `seen_rows`; out [rows, SIZE]. The grid is
    [rows, cdiv(SIZE, BLOCK)].
    """
    tl.static_assert(WIDTH <= MOST)
    gdc_launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    if bias is None:
        total = tl.zeros([BLOCK], tl.float32)
    else:
        total = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    at = projected + row * 3 * SIZE + column
    own = _input(at, inside, SIZE)
    place = tl.load(seen + row * MOST).to(tl.int64)
    tl.store(kept + place * SIZE + column, own, mask=inside & (place >= 0))
    for tap in tl.static_range(WIDTH):
        given = own
        if tap < WIDTH - 1:
            back = WIDTH - 1 - tap
            place = tl.load(seen + row * MOST + back).to(tl.int64)
            stored = tl.load(kept + place * SIZE + column, mask=inside & (place >= 0), other=0.0)
            here = inside & (place == _COMPUTED_HERE)
            given = tl.where(here, _input(at - back * 3 * SIZE, here, SIZE), stored.to(own.dtype))
        tap_weight = tl.load(filters + column * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        total += tap_weight * given.to(tl.float32)
    c = tl.load(at + SIZE, mask=inside, other=0.0)
    mixed = c.to(tl.float32) * total.to(c.dtype).to(tl.float32)
    tl.store(out + row * SIZE + column, mixed.to(c.dtype), mask=inside)
