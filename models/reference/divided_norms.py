"""RMSNorms over numbers of which every rank has a part: their mean squares are those of all ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from models.network import Network
from models.recurrences import Mamba2
from models.reference.collective import Collective

GroupSquares = Callable[[Tensor], Tensor]
"""(sums of squares fp32 [T, groups] of a rank's part of its groups) -> the mean squares of the whole groups."""


def head_squares(
    network: Network, peers: Collective, index: int, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean squares of all q heads and of all k heads of layer `index`, each fp32 [T, 1].

    `q` and `k` [T, numbers] are those of this rank.
    """
    assert network.share is not None
    whole = network.whole.layers[index].attention
    own = torch.stack([x.float().square().sum(-1, keepdim=True) for x in (q, k)])
    q_squares, k_squares = peers.sum(own)
    copies = network.share.copies(whole.kv_heads)
    return (
        q_squares / (whole.heads * whole.head_dim),
        k_squares / (whole.kv_heads * whole.head_dim * copies),
    )


def group_squares(network: Network, peers: Collective | None, index: int) -> GroupSquares | None:
    """Return what makes the mean squares of the groups of the Mamba-2 layer `index`; None if each rank has whole
    groups."""
    share, whole = network.share, network.whole.layers[index].mixer
    assert isinstance(whole, Mamba2)
    if peers is None or share is None or share.copies(whole.groups) == 1:
        return None
    group = share.mamba_groups(whole).start

    def mean(squares: Tensor) -> Tensor:
        every = squares.new_zeros(len(squares), whole.groups)
        every[:, group] = squares[:, 0]  # zeros where the rank has no heads
        return peers.sum(every)[:, group, None] / (whole.output_size // whole.groups)

    return mean
