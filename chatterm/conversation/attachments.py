"""`@path` in a message attaches a text file, a PDF, the files of a folder (`@path/`), a page (`@https://...`) or a
resource of an MCP server (`@server:...`): the text of each follows the message in a fenced block."""

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
"""What may stand behind a path and belong to the sentence."""
_BLOCK = re.compile(r"\n\n([^\n]{1,200}):\n(`{3,})\w*\n.*?\n\2(?=\n\n|\Z)", re.DOTALL)
"""What `fence_text` writes, behind a message."""
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
"""How names of files end: `@app.route` and `@example.com` are none."""


@dataclass(frozen=True, slots=True)
class Mention:
    """`@path` at `start:end` of a text."""

    start: int
    end: int
    path: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class MessageWithFiles:
    """A message whose files were read."""

    message: str
    """The message; the files in it are just names."""
    blocks: tuple[str, ...] = ()
    """The files, each as its name and a fenced block."""
    places: tuple[tuple[int, int], ...] = ()
    """Where in the text as it was written they are mentioned."""


def mentions(text: str) -> Iterator[Mention]:
    """Everything that looks like `@path` or `@"a path"`, at the start of a word."""
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
    """`shown` and the files that it mentions. It looks at the disk, and `fetches` pages and resources of `servers`: not
    for the screen's thread.

    Pictures are for a model that `sees`. What is no file stays text, and where it looks like one only `as_text`. Raises
    AttachmentError; NeedsYesError for a folder, and for an address of this machine or its network, unless the person
    `said_yes`.
    """
    parts: list[str] = []
    blocks: dict[str, str] = {}
    places: list[tuple[int, int]] = []
    place = 0
    for mention in mentions(shown):
        if not fetches and _address(mention):
            continue
        name = _of_server(mention, servers) if servers is not None else None
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
    """Where a path lies that was written in `folder`; `~` is the home."""
    try:
        return folder / Path(name).expanduser()
    except RuntimeError:  # no such home
        return folder / name


def working_folder() -> Path:
    """Where the application was started; the root, where that is gone."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def _meant(mention: Mention, folder: Path) -> str | None:
    """A file, a folder or an address as it was written, without the sentence around it; None: there is none."""
    if address := _address(mention):
        return address
    if (name := next((n for n in _readings(mention) if n.endswith("/")), None)) is not None:
        return name if _kind(located(folder, name)) == "folder" else None
    return next((n for n in _readings(mention) if _kind(located(folder, n)) == "file"), None)


def _readings(mention: Mention) -> Iterator[str]:
    """The path, then without what may belong to the sentence."""
    name = mention.path
    yield name
    while not mention.quoted and name[-1:] in _AFTER and len(name) > 1:
        name = name[:-1]
        yield name


def _looks_wrong(mention: Mention, folder: Path) -> str:
    """What to say of a mention that is no file but looks like a path; "" for `@somebody`, `@decorator` and the like."""
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
    """file, folder, or "" where there is nothing that can be looked at."""
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except (OSError, ValueError):
        return ""


def _address(mention: Mention) -> str:
    """The address of a page, without the sentence around it; "" for none."""
    if not mention.path.startswith(("http://", "https://")):
        return ""
    return mention.path if mention.quoted else mention.path.rstrip(_AFTER)


def mentioned_server(path: str) -> str:
    """The server that a mention may name (`server:...`); "" for none, as for addresses."""
    match = _SERVER.match(path)
    return match[1] if match is not None and not path.startswith(("http://", "https://")) else ""


def _of_server(mention: Mention, servers: ToolSession) -> str | None:
    """A resource of a server as it was written, without the sentence around it; None: it is none."""
    server = mentioned_server(mention.path)
    if not server or server not in servers.server_names():
        return None
    name = mention.path if mention.quoted else mention.path.rstrip(_AFTER)
    return name if len(name) > len(server) + 1 else None


def _resource(name: str, servers: ToolSession | None) -> str:
    """Raises AttachmentError."""
    assert servers is not None
    server, _, written = name.partition(":")
    try:
        return servers.resource(server, written)
    except EngineError as error:
        raise AttachmentError(f"@{one_line(name, 120)} cannot be attached: {error}") from None


def _content(name: str, path: Path, said_yes: bool, sees: bool) -> str:
    """What is attached for a name: blocks. Raises AttachmentError."""
    if name.startswith(("http://", "https://")):
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
    """The names of the files whose content stands behind a message."""
    return [match[1] for match in _blocks(message)]


def without_files(message: str) -> str:
    """A message with the names of its files, and without their content."""
    found = _blocks(message)
    if not found:
        return message
    left = "\n".join(f"({match[1]} was attached here; its content is left out.)" for match in found)
    return f"{message[: found[0].start()]}\n\n{left}"


def _blocks(message: str) -> list[re.Match[str]]:
    """The blocks at the end of a message, each right behind the one before."""
    found: list[re.Match[str]] = []
    for match in _BLOCK.finditer(message):
        if found and found[-1].end() != match.start():
            found = []
        found.append(match)
    return found if found and found[-1].end() == len(message) else []


def fence_text(name: str, text: str) -> str:
    """The name, where there is one, then the text in a fence that nothing in it can close."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`{3,}", text)), 3)
    suffix = Path(name).suffix[1:]
    language = suffix if _WORD.fullmatch(suffix) else ""
    end = "" if text.endswith("\n") else "\n"
    head = f"{one_line(name, limit=200)}:\n" if name else ""
    return f"{head}{fence}{language}\n{text}{end}{fence}"
