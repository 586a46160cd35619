"""`@path` in a message attaches a text file, a PDF, the files of a folder (`@path/`), a page (`@https://...`) or a
resource of an MCP server (`@server:...`). The text of each follows the message in a fenced block.
"""

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chatterm.backends.backend import EngineError
from chatterm.conversation.attached_file import is_picture, picture_line, read_text
from chatterm.conversation.attachment_errors import AttachmentError, NeedsYesError, NoFileError
from chatterm.terminal.sanitize import one_line
from chatterm.tools.session import ToolSession

_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|([^\s"]+))')
_AFTER = ".,;:!?)]}'"
"""Punctuation that may follow a path and belong to the sentence."""
_BLOCK = re.compile(r"\n\n([^\n]{1,200}):\n(`{3,})\w*\n.*?\n\2(?=\n\n|\Z)", re.DOTALL)
"""A block that `fence_text` writes, behind a message."""
_SERVER = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,31}):")
_WORD = re.compile(r"\w{1,12}")
_FILE_NAME = re.compile(
    r".*[^.]\.("
    r"bash|bmp|c|cfg|conf|cpp|cs|css|csv|diff|doc|docx|epub|gif|go|gz|h|hpp|htm|html|ini|ipynb|java|jpeg|"
    r"jpg|js|json|jsonl|jsx|kt|log|lua|md|mjs|odt|patch|pdf|php|png|pptx|proto|py|r|rb|rs|rst|rtf|scala|"
    r"scss|sh|sql|svg|swift|tar|tex|toml|ts|tsv|tsx|txt|vue|webp|xls|xlsx|xml|yaml|yml|zip"
    r")",
    re.IGNORECASE | re.DOTALL,
)
"""Names with a usual file suffix: `@app.route` and `@example.com` have none."""


@dataclass(frozen=True, slots=True)
class Mention:
    """`@path` at `start:end` of a text."""

    start: int
    end: int
    path: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class MessageWithFiles:
    """A message and the files that it mentions, as they were read."""

    message: str
    """The message, in which files appear only by name."""
    blocks: tuple[str, ...] = ()
    """The files, each as its name and a fenced block."""
    places: tuple[tuple[int, int], ...] = ()
    """The ranges of the original text that mention them."""


def mentions(text: str) -> Iterator[Mention]:
    """Yield everything that looks like `@path` or `@"a path"` at the start of a word."""
    for match in _MENTION.finditer(text):
        yield Mention(match.start(), match.end(), match[1] or match[2], match[1] is not None)


def attach(
    shown: str,
    folder: Path,
    *,
    as_text: bool = False,
    said_yes: bool = True,
    fetches: bool = True,
    servers: ToolSession | None = None,
    sees: bool = False,
) -> MessageWithFiles:
    """Return `shown` with the files it mentions. Blocks on disk and network, so never call it in the screen's thread.

    Pages and resources are left out unless `fetches`; resources come from `servers`; pictures need a model that `sees`.
    A mention of no file stays text, but raises NoFileError if it looks like a file, unless `as_text`. Raises
    AttachmentError; also NeedsYesError for a folder or an address of this machine or its network, unless the user
    `said_yes`.
    """
    parts: list[str] = []
    blocks: dict[str, str] = {}
    places: list[tuple[int, int]] = []
    place = 0
    for mention in mentions(shown):
        name = _of_server(mention, servers) if servers is not None else None
        if not fetches and (name is not None or _address(mention)):
            continue
        if name is None:
            name = _meant(mention, folder)
        elif name not in blocks:
            blocks[name] = fence_text(name, _resource(name, servers))
        if name is None:
            if not as_text and (problem := _looks_wrong(mention, folder)):
                raise NoFileError(problem)
            continue
        parts += [shown[place : mention.start], name]
        place = mention.start + 1 + len(name) + 2 * mention.quoted
        places.append((mention.start, place))
        if name not in blocks:
            blocks[name] = _content(name, located(folder, name), said_yes, sees)
    if not blocks:
        return MessageWithFiles(shown)
    message = "".join([*parts, shown[place:]]).rstrip()
    return MessageWithFiles(message, tuple(blocks.values()), tuple(places))


def located(folder: Path, name: str) -> Path:
    """Return the location of a path written in `folder`; `~` is the home folder."""
    try:
        return folder / Path(name).expanduser()
    except RuntimeError:  # no such home
        return folder / name


def working_folder() -> Path:
    """Return the folder in which the application was started, or the root if that is gone."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def _meant(mention: Mention, folder: Path) -> str | None:
    """Return the file, folder or address mentioned, without the sentence's punctuation; None if there is none."""
    if address := _address(mention):
        return address
    if (name := next((n for n in _readings(mention) if n.endswith("/")), None)) is not None:
        return name if _kind(located(folder, name)) == "folder" else None
    return next((n for n in _readings(mention) if _kind(located(folder, n)) == "file"), None)


def _readings(mention: Mention) -> Iterator[str]:
    """Yield the path, then the path without punctuation that may belong to the sentence."""
    name = mention.path
    yield name
    while not mention.quoted and name[-1:] in _AFTER and len(name) > 1:
        name = name[:-1]
        yield name


def _looks_wrong(mention: Mention, folder: Path) -> str:
    """Return the error for a mention that looks like a path but is no file; "" for `@somebody`, `@decorator` etc."""
    for name in _readings(mention):
        if any(c.isalnum() for c in name) and _kind(located(folder, name)) == "folder":
            shown = one_line(name, limit=200)
            return f"{shown} is a folder; write @{shown}/ to attach the files in it."
    *_, name = _readings(mention)
    path = located(folder, name)
    is_path = mention.quoted or name.startswith(("./", "../", "/", "~/"))
    has_suffix = _FILE_NAME.fullmatch(path.name) is not None
    # A scoped package (`@types/node`) is no path, unless its scope is a folder here.
    is_inside = "/" in name and (has_suffix or _kind(path.parent) == "folder")
    return f"There is no file {one_line(name, limit=200)}." if is_path or has_suffix or is_inside else ""


def _kind(path: Path) -> str:
    """Return "file" or "folder"; "" if there is nothing that can be inspected."""
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except (OSError, ValueError):
        return ""


def is_address(path: str) -> bool:
    """Return whether a mention's path is the address of a page."""
    return path.startswith(("http://", "https://"))


def _address(mention: Mention) -> str:
    """Return the address of a page, without the sentence's punctuation; "" if it is none."""
    if not is_address(mention.path):
        return ""
    return mention.path if mention.quoted else mention.path.rstrip(_AFTER)


def mentioned_server(path: str) -> str:
    """Return the server that a mention may name (`server:...`); "" for none, as for web addresses."""
    match = _SERVER.match(path)
    return match[1] if match is not None and not is_address(path) else ""


def _of_server(mention: Mention, servers: ToolSession) -> str | None:
    """Return the server's resource that is mentioned, without the sentence's punctuation; None if it is none."""
    server = mentioned_server(mention.path)
    if not server or server not in servers.server_names():
        return None
    name = mention.path if mention.quoted else mention.path.rstrip(_AFTER)
    return name if len(name) > len(server) + 1 else None


def _resource(name: str, servers: ToolSession | None) -> str:
    """Return the text of a server's resource. Raises AttachmentError."""
    assert servers is not None
    server, _, written = name.partition(":")
    try:
        return servers.resource(server, written)
    except EngineError as error:
        raise AttachmentError(f"@{one_line(name, 120)} cannot be attached: {error}") from None


def _content(name: str, path: Path, said_yes: bool, sees: bool) -> str:
    """Return the fenced blocks to attach for a name. Raises AttachmentError."""
    if is_address(name):
        from chatterm.conversation.web_page import page_text

        return fence_text(name, page_text(name, may_be_private=said_yes))
    if sees and is_picture(path):
        return fence_text(name, picture_line(path, name))
    if not name.endswith("/"):
        return fence_text(name, read_text(path, name))
    from chatterm.conversation.folder import folder_files

    files = folder_files(path, name)
    if not said_yes:
        raise NeedsYesError(files.preview)
    return "\n\n".join(fence_text(file, text) for file, text in files.texts.items())


def attached_files(message: str) -> list[str]:
    """Return the names of the files whose content follows a message."""
    return [match[1] for match in _blocks(message)]


def without_files(message: str) -> str:
    """Return a message with the names of its files but without their content."""
    found = _blocks(message)
    if not found:
        return message
    left = "\n".join(f"({match[1]} was attached here; its content is left out.)" for match in found)
    return f"{message[: found[0].start()]}\n\n{left}"


def _blocks(message: str) -> list[re.Match[str]]:
    """Return the blocks at the end of a message, each directly after the one before."""
    found: list[re.Match[str]] = []
    for match in _BLOCK.finditer(message):
        if found and found[-1].end() != match.start():
            found = []
        found.append(match)
    return found if found and found[-1].end() == len(message) else []


def fence_text(name: str, text: str) -> str:
    """Return the name, if any, and the text in a fence that nothing in the text can close."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`{3,}", text)), 3)
    suffix = Path(name).suffix[1:]
    language = suffix if _WORD.fullmatch(suffix) else ""
    end = "" if text.endswith("\n") else "\n"
    head = f"{one_line(name, limit=200)}:\n" if name else ""
    return f"{head}{fence}{language}\n{text}{end}{fence}"
