"""Whether the terminal's background is dark: asked once, and reported again by terminals that change with the day.

The background's colour is xterm's `OSC 11`, the reports are contour's mode 2031:
https://invisible-island.net/xterm/ctlseqs/ctlseqs.html, https://contour-terminal.org/vt-extensions/color-palette-update-notifications/.
"""

import re
from collections.abc import Iterator, Mapping

from textual.message import Message

ASK = "\x1b]11;?\x1b\\\x1b[?2031h"
"""Asks for the background, and for a report of each change."""
STOP = "\x1b[?2031l"
_PART = r"/?([0-9a-fA-F]{1,4})"
_REPORT = re.compile(rf"\x1b\]11;rgba?:{_PART * 3}[0-9a-fA-F/]{{0,5}}(?:\x07|\x1b\\)|\x1b\[\?997;([12])n")
_BEGUN = re.compile(
    r"\x1b(?:\](?:1(?:1(?:;[rgba:0-9A-F/]{0,30}\x1b?)?)?)?|\[(?:\?(?:9(?:9(?:7(?:;[12]?)?)?)?)?)?)\Z",
    re.IGNORECASE,
)
_WEIGHTS = 0.2126, 0.7152, 0.0722
"""Of red, green and blue in the luminance of a colour (ITU-R BT.709)."""
_LIGHT = ("7", "15")


class BackgroundReported(Message):
    """The terminal has said whether its background is dark."""

    def __init__(self, is_dark: bool) -> None:
        super().__init__()
        self.is_dark = is_dark


class BackgroundReader:
    """Extracts the reports from the input of a terminal."""

    def __init__(self) -> None:
        self._begun = ""

    def feed(self, keys: str) -> Iterator[str | BackgroundReported]:
        """Yield the parts of `keys` in order; what may be the beginning of a report is kept."""
        keys, self._begun = self._begun + keys, ""
        if (begun := _BEGUN.search(keys)) is not None:
            keys, self._begun = keys[: begun.start()], begun[0]
        end = 0
        for report in _REPORT.finditer(keys):
            if report.start() > end:
                yield keys[end : report.start()]
            end = report.end()
            yield BackgroundReported(_is_dark(report))
        if end < len(keys):
            yield keys[end:]

    def flush(self) -> str:
        """Return what was no report."""
        keys, self._begun = self._begun, ""
        return keys


def guessed_dark(environment: Mapping[str, str]) -> bool:
    """Return whether the background is probably dark, before the terminal has answered: COLORFGBG is rxvt's."""
    return environment.get("COLORFGBG", "").rpartition(";")[2] not in _LIGHT


def _is_dark(report: re.Match[str]) -> bool:
    if report[4] is not None:
        return str(report[4]) == "1"
    parts = [int(part, 16) / (16 ** len(part) - 1) for part in report.group(1, 2, 3)]
    luminance: float = sum(weight * part for weight, part in zip(_WEIGHTS, parts, strict=True))
    return luminance < 0.5
