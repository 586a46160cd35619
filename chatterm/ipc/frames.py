"""Frames: a 4-byte big-endian length, then that many bytes. The length is checked before the body is read."""

from engine.errors import EngineError

MOST = 80 * 2**20
"""The longest body of a frame, in bytes: more than the longest prompt that a command reads."""
_HEADER = 4


class FrameError(EngineError):
    """An invalid frame or body. After a frame that was received, the rest of the stream cannot be parsed."""


def encode_frame(body: bytes) -> bytes:
    """Encode `body` as a frame. Raises FrameError if it is too long."""
    if len(body) > MOST:
        raise FrameError(
            f"A message of {len(body):,} bytes is larger than the server accepts; send less at once."
        )
    return len(body).to_bytes(_HEADER, "big") + body


class FrameReader:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._held = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Return the bodies of the frames that are complete. Raises FrameError for an empty or oversized frame."""
        self._held += data
        bodies, at = [], 0
        while len(self._held) - at >= _HEADER:
            size = int.from_bytes(self._held[at : at + _HEADER], "big")
            if not 0 < size <= self._most:
                raise FrameError(
                    f"The other side sent a frame of {size:,} bytes, which cannot be one of chatterm's."
                )
            if len(self._held) - at - _HEADER < size:
                break
            at += _HEADER + size
            bodies.append(bytes(self._held[at - size : at]))
        del self._held[:at]
        return bodies
