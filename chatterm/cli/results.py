"""The file a batch writes: whole lines, in the order of the input. An interrupted batch can continue it."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader, RawIOBase
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from chatterm.backends.backend import EngineError
from chatterm.cli.requests import InputLine
from models.system import BINARY, try_lock

_START = b'{"line": '
"""How every result begins."""


class Results:
    """An output file. Errors are EngineError, one line."""

    def __init__(self, name: str, stream: RawIOBase, source: BinaryIO, *, resumes: bool = True) -> None:
        """`source` is the input, which must be another file. If the batch `resumes`, existing results are kept.

        `stream` has no buffer, whose unwritten rest would follow when it is closed.

        Raises EngineError.
        """
        self.name = name
        self._stream = stream
        state = os.fstat(stream.fileno())
        self.is_file = resumes and S_ISREG(state.st_mode)
        """Whether it can be continued."""
        self._end = 0
        """The size of the complete results, in bytes."""
        with suppress(OSError, ValueError):
            if S_ISREG(state.st_mode) and os.path.samestat(state, os.fstat(source.fileno())):
                raise EngineError(f"{name} is both input and output; name another file with -o.")
        self._lock()

    @classmethod
    def open(cls, path: str, source: BinaryIO) -> "Results":
        """Open the file at `path`; create it if needed."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
            return cls(path, os.fdopen(file, "r+b", buffering=0), source)
        except IsADirectoryError:
            raise EngineError(f"{path} is a folder; name a file with -o.") from None
        except (OSError, ValueError) as error:
            folder = Path(path).parent
            if isinstance(error, FileNotFoundError) and not folder.exists():
                raise EngineError(f"There is no folder {folder}; create it, or name another file.") from error
            raise EngineError(f"{path} cannot be written ({_why(error)}); name another file.") from error

    def _lock(self) -> None:
        if not self.is_file:
            return
        try:
            is_ours = try_lock(self._stream.fileno())
        except OSError:  # a file system without locks
            return
        if not is_ours:
            raise EngineError(
                f"Another chatterm batch is writing {self.name}; wait for it, or name another file."
            )

    def resume(self, lines: Iterator[InputLine]) -> tuple[int, int]:
        """Skip the `lines` that have results; return the number of results, and how many of them are errors.

        A last result that is incomplete is not counted. Raises EngineError if a result does not belong to its line.
        """
        count = errors = 0
        if not self.is_file:
            return 0, 0
        self._stream.seek(0)
        for data in _lines(self._stream):
            if not data.endswith(b"\n"):
                self._check_half(data, count)
                break
            result = self._result(data, count + 1)
            line = next(lines, None)
            if line is None:
                raise EngineError(
                    f"{self.name} has more results than the input has requests; name another file with -o."
                )
            if (result.get("line"), result.get("request")) != (line.number, line.digest):
                raise EngineError(
                    f"Result {count + 1:,} in {self.name} does not belong to line {line.number:,} of this "
                    "input with this "
                    "model and these options; run it as before to continue, or name another file with -o."
                )
            count, errors, self._end = count + 1, errors + ("error" in result), self._end + len(data)
        self._stream.seek(self._end)
        return count, errors

    def _result(self, data: bytes, number: int) -> dict[str, object]:
        result: object = None
        with suppress(ValueError, RecursionError):
            result = json.loads(data)
        if not isinstance(result, dict) or not data.startswith(_START):
            raise EngineError(
                f"Line {number:,} of {self.name} is not a result of chatterm batch; name another file with -o."
            )
        return result

    def _check_half(self, data: bytes, count: int) -> None:
        """Raise EngineError unless the incomplete last line is ours: it will be overwritten."""
        is_ours = data.startswith(_START) or _START.startswith(data) or (count and not data.strip(b"\0"))
        if not is_ours:
            raise EngineError(f"{self.name} is not a result of chatterm batch; name another file with -o.")

    def begin(self) -> None:
        """Prepare for writing: cut off an incomplete last result."""
        if self.is_file:
            try:
                self._stream.truncate(self._end)
            except OSError as error:
                raise EngineError(f"{self.name} cannot be written ({_why(error)}).") from error

    def write(self, data: bytes) -> None:
        """Write one more result; a file of our own gets it as a whole or not at all. May raise BrokenPipeError."""
        left = memoryview(data)
        try:
            while left:
                written = self._stream.write(left)
                if written is None:
                    raise BlockingIOError("it is busy")
                left = left[written:]
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.is_file:  # standard output may have had content before, and other writers
                with suppress(OSError):
                    self._stream.truncate(self._end)
            raise EngineError(f"{self.name} cannot be written ({_why(error)}).") from error
        self._end += len(data)

    def close(self) -> None:
        """Close the file; everything is already written. Closing twice is fine."""
        with suppress(OSError):
            self._stream.close()


def _lines(stream: RawIOBase) -> Iterator[bytes]:
    reader = BufferedReader(stream)
    try:
        yield from iter(reader.readline, b"")
    finally:
        reader.detach()  # else it would close the stream


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
