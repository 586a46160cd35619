"""The local files of a model, and reading and writing JSON and other small files."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from stat import S_ISDIR, S_ISREG
from typing import Any

from models.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The local files of one model: a folder in Hugging Face layout, or a GGUF file."""

    name: str
    """The name for display: "smollm2", "Qwen/Qwen3-0.6B", or that of the folder or file."""
    folder: Path | None = None
    """The folder with config.json, *.safetensors, tokenizer.json, ...; None for a GGUF model."""
    gguf: Path | None = None
    """The GGUF file, which has config, tokenizer and weights (of several parts, the first); None for a folder."""
    note: str | None = None
    """A line for the user about which model this is."""


MOST_JSON = 256 << 20
"""The most bytes of a JSON file that are read; the largest tokenizers have a tenth of it."""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def gguf_parts(name: str) -> list[str]:
    """Return all files of the GGUF model that the file `name` belongs to, in order; only `name` if it is not a part."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises ModelError if there is none."""
    try:
        found = path.stat()
        if found.st_size > MOST_JSON or not (S_ISREG(found.st_mode) or S_ISDIR(found.st_mode)):
            raise ModelError(f"{path} is too large, or not a regular file; download it again.")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; name a folder in Hugging Face layout.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON; download it again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; download it again.")
    return value


def write_whole(
    path: Path, text: str, *, mode: int = 0o666, errors: str = "strict", parents: bool = True
) -> None:
    """Write a small file atomically: a full disk or a crash leaves the previous file as it was.

    A file that is replaced keeps its mode. A link stays, and the file to which it leads is replaced. A new file gets
    `mode`, less the umask. With `parents`, missing folders are made. `errors` is as for `open`. Raises OSError, and
    UnicodeEncodeError if `errors` asks for that.
    """
    target = Path(os.path.realpath(path))
    if parents:
        target.parent.mkdir(parents=True, exist_ok=True)
    found = target.stat().st_mode & 0o777 if target.exists() else None
    scratch = target.with_name(f".{token_hex(8)}.tmp")
    first = mode if found is None else found & 0o700  # nobody else may read it before it has its final mode

    def made(name: str, flags: int) -> int:
        return os.open(name, flags, first)

    try:
        with open(scratch, "x", encoding="utf-8", errors=errors, newline="\n", opener=made) as file:
            file.write(text)
        if found is not None:
            scratch.chmod(found)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
