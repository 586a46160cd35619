"""Parsing of untrusted pages: whatever they contain, parsing ends soon and without an error."""

from html.parser import HTMLParser

_PIECE = 65_536
_LONGEST = 4 * _PIECE
"""The longest unterminated markup that is kept, in characters."""


class HtmlParser(HTMLParser):
    """An HTML parser that never raises."""

    def read(self, text: str) -> None:
        """Parse a whole page."""
        for at in range(0, len(text), _PIECE):
            self.feed(text[at : at + _PIECE])
            self._leave_out(_LONGEST)
        self._leave_out(0)
        self.close()

    def _leave_out(self, longest: int) -> None:
        """Drop unterminated markup, which the library would scan again from each of its characters."""
        if self.cdata_elem is None and self.rawdata.startswith("<") and len(self.rawdata) > longest:
            self.rawdata = ""

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """Skip `<![...` sections of a kind that the library does not know."""
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)


def decoded(data: bytes, charset: str) -> str:
    """Decode a page in the charset its server names, or as UTF-8 if there is no such charset."""
    try:
        text = data.decode(charset, "replace")
    except (LookupError, UnicodeError):
        text = data.decode("utf-8", "replace")
    return text
