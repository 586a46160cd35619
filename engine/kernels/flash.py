"""The compiled functions of flash-attn 2.8 (https://github.com/Dao-AILab/flash-attention), called without its package.

The package registers its functions as custom operators, for autograd and torch.compile. Importing it costs seconds at
every start, and each call through autograd and operator dispatch 0.3 ms. We need neither.
"""

from torch import Tensor

MODULE = "flash_attn_2_cuda"
"""The module of the compiled functions; importing it needs torch to be imported."""
NO_WINDOW = (-1, -1)


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rows: Tensor | None = None,
    table: Tensor | None = None,
    scale: float | None = None,
    window: tuple[int, int] = NO_WINDOW,
    cap: float = 0.0,
) -> Tensor:
    """Compute causal attention of q [sequences, tokens, Hq, D]; the last token sees the last row.

    keys and values are [sequences, rows, Hkv, D], or with a `table` int32 [sequences, blocks] pages [blocks, rows, Hkv,
    D]. Each sequence has `rows` int32 [sequences] rows; None: all. k and v [sequences, tokens, Hkv, D] are appended to
    them first. A token sees window[0] rows before its own (-1: all); `cap` 0 is none.
    """
    from flash_attn_2_cuda import fwd_kvcache

    out: Tensor = fwd_kvcache(
        q, keys, values, k, v, rows, None, None, None, None, table, None, None,
        q.shape[-1] ** -0.5 if scale is None else scale, True, *window, cap, True, 0,
    )[0]  # fmt: skip
    return out


def attend_ragged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    table: Tensor,
    most_tokens: int,
    most_rows: int,
    *,
    scale: float | None = None,
    window: tuple[int, int] = NO_WINDOW,
    cap: float = 0.0,
) -> Tensor:
    """Compute the same for spans of any lengths in q [T, Hq, D]; the tensors are those of `RaggedBackend.ragged`."""
    from flash_attn_2_cuda import varlen_fwd

    out: Tensor = varlen_fwd(
        q, keys, values, None, q_ends, k_ends, None, None, table, None, most_tokens, most_rows, 0.0,
        q.shape[-1] ** -0.5 if scale is None else scale, False, True, *window, cap, False, None,
    )[0]  # fmt: skip
    return out
