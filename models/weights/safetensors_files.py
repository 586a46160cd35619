"""The safetensors files of a model and their headers, without torch: inspecting a model loads nothing."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from models.errors import ModelError
from models.files import read_json

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

_LONGEST = 200
"""Characters of the name of a file; file systems refuse longer ones."""


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the checkpoint in a folder. Raises ModelError if there is none."""
    index = folder / _INDEX
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


def weight_map(folder: Path) -> dict[str, str]:
    """Return the name of each tensor's shard, from the index of the checkpoint in `folder`; empty without an index.

    Raises ModelError for a damaged index.
    """
    index = folder / _INDEX
    if not index.is_file():
        return {}
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{index} has no weight_map; download it again.")
    return {name: str(shard) for name, shard in shards.items()}


def _shards(index: Path) -> list[str]:
    shards = sorted(set(weight_map(index.parent).values()))
    for shard in shards:
        if Path(shard).name != shard or len(shard) > _LONGEST:
            raise ModelError(
                f"{index} names the shard {shard[:80]!r}, which is not there; download it again."
            )
        if not (index.parent / shard).is_file():
            raise ModelError(f"The shard {shard} named by {index} is missing; download the model again.")
    return shards


def tensor_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of every tensor in a file, by name. Raises ModelError for a damaged or incomplete file."""
    try:
        file: Any = safe_open(path, framework="np")
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (SafetensorError, OSError, ValueError, UnicodeError) as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: Exception) -> ModelError:
    """Return the error for a file that cannot be read because of `error`."""
    reason = " ".join(str(error).split())[:160]
    return ModelError(f"{path} cannot be read ({reason}); it is damaged or incomplete: download it again.")
