"""The tensors of a checkpoint of safetensors files, whole or in shards; nothing is read yet."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import ModelError
from models.weights.block_formats import Kind
from models.weights.safetensors_files import damaged, safetensors_files, weight_map
from models.weights.staging import Extent

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = FLOATS | {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""All types, with those in quantised checkpoints (see models.weights.quantized_checkpoint)."""

_PART = (1 << 15) - 1
"""How many numbers of a matrix are read at once; models.weights.formats.blocks explains the limit."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix in blocks of one type, those of a file or made where they are needed."""

    kind: Kind
    rows: Callable[[torch.device], Tensor]
    """Returns uint8 [rows, bytes per row] on a device, in order: on a CPU, perhaps memory of the file that must not be
    written."""
    is_mapped: bool = False
    """Whether `rows` returns memory of the file on a CPU."""
    order: Tensor | None = None
    """int64 [columns]: the matrix column at each place; None: columns are in order."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet."""

    name: str
    """The name in the file."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes in the file."""
    copy_into: Callable[[Tensor], None]
    """Writes it to a tensor of this shape (or one that it broadcasts to), of any float dtype and device."""
    extent: Extent | None = None
    """Where its bytes lie, for streaming to a device; None if only `copy_into` can read it."""
    parts: Callable[[], Iterator[tuple[int, Tensor]]] | None = None
    """Yields (first row, numbers [some rows, columns]) of a matrix, in order; None if it is never quantised."""
    blocks: Blocks | None = None
    """The blocks of a quantised matrix; None if it is stored as plain numbers."""
    on_device: Blocks | None = None
    """The blocks that a GPU uses instead of `blocks`; perhaps of a type that only a GPU reads."""
    cut: Callable[[int, int], "StoredTensor"] | None = None
    """(first row, rows) -> only these rows, with all dimensions but the last flattened; for a vector, these numbers."""
    type: str = "F32"
    """The stored type, as safetensors calls it."""
    quantized: str | None = None
    """How it is stored, for display, if that is neither plain numbers nor a GGUF file's blocks."""

    def numbers(self) -> Tensor:
        """Read all numbers, in fp32."""
        out = torch.empty(self.shape)
        self.copy_into(out)
        return out

    def part(
        self,
        shape: tuple[int, ...],
        copy_into: Callable[[Tensor], None],
        parts: Callable[[], Iterator[tuple[int, Tensor]]],
        blocks: Blocks | None = None,
        on_device: Blocks | None = None,
    ) -> "StoredTensor":
        """Return some of the numbers as a tensor of this shape, which cannot be cut further."""
        return replace(
            self,
            shape=shape,
            nbytes=self.nbytes * math.prod(shape) // math.prod(self.shape),
            copy_into=copy_into,
            extent=None,
            parts=parts if len(shape) == 2 else None,
            blocks=blocks,
            on_device=on_device,
            cut=None,
        )


def copy_parts(parts: Iterable[tuple[int, Tensor]], out: Tensor) -> None:
    """Write a matrix, or several, to `out`; `parts` has (first row, some rows)."""
    # Thousands of small copies to a GPU would take longer than all the rest: copy the whole tensor at once.
    near = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
    rows = near.view(-1, near.shape[-1])
    for start, some in parts:
        rows[start : start + len(some)] = some
    if near is not out:
        out.copy_(near)


def read_safetensors(folder: Path) -> list[StoredTensor]:
    """Return all tensors of the checkpoint in a folder, in file order. Raises ModelError for a damaged file.

    If several shards have a tensor of the same name, the one in the shard that the index names is used.
    """
    found = [(path.name, tensor) for path in safetensors_files(folder) for tensor in _read_file(path)]
    shards, there = weight_map(folder), {(shard, tensor.name) for shard, tensor in found}

    def counts(shard: str, name: str) -> bool:
        named = shards.get(name, shard)
        return shard == named or (named, name) not in there

    return [tensor for shard, tensor in found if counts(shard, tensor.name)]


def _read_file(path: Path) -> list[StoredTensor]:
    try:
        # safe_open checks the header: the tensors fill the rest of the file without gaps or overlaps.
        file = safe_open(path, framework="pt", device="cpu")
        with path.open("rb") as raw:
            offset = 8 + int.from_bytes(raw.read(8), "little")
        tensors = []
        for name in file.offset_keys():  # type: ignore[no-untyped-call]
            tensors.append(_stored(path, file, name, offset))
            offset += tensors[-1].nbytes
        return tensors
    except (SafetensorError, OSError, ValueError, RuntimeError, UnicodeError) as error:
        raise damaged(path, error) from None


def _stored(path: Path, file: Any, name: str, offset: int) -> StoredTensor:
    part = file.get_slice(name)
    kind, shape = part.get_dtype(), tuple(part.get_shape())
    if kind not in TYPES:
        raise ModelError(
            f"{name} in {path} is of type {kind}; supported: {', '.join(FLOATS)}. "
            "Use the original checkpoint or a GGUF file."
        )
    tensor = _plain(path, name, shape, kind, offset)

    def copy_into(out: Tensor) -> None:
        try:
            out.copy_(file.get_tensor(name))
        except SafetensorError as error:
            raise damaged(path, error) from None

    return replace(tensor, copy_into=copy_into) if kind in FLOATS else tensor


def _plain(path: Path, name: str, shape: tuple[int, ...], kind: str, offset: int) -> StoredTensor:
    """Return numbers of a type that begin at byte `offset` of a file."""
    dtype = TYPES[kind]

    # Read, not mapped: mapped pages would count as this process's memory although they are not needed again.
    def numbers(start: int, rows: int, columns: int) -> Tensor:
        data = bytearray(rows * columns * dtype.itemsize)
        try:
            with path.open("rb", buffering=0) as raw:
                raw.seek(offset + start * columns * dtype.itemsize)
                if raw.readinto(data) != len(data):
                    raise OSError("it ended too early")
        except OSError as error:
            raise damaged(path, error) from None
        return torch.frombuffer(data, dtype=dtype).view(rows, columns)

    def copy_into(out: Tensor) -> None:
        out.copy_(numbers(0, 1, count).view(shape))

    def parts() -> Iterator[tuple[int, Tensor]]:
        rows, columns = shape
        step = max(1, _PART // max(1, columns))
        for start in range(0, rows, step):
            yield start, numbers(start, min(step, rows - start), columns)

    def cut(start: int, rows: int) -> StoredTensor:
        width = shape[-1:] if len(shape) > 1 else ()
        return _plain(path, name, (rows, *width), kind, offset + start * math.prod(width) * dtype.itemsize)

    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    extent = Extent(path, offset, nbytes, count, dtype.itemsize, lambda staged: staged.view(dtype))
    return StoredTensor(name, shape, nbytes, copy_into, extent, parts, cut=cut, type=kind)
