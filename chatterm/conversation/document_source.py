"""Read a file, a folder or a page as a document of the library, in the form of an attachment."""

from dataclasses import dataclass
from pathlib import Path

from chatterm.backends.backend import Document
from chatterm.conversation.attached_file import read_text
from chatterm.conversation.attachment_errors import AttachmentError
from chatterm.conversation.attachments import fence_text, located
from chatterm.sessions.library import DocumentLibrary, LibraryEntry
from chatterm.terminal.sanitize import one_line
from models.units import counted


@dataclass(frozen=True, slots=True)
class SourceText:
    """The text of a source."""

    text: str
    """Each file as its name and a fenced block."""
    place: str
    """An absolute path, or an address."""
    remark: str = ""
    """A remark for the user; "" for none."""


def read_source(written: str, folder: Path) -> SourceText:
    """Read a file, a folder or an address as the user wrote it in `folder`; private addresses are allowed.

    Waits for the disk or the network. Raises AttachmentError (one line).
    """
    if written.startswith(("http://", "https://")):
        from chatterm.conversation.web_page import page_text

        return SourceText(fence_text(written, page_text(written, may_be_private=True)), written)
    shown = one_line(written, 200)
    path = located(folder, written)
    try:
        here, is_folder, is_there = path.absolute(), path.is_dir(), path.exists()
    except (OSError, ValueError):
        is_there = False
    if not written or not is_there:
        raise AttachmentError(f"There is no file or folder {shown!r}; check the path.")
    if is_folder:
        from chatterm.conversation.folder import folder_files

        files = folder_files(path, f"{path.resolve().name}/")
        left = (
            f"{counted(len(files.left_out), 'file')} left out: not text, or too large."
            if files.left_out
            else ""
        )
        return SourceText("\n\n".join(fence_text(*file) for file in files.texts.items()), str(here), left)
    text = read_text(path, here.name)
    if not text.strip():
        raise AttachmentError(f"{shown} is empty; there is nothing to keep.")
    return SourceText(fence_text(here.name, text), str(here))


def keep_document(
    library: DocumentLibrary, written: str, name: str, folder: Path
) -> tuple[LibraryEntry, Document, str]:
    """Read a document and add it to the library; return its entry, the document, and a remark for the user.

    Raises AttachmentError and SessionError (one line); then nothing was kept.
    """
    found = read_source(written, folder)
    document = Document(name, found.text)
    return library.add(document, found.place), document, found.remark
