"""GPTQ, the layout of AutoGPTQ and GPTQModel: transposed, with digits of a column in a word."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from models.weights.formats.format import BITS, Config, Format, Scheme, Shapes, groups_text, held_as, refused

if TYPE_CHECKING:
    from models.weights.checkpoint import StoredTensor
    from models.weights.formats.matrix import MatrixTensors


@dataclass(frozen=True, slots=True)
class GPTQ(Format):
    digits: str = ".qweight"
    type: str = "I32"
    needs: tuple[tuple[str, ...], ...] = ((".scales",), (".qzeros",))
    may: tuple[str, ...] = (".g_idx",)
    group: int | None = None
    zero_offset: int = 0
    """The amount that was subtracted from the stored zero points."""

    def read(self, found: "MatrixTensors") -> "StoredTensor":
        """Return the matrix."""
        groups, rows = found.shape(".scales")
        bits = found.bits(".qzeros", found.shape(".qzeros")[1], rows)
        columns = found.shape(".qweight")[0] * 32 // bits
        found.expect(".qweight", (columns * bits // 32, rows))
        found.expect(".qzeros", (groups, -(-rows * bits // 32)))
        found.expect(".g_idx", (columns,))
        # Added to whole words, because it was subtracted from whole words: a digit of 0 borrowed from the next one.
        offset = sum(self.zero_offset << shift for shift in range(0, 32, bits))

        words, zeros = found.words(".qweight", bits), found.words(".qzeros", bits, offset)
        order = found.order(".scales", groups, columns, self.group, ".g_idx")
        scales = found.reader(".scales")
        return found.matrix(
            (rows, columns),
            bits,
            lambda device: words(device).view(-1, rows, 32 // bits).transpose(0, 1).reshape(rows, -1),
            lambda device: scales(device).T,
            lambda device: zeros(device).T[:rows],
            order,
        )

    def count(self, shapes: Shapes) -> tuple[str, int]:
        """Return type and count of the numbers."""
        zeros, scales = shapes[".qzeros"], shapes[".scales"]
        bits = 8 if zeros[-1:] and zeros[-1] * 4 == prod(scales[-1:]) else 4
        return f"INT{bits}", prod(shapes[".qweight"]) * 32 // bits


def scheme(raw: Config) -> Scheme:
    """Read a config. Raises ModelError for what is not supported."""
    bits, group = raw.integer("bits", 4), raw.group()
    stored = str(raw.get("checkpoint_format") or raw.get("format") or "gptq").lower()
    if raw.get("is_marlin_format") or stored not in ("gptq", "gptq_v2"):
        raise refused(f"The checkpoint is quantised by GPTQ in the layout {stored[:40]}")
    if bits not in BITS:
        raise refused(f"The checkpoint is quantised by GPTQ to {bits} bits")
    # Static groups follow the order of the columns, whatever the order in which the columns were quantised.
    act_order = bool(raw.get("desc_act") and not raw.get("static_groups"))
    name = f"GPTQ, {bits} bits, {groups_text(group)}{', act-order' * act_order}"
    form = GPTQ(group=group, zero_offset=0 if stored == "gptq_v2" else 1)
    return Scheme(name, (form,), *held_as(bits, raw.get("sym", True) is not False, group, act_order))
