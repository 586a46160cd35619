"""compressed-tensors: integers packed in words of a row each (pack-quantized), or bytes (see fp8.py)."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from models.errors import ModelError, faulty
from models.weights.formats.format import BITS, Config, Format, Scheme, Shapes, groups_text, held_as, refused
from models.weights.formats.fp8 import FP8, NO_FP8, Int8

if TYPE_CHECKING:
    from models.weights.checkpoint import StoredTensor
    from models.weights.formats.matrix import MatrixTensors

_FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "mixed-precision",
)


@dataclass(frozen=True, slots=True)
class PackedIntegers(Format):
    """A word has digits of one row, or zeros of one group down the rows."""

    digits: str = ".weight_packed"
    type: str = "I32"
    needs: tuple[tuple[str, ...], ...] = ((".weight_scale",), (".weight_shape",))
    may: tuple[str, ...] = (".weight_zero_point", ".weight_g_idx")
    group: int | None = None
    """Columns with a common scale, if all integers have the same, for counting."""
    bits: int = 4
    """The bits of most integers, for counting."""
    block: tuple[int, int] = (128, 128)

    def read(self, found: "MatrixTensors") -> "StoredTensor":
        """Return the matrix."""
        found.expect(".weight_shape", (2,))
        rows, columns = (int(size) for size in found.read(".weight_shape", "I64"))
        if rows < 1 or columns < 1:
            raise faulty(f"{found.stem}.weight_shape is [{rows}, {columns}]")
        across = found.shape(".weight_packed")[1]
        bits = found.bits(".weight_packed", across, columns)
        found.expect(".weight_packed", (rows, across))
        high, groups, width = found.grid(".weight_scale", rows, columns, self.block)
        found.expect(".weight_zero_point", (-(-rows * bits // 32), groups))
        found.expect(".weight_g_idx", (columns,))

        words = found.words(".weight_packed", bits)
        zeros = found.words(".weight_zero_point", bits, down=True)
        return found.matrix(
            (rows, columns),
            bits,
            lambda device: words(device)[:, :columns],
            found.spread(found.reader(".weight_scale"), rows, high, groups),
            (lambda device: zeros(device)[:rows]) if ".weight_zero_point" in found else None,
            found.order(".weight_scale", groups, columns, width, ".weight_g_idx"),
        )

    def count(self, shapes: Shapes) -> tuple[str, int]:
        """Return type and count of the numbers."""
        words, scales, bits = shapes[".weight_packed"], shapes[".weight_scale"], self.bits
        if (width := self.group or 0) > 0 and len(scales) == len(
            words
        ) == 2:  # some may be of 4 bits and others of 8
            bits = 8 if words[1] * 4 >= scales[1] * width else 4
        return f"INT{bits}", prod(words) * 32 // bits


def scheme(raw: Config) -> Scheme:
    """Read a config. Raises ModelError for what is not supported."""
    stored = str(raw.get("format", "dense"))
    sparse = raw.get("sparsity_config")
    sparse = str(sparse.get("format", "dense")) if isinstance(sparse, dict) else "dense"
    if stored not in _FORMATS or sparse != "dense":
        named = stored if sparse == "dense" else sparse
        raise refused(f"The checkpoint is compressed as {named[:40]}")
    if raw.get("transform_config"):
        raise refused("The checkpoint rotates its weights (transform_config)")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict):
        raise ModelError("quantization_config has no config_groups; download config.json again.")
    found = [group for raw in groups.values() if (group := _group(raw)) is not None]
    if not found:
        raise ModelError("quantization_config does not say how weights are quantised; correct config.json.")
    parts, integers = zip(*found, strict=True)
    held = {part.held for part in parts}
    block = next((each.block for each in integers if each.block != (128, 128)), (128, 128))
    size = integers[0].group if len({each.group for each in integers}) == 1 else None
    packed = PackedIntegers(group=size, bits=min(each.bits for each in integers), block=block)
    return Scheme(
        "; ".join(dict.fromkeys(part.name for part in parts)),
        (packed, Int8(block=block), FP8(block=block)),
        None if None in held else " and ".join(sorted(map(str, held))),
        next((part.why for part in parts if part.why), ""),
        next((part.activations for part in parts if part.activations is not None), None),
    )


def _group(group: object) -> tuple[Scheme, PackedIntegers] | None:
    """Return how some of the matrices are stored, and how if they are packed integers."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        return None
    raw = Config(weights)
    bits, kind, block = raw.integer("num_bits", 8), str(raw.get("type", "int")), raw.block("block_structure")
    strategy = str(raw.get("strategy", "tensor"))
    size = raw.integer("group_size", -1) if strategy == "group" else None
    if strategy == "tensor":
        scales = "one scale per tensor"
    elif strategy == "block":
        scales = f"blocks of {block[0]}x{block[1]}"
    elif strategy in ("group", "channel"):
        scales = groups_text(size)
    else:
        raise refused(f"The checkpoint has scales by {strategy[:40]}")
    if kind == "float" and bits == 8 and str(group.get("format", "float-quantized")) in _FORMATS:
        name, size, held, why = f"compressed-tensors, fp8, {scales}", None, None, NO_FP8
    elif kind == "int" and bits in BITS:
        act_order = raw.get("actorder") in ("group", True)
        held, why = held_as(bits, raw.get("symmetric", True) is not False, size, act_order)
        name = f"compressed-tensors, int{bits}, {scales}{', act-order' * act_order}"
    else:
        raise refused(f"The checkpoint has weights of {bits}-bit {kind[:20]} numbers")
    packed = PackedIntegers(group=size, bits=bits, block=block)
    rounds, activations = group.get("input_activations"), None
    if isinstance(rounds, dict):
        activations = (
            f"{'fp' if rounds.get('type') == 'float' else 'int'}{Config(rounds).integer('num_bits', 8)}"
        )
    return Scheme(name, (packed,), held, why, activations), packed
