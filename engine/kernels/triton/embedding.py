"""The first kernel of a decode step: the embeddings of its tokens.

The plain twin is `embed` in `models/reference/tiled.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl


@triton.jit
def embedding_kernel(
    active, token, weight, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr = 1.0
):
    """Write out [rows, SIZE]: SCALE times the embedding of token[slot], int64 [slots], in weight [vocab, SIZE].

    active int32 [rows]: the slot of each row, or -1: such a row becomes zeros. The kernel never starts before the
    previous kernel has ended, so that nothing of a step overtakes the step before. The grid is [cdiv(SIZE, BLOCK),
    rows].
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(1)
    slot = tl.load(active + batch)
    row = tl.maximum(tl.load(token + slot, mask=slot >= 0, other=0), 0).to(tl.int64)
    inside = columns < SIZE
    x = tl.load(weight + row * SIZE + columns, mask=inside & (slot >= 0), other=0.0)
    if SCALE != 1.0:
        x = (x.to(tl.float32) * SCALE).to(x.dtype)
    tl.store(out + batch * SIZE + columns, x, mask=inside)
