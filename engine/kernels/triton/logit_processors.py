"""Optional steps around a draw: a bias or a mask on the logits before it, log-probabilities after it.

The plain twins are `edit` and `log_chances` of `engine/sampling/sampler.py`. After those of `scores.py`, a slot's
`settings` have three more: the number of biased tokens, whether there is a mask, and the number of alternatives to
report (-1: no log-probabilities at all).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait
from engine.kernels.triton.scores import INFINITY, entry

BIASED = tl.constexpr(1024)
"""The most biases of a slot."""
MOST = tl.constexpr(20)
"""The most alternatives that can be reported."""
PLACES = tl.constexpr(32)
"""The distance between the results of one token and the next."""
BLOCK = tl.constexpr(2048)
"""Tokens per program."""


@triton.jit
def _allowed(mask, ids, inside):
    """Return whether the mask bits of tokens are set."""
    word = tl.load(mask + ids // 32, mask=inside, other=0)
    return ((word >> (ids % 32)) & 1) != 0


@triton.jit(do_not_specialize_on_alignment=["active"])
def edit_kernel(
    logits, stride, active, settings, biased, bias, masks, out,
    VOCAB: tl.constexpr, WORDS: tl.constexpr, PITCH: tl.constexpr, BY_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy rows of logits, `stride` apart, to fp32 `out` [rows, VOCAB], applying the bias and mask of each row's slot.

    By slot: settings (PITCH apart), biased int32 and bias fp32 [BIASED], masks int32 [WORDS], which may lie in host
    memory. With BY_ROW, masks are by row.
    """
    row = tl.program_id(1)
    slot = tl.load(active + row).to(tl.int64)
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    if slot < 0:
        return
    logits += row.to(tl.int64) * stride
    out += row.to(tl.int64) * VOCAB
    settings += slot * PITCH
    masks += (row if BY_ROW else slot) * WORDS
    start = tl.program_id(0) * BLOCK
    group = start // 32 + tl.arange(0, BLOCK // 32)
    lane = tl.arange(0, 32)
    ids = group[:, None] * 32 + lane[None, :]
    inside = ids < VOCAB
    x = tl.load(logits + ids, mask=inside, other=0.0).to(tl.float32)
    masked = tl.load(settings + 8) != 0.0
    if masked:
        word = tl.load(masks + group, mask=group < WORDS, other=0)
        x = tl.where(((word[:, None] >> lane[None, :]) & 1) != 0, x, -INFINITY)
    tl.store(out + ids, x, mask=inside)
    count = tl.load(settings + 7).to(tl.int32)
    if count > 0:
        tl.debug_barrier()  # the stores below must come after the one above
        i = tl.arange(0, BIASED)
        which = tl.load(biased + slot * BIASED + i, mask=i < count, other=-1)
        mine = (which >= start) & (which < start + BLOCK)
        more = tl.load(bias + slot * BIASED + i, mask=mine, other=0.0)
        y = tl.load(logits + which, mask=mine, other=0.0).to(tl.float32) + more
        if masked:
            y = tl.where(_allowed(masks, which, mine), y, -INFINITY)
        tl.store(out + which, y, mask=mine)


@triton.jit(do_not_specialize_on_alignment=["active"])
def chances_kernel(
    logits, stride, active, settings, peaks, sums, values, names,
    VOCAB: tl.constexpr, PITCH: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find each block's largest logit, the sum of exponentials relative to it, and the likeliest tokens.

    Scratch by row: peaks and sums fp32 [BLOCKS], values fp32 and names int32 [BLOCKS, MOST].
    """
    row = tl.program_id(1)
    block = tl.program_id(0)
    slot = tl.load(active + row).to(tl.int64)
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    if slot < 0:
        return
    count = tl.load(settings + slot * PITCH + 9).to(tl.int32)
    if count < 0:
        return
    i = tl.arange(0, BLOCK)
    ids = block * BLOCK + i
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < VOCAB, other=-INFINITY).to(tl.float32)
    peak = tl.max(x, 0)
    at = row * BLOCKS + block
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(tl.where(x == -INFINITY, 0.0, tl.exp(x - peak)), 0))
    left = ids < VOCAB
    for j in range(count):
        # Tokens with -inf come last, one after the other as well.
        best = tl.argmax(tl.where(left, tl.maximum(x, -3.4e38), -INFINITY), 0)
        tl.store(values + at * MOST + j, entry(x, best))
        tl.store(names + at * MOST + j, tl.where(tl.max(left.to(tl.int32), 0) > 0, block * BLOCK + best, -1))
        left = left & (i != best)


@triton.jit(do_not_specialize_on_alignment=["active"])
def tell_kernel(
    logits, stride, active, settings, numbers, peaks, sums, values, names, token, chances, others,
    PITCH: tl.constexpr, NUMBERS: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr, ROOM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the log-probabilities of each row's newest and likeliest tokens, from the results of `chances_kernel`.

    By slot: token int64; chances fp32 and others int32 [SLOTS, PLACES], at the index of the token in its answer: first
    the token's own, then the alternatives, likeliest first. Writes nothing where there is no token. ROOM is a power of
    two, at least MOST * BLOCKS.
    """
    row = tl.program_id(0)
    slot = tl.load(active + row).to(tl.int64)
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    if slot < 0:
        return
    count = tl.load(settings + slot * PITCH + 9).to(tl.int32)
    chosen = tl.load(token + slot)
    if (count < 0) | (chosen < 0):
        return
    i = tl.arange(0, ROOM)
    there = i < BLOCKS
    part = tl.load(peaks + row * BLOCKS + i, mask=there, other=-INFINITY)
    peak = tl.max(part, 0)
    sums_ = tl.load(sums + row * BLOCKS + i, mask=there, other=0.0)
    whole = peak + tl.log(tl.sum(sums_ * tl.exp(part - peak), 0))
    step = tl.load(numbers + slot * NUMBERS + 1) - 1
    at = (slot * SLOTS + step % SLOTS) * PLACES
    x = tl.load(logits + row.to(tl.int64) * stride + chosen).to(tl.float32)
    tl.store(chances + at, x - whole)
    there = (i < MOST * BLOCKS) & (i % MOST < count)
    ids = tl.load(names + row * MOST * BLOCKS + i, mask=there, other=-1)
    values_ = tl.load(values + row * MOST * BLOCKS + i, mask=there, other=-INFINITY)
    left = ids >= 0
    for j in range(count):
        best = tl.argmax(tl.where(left, tl.maximum(values_, -3.4e38), -INFINITY), 0)
        tl.store(chances + at + 1 + j, entry(values_, best) - whole)
        tl.store(others + at + 1 + j, tl.sum(tl.where(i == best, ids, 0), 0))
        left = left & (i != best)
