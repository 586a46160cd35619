"""AWQ, the gemm layout of AutoAWQ: transposed, with eight digits of a row per word, even ones first."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from models.weights.formats.format import Config, Format, Scheme, Shapes, groups_text, held_as, refused

if TYPE_CHECKING:
    from models.weights.checkpoint import StoredTensor
    from models.weights.formats.matrix import MatrixTensors, Read

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each column's digit among the eight digits of a word."""


@dataclass(frozen=True, slots=True)
class AWQ(Format):
    digits: str = ".qweight"
    type: str = "I32"
    needs: tuple[tuple[str, ...], ...] = ((".scales",), (".qzeros",))
    group: int | None = None

    def read(self, found: "MatrixTensors") -> "StoredTensor":
        """Return the matrix."""
        groups, rows = found.shape(".scales")
        columns = found.shape(".qweight")[0]
        found.expect(".qweight", (columns, -(-rows // 8)))
        found.expect(".qzeros", (groups, -(-rows // 8)))

        def columns_of(part: str) -> "Read":
            words = found.words(part, 4)
            return lambda device: words(device).view(-1, -(-rows // 8), 8)[..., _ORDER].flatten(1).T[:rows]

        scales = found.reader(".scales")
        return found.matrix(
            (rows, columns),
            4,
            columns_of(".qweight"),
            lambda device: scales(device).T,
            columns_of(".qzeros") if ".qzeros" in found else None,
            found.order(".scales", groups, columns, self.group),
        )

    def count(self, shapes: Shapes) -> tuple[str, int]:
        """Return type and count of the numbers."""
        return "INT4", prod(shapes[".qweight"]) * 8


def scheme(raw: Config) -> Scheme:
    """Read a config. Raises ModelError for what is not supported."""
    bits, group = raw.integer("bits", raw.integer("w_bit", 4)), raw.group()
    version = str(raw.get("version", raw.get("format", "gemm"))).lower()
    if version != "gemm":
        raise refused(f"The checkpoint is quantised by AWQ in the layout {version[:40]}")
    if bits != 4:
        raise refused(f"The checkpoint is quantised by AWQ to {bits} bits")
    symmetric = raw.get("zero_point") is False
    form = AWQ(needs=((".scales",),), may=(".qzeros",), group=group) if symmetric else AWQ(group=group)
    return Scheme(f"AWQ, 4 bits, {groups_text(group)}", (form,), *held_as(4, symmetric, group))
