"""Match the tensors of a checkpoint to the slots of a network."""

from collections.abc import Iterable
from dataclasses import replace

from models.errors import ModelError
from models.spec import ModelSpec, each_attention
from models.weights.checkpoint import StoredTensor
from models.weights.slots import Names, Slot, slots


def match(spec: ModelSpec, tensors: Iterable[StoredTensor], names: Names) -> dict[str, Slot]:
    """Return the slot of each tensor by its name, in file order.

    Raises ModelError unless the tensors are exactly the network's.
    """
    wanted = {slot.name(names): slot for slot in slots(spec)}
    # Checkpoints may have k and v for layers that read those of another.
    own = each_attention(spec, lambda _, attention: replace(attention, kv_from=None))
    unused = {slot.name(names) for slot in slots(own)} - wanted.keys() if own != spec else set[str]()
    places: dict[str, Slot] = {}
    for tensor in tensors:
        if _is_unused(tensor.name) or tensor.name in unused:
            continue
        slot = wanted.pop(tensor.name, None)
        if slot is None and tensor.name in places:
            raise ModelError(
                f"The checkpoint has the tensor {tensor.name[:80]} twice, and no index that says which counts; "
                "download it again."
            )
        if slot is None:
            raise ModelError(
                f"The checkpoint has the tensor {tensor.name[:80]}, which {spec.architecture} with this "
                "config does not use; the weights and the config do not match."
            )
        if tensor.shape != slot.shape:
            raise ModelError(
                f"{tensor.name} has the shape {list(tensor.shape)}, but the config requires "
                f"{list(slot.shape)}; the weights and the config do not match."
            )
        places[tensor.name] = slot
    if wanted:
        more = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
        raise ModelError(
            f"The checkpoint lacks {next(iter(wanted))}{more}; it is incomplete: download it again."
        )
    return places


def _is_unused(name: str) -> bool:
    """Return whether the network never uses a tensor: RoPE frequencies of old checkpoints, multi-token prediction."""
    return name.endswith("rotary_emb.inv_freq") or any(part.startswith("mtp") for part in name.split("."))
