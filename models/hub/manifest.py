"""The manifest beside a model that chatterm wrote: the model's source, and the hashes of its files."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from models.errors import ModelError
from models.files import read_json, write_whole

MANIFEST = "chatterm.manifest.json"
"""The name of the manifest in a folder, and the end of its name beside a GGUF file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The recorded facts about a model."""

    source: str
    """The model it was made from, as a user would name it."""
    revision: str | None
    """The commit of the source on the Hub; None for other sources."""
    format: str
    """How the weights are held, for display: "int4, calibrated"."""
    kl: float | None
    """Mean KL divergence from the source in nats, on the calibration text; None if not measured."""
    files: Mapping[str, str]
    """SHA-256 of every file, by name."""


def manifest_path(model: Path) -> Path:
    """Return the path of the manifest of a folder or of a GGUF file."""
    return model / MANIFEST if model.is_dir() else model.with_name(f"{model.name}.{MANIFEST}")


def read_manifest(model: Path) -> Manifest | None:
    """Read the manifest of a model; None if there is none. Raises ModelError if it is damaged."""
    path = manifest_path(model)
    if not path.is_file():
        return None
    raw = read_json(path)
    files, kl = raw.get("files"), raw.get("kl")
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(v, str) and re.fullmatch(r"[0-9a-f]{64}", v) for v in files.values())
        or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files)
    ):
        raise ModelError(f"{path} is damaged: it has no SHA-256 of every file.")
    revision = raw.get("revision")
    return Manifest(
        str(raw.get("source", "unknown")),
        None if revision is None else str(revision),
        str(raw.get("format", "unknown")),
        kl if isinstance(kl, float) else None,
        files,
    )


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest whole or not at all. Raises OSError."""
    write_whole(path, json.dumps(asdict(manifest), indent=2) + "\n")
