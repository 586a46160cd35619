"""The person's own editor: $VISUAL or $EDITOR."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from chatterm.settings import SettingsError

_COMMON = ("nano", "vim", "vi") if sys.platform != "win32" else ("notepad",)


def editor_command() -> list[str]:
    """What to run, as words. Raises SettingsError where there is no editor."""
    for variable in ("VISUAL", "EDITOR"):
        if text := os.environ.get(variable, "").strip():
            try:
                words = shlex.split(text, posix=sys.platform != "win32")
            except ValueError as error:
                raise SettingsError(f"{variable} cannot be read ({error}); it is {text!r}.") from error
            if shutil.which(words[0]) is None:
                raise SettingsError(f"There is no program {words[0]}; {variable} names it as your editor.")
            return words
    for name in _COMMON:
        if shutil.which(name):
            return [name]
    raise SettingsError("There is no editor; set VISUAL or EDITOR to the one you use.")


def edit_file(path: Path) -> None:
    """Let the person edit a file; the terminal is the editor's meanwhile. Raises SettingsError."""
    command = editor_command()
    try:
        status = subprocess.run([*command, str(path)], check=False).returncode
    except OSError as error:
        raise SettingsError(f"{command[0]} cannot be run: {error.strerror or error}.") from error
    if status:
        raise SettingsError(f"{command[0]} ended with status {status}; nothing was taken from it.")
