"""The tensors of a checkpoint, not read yet: safetensors files, whole or in shards."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import ModelError
from models.files import read_json
from models.weights.block_formats import Kind
from models.weights.staging import Extent

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_PART = (1 << 15) - 1
"""Numbers that are read at once where a matrix is read in parts; see models.weights.dequantize for why no more."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix as it is stored: in blocks of one of GGUF's types."""

    kind: Kind
    rows: Callable[[], Tensor]
    """uint8 [rows, bytes a row], in order: memory of the file that must not be written, or else a copy."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet."""

    name: str
    """As the file calls it."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes in the file."""
    copy_into: Callable[[Tensor], None]
    """Writes it to a tensor of this shape (or one that it broadcasts to), of any float dtype and device."""
    extent: Extent | None = None
    """Where its bytes lie, to be streamed to a device instead; None where only `copy_into` can read it."""
    parts: Callable[[], Iterator[tuple[int, Tensor]]] | None = None
    """(first row, numbers [some rows, columns]) of a matrix, from first to last; None where it cannot be cut."""
    blocks: Blocks | None = None
    """The blocks of a quantised matrix; None where it is stored as plain numbers."""


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint in a folder. Raises ModelError when there is none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / shard for shard in _shards(index)]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} has its weights only as {pickles[0]}, a pickle, which can run any program when it "
            "is opened; use a version of the model with safetensors or a GGUF file."
        )
    raise ModelError(f"{folder} has no *.safetensors file; download the model again.")


def _shards(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; download it again.")
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        if Path(shard).name != shard:
            raise ModelError(
                f"{index} names the shard {shard[:80]!r}, which is not there; download it again."
            )
        if not (index.parent / shard).is_file():
            raise ModelError(f"The shard {shard} named by {index} is missing; download the model again.")
    return shards


def read_safetensors(folder: Path) -> list[StoredTensor]:
    """All tensors of the checkpoint in a folder, in file order. Raises ModelError for a damaged file."""
    return [tensor for path in safetensors_files(folder) for tensor in _read_file(path)]


def _read_file(path: Path) -> list[StoredTensor]:
    try:
        # safe_open checks the header: the tensors fill the rest of the file without a gap or an overlap.
        file = safe_open(path, framework="pt", device="cpu")
        with path.open("rb") as raw:
            offset = 8 + int.from_bytes(raw.read(8), "little")
        tensors = []
        for name in file.offset_keys():  # type: ignore[no-untyped-call]
            tensors.append(_stored(path, file, name, offset))
            offset += tensors[-1].nbytes
        return tensors
    except (SafetensorError, OSError, ValueError, RuntimeError, UnicodeError) as error:
        raise _damaged(path, error) from None


def _stored(path: Path, file: Any, name: str, offset: int) -> StoredTensor:
    part = file.get_slice(name)
    if part.get_dtype() not in _FLOATS:
        raise ModelError(
            f"{name} in {path} is of type {part.get_dtype()}; supported: {', '.join(_FLOATS)}. "
            "Use the original checkpoint or a GGUF file."
        )
    shape, dtype = tuple(part.get_shape()), _FLOATS[part.get_dtype()]
    count = math.prod(shape)

    def copy_into(out: Tensor) -> None:
        try:
            out.copy_(file.get_tensor(name))
        except SafetensorError as error:
            raise _damaged(path, error) from None

    def parts() -> Iterator[tuple[int, Tensor]]:
        # Read and not mapped: what was read would count as this process's memory, though nothing needs it again.
        rows, columns = shape
        step = max(1, _PART // max(1, columns))
        try:
            with path.open("rb", buffering=0) as raw:
                raw.seek(offset)
                for start in range(0, rows, step):
                    data = bytearray(min(step, rows - start) * columns * dtype.itemsize)
                    if raw.readinto(data) != len(data):
                        raise OSError("it ended too early")
                    yield start, torch.frombuffer(data, dtype=dtype).view(-1, columns)
        except OSError as error:
            raise _damaged(path, error) from None

    nbytes = count * dtype.itemsize
    extent = Extent(path, offset, nbytes, count, dtype.itemsize, lambda staged: staged.view(dtype))
    return StoredTensor(name, shape, nbytes, copy_into, extent, parts)


def _damaged(path: Path, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:160]
    return ModelError(f"{path} cannot be read ({reason}); it is damaged or incomplete: download it again.")
