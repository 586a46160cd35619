"""Pages that anyone may have written: whatever they contain, they are read to their end, and soon."""

from html.parser import HTMLParser

_PIECE = 65_536
_LONGEST = 4 * _PIECE
"""Characters of markup that has no end; longer ones are left out."""


class HtmlParser(HTMLParser):
    """A parser that no page brings to fail."""

    def read(self, text: str) -> None:
        """Take all of a page."""
        for at in range(0, len(text), _PIECE):
            self.feed(text[at : at + _PIECE])
            self._leave_out(_LONGEST)
        self._leave_out(0)
        self.close()

    def _leave_out(self, longest: int) -> None:
        """Forget markup without an end, which the library would look through again from each of its characters."""
        if self.cdata_elem is None and self.rawdata.startswith("<") and len(self.rawdata) > longest:
            self.rawdata = ""

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """`<![...` of a kind that the library does not know is left out."""
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)


def decoded(data: bytes, charset: str) -> str:
    """The text of a page in a charset that its server names, which may be none."""
    try:
        text = data.decode(charset, "replace")
    except (LookupError, UnicodeError):
        text = data.decode("utf-8", "replace")
    return text
