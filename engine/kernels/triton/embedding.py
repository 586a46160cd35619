"""The first kernel of a decode step: the embedding of its token.

The plain twin is Embedding in `models/reference/layers.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
import triton
import triton.language as tl


@triton.jit
def embedding_kernel(token, weight, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out [SIZE] = row token[0] of weight [vocab, SIZE].

    It never starts before the kernel before it has ended, so that nothing of the step overtakes the one before.
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.maximum(tl.load(token), 0).to(tl.int64)
    tl.store(out + columns, tl.load(weight + row * SIZE + columns, mask=columns < SIZE), mask=columns < SIZE)
