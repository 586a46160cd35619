"""Escape sequences for the window around the terminal: its title and notifications. Pure functions."""

from collections.abc import Mapping
from typing import Literal

from chatterm.terminal.sanitize import one_line

Notify = Literal["off", "bell", "notify"]

SAVE_TITLE, RESTORE_TITLE = "\x1b[22;0t", "\x1b[23;0t"
"""Push and pop the title; a terminal without a stack of titles ignores them."""
BELL = "\a"
_LIMIT = 120
"""The most characters of a title or a notification."""
# Terminals that show a notification for OSC 9, and for OSC 777. Others may print a sequence that they do not know.
_OSC_9 = ("iterm.app", "wezterm", "ghostty", "xterm-kitty", "xterm-ghostty")
_OSC_777 = ("foot", "rxvt-unicode")
_SILENT = ("linux", "vt", "cons", "sun", "dumb", "xterm-mono")


def title_sequence(title: str) -> str:
    """Return the sequence that sets the window's title to `title`, which may come from anywhere."""
    return f"\x1b]0;{one_line(title, _LIMIT)}\a"


def has_title(environment: Mapping[str, str]) -> bool:
    """Return whether the terminal has a title: a console would print the sequence."""
    return not environment.get("TERM", "").lower().startswith(_SILENT)


def attention(how: Notify, text: str, environment: Mapping[str, str]) -> str:
    """Return the sequence that shows `text` as a notification, or the bell if none is known; "" for off."""
    if how == "off":
        return ""
    names = (environment.get("TERM_PROGRAM", "").lower(), environment.get("TERM", "").lower())
    if how == "bell" or "TMUX" in environment:  # tmux does not pass on sequences that it does not know
        return BELL
    body = one_line(text, _LIMIT)
    if any(name.startswith(_OSC_9) for name in names):
        return f"\x1b]9;{body}\a"
    if any(name.startswith(_OSC_777) for name in names):
        return f"\x1b]777;notify;chatterm;{body.replace(';', ',')}\a"
    return BELL
