"""`chatterm sessions`: list, search, show, rename, delete, export and import conversations."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chatterm.cli.usage import WrongUsage
from chatterm.terminal.sanitize import one_line

if TYPE_CHECKING:
    from chatterm.sessions.records import SessionInfo
    from chatterm.sessions.store import SessionStore
    from chatterm.sessions.tree import Tree

sessions_app = typer.Typer(
    help="List, search, show, rename, delete, export and import saved conversations.",
    invoke_without_command=True,
    no_args_is_help=False,
)

_NAME = "A session: its id (or the start of it) or its title (or part of it)."
NameArgument = Annotated[str, typer.Argument(metavar="SESSION", help=_NAME, show_default=False)]


@sessions_app.callback()
def sessions(context: typer.Context) -> None:
    """Manage saved conversations. Without a command, list them."""
    if context.invoked_subcommand is None:
        list_sessions()


@sessions_app.command("list")
def list_sessions() -> None:
    """List all sessions, latest first: as a table on a terminal, else as tab-separated lines."""
    with _opened() as store:
        _print_sessions(_found(store), nothing="There are no sessions yet; chatterm run starts one.")


@sessions_app.command()
def search(
    words: Annotated[
        list[str], typer.Argument(metavar="WORDS", help="Words that must all occur.", show_default=False)
    ],
) -> None:
    """List sessions whose title or messages contain all WORDS."""
    from chatterm.cli.options import check_utf8

    check_utf8(" ".join(words))
    with _opened() as store:
        found = _found(store, " ".join(words))
        _print_sessions(found, nothing="No session contains all of these words.")
        if not found:
            raise typer.Exit(1)


@sessions_app.command()
def show(session: NameArgument) -> None:
    """Print the current branch of SESSION."""
    from chatterm.sessions.export import exported

    with _opened() as store:
        info, tree, _ = store.load(_picked(store, session).id)
        print(exported(info, tree, "md"), end="")
    for line in _not_shown(info.id, tree):
        print(line, file=sys.stderr)


@sessions_app.command()
def rename(
    session: NameArgument,
    title: Annotated[str, typer.Argument(metavar="TITLE", help="The new title.", show_default=False)],
) -> None:
    """Give SESSION another title."""
    from chatterm.cli.options import check_utf8
    from chatterm.sessions.titles import given_title

    check_utf8(title)
    title = given_title(title)
    with _opened(writes=True) as store:
        store.rename(_picked(store, session).id, title)


@sessions_app.command()
def delete(
    names: Annotated[list[str], typer.Argument(metavar="SESSION...", help=_NAME, show_default=False)],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete sessions with all their branches."""
    with _opened(writes=True) as store:
        chosen = {info.id: info for info in (_picked(store, name) for name in names)}
        if not yes and not _confirmed(chosen.values()):
            raise typer.Exit(1)
        for info in chosen.values():
            store.delete(info.id)
    for info in chosen.values():
        print(f"Deleted: {info.title}")


@sessions_app.command()
def export(
    session: NameArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The file to write; default: standard output.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        Literal["md", "json", "html"] | None,
        typer.Option(
            "--format",
            help="Default: from FILE's extension, or md. Only json contains all branches.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE if it exists.")] = False,
) -> None:
    """Write SESSION as Markdown, JSON or a web page."""
    from chatterm.sessions.export import choose_format, exported, write_export

    chosen = format or (choose_format(output) if output else "md")
    with _opened() as store:
        info, tree, _ = store.load(_picked(store, session).id)
    text = exported(info, tree, chosen)
    if output is None:
        print(text, end="")
    else:
        write_export(output, text, replace=force)


@sessions_app.command("import")
def import_sessions(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="JSON exports, or JSON lists of chat messages.", show_default=False
        ),
    ],
) -> None:
    """Add sessions from JSON files."""
    from chatterm.sessions.export import read_import

    read = [read_import(file) for file in files]
    with _opened(writes=True) as store:
        added = [(store.add(info, tree.exchanges, tree.head), info) for info, tree in read]
    for id, info in added:
        print(f"{id}\t{info.title}")


@contextmanager
def _opened(*, writes: bool = False) -> "Iterator[SessionStore]":
    """Yield the person's store. Raises SessionError at the end if something could not be written."""
    from chatterm.sessions.records import SessionError
    from chatterm.sessions.store import SessionStore

    store = SessionStore.open()
    try:
        yield store
        if writes:
            store.flush()
    finally:
        store.close()
    if writes and store.trouble is not None:
        raise SessionError(store.trouble.in_shell)


def _found(store: "SessionStore", text: str = "") -> "list[SessionInfo]":
    from chatterm.sessions.resume import sessions_to_choose_from

    return sessions_to_choose_from(store, text)


def _picked(store: "SessionStore", name: str) -> "SessionInfo":
    from chatterm.sessions.titles import pick

    return pick(_found(store), name)


def _confirmed(chosen: "Iterable[SessionInfo]") -> bool:
    from chatterm.sessions.titles import extent_text

    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise WrongUsage("There is no terminal to confirm on; add --yes to delete.")
    for info in chosen:
        print(f"{info.title} ({extent_text(info)})", file=sys.stderr)
    print("Delete permanently? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _not_shown(session: str, tree: "Tree") -> list[str]:
    """Return lines for a person on what exists besides the selected branch, and how to reach it."""
    lines = []
    if undone := len(tree.ahead(tree.head)):
        what, which = ("1 message is", "it") if undone == 1 else (f"{undone:,} messages are", "them")
        lines.append(f"{what} undone; `chatterm run --session {session}` and /redo restore {which}.")
    if (branches := tree.branches) > 1:
        lines.append(
            f"This is one of {branches:,} branches; `chatterm sessions export --format json` exports all."
        )
    return lines


def _print_sessions(found: "list[SessionInfo]", nothing: str) -> None:
    from time import time

    from chatterm.cli.lists import print_list
    from chatterm.sessions.dates import stamp, when_text

    now = time()
    columns: dict[str, dict[str, Any]] = {
        "Id": {"style": "dim", "no_wrap": True},
        "Title": {"overflow": "fold", "ratio": 1},
        "Messages": {"justify": "right", "no_wrap": True},
        "Model": {"overflow": "ellipsis", "no_wrap": True},
        "Last used": {"no_wrap": True},
    }
    rows = [
        (info.id, info.title, f"{info.messages:,}", one_line(info.model, 40), when_text(info.updated, now))
        for info in found
    ]
    lines = [
        (info.id, stamp(info.updated), info.messages, one_line(info.model), info.title) for info in found
    ]
    print_list(columns, rows, lines, nothing)
