"""The first kernel of a decode step: the embeddings of its tokens.

The plain twin is `embed` in `models/reference/tiled.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl

from engine.kernels.triton.unpack import tile_numbers


@triton.jit
def embedding_kernel(
    active, token, weight, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr = 1.0,
    more=None, scales=None, supers=None, CODES: tl.constexpr = None,
):  # fmt: skip
    """Write out [rows, SIZE]: SCALE times the embedding of token[slot], int64 [slots], in weight [vocab, SIZE].

    active int32 [rows]: the slot of each row, or -1: such a row becomes zeros. The kernel never starts before the
    previous kernel has ended, so that nothing of a step overtakes the step before. The grid is [cdiv(SIZE, BLOCK),
    rows]. With CODES, weight is the codes of planes (see `packed_linear_kernel`), and BLOCK divides 128; numbers are
    rounded before they are scaled, too.
    """
    first, batch = tl.program_id(0) * BLOCK, tl.program_id(1) + tl.arange(0, 1)
    columns = first + tl.arange(0, BLOCK)[None, :]
    slot = tl.load(active + batch)
    row = tl.maximum(tl.load(token + slot, mask=slot >= 0, other=0), 0)
    inside, there = columns < SIZE, (slot >= 0)[:, None]
    if CODES is None:
        x = tl.load(weight + row.to(tl.int64)[:, None] * SIZE + columns, mask=inside & there, other=0.0)
    else:
        value = tile_numbers(weight, more, scales, supers, row.to(tl.int32), first, BLOCK, SIZE, CODES)
        x = tl.where(there, value, 0.0).to(out.dtype.element_ty)
    if SCALE != 1.0:
        x = (x.to(tl.float32) * SCALE).to(x.dtype)
    tl.store(out + batch[:, None] * SIZE + columns, x, mask=inside)
