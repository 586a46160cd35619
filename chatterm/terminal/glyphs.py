"""Lines, bars and marks in ASCII, for terminals and fonts that have nothing else. One table for the whole screen."""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.filter import LineFilter

_TABLE = {
    "─╌┄╴╶╼╾": "-",
    "━═": "=",
    "│┃║▏▎▍▌▐▕┆╎╵╷": "|",
    "┌┐└┘├┤┬┴┼╭╮╰╯╔╗╚╝╞╡╪┏┓┗┛┠┨": "+",
    "▁": "_",
    "▂": ".",
    "▃": "-",
    "▄": "=",
    "▅": "+",
    "▆": "*",
    "▇█■◼▓": "#",
    "▀▔": '"',
    "▣": "@",
    "░▒": ":",
    "□◻▢": "o",
    "•●▪◆⏺": "*",
    "◦○◇": "o",
    "·…": ".",
    "▸▶›»❯→⟶": ">",
    "◂◀‹«←": "<",
    "▾▼↓⌄": "v",
    "▴▲↑⌃": "^",
    "✗✘×": "x",
    "✎": "*",
    "✓✔": "+",
    "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏": "*",
    "–—−‐‑": "-",
    "“”„": '"',
    "‘’‚": "'",
    "↵⏎": "<",
    "\u00a0\u202f\u2009": " ",
}
"""Each character of a key is replaced by its value; both are one column wide."""
ASCII = {ord(glyph): plain for glyphs, plain in _TABLE.items() for glyph in glyphs}


@lru_cache(maxsize=4096)
def plain(text: str) -> str:
    """Return `text` with the characters of the table replaced; it is as wide as before."""
    return text.translate(ASCII)


def ascii_filter() -> "LineFilter":
    """Return a filter that makes a whole Textual application draw in ASCII."""
    from rich.segment import Segment
    from textual.color import Color
    from textual.filter import LineFilter

    class AsciiFilter(LineFilter):
        def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
            return [
                segment if segment.text.isascii() else Segment(plain(segment.text), *segment[1:])
                for segment in segments
            ]

    return AsciiFilter()
