"""Join the tensors of a quantised safetensors checkpoint: those that make up a matrix become one tensor."""

from collections.abc import Iterable

from models.errors import ModelError, faulty
from models.spec import ModelSpec
from models.weights.checkpoint import FLOATS, StoredTensor
from models.weights.formats.format import Scheme
from models.weights.formats.matrix import MatrixTensors
from models.weights.formats.registry import OF_ACTIVATIONS
from models.weights.slots import Names, slots


def join_quantized(tensors: Iterable[StoredTensor], scheme: Scheme | None) -> list[StoredTensor]:
    """Return `tensors` with one tensor for each quantised matrix, named as if unquantised; leave out activation scales.

    Raises ModelError if tensors of a matrix are missing or do not fit together, and for types that no network has.
    """
    tensors = list(tensors)
    named = {tensor.name: tensor for tensor in tensors}
    matrices, used = [], set[str]()
    for tensor in tensors:
        if scheme is None or (form := scheme.format_of(tensor.name, tensor.type)) is None:
            continue
        stem = tensor.name.removesuffix(form.digits)
        parts = form.tensors(stem, named)
        used |= set(parts.values())
        own = {part: named[name] for part, name in parts.items()} | {form.digits: tensor}
        matrices.append(form.read(MatrixTensors(stem, stem + form.becomes, own, scheme.name)))
    left_out = OF_ACTIVATIONS if scheme is not None else ()
    rest = [t for t in tensors if t.name not in used and not t.name.endswith(left_out)]
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
    for form in scheme.formats if scheme is not None else ():
        for part in (*(way for ways in form.needs for way in ways), *form.may):
            if tensor.name.endswith(part):
                digits = tensor.name.removesuffix(part) + form.digits
                raise faulty(f"{tensor.name} has no {digits} of type {form.type} beside it", "incomplete")


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
        return not bool(tensor.numbers().any())

    return [tensor for tensor in tensors if not is_empty(tensor)]
