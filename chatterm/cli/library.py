"""`chatterm library`: list, add, show and remove the documents that conversations may begin with."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatterm.cli.usage import WrongUsage
from chatterm.terminal.sanitize import one_line, visible

if TYPE_CHECKING:
    from chatterm.backends.backend import Document

library_app = typer.Typer(
    help="List, add, show and remove documents that conversations may begin with.",
    invoke_without_command=True,
    no_args_is_help=False,
)

LibraryOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME...]",
        help="Begin the conversation with these documents, in this order (chatterm library lists them).",
        show_default=False,
    ),
]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A document in the library.", show_default=False)
]


@library_app.callback()
def library(context: typer.Context) -> None:
    """Manage the library. Without a command, list it."""
    if context.invoked_subcommand is None:
        list_documents()


@library_app.command("list")
def list_documents() -> None:
    """List all documents by name: as a table on a terminal, else as tab-separated lines."""
    from time import time

    from chatterm.cli.lists import print_list
    from chatterm.sessions.dates import stamp, when_text
    from chatterm.sessions.library import DocumentLibrary, size_text

    entries, now = DocumentLibrary().entries(), time()
    columns: dict[str, dict[str, Any]] = {
        "Name": {"no_wrap": True},
        "Length": {"justify": "right", "no_wrap": True},
        "Added": {"no_wrap": True},
        "Source": {"overflow": "fold", "ratio": 1},
    }
    rows = [
        (entry.name, size_text(entry), when_text(entry.added, now), one_line(entry.source, 200))
        for entry in entries
    ]
    lines = [(entry.name, stamp(entry.added), entry.characters, entry.source) for entry in entries]
    print_list(columns, rows, lines, "The library is empty; chatterm library add FILE fills it.")


@library_app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|FOLDER|URL", help="A text file, a PDF, a folder, or a page.", show_default=False
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", help="What it is called. Default: its file name.", show_default=False
        ),
    ] = None,
) -> None:
    """Keep the text of a document. The model of the next chat reads it in idle time."""
    from chatterm.conversation.attachments import working_folder
    from chatterm.conversation.document_source import keep_document
    from chatterm.sessions.library import DocumentLibrary, name_for, size_text

    entry, _, remark = keep_document(DocumentLibrary(), source, name or name_for(source), working_folder())
    print(
        f"Added: {entry.name} ({size_text(entry)}). The model of the next chatterm run reads it in idle time."
    )
    print(f"To begin a conversation with it: chatterm run --library {entry.name}")
    if remark:
        print(f"chatterm: {remark}", file=sys.stderr)


@library_app.command()
def show(name: NameArgument) -> None:
    """Print the text of a document as a model sees it."""
    from chatterm.sessions.library import DocumentLibrary

    (document,) = DocumentLibrary().find([name])
    print(visible(document.text))


@library_app.command()
def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Documents in the library.", show_default=False)
    ],
) -> None:
    """Remove documents. Conversations that began with them keep them."""
    from chatterm.sessions.library import DocumentLibrary

    known = DocumentLibrary()
    for document in known.find(names):  # all of them, each once, or none
        print(f"Removed: {known.remove(document.name).name}")


def find_documents(names: str) -> "tuple[Document, ...]":
    """Return the documents of `--library`. Raises WrongUsage if none is named, SessionError for an unknown name."""
    from chatterm.sessions.library import DocumentLibrary

    given = [name.strip() for name in names.split(",") if name.strip()]
    if not given:
        raise WrongUsage("--library needs the name of a document; chatterm library list shows them.")
    return DocumentLibrary().find(given)
