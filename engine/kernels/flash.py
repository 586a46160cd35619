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
    kv: tuple[Tensor, Tensor],
    *,
    new: tuple[Tensor, Tensor] | None = None,
    rows: Tensor | None = None,
    table: Tensor | None = None,
    scale: float | None = None,
    window: tuple[int, int] = NO_WINDOW,
    cap: float = 0.0,
) -> Tensor:
    """Compute causal attention of q [sequences, tokens, Hq, D]; the last token sees the last row.

    `kv` are K and V, [sequences, rows, Hkv, D], or with a `table` int32 [sequences, blocks] pages [blocks, rows, Hkv,
    D]. Each sequence has `rows` int32 [sequences] rows; None: all. `new` K and V [sequences, tokens, Hkv, D] are
    appended to them first. A token sees window[0] rows before its own (-1: all); `cap` 0 is none.
    """
    from flash_attn_2_cuda import fwd_kvcache

    out: Tensor = fwd_kvcache(
        q, *kv, *(new or (None, None)), rows, None, None, None, None, table, None, None,
        q.shape[-1] ** -0.5 if scale is None else scale, True, *window, cap, True, 0,
    )[0]  # fmt: skip
    return out


def attend_ragged(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    ends: tuple[Tensor, Tensor],
    table: Tensor,
    most: tuple[int, int],
    *,
    scale: float | None = None,
    window: tuple[int, int] = NO_WINDOW,
    cap: float = 0.0,
) -> Tensor:
    """Compute the same for spans of any lengths in q [T, Hq, D].

    `ends` are q_ends and k_ends of `RaggedBackend.ragged`; `most` are the most tokens and rows of a span.
    """
    from flash_attn_2_cuda import varlen_fwd

    out: Tensor = varlen_fwd(
        q, *kv, None, *ends, None, None, table, None, *most, 0.0,
        q.shape[-1] ** -0.5 if scale is None else scale, False, True, *window, cap, False, None,
    )[0]  # fmt: skip
    return out
