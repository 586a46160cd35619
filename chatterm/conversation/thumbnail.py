"""Pictures for a terminal: each character shows two pixels, one above the other. Pillow decodes them."""

import io
import warnings
from dataclasses import dataclass

from chatterm.backends.pictures import Picture, read_picture
from chatterm.markdown.lines import Line

COLUMNS, ROWS = 48, 12
"""Largest size of a picture, in characters."""
_MOST_PIXELS = 50_000_000
"""Most pixels of a picture that is decoded; each takes up to four bytes meanwhile."""
_GROUND = (128, 128, 128)
"""The background of transparent pictures: black and white are both visible on it."""
_HALF = "▀"


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small picture; `pixels` are its rows from the top, three bytes of RGB each."""

    width: int
    height: int
    pixels: bytes

    def lines(self, room: int) -> list[Line]:
        """Return lines of at most `room` columns. A run is half blocks of one style with two colours: see `Painter`."""
        width = max(min(self.width, room), 1)
        height = max(self.height * width // self.width, 1)
        lines: list[Line] = []
        for row in range(0, height, 2):
            line: Line = []
            for column in range(width):
                lower = self._at(column, row + 1, width, height) if row + 1 < height else ""
                style = f"picture rgb{self._at(column, row, width, height)}{lower}"
                if line and line[-1][1] == style:
                    line[-1] = (line[-1][0] + _HALF, style)
                else:
                    line.append((_HALF, style))
            lines.append(line)
        return lines

    def _at(self, column: int, row: int, width: int, height: int) -> str:
        """Return a colour of the picture scaled to this width and height, as six hexadecimal digits."""
        place = 3 * (row * self.height // height * self.width + column * self.width // width)
        return self.pixels[place : place + 3].hex()


def thumbnail(picture: Picture) -> Thumbnail | None:
    """Read and decode a picture. Return None if the file has changed or is gone, if Pillow is missing or rejects it, or
    if it is too large. Slow: not for the screen's thread.
    """
    if picture.width * picture.height > _MOST_PIXELS or (data := read_picture(picture)) is None:
        return None
    try:
        from PIL import Image, ImageOps
    except ImportError:
        return None
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    try:
        with Image.open(io.BytesIO(data), formats=[picture.kind.removeprefix("image/").upper()]) as image:
            if image.size != (picture.width, picture.height):
                return None
            is_turned = image.getexif().get(0x0112, 1) >= 5  # it is stored on its side
            box = (2 * ROWS, COLUMNS) if is_turned else (COLUMNS, 2 * ROWS)
            image.thumbnail(box)
            small = ImageOps.exif_transpose(image).convert("RGBA")
            ground = Image.new("RGBA", small.size, _GROUND)
            return Thumbnail(*small.size, Image.alpha_composite(ground, small).convert("RGB").tobytes())
    except Exception:  # noqa: BLE001 (a decoder raises anything for a broken file)
        return None
