"""A byte per number, fp8 or integer, in the matrix's shape; scales are per tensor, row, group or block."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.weights.formats.format import Config, Format, Scheme, refused

if TYPE_CHECKING:
    from models.weights.checkpoint import StoredTensor
    from models.weights.formats.matrix import MatrixTensors

NO_FP8 = "native kernels have no fp8"
"""Why a CPU expands fp8."""


@dataclass(frozen=True, slots=True)
class FP8(Format):
    digits: str = ".weight"
    type: str = "F8_E4M3"
    needs: tuple[tuple[str, ...], ...] = ((".weight_scale_inv", ".weight_scale"),)
    block: tuple[int, int] = (128, 128)
    """Rows and columns with a common scale, for scales that belong to neither a row nor a group."""

    def read(self, found: "MatrixTensors") -> "StoredTensor":
        """Return the matrix."""
        rows, columns = found.shape(".weight")
        scale = next(part for part in self.needs[0] if part in found)
        high, groups, width = found.grid(scale, rows, columns, self.block)
        found.expect(".weight_zero_point", found.tensors[scale].shape)
        zeros = found.reader(".weight_zero_point", "I8") if ".weight_zero_point" in found else None
        return found.matrix(
            (rows, columns),
            8,
            found.reader(".weight", self.type),
            found.spread(found.reader(scale), rows, high, groups),
            None if zeros is None else found.spread(zeros, rows, high, groups),
            found.order(scale, groups, columns, width),
            is_integer=self.type == "I8",
        )


@dataclass(frozen=True, slots=True)
class Int8(FP8):
    type: str = "I8"
    needs: tuple[tuple[str, ...], ...] = ((".weight_scale",),)
    may: tuple[str, ...] = (".weight_zero_point",)


def scheme(raw: Config) -> Scheme:
    """Read a config. Raises ModelError for what is not supported."""
    fmt = str(raw.get("fmt", "e4m3")).lower()
    if fmt not in ("e4m3", "float8_e4m3fn") or raw.get("expert_dtype", "fp8") != "fp8":
        raise refused(f"The checkpoint is quantised to fp8 as {fmt[:40]}")
    block, is_given = raw.block("weight_block_size"), raw.get("weight_block_size") is not None
    scales = f"blocks of {block[0]}x{block[1]}" if is_given else "one scale per row or tensor"
    return Scheme(f"fp8, {scales}", (FP8(block=block),), None, NO_FP8, "fp8")
