"""Read one attached file: its text, or an error that says in one line why there is none."""

import stat
from pathlib import Path

from chatterm.backends.pictures import PictureError, inspect_picture
from chatterm.conversation.attachment_errors import AttachmentError
from chatterm.terminal.sanitize import cleaned, one_line
from models.units import bytes_text

LARGEST = 1_000_000
"""Largest size of an attached file, in bytes."""
LARGEST_PDF = 20_000_000
_IMAGES = frozenset(
    [".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".heic", ".avif", ".ico"]
)


def is_picture(path: Path) -> bool:
    """Return whether the file name has the suffix of a picture."""
    return path.suffix.lower() in _IMAGES


def picture_line(path: Path, name: str) -> str:
    """Return the line for a picture in a message (see `chatterm.backends.pictures`). Raises AttachmentError."""
    shown = one_line(name, limit=200)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise AttachmentError(f"{shown} is not a regular file; only files can be attached.")
        return str(inspect_picture(path, shown))
    except OSError as error:
        raise AttachmentError(f"{shown} cannot be read: {error.strerror or error}.") from error
    except PictureError as error:
        raise AttachmentError(f"{shown} {error}.") from None


def read_text(path: Path, name: str) -> str:
    """Return the text of a file, which errors call `name`. Raises AttachmentError."""
    shown = one_line(name, limit=200)
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise AttachmentError(f"{shown} is a folder; attach a file in it.")
        if not stat.S_ISREG(info.st_mode):
            raise AttachmentError(f"{shown} is not a regular file; only text files can be attached.")
        if is_picture(path):
            raise AttachmentError(
                f"{shown} is a picture, and the models on this machine read text only; describe it in words, "
                "or choose a remote model that sees."
            )
        is_pdf = path.suffix.lower() == ".pdf"
        most = LARGEST_PDF if is_pdf else LARGEST
        if info.st_size > most:
            raise AttachmentError(
                f"{shown} has {bytes_text(info.st_size)}; at most {bytes_text(most)} can be attached."
            )
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise AttachmentError(f"{shown} cannot be read: {error.strerror or error}.") from error
    if len(data) > most:
        raise AttachmentError(f"{shown} is longer than {bytes_text(most)}; it cannot be attached.")
    if is_pdf and data.startswith(b"%PDF"):
        from chatterm.conversation.pdf import pdf_text

        return pdf_text(data, shown)
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise AttachmentError(f"{shown} is not a text file; only text (UTF-8) can be attached.")
    return cleaned(text)
