"""The user's own editor: $VISUAL or $EDITOR."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError

if TYPE_CHECKING:
    from textual.app import App


class EditorError(EngineError):
    """The editor cannot be used; one line."""


_COMMON = ("nano", "vim", "vi") if sys.platform != "win32" else ("notepad",)


def editor_command() -> list[str]:
    """Return the command line of the editor, as words. Raises EditorError if there is no editor."""
    for variable in ("VISUAL", "EDITOR"):
        if text := os.environ.get(variable, "").strip():
            try:
                words = shlex.split(text, posix=sys.platform != "win32")
            except ValueError as error:
                raise EditorError(f"{variable} cannot be read ({error}); it is {text!r}.") from error
            if shutil.which(words[0]) is None:
                raise EditorError(f"{variable} names the editor {words[0]}, which was not found.")
            return words
    for name in _COMMON:
        if shutil.which(name):
            return [name]
    raise EditorError("No editor was found; set VISUAL or EDITOR to the one you use.")


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl+C meanwhile: it is meant for the editor, but the terminal sends it to this process, too."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # the editor would inherit SIG_IGN
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def edit_file(path: Path) -> None:
    """Let the user edit a file; the editor has the terminal meanwhile. Raises EditorError."""
    command = editor_command()
    try:
        with _interrupts_ignored():
            status = subprocess.run([*command, str(path)], check=False).returncode
    except OSError as error:
        raise EditorError(f"{command[0]} cannot be run: {error.strerror or error}.") from error
    if status:
        raise EditorError(f"{command[0]} ended with status {status}; nothing was taken over from it.")


def edit_text(app: "App[object]", text: str) -> str:
    """Return `text` as the user edited it; the screen of `app` is suspended meanwhile. Raises EditorError."""
    from textual.app import SuspendNotSupported

    editor_command()  # fails before the screen is suspended
    try:
        with tempfile.TemporaryDirectory(prefix="chatterm-") as folder:
            path = Path(folder) / "message.md"
            path.write_text(text, encoding="utf-8")
            failed: EditorError | None = None
            with app.suspend():
                try:
                    edit_file(path)
                except EditorError as error:  # raised in here it would keep Textual from resuming
                    failed = error
            if failed is not None:
                raise failed
            return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise EditorError(f"The message cannot be edited: {error.strerror or error}.") from error
    except SuspendNotSupported as error:
        raise EditorError("An editor cannot run in this terminal.") from error
