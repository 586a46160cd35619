"""`chatterm pull`, `list`, `rm`, `show`: the models on this machine."""

import sys
from typing import Any

from chatterm.cli.lists import print_list
from chatterm.cli.progress import progress_on
from chatterm.terminal.sanitize import one_line
from models.files import ModelFiles
from models.hub.sources import held_bytes, local_models, resolve
from models.hub.sources import remove as remove_files
from models.units import bytes_text


def pull(model: str) -> None:
    """Download `model`, the rest of it, or its newer version if there is one. Raises ModelError."""
    with progress_on(sys.stderr, keep=True) as on_progress:
        files = resolve(model, on_progress=on_progress, refresh=True)
    print(f"{one_line(files.name)} is ready: chatterm run {one_line(files.name)}")


def list_models() -> None:
    """Print the models on this machine: a table on a terminal, tab-separated lines elsewhere."""
    found = local_models()
    columns: dict[str, dict[str, Any]] = {
        "Model": {"overflow": "fold"},
        "Size": {"justify": "right", "no_wrap": True},
        "From": {"no_wrap": True},
        "Path": {"style": "dim", "overflow": "fold"},
    }
    rows = [
        (one_line(entry.name), bytes_text(entry.bytes), entry.source, place(entry.files)) for entry in found
    ]
    lines = [(one_line(entry.name), entry.bytes, entry.source, place(entry.files)) for entry in found]
    print_list(columns, rows, lines, "There are no models on this machine yet; try: chatterm pull smollm2")


def confirm_removal(model: str) -> bool:
    """Ask on the terminal whether to delete `model`. Raises ModelError if it is not on this machine."""
    extent = bytes_text(held_bytes(model))
    question = f"Delete {one_line(model)} ({extent}) from this machine? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def remove(model: str) -> None:
    """Delete `model` from the caches. Raises ModelError if it is not on this machine."""
    freed = remove_files(model)
    print(f"Deleted {one_line(model)}; {bytes_text(freed)} freed.")


def place(files: ModelFiles) -> str:
    """Return the path of the files, on one line."""
    return one_line(str(files.gguf or files.folder), 1000)
