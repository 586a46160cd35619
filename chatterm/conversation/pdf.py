"""Read the text of a PDF with pypdf, if that is installed."""

import io
import logging

from chatterm.conversation.attachment_errors import AttachmentError
from chatterm.terminal.sanitize import cleaned, one_line

_PAGES = 300
_CHARACTERS = 1_000_000


def pdf_text(data: bytes, shown: str) -> str:
    """Return the text of a PDF, which errors call `shown`. Raises AttachmentError (one line)."""
    try:
        import pypdf
    except ImportError:
        raise AttachmentError(
            f"{shown} is a PDF, which pypdf reads: install it with pip install 'chatterm[pdf]'."
        ) from None
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it would write over the screen
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise AttachmentError(f"{shown} is locked with a password; save it without one to attach it.")
        if len(reader.pages) > _PAGES:
            raise AttachmentError(
                f"{shown} has {len(reader.pages):,} pages; at most {_PAGES} can be attached."
            )
        parts, size = [], 0
        for page in reader.pages:
            parts.append(page.extract_text())
            size += len(parts[-1])
            if size > _CHARACTERS:
                raise AttachmentError(
                    f"{shown} has too much text; at most {_CHARACTERS:,} characters can be attached."
                )
    except AttachmentError:
        raise
    except Exception as error:
        why = one_line(str(error), 100) or type(error).__name__
        raise AttachmentError(f"{shown} cannot be read as a PDF: {why.rstrip('.')}.") from error
    text = cleaned("\n\n".join(parts)).strip()
    if not text:
        raise AttachmentError(
            f"{shown} has no text: its pages are pictures, and the models on this machine read text only."
        )
    return text
