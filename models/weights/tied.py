"""Whether the embedding and the head are one matrix, by the checkpoint's tensors rather than its config."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from models.spec import ModelSpec
from models.weights.checkpoint import StoredTensor
from models.weights.slots import Names

_NUMBERS = 1 << 20
"""How many numbers of each matrix are compared at once."""


def as_stored(
    spec: ModelSpec, tensors: Iterable[StoredTensor], names: Names
) -> tuple[ModelSpec, list[StoredTensor], str | None]:
    """Return the spec and the tensors, with embedding and head as they are stored, and a note for the user or None.

    As in transformers (`PreTrainedModel.tie_weights`), a stored head that differs from the embedding is used, whatever
    the config says, and a head that is stored alone is the embedding, too. The two are read only if both are stored.
    Raises ModelError if they cannot be read.
    """
    tensors = list(tensors)
    embedding, head = (
        next((t for t in tensors if t.name == f"{names[part]}.weight"), None)
        for part in ("embedding", "head")
    )
    if not spec.tied or head is None:
        return spec, tensors, None
    if embedding is not None and not _equal(embedding, head):
        note = f"The checkpoint has a head of its own ({head.name}), which is used although the config says otherwise."
        return replace(spec, tied=False), tensors, note
    rest = [tensor for tensor in tensors if tensor is not head]
    return (
        spec,
        rest if embedding is not None else [replace(head, name=f"{names['embedding']}.weight"), *rest],
        None,
    )


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape or len(one.shape) != 2 or 0 in one.shape:
        return False  # a later check rejects the shape
    if one.quantized or other.quantized:
        return False  # quantised numbers differ from those of the other
    step = max(1, _NUMBERS // one.shape[1])
    return all(
        torch.equal(_rows(one, start, step), _rows(other, start, step))
        for start in range(0, one.shape[0], step)
    )


def _rows(tensor: StoredTensor, start: int, count: int) -> torch.Tensor:
    """Return rows of a matrix, fp32 [at most `count`, columns]."""
    assert tensor.cut is not None
    return tensor.cut(start, min(count, tensor.shape[0] - start)).numbers()
