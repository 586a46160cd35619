"""From what a person writes to files on this machine."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The local files of one model: a folder in Hugging Face layout, or one GGUF file."""

    name: str
    """What people call it: "smollm2", "Qwen/Qwen3-0.6B", the folder's or file's name."""
    folder: Path | None = None
    """Holds config.json, *.safetensors, tokenizer.json, ...; None for a GGUF model."""
    gguf: Path | None = None
    """The GGUF file (brings config, tokenizer and weights); None for a folder."""
