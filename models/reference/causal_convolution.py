"""The causal convolution before a recurrence."""

import torch
import torch.nn.functional as F
from torch import Tensor


def convolved(rows: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel of rows [width - 1 + n, channels] and apply SiLU: -> [n, channels] in their dtype.

    `filters` is [channels, width], `bias` [channels]. The sums are in fp32 and rounded once. A row has the same bits
    regardless of how many there are.
    """
    given, count = rows.float(), len(rows) - filters.shape[1] + 1
    out = torch.zeros_like(given[:count]) if bias is None else bias.float()
    for at, each in enumerate(filters.float().unbind(1)):
        out = out + each * given[at : at + count]  # not as one operation, whose rounding may vary
    out = out.to(rows.dtype)
    for row in out.unbind(0):  # where a row begins in a vector register must not depend on those before it
        F.silu(row, inplace=True)
    return out
