"""`chatterm pull`, `list`, `rm`, `show`: the models on this machine."""

import sys
from collections.abc import Iterable

from chatterm.cli.progress import progress_on
from chatterm.terminal.sanitize import one_line
from models.files import ModelFiles
from models.hub.sources import LocalModel, held_bytes, local_models, resolve
from models.hub.sources import remove as remove_files
from models.spec import ModelSpec
from models.units import bytes_text, counted


def pull(model: str) -> None:
    """Fetch `model`, or the rest of it; asks its source for a newer version. Raises ModelError."""
    with progress_on(sys.stderr, keep=True) as on_progress:
        files = resolve(model, on_progress=on_progress, refresh=True)
    print(f"{one_line(files.name)} is ready: chatterm run {one_line(files.name)}")


def list_models() -> None:
    """Print the models on this machine: a table on a terminal, tab-separated lines elsewhere."""
    found = local_models()
    if not found:
        print("There are no models on this machine yet; try: chatterm pull smollm2", file=sys.stderr)
    elif sys.stdout.isatty():
        _print_table(found)
    else:
        for entry in found:
            print(one_line(entry.name), entry.bytes, entry.source, place(entry.files), sep="\t")


def _print_table(found: Iterable[LocalModel]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Model", overflow="fold")
    table.add_column("Size", justify="right", no_wrap=True)
    table.add_column("From", no_wrap=True)
    table.add_column("Path", style="dim", overflow="fold")
    for entry in found:
        table.add_row(
            Text(one_line(entry.name)), bytes_text(entry.bytes), entry.source, Text(place(entry.files))
        )
    Console().print(table)


def confirm_removal(model: str) -> bool:
    """Ask on the terminal whether `model` shall go. Raises ModelError when it is not there."""
    extent = bytes_text(held_bytes(model))
    question = f"Delete {one_line(model)} ({extent}) from this machine? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def remove(model: str) -> None:
    """Delete `model` from the caches. Raises ModelError when it is not there."""
    freed = remove_files(model)
    print(f"Deleted {one_line(model)}; {bytes_text(freed)} freed.")


def show(model: str) -> None:
    """Print what `model` is. It must be on this machine. Raises ModelError."""
    from models.hub.inspect import describe

    files = resolve(model, offline=True)
    facts = describe(files)
    context = counted(facts.context_length, "token") if facts.context_length else "unknown"
    rows = [
        ("Model", facts.name),
        ("Architecture", facts.architecture),
        ("Runs here", "yes" if facts.supported else f"no: {facts.reason}"),
        *(computed_by(facts.spec) if facts.spec is not None else ()),
        ("Parameters", f"{facts.parameters / 1e6:,.1f} million"),
        ("Context", context),
        ("Weights", facts.dtype),
        ("Chat template", "yes" if facts.has_chat_template else "no"),
        ("Path", place(files)),
        ("Files", f"{len(facts.files)}, {bytes_text(sum(size for _, size in facts.files))}"),
    ]
    rows += [("", f"{name}, {bytes_text(size)}") for name, size in facts.files]
    for label, value in rows:
        print(f"{label:<13}  {one_line(value)}")


def computed_by(spec: ModelSpec) -> list[tuple[str, str]]:
    """Rows that say what computes such a network on a CPU, this one, and on a GPU."""
    from engine.execute.compatibility import by_torch, not_fused, not_native
    from engine.kernels.native.library import problem

    no_native, no_fused = not_native(spec) or problem(), not_fused(spec)
    return [
        ("On the CPU", by_torch(no_native) if no_native else "native kernels"),
        ("On a GPU", by_torch(no_fused) if no_fused else "fused kernels"),
    ]


def place(files: ModelFiles) -> str:
    """Where the files are, on one line."""
    return one_line(str(files.gguf or files.folder), 1000)
