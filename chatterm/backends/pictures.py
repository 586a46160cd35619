"""Pictures in messages: a message names a file and describes it; the bytes are read when a request is sent.

In the text, a picture is a block like that of any attached file, whose only line is a `Picture`. Nothing is copied: if
the file has changed or is gone, no picture is sent and the message says so.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from models.units import bytes_text

LARGEST = 20_000_000
"""Largest size of a picture, in bytes."""
MOST = 60_000_000
"""Largest size of all pictures of a request, in bytes; the latest pictures take precedence."""
_LONGEST_SIDE = 20_000
_BLOCK = re.compile(
    r"^([^\n]{1,200}):\n(`{3,})\w*\n"
    r"(image/(?:png|jpeg|gif|webp)), (\d{1,5}) x (\d{1,5}) pixels, [^\n,]{1,20}, "
    r"sha256 ([0-9a-f]{64}), (/[^\n]{1,4096})"
    r"\n\2$",
    re.MULTILINE,
)


class PictureError(Exception):
    """The reason why a file is not a picture that can be sent, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture file as it was when it was attached."""

    name: str
    kind: str
    """image/png, image/jpeg, image/gif or image/webp."""
    width: int
    height: int
    bytes: int
    digest: str
    path: str

    def __str__(self) -> str:
        """Return its line in a message."""
        size = bytes_text(self.bytes).replace(",", "")
        return f"{self.kind}, {self.width} x {self.height} pixels, {size}, sha256 {self.digest}, {self.path}"


def inspect_picture(path: Path, name: str) -> Picture:
    """Read the picture in a file. Raises OSError and PictureError."""
    place = path.resolve()
    with place.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise PictureError(f"is larger than {bytes_text(LARGEST)}")
    found = measure_picture(data)
    if found is None:
        raise PictureError("is not a PNG, JPEG, GIF or WebP picture, and servers accept no others")
    kind, width, height = found
    if not (0 < width <= _LONGEST_SIDE and 0 < height <= _LONGEST_SIDE):
        raise PictureError(
            f"claims to have {width} x {height} pixels; at most {_LONGEST_SIDE:,} a side are allowed"
        )
    if not str(place).isprintable() or len(str(place)) > 4096:
        raise PictureError("has a path that is too long or has control characters")
    return Picture(name, kind, width, height, len(data), sha256(data).hexdigest(), str(place))


def measure_picture(data: bytes) -> tuple[str, int, int] | None:
    """Return the media type, width and height of a picture from its first bytes; None if it is not a picture."""
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and len(data) >= 24:
        return "image/png", _big(data, 16, 4), _big(data, 20, 4)
    if data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        return "image/gif", _little(data, 6, 2), _little(data, 8, 2)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and len(data) >= 30:
        return _webp(data)
    return _jpeg(data) if data.startswith(b"\xff\xd8\xff") else None


def collect_pictures(texts: Sequence[str]) -> dict[str, bytes]:
    """Return the unchanged pictures that these messages name, by digest, up to the size limit of a request."""
    found: dict[str, bytes] = {}
    left = MOST
    for text in reversed(texts):
        for picture in reversed([_picture(match) for match in _BLOCK.finditer(text)]):
            data = found.get(picture.digest) or read_picture(picture)
            if data is not None and picture.digest not in found and len(data) <= left:
                found[picture.digest] = data
                left -= len(data)
    return found


def take_out_pictures(text: str) -> tuple[str, list[Picture]]:
    """Return a message without the blocks of its pictures, and the pictures."""
    found = list(_BLOCK.finditer(text)) if "sha256 " in text else []
    places = [0, *(place for match in found for place in match.span()), len(text)]
    between = [
        text[a:b].strip("\n") if found else text for a, b in zip(places[::2], places[1::2], strict=True)
    ]
    return "\n\n".join(part for part in between if part), [_picture(match) for match in found]


def replace_pictures(text: str, there: Mapping[str, object]) -> tuple[str, list[Picture]]:
    """Replace each picture block of a message by a sentence; return it with the pictures in `there`, in order."""
    pictures: list[Picture] = []

    def said(match: re.Match[str]) -> str:
        picture = _picture(match)
        if picture.digest not in there:
            return f"({picture.name} was a picture; it is not sent any more.)"
        if picture not in pictures:
            pictures.append(picture)
        return f"({picture.name} is the picture of {picture.width} x {picture.height} pixels here.)"

    return _BLOCK.sub(said, text), pictures


def _picture(match: re.Match[str]) -> Picture:
    name, _, kind, width, height, digest, path = match.groups()
    return Picture(name, kind, int(width), int(height), 0, digest, path)


def read_picture(picture: Picture) -> bytes | None:
    """Return the bytes of the file; None if it has changed or is gone."""
    try:
        with Path(picture.path).open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError):
        return None
    return data if len(data) <= LARGEST and sha256(data).hexdigest() == picture.digest else None


def _webp(data: bytes) -> tuple[str, int, int] | None:
    match data[12:16]:
        case b"VP8X":
            return "image/webp", _little(data, 24, 3) + 1, _little(data, 27, 3) + 1
        case b"VP8L":
            bits = _little(data, 21, 4)
            return "image/webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            return "image/webp", _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF
    return None


def _jpeg(data: bytes) -> tuple[str, int, int] | None:
    """Read the first frame: sections follow each other, each with its length."""
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        mark = data[place + 1]
        if mark == 0xFF:  # may precede any mark
            place += 1
        elif 0xC0 <= mark <= 0xCF and mark not in (0xC4, 0xC8, 0xCC):
            return "image/jpeg", _big(data, place + 7, 2), _big(data, place + 5, 2)
        elif mark in (0x01, *range(0xD0, 0xD8)):
            place += 2
        else:
            place += 2 + max(_big(data, place + 2, 2), 2)
    return None


def _big(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "big")


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
