# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Attention of a few query tokens over a block table, the rows split among programs ("split KV")."""

import triton
import triton.language as tl


@triton.jit
def attend_tile(q, k, v, visible, m, l, acc, scale_log2):  # noqa: E741 - the names of the paper
    """One step of the online softmax: what C more rows add to what M queries have seen so far.

    q [M, D]; k and v [C, D]; visible [M, C] bool; `scale_log2` is the scale of the scores times log2(e). M, C and
    D are powers of two from 16 on. Where nobody sees a row, v has to be finite there (its weight is 0, and 0 * NaN
    is NaN). fp32 and carried from tile to tile: m [M], the highest score so far (start with -inf), l [M], the sum of
    the weights relative to it (0), acc [M, D], the weighted sum of v (0). Returns (m, l, acc); the output is
    acc / l, and the weights' sum as a logarithm to base 2 is m + log2(l).

    A tile of which a query sees nothing leaves its m, l and acc bitwise as they were.
    From "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (Dao 2023), algorithm 1.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 1))
    # A query that has seen nothing yet has no highest score: -inf - -inf would be NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(m - base)
    l = l * shrink + tl.sum(weights, 1)  # noqa: E741
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return highest, l, acc
