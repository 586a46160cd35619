"""What a format of safetensors checkpoints is: the tensors that make up a matrix, and how to read them.

Only config.json is read here and torch is not imported, because inspecting a model loads nothing.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from models.errors import ModelError, faulty

if TYPE_CHECKING:
    from models.weights.checkpoint import StoredTensor
    from models.weights.formats.matrix import MatrixTensors

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""The shapes of the tensors of a matrix, by suffix."""
BITS = (4, 8)
"""The bits of integers that are packed in words."""


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store a matrix: NAME + `digits` and the tensors beside it become NAME + `becomes`."""

    digits: str
    """The name suffix of the tensor of digits."""
    type: str
    """The type of the digits, as safetensors calls it."""
    needs: tuple[tuple[str, ...], ...]
    """The tensors that must be beside it; each has one of these suffixes."""
    may: tuple[str, ...] = ()
    """The suffixes of optional tensors."""
    becomes: str = ".weight"

    def read(self, found: "MatrixTensors") -> "StoredTensor":
        """Return the matrix that these tensors make up. Reads only what describes it; wrong shapes raise ModelError."""
        raise NotImplementedError

    def count(self, shapes: Shapes) -> tuple[str, int]:
        """Return type, for display, and count of the numbers of tensors with these shapes."""
        return {"I8": "INT8", "F8_E4M3": "FP8"}[self.type], prod(shapes[self.digits])

    def tensors(self, stem: str, names: Container[str]) -> dict[str, str]:
        """Return the tensors that make up the matrix NAME, from suffix to name.

        Raises ModelError if a required one is missing.
        """
        found = {self.digits: stem + self.digits}
        for ways in self.needs:
            way = next((way for way in ways if stem + way in names), None)
            if way is None:
                raise faulty(f"{stem}{self.digits} has no {stem}{ways[-1]} beside it", "incomplete")
            found[way] = stem + way
        return found | {way: stem + way for way in self.may if stem + way in names}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of a checkpoint are stored."""

    name: str
    """For display: "GPTQ, 4 bits, groups of 128"."""
    formats: tuple[Format, ...]
    held: str | None
    """The blocks in which native CPU kernels take such matrices; None: they are expanded on a CPU."""
    why: str = ""
    """Why they are expanded, for display."""
    activations: str | None = None
    """The type to which the checkpoint expects activations to be rounded; None: it expects no rounding."""

    @property
    def note(self) -> str | None:
        """Return a line for the user about what is computed otherwise than the checkpoint asks for, or None."""
        if self.activations is None:
            return None
        return f"The checkpoint was made for activations in {self.activations}; here only its weights are quantised."

    def format_of(self, name: str, kind: str) -> Format | None:
        """Return the format in which a tensor of this name and type holds the digits, or None."""
        return next((x for x in self.formats if x.type == kind and name.endswith(x.digits)), None)


@dataclass(frozen=True, slots=True)
class Config:
    """quantization_config of a config.json, or a part of it. All methods raise ModelError for what makes no sense."""

    raw: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as it is."""
        return self.raw.get(key, default)

    def integer(self, key: str, default: int) -> int:
        """Return a number."""
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(
                f"quantization_config has {key} {str(value)[:40]!r}, which is not a number; correct config.json."
            )
        return value

    def group(self) -> int | None:
        """Return the number of columns with a common scale; None: the whole row."""
        size = self.integer("group_size", self.integer("q_group_size", 128))
        if size == 0 or size < -1:
            raise ModelError(f"quantization_config has a group_size of {size}; correct config.json.")
        return None if size == -1 else size

    def block(self, key: str) -> tuple[int, int]:
        """Return the rows and columns with a common scale."""
        raw = self.raw.get(key)
        if raw is None:
            return 128, 128
        try:
            rows, columns = (int(size) for size in (raw.split("x") if isinstance(raw, str) else raw))
            if rows > 0 and columns > 0:
                return rows, columns
        except (TypeError, ValueError, OverflowError):
            pass
        raise ModelError(f"quantization_config has blocks of {str(raw)[:40]}; correct config.json.")


def refused(what: str) -> ModelError:
    """Return the error for a checkpoint that is not supported."""
    return ModelError(
        f"{what}, which chatterm does not read; use the original checkpoint, a GGUF file, or one quantised "
        "with AWQ, GPTQ, compressed-tensors, fp8 or MXFP4."
    )


def groups_text(size: int | None) -> str:
    """Describe groups of this size for display."""
    return "one scale per row" if size is None else f"groups of {size}"


def held_as(bits: int, symmetric: bool, group: int | None, act_order: bool = False) -> tuple[str | None, str]:
    """Return the blocks in which a CPU holds integers, or None and the reason why there are none."""
    if act_order:
        return None, "its groups are spread over the columns (act-order)"
    if group is not None and group % 32:
        return None, f"groups of {group} numbers are not whole blocks of 32"
    if bits == 8 and not symmetric:
        return None, "there are no blocks of asymmetric 8-bit numbers"
    return ("Q8_0" if bits == 8 else "Q4_0" if symmetric else "Q4_1"), ""
