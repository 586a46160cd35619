"""Join the tensors of a quantised safetensors checkpoint: those that make up a matrix become one tensor."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from models.errors import ModelError
from models.spec import ModelSpec
from models.weights import mxfp4
from models.weights.checkpoint import FLOATS, Blocks, StoredTensor
from models.weights.device_blocks import device_blocks
from models.weights.group_quant import (
    UNPACK,
    GroupedMatrix,
    MatrixTensors,
    block_rows,
    choose_blocks,
    numbers,
)
from models.weights.quant_config import MXFP4, OF_ACTIVATIONS, Scheme, beside, find_layout
from models.weights.slots import Names, slots

_CPU = torch.device("cpu")


def join_quantized(tensors: Iterable[StoredTensor], scheme: Scheme | None) -> list[StoredTensor]:
    """Return `tensors` with one tensor for each quantised matrix, named as if unquantised; leave out activation scales.

    Raises ModelError if tensors of a matrix are missing or do not fit together, and for types that no network has.
    """
    tensors = list(tensors)
    named = {tensor.name: tensor for tensor in tensors}
    matrices, used = [], set[str]()
    for tensor in tensors if scheme is not None else ():
        assert scheme is not None
        layout = find_layout(tensor.name, tensor.type, scheme)
        if layout is None:
            continue
        stem = tensor.name.removesuffix(layout.digits)
        parts = beside(stem, layout, named)
        used |= {tensor.name, *parts.values()}
        own = {layout.digits: tensor, **{part: named[name] for part, name in parts.items()}}
        if layout is MXFP4:
            matrices.append(mxfp4.join_mxfp4(stem, *own.values()))
        else:
            found = MatrixTensors(stem, own, scheme)
            nbytes = sum(part.nbytes for part in own.values())
            matrices.append(_stored(stem + layout.becomes, UNPACK[layout.name](found), nbytes, scheme.name))
    rest = [
        tensor
        for tensor in tensors
        if tensor.name not in used and not (scheme is not None and tensor.name.endswith(OF_ACTIVATIONS))
    ]
    for tensor in rest:
        if tensor.type not in FLOATS:
            _check_alone(tensor, scheme)
            raise ModelError(
                f"{tensor.name} is of type {tensor.type}; supported: {', '.join(FLOATS)}. Use the original checkpoint "
                "or a GGUF file."
            )
    return [*rest, *matrices]


def _check_alone(tensor: StoredTensor, scheme: Scheme | None) -> None:
    """Raise ModelError if a tensor belongs beside digits, which are missing."""
    for layout in scheme.layouts if scheme is not None else ():
        for part in (*(way for ways in layout.needs for way in ways), *layout.may):
            if tensor.name.endswith(part):
                stem = tensor.name.removesuffix(part)
                raise ModelError(
                    f"{tensor.name} has no {stem}{layout.digits} of type {layout.type} beside it; the checkpoint is "
                    "incomplete: download it again."
                )


def _stored(name: str, grouped: GroupedMatrix, nbytes: int, quantized: str) -> StoredTensor:
    def parts() -> Iterator[tuple[int, Tensor]]:
        return numbers(grouped)

    def copy_into(out: Tensor) -> None:
        # Copy the packed tensors to the device and decode them there.
        for start, values in numbers(grouped, out.device):
            out[start : start + len(values)] = values

    def cut(start: int, rows: int) -> StoredTensor:
        return _stored(name, grouped.cut(start, rows), nbytes * rows // grouped.rows, quantized)

    kind = choose_blocks(grouped)
    on_device = device_blocks(grouped)
    blocks = None if kind is None else Blocks(kind, lambda: block_rows(grouped, kind))
    shape = (grouped.rows, grouped.columns)
    return StoredTensor(
        name, shape, nbytes, copy_into, None, parts, blocks, on_device, cut, quantized=quantized
    )


def without_empty_biases(
    spec: ModelSpec, tensors: Iterable[StoredTensor], names: Names
) -> list[StoredTensor]:
    """Drop biases that are all zeros from a quantised checkpoint, for layers that have no bias in `spec`."""
    tensors = list(tensors)
    if not any(tensor.quantized for tensor in tensors):
        return tensors
    wanted = {slot.name(names) for slot in slots(spec)}

    def is_empty(tensor: StoredTensor) -> bool:
        if tensor.name in wanted or not tensor.name.endswith(".bias") or len(tensor.shape) != 1:
            return False
        values = torch.empty(tensor.shape)
        tensor.copy_into(values)
        return not bool(values.any())

    return [tensor for tensor in tensors if not is_empty(tensor)]
