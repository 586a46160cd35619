"""Quick operators for Triton's interpreter: what an operator makes of two types is asked once, not with every number.

The interpreter's own operator answers first and says of which type the result is, or that there is none. Where two
operands of these types come again, numpy computes at once what the interpreter would have had it compute.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter

INTEGERS = {name: np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")}
NUMBERS = INTEGERS | {"fp32": np.dtype(np.float32)}
BITS = INTEGERS | {"int1": np.dtype(bool)}
"""How the interpreter holds the types whose results numpy has the same type for."""

WHOLE = {name: INTEGERS[name] for name in ("int32", "int64")}


def divide(left: Any, right: Any) -> Any:
    """Towards zero, as the interpreter does."""
    return (left - np.fmod(left, right)) // right


OPERATORS: dict[str, tuple[Any, dict[Any, Any]]] = {
    "add": (np.add, NUMBERS),
    "sub": (np.subtract, NUMBERS),
    "mul": (np.multiply, NUMBERS),
    "floordiv": (divide, WHOLE),
    "mod": (np.fmod, WHOLE),
    "and": (np.bitwise_and, BITS),
    "or": (np.bitwise_or, BITS),
    "xor": (np.bitwise_xor, BITS),
    "lshift": (np.left_shift, INTEGERS),
    "rshift": (np.right_shift, INTEGERS),
    "lt": (np.less, NUMBERS),
    "le": (np.less_equal, NUMBERS),
    "gt": (np.greater, NUMBERS),
    "ge": (np.greater_equal, NUMBERS),
    "eq": (np.equal, NUMBERS),
    "ne": (np.not_equal, NUMBERS),
}
MOST_CONSTANTS = 4096

tensor = language.core.tensor
Handle = interpreter.TensorHandle
constants: dict[Any, Any] = {}
made: dict[str, dict[Any, dict[str, Any]]] = {}


def constant(value: Any, dtype: Any) -> Any:
    """A number as the array that the interpreter makes of it beside numbers of a type, or None: let it decide."""
    if type(value) is int:
        if not (-(2**31) <= value < 2**31 if dtype.name in ("int32", "int64", "fp32") else 0 <= value < 128):
            return None
    elif type(value) is not float or dtype.name != "fp32" or not 2**-126 <= abs(value) <= 2**127:
        return None
    key = value, type(value), dtype.name
    if key not in constants:
        if len(constants) >= MOST_CONSTANTS:
            constants.clear()
        constants[key] = np.array([value], NUMBERS[dtype.name])
    return constants[key]


def number_of(given: Any, dtype: Any, held: Any) -> tuple[Any, Any]:
    """The array of an operand and the name of its type, or (None, None) where it is not of the other's type."""
    if type(given) is tensor:
        if given.dtype is dtype and given.handle.data.dtype is held:
            return given.handle.data, given.type.name
        return None, None
    if type(given) is language.core.constexpr:
        given = given.value
    return constant(given, dtype), type(given)


def facts(found: Any) -> dict[str, Any]:
    """All but the numbers of a tensor."""
    return {name: value for name, value in found.__dict__.items() if name != "handle"}


def like(result: dict[str, Any], data: Any, dtype: Any) -> Any:
    """A tensor of a type that is known, without the questions of its making."""
    handle, found = Handle.__new__(Handle), tensor.__new__(tensor)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    found.__dict__.update(result)
    found.handle = handle
    return found


def quick(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of a tensor; `__radd__` and its like have the tensor on the right."""
    bare = name.strip("_")
    turned = bare not in OPERATORS
    compute, types = OPERATORS[bare[1:] if turned else bare]
    known = made.setdefault(name, {})

    def operator(self: Any, other: Any) -> Any:
        dtype, left = self.dtype, self.handle.data
        held = types.get(dtype.name)
        if held is None or left.dtype is not held:
            return slow(self, other)
        right, kind = number_of(other, dtype, held)
        if right is None:
            return slow(self, other)
        key = self.type.name, kind
        if key not in known:
            found = slow(self, other)
            known[key] = facts(found)
            return found
        return like(known[key], compute(right, left) if turned else compute(left, right), self.handle.dtype)

    operator.slow = slow  # type: ignore[attr-defined]
    return operator


def moved(slow: Callable[..., Any]) -> Callable[..., Any]:
    """A pointer some elements further on; of anything else, the sum."""
    add, known = quick("__add__", slow), made.setdefault("pointers", {})

    def operator(self: Any, other: Any) -> Any:
        if not isinstance(self.dtype, language.pointer_type):
            return add(self, other)
        if type(other) is not tensor or other.dtype.name not in ("int32", "int64"):
            return slow(self, other)
        key = self.type.name, other.type.name
        if key not in known:
            found = slow(self, other)
            known[key] = facts(found)
            return found
        at = self.handle
        size = max(1, at.get_element_ty().primitive_bitwidth // 8)
        return like(known[key], at.data + size * other.handle.data.astype(np.uint64), at.dtype)

    operator.slow = slow  # type: ignore[attr-defined]
    return operator


def where(slow: Callable[..., Any]) -> Callable[..., Any]:
    """The choice between two tensors, or a tensor and a number."""
    known = made.setdefault("where", {})

    def operator(self: Any, condition: Any, x: Any, y: Any) -> Any:
        given = x if type(x) is tensor else y
        held = NUMBERS.get(given.dtype.name) if type(given) is tensor else None
        if held is None or condition.handle.data.dtype != bool or condition.dtype is not language.int1:
            return slow(self, condition, x, y)
        (left, one), (right, two) = (number_of(each, given.dtype, held) for each in (x, y))
        if left is None or right is None:
            return slow(self, condition, x, y)
        key = condition.type.name, given.type.name, one, two
        if key not in known:
            found = slow(self, condition, x, y)
            known[key] = facts(found)
            return found
        return like(known[key], np.where(condition.handle.data, left, right), given.dtype)

    return operator


def install() -> None:
    """Once, after which every kernel that the interpreter runs has them."""
    patch = interpreter._patch_lang_tensor
    names = [
        *OPERATORS,
        *(f"r{name}" for name in OPERATORS if name not in ("lt", "le", "gt", "ge", "eq", "ne")),
    ]

    def patch_tensor(kind: Any, scope: Any) -> None:
        patch(kind, scope)
        for name in (f"__{each}__" for each in names):
            found = getattr(kind, name, None)
            if found is not None and not hasattr(found, "slow"):
                scope.set_attr(kind, name, moved(found) if name == "__add__" else quick(name, found))

    interpreter._patch_lang_tensor = patch_tensor
    semantic = interpreter.TritonSemantic
    semantic.where = where(semantic.where)
