"""The rows and columns that a rank has of the tensors of a recurrence: those of its heads."""

from models.recurrences import DeltaNet, Mamba2, Recurrence
from models.weights.share import Share, SharePart

Parts = tuple[SharePart, ...]
"""Parts of a tensor, in order."""


def recurrent_parts(share: Share, spec: Recurrence, part: str) -> Parts | None:
    """Return what a rank has of the tensor of a recurrence whose `Slot.part` is `part`; None: all of it.

    These are columns of the output's weight, and rows of all others.
    """
    return _of_mamba2(share, spec, part) if isinstance(spec, Mamba2) else _of_delta_net(share, spec, part)


def _of_delta_net(share: Share, spec: DeltaNet, part: str) -> Parts | None:
    keys, heads = share.key_heads(spec).times(spec.key_dim), share.value_heads(spec)
    values = tuple(each.times(spec.value_dim) for each in heads)
    if part in ("delta_q", "delta_k"):
        return (keys,)
    if part in ("delta_v", "delta_z", "delta_out"):
        return values
    if part in ("delta_b", "delta_a", "dt_bias", "decay"):
        return heads
    if part == "filters":
        return keys, keys.after(spec.key_size), *(each.after(2 * spec.key_size) for each in values)
    return None


def _of_mamba2(share: Share, spec: Mamba2, part: str) -> Parts | None:
    heads = share.mamba_heads(spec)
    x, b = heads.times(spec.head_dim), share.mamba_groups(spec).times(spec.state_size)
    inner = x, *(b.after(spec.output_size + at * spec.groups * spec.state_size) for at in range(2))
    if part in ("gated_norm", "ssm_out"):
        return (x,)
    if part in ("dt_bias", "decay", "skip"):
        return (heads,)
    if part == "filters":
        return inner
    if part == "ssm_in":
        size = spec.output_size
        return x, *(each.after(size) for each in inner), heads.after(size + spec.conv_size)
    return None
