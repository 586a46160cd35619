"""Parse the bytes of a stream into messages: server-sent events, or one JSON document a line. The messages do not
depend on how the bytes are cut.
"""

from collections.abc import Iterable

LONGEST = 8 * 1024 * 1024
"""Largest size of a line or a message, in bytes."""


class TooLongError(Exception):
    """A line or a message exceeds the limit."""


class LineReader:
    """Splits bytes into lines, which end with LF, CR LF or CR."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that end within `data`. Raises TooLongError."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        *lines, rest = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self._longest or any(len(line) > self._longest for line in lines):
            raise TooLongError
        return lines

    def end(self) -> list[bytes]:
        """Return the last line if it has no line end."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [rest] if rest else []


class EventReader:
    """Extracts the data of server-sent events. Comments, event names, ids and retry times are ignored."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._lines = LineReader(longest)
        self._longest = longest
        self._data: list[bytes] = []
        self._size = 0
        self._is_first = True

    def feed(self, data: bytes) -> list[str]:
        """Return the messages that end within `data`. Invalid UTF-8 is replaced. Raises TooLongError."""
        return self._take(self._lines.feed(data))

    def end(self) -> list[str]:
        """Return the last message if it has no end mark: a server that dies may leave one."""
        return self._take([*self._lines.end(), b""])

    def _take(self, lines: Iterable[bytes]) -> list[str]:
        found: list[str] = []
        for line in lines:
            if self._is_first:
                self._is_first, line = False, line.removeprefix(b"\xef\xbb\xbf")
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data).decode("utf-8", "replace"))
                    self._data, self._size = [], 0
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                value = value.removeprefix(b" ")
                self._data.append(value)
                self._size += len(value) + 1
                if self._size > self._longest:
                    raise TooLongError
        return found


class DocumentReader:
    """Splits bytes into the lines of newline-delimited JSON; empty lines are skipped."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._lines = LineReader(longest)

    def feed(self, data: bytes) -> list[str]:
        return [line.decode("utf-8", "replace") for line in self._lines.feed(data) if line.strip()]

    def end(self) -> list[str]:
        return [line.decode("utf-8", "replace") for line in self._lines.end() if line.strip()]
