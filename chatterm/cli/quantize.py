"""`chatterm quantize`: a model in 4 bits, as files of its own."""

import sys
from pathlib import Path
from shlex import quote

from chatterm.cli.progress import progress_on
from chatterm.terminal.sanitize import one_line
from models.hub import catalogue
from models.hub.sources import local_commit, resolve
from models.units import bytes_text


def quantize(model: str, out: Path) -> None:
    """Write `model` to `out`. Raises ModelError."""
    with progress_on(sys.stderr) as on_progress:
        files = resolve(model, on_progress=on_progress)
        from models.quantizing.quantize import quantize_model

        written = quantize_model(files, out, local_commit(model), on_progress)
    name = one_line(str(out))
    kept = f"{written.kept} of {written.matrices} matrices in 8 bits"
    print(f"{name}: {bytes_text(written.bytes)}, {kept}, the others in 4.")
    print(f"KL divergence from {one_line(files.name)}: {written.manifest.kl:.4f} nats a token.")
    named = quote(as_model(out))
    print(f"To run it: chatterm run {named}; to check its files: chatterm verify {named}")


def as_model(out: Path) -> str:
    """Return the text that names this file or folder as a MODEL argument."""
    text = str(out)
    is_taken = text.lower() in catalogue.names() or text.startswith("-")
    return f"./{text}" if is_taken else text
