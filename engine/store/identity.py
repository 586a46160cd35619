"""Hashes of everything but the tokens that determines the bits of a KV block: the weights, and the code."""

import os
import sys
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from models.files import ModelFiles, gguf_parts

_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
_CODE = (
    *("engine/attention", "engine/batch.py", "engine/build.py", "engine/cache", "engine/execute"),
    *("engine/kernels", "models/loading/assemble.py", "models/families", "models/loading/load.py"),
    *("models/network.py", "models/reference", "models/spec.py", "models/weights"),
)
_SUFFIXES = {".py", ".cpp", ".h", ".so", ".dylib", ".dll"}


def of_weights(files: ModelFiles) -> str:
    """Return a SHA-256 of a model's files: their names, sizes, modification times and samples of their contents, first
    and last bytes included. Raises OSError."""
    digest = sha256()
    for path in _weight_files(files):
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            digest.update(f"{path.name} {info.st_size} {info.st_mtime_ns};".encode())
            last = max(info.st_size - _SAMPLE_BYTES, 0)
            for number in range(_SAMPLES):
                file.seek(last * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@cache
def of_code() -> str:
    """Return a SHA-256 of all code that computes, the versions of torch and Python, and the CPU's instruction set.
    Raises OSError."""
    top = Path(__file__).parents[2]
    digest = sha256(f"{torch.__version__} {sys.version} {torch.backends.cpu.get_cpu_capability()}".encode())
    for name in _CODE:
        for path in sorted([top / name, *(top / name).rglob("*")]):
            if path.suffix in _SUFFIXES:
                digest.update(str(path.relative_to(top)).encode() + path.read_bytes())
    return digest.hexdigest()


def _weight_files(files: ModelFiles) -> Iterable[Path]:
    if files.gguf is not None:
        return [files.gguf.with_name(name) for name in gguf_parts(files.gguf.name)]
    assert files.folder is not None
    return sorted([*files.folder.glob("*.safetensors"), files.folder / "config.json"])
