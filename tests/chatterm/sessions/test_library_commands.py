"""`chatterm library` and `chatterm run --library`, from the command line."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import ChatOptions, Document
from chatterm.cli import library as commands
from chatterm.sessions.library import DocumentLibrary
from chatterm.sessions.store import SessionStore
from tests.chatterm.scripted import ScriptedBackend
from tests.chatterm.sessions.test_session_commands import Shell, shell  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    (tmp_path / "paper.md").write_text("# Blocks\n\nThey are shared. \x1b[31m")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.txt").write_text("one")
    (tmp_path / "docs" / "two.txt").write_text("two")
    (tmp_path / "docs" / "three.bin").write_bytes(b"\0\1")


def test_add_list_show_and_remove(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    assert shell("library") == 0
    assert "The library is empty" in shell.err
    assert shell("library", "add", "paper.md") == 0
    assert shell.out.startswith("Added: paper (about ")
    assert "The model of the next chatterm run reads it in idle time." in shell.out
    assert "chatterm run --library paper" in shell.out
    assert shell("library", "add", "docs", "--as", "All-of-it") == 0
    assert "1 file left out" in shell.err
    assert shell("library", "list") == 0
    rows = [line.split("\t") for line in shell.out.splitlines()]
    assert [(row[0], row[3]) for row in rows] == [
        ("All-of-it", str(tmp_path / "docs")),
        ("paper", str(tmp_path / "paper.md")),
    ]
    assert shell("library", "show", "ALL-of-it") == 0
    assert shell.out == "docs/one.txt:\n```txt\none\n```\n\ndocs/two.txt:\n```txt\ntwo\n```\n"
    assert shell("library", "show", "paper") == 0
    assert "\x1b" not in shell.out
    assert shell("library", "remove", "paper", "nothing") == 1
    assert len(DocumentLibrary().entries()) == 2, "all of them, or none"
    assert shell("library", "remove", "paper", "paper", "Paper", "all-of-it") == 0
    assert shell.out == "Removed: paper\nRemoved: All-of-it\n"
    assert DocumentLibrary().entries() == []


def test_a_folder_below_one_that_may_not_be_looked_into_is_added(
    shell: Shell,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = Path.exists

    def forbidden(path: Path) -> bool:
        if path.name == ".git":
            raise PermissionError(13, "Permission denied", str(path))
        return looked(path)

    monkeypatch.setattr(Path, "exists", forbidden)
    assert shell("library", "add", "docs") == 0
    assert shell.out.startswith("Added: docs")


def test_on_a_terminal_the_list_is_a_table(
    shell: Shell,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shell("library", "add", "paper.md")
    library = DocumentLibrary()
    library.count(*library.find(["paper"]), "tiny", 1234)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    commands.list_documents()
    assert "1,234 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nofile", "no file or folder 'nofile'"),
        ("", "no file or folder ''"),
        ("docs/three.bin", "not a text file"),
        ("empty.txt", "is empty"),
        ("hollow", "no text files"),
        ("http://127.0.0.1:1/page", "cannot be fetched: Connection refused."),
        ("http://[", "address"),
        ("picture.png", "is a picture"),
        ("x" * 5000, "no file or folder"),
        ("a\0b", "no file or folder"),
    ],
)
def test_what_cannot_be_added_is_one_line(
    shell: Shell,  # noqa: F811
    source: str,
    words: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert shell("library", "add", source) == 1
    assert words in shell.err
    assert shell.err.count("\n") == 1
    assert shell.out == ""
    assert DocumentLibrary().entries() == []


class Kept(ScriptedBackend):
    """One that remembers with what it was made."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ChatOptions]:
    found: list[ChatOptions] = []

    @contextmanager
    def answering(model: str, options: ChatOptions, *_: Any, **__: Any) -> Iterator[Kept]:
        found.append(options)
        yield Kept(documents=options.documents)

    monkeypatch.setattr("chatterm.cli.options.answering", answering)
    return found


def test_a_conversation_begins_on_documents_and_its_session_remembers_them(
    shell: Shell,  # noqa: F811
    made: list[ChatOptions],
    path: Path,
) -> None:
    shell("library", "add", "paper.md")
    shell("library", "add", "docs")
    docs, paper = DocumentLibrary().find(["docs", "paper"])
    assert shell("run", "m", "--library", "docs, PAPER", "-p", "hello", "--save") == 0
    assert made[-1].documents == (docs, paper)
    assert shell("library", "remove", "docs", "paper") == 0
    assert shell("run", "-c", "-p", "more") == 0
    assert made[-1].documents == (docs, paper)
    store = SessionStore.open(path)
    assert store.load(store.find()[0].id)[0].documents == (docs, paper)
    assert store.close()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--library", "papr"], 1, "did you mean paper"),
        (["--library", " , "], 2, "needs the name of a document"),
        (["--library", "paper", "-c"], 2, "leave out --library"),
        (["--library", "paper", "--session", "x"], 2, "leave out --library"),
    ],
)
def test_wrong_use_is_one_line(
    shell: Shell,  # noqa: F811
    made: list[ChatOptions],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    shell("library", "add", "paper.md")
    assert shell("run", "m", "-p", "hello", *arguments) == code
    assert words in shell.err
    assert made == []


def test_inline_too(shell: Shell, made: list[ChatOptions], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    shell("library", "add", "paper.md")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert shell("run", "m", "--inline", "--library", "paper") == 0
    assert made[-1].documents == DocumentLibrary().find(["paper"])
    assert isinstance(made[-1].documents[0], Document)
