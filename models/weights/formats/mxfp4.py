"""MXFP4 in safetensors files: a tensor of digits and a tensor of scales become blocks, as in GGUF files."""

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from models.errors import faulty
from models.weights.block_formats import Kind
from models.weights.formats.format import Config, Format, Scheme, Shape, Shapes

if TYPE_CHECKING:
    import torch

    from models.weights.checkpoint import StoredTensor
    from models.weights.formats.matrix import MatrixTensors

_BLOCK = Kind.MXFP4.block


@dataclass(frozen=True, slots=True)
class MXFP4(Format):
    """Digits [..., groups, 16] and scales [..., groups]."""

    digits: str = "_blocks"
    type: str = "U8"
    needs: tuple[tuple[str, ...], ...] = (("_scales",),)
    becomes: str = ""

    def read(self, found: "MatrixTensors") -> "StoredTensor":
        """Return the matrix, or several one after the other."""
        digits, scales = found.tensors["_blocks"], found.tensors["_scales"]
        if digits.shape != (*scales.shape, _BLOCK // 2) or not scales.shape:
            raise faulty(
                f"{scales.name} has the shape {list(scales.shape)}, but {digits.name} requires "
                f"{list(digits.shape[:-1])}",
                "inconsistent",
            )
        if scales.type != digits.type:
            raise faulty(f"{scales.name} is of type {scales.type}, but must be of type {digits.type}")
        *rows, groups = scales.shape
        return _joined(found, (*rows, groups * _BLOCK))

    def count(self, shapes: Shapes) -> tuple[str, int]:
        """Return type and count of the numbers."""
        return "MXFP4", 2 * prod(shapes["_blocks"])


def scheme(raw: Config) -> Scheme:
    """Read a config, which says nothing more."""
    return Scheme("MXFP4", (MXFP4(),), "MXFP4")


def _joined(found: "MatrixTensors", shape: Shape) -> "StoredTensor":
    """Join digits and scales into a tensor of this shape."""
    groups = shape[-1] // _BLOCK

    def rows(device: "torch.device") -> "torch.Tensor":
        packed = found.read("_blocks", "U8", device).view(-1, _BLOCK // 2)
        blocks = packed.new_empty(len(packed), Kind.MXFP4.block_bytes)
        blocks[:, 0] = found.read("_scales", "U8", device).view(-1)
        # Bytes with numbers 2 j and 2 j + 1 become bytes with j and j + 16, low half first.
        first, second = packed.chunk(2, dim=-1)
        blocks[:, 1::2] = first & 15 | second << 4
        blocks[:, 2::2] = first >> 4 | second & 240
        return blocks.view(-1, groups * Kind.MXFP4.block_bytes)

    def cut(start: int, some: int) -> "StoredTensor":
        digits, scales = found.tensors["_blocks"].cut, found.tensors["_scales"].cut
        assert digits is not None
        assert scales is not None
        own = {"_blocks": digits(start * groups, some * groups), "_scales": scales(start, some)}
        return _joined(replace(found, tensors=own), (some, shape[-1]))

    return found.in_blocks(Kind.MXFP4, shape, rows, cut)
