"""compressed-tensors: integers packed in words of a row each (pack-quantized), or bytes (see fp8.py)."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from models.errors import ModelError, faulty
from models.weights.formats.format import (
    BITS,
    Config,
    Format,
    Scheme,
    Shapes,
    block_size,
    groups_text,
    held_as,
    integer,
    refused,
)
from models.weights.formats.fp8 import FP8, NO_FP8, Int8

if TYPE_CHECKING:
    import torch

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
        words = found.shape(".weight_packed")[1]
        bits = found.bits(".weight_packed", words, columns)
        found.expect(".weight_packed", (rows, words))
        high, groups, width = found.grid(".weight_scale", rows, columns, self.block)
        found.expect(".weight_zero_point", (-(-rows * bits // 32), groups))
        found.expect(".weight_g_idx", (columns,))

        def digits(device: "torch.device") -> "torch.Tensor":
            return found.unpack(found.read(".weight_packed", "I32", device), bits)[:, :columns]

        def zeros(device: "torch.device") -> "torch.Tensor":
            return found.unpack(found.read(".weight_zero_point", "I32", device).T, bits)[:, :rows].T

        return found.matrix(
            rows,
            columns,
            bits,
            digits,
            found.spread(found.reader(".weight_scale"), rows, high, groups),
            zeros if ".weight_zero_point" in found else None,
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


def _group(raw: object) -> tuple[Scheme, PackedIntegers] | None:
    """Return how some of the matrices are stored, and how if they are packed integers."""
    weights = raw.get("weights") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(weights, dict):
        return None
    bits, kind = integer(weights, "num_bits", 8), str(weights.get("type", "int"))
    strategy = str(weights.get("strategy", "tensor"))
    size = integer(weights, "group_size", -1) if kind == "int" and strategy == "group" else None
    if kind == "float" and bits == 8 and str(raw.get("format", "float-quantized")) in _FORMATS:
        name, held, why = f"compressed-tensors, fp8, {_strategy(weights)}", None, NO_FP8
    elif kind == "int" and bits in BITS:
        held, why = held_as(bits, weights.get("symmetric", True) is not False, size)
        name = f"compressed-tensors, int{bits}, {_strategy(weights)}"
        if weights.get("actorder") in ("group", True):
            held, why = None, "its groups are spread over the columns (act-order)"
            name += ", act-order"
    else:
        raise refused(f"The checkpoint has weights of {bits}-bit {kind[:20]} numbers")
    packed = PackedIntegers(group=size, bits=bits, block=block_size(weights.get("block_structure")))
    return Scheme(name, (packed,), held, why, _activations(raw.get("input_activations"))), packed


def _strategy(weights: Config) -> str:
    strategy = str(weights.get("strategy", "tensor"))
    if strategy == "group":
        return groups_text(integer(weights, "group_size", -1))
    if strategy == "block":
        rows, columns = block_size(weights.get("block_structure"))
        return f"blocks of {rows}x{columns}"
    if strategy not in ("tensor", "channel"):
        raise refused(f"The checkpoint has scales by {strategy[:40]}")
    return groups_text(None) if strategy == "channel" else "one scale per tensor"


def _activations(raw: object) -> str | None:
    if not isinstance(raw, dict):
        return None
    bits = integer(raw, "num_bits", 8)
    return f"{'fp' if raw.get('type') == 'float' else 'int'}{bits}"
