"""The system clipboard, through any program of this machine that can reach it.

The terminal's own way (OSC 52, `App.copy_to_clipboard`) is used as well: it also works over ssh.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from models.system import own_group

_PATIENCE = 2.0
"""Seconds that such a program may take."""
TERMINAL_LIMIT = 74_000
"""Bytes that every terminal with OSC 52 accepts; some accept more."""


def programs(
    environment: Mapping[str, str] = os.environ,
    platform: str = sys.platform,
    which: Callable[[str], str | None] = shutil.which,
) -> list[list[str]]:
    """Return command lines that fill a clipboard from standard input, the likeliest to work first."""
    found: list[Sequence[str]] = []
    if platform == "darwin":
        found.append(("pbcopy",))
    if environment.get("WAYLAND_DISPLAY"):
        found.append(("wl-copy",))
    if environment.get("DISPLAY"):
        found += [("xclip", "-selection", "clipboard"), ("xsel", "--clipboard", "--input")]
    if environment.get("WSL_DISTRO_NAME"):
        found.append(("clip.exe",))
    if environment.get("TMUX"):
        found.append(("tmux", "load-buffer", "-w", "-"))
    return [list(command) for command in found if which(command[0])]


def copy(text: str, commands: Sequence[Sequence[str]] | None = None) -> str:
    """Put `text` on the clipboard unchanged; return the program that took it, "" if none did. May take seconds."""
    data = text.encode("utf-8", "replace")
    for command in programs() if commands is None else commands:
        try:
            # A process that stays behind to serve the clipboard must not hold our pipes or our terminal.
            done = subprocess.run(
                list(command),
                input=data,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_PATIENCE,
                **own_group(),
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        if done.returncode == 0:
            return command[0]
    return ""


def copied_text(text: str, program: str) -> str:
    """Return a message about a copy that claims only what is known to be true."""
    count = f"{len(text):,} character{'' if len(text) == 1 else 's'}"
    if program == "tmux":
        return f"Copied {count} into tmux and the terminal's clipboard."
    if program:
        return f"Copied {count} ({program})."
    if len(text.encode("utf-8", "replace")) > TERMINAL_LIMIT:
        return (
            f"Sent {count} to the terminal (OSC 52), more than some terminals accept; /export writes a file."
        )
    return f"Sent {count} to the terminal's clipboard (OSC 52)."
