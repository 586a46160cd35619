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

    active int32 [rows]: the slot of each row, -1 for none. The kernel never starts before the previous kernel has
    ended, so that nothing of a step overtakes the step before. The grid is [cdiv(SIZE, BLOCK), rows].
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(1)
    slot = tl.load(active + batch)
    if slot >= 0:
        row = tl.maximum(tl.load(token + slot), 0).to(tl.int64)
        inside = columns < SIZE
        target = out + batch * SIZE + columns
        x = tl.load(weight + row * SIZE + columns, mask=inside)
        if SCALE != 1.0:
            x = (x.to(tl.float32) * SCALE).to(x.dtype)
        tl.store(target, x, mask=inside)
