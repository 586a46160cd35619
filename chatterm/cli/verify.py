"""`chatterm verify`: check the files of a model against their hashes."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from chatterm.cli.progress import progress_on
from chatterm.terminal.sanitize import one_line
from models.hub.verify import Checked, verify
from models.units import bytes_text, counted


def check(model: str, *, online: bool, as_json: bool) -> int:
    """Print the state of every file of `model`; return the exit code, 1 unless all are good. Raises ModelError."""
    with progress_on(sys.stderr) as on_progress:
        verdict = verify(model, online=online, on_progress=on_progress)
    if as_json:
        print(json.dumps({"model": model, "good": verdict.is_good, **asdict(verdict)}))
        return 0 if verdict.is_good else 1
    for file in verdict.files:
        print(f"{file.state:<8} {one_line(_line(file), 400)}")
    bad = [file for file in verdict.files if file.state in ("damaged", "missing")]
    name = one_line(model)
    if bad:
        are = "is" if len(bad) == 1 else "are"
        against = one_line(verdict.against)  # a manifest may contain any text
        print(f"{len(bad)} of {len(verdict.files)} files {are} not what {against} says.", file=sys.stderr)
        if not Path(model).exists():
            print(f"To download {name} again: chatterm rm {name}, then chatterm pull {name}", file=sys.stderr)
    elif not verdict.is_good and Path(model).exists():
        count = counted(sum(file.state == "unknown" for file in verdict.files), "file")
        print(
            f"The manifest of {name} does not name {count} that loading may read; delete what you did not add.",
            file=sys.stderr,
        )
    elif not verdict.is_good:
        print("Not every hash is known here; chatterm verify --online asks the Hub.", file=sys.stderr)
    else:
        count = counted(len(verdict.files), "file")
        print(f"{count} of {name} checked against {one_line(verdict.against)}: all good.")
    return 0 if verdict.is_good else 1


def _line(file: Checked) -> str:
    if file.state == "damaged":
        expected, found = (text or "" for text in (file.expected, file.found))
        return f"{file.name}, {bytes_text(file.bytes)}: its hash is {found[:16]}... instead of {expected[:16]}..."
    return file.name if file.state == "missing" else f"{file.name}, {bytes_text(file.bytes)}"
