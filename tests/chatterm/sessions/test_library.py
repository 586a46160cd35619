"""The library on the disk, and the sessions that were begun on documents of it."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from chatterm.backends.backend import Document
from chatterm.sessions.as_json import from_json
from chatterm.sessions.export import exported
from chatterm.sessions.library import DocumentLibrary, name_for
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.schema import connect
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from engine.store.folder import chunk_owner

PAPER = Document("paper", "paper.md:\n```md\nGrüße 🎈\x00\n```")
NOTES = Document("Notes", "notes.txt:\n```txt\nmilk\n```")


@pytest.fixture
def library(path: Path) -> DocumentLibrary:
    return DocumentLibrary(path)


def texts(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as reader:
        return [text for (text,) in reader.execute("SELECT text FROM texts ORDER BY text").fetchall()]


def begun(store: SessionStore, *documents: Document) -> str:
    """A session on these, with one exchange."""
    session, tree = store.new(SessionInfo(model="m", documents=documents)), Tree()
    exchange = tree.add(None, "hello", "m")
    exchange.finish_reason = "eos"
    store.save(session, exchange)
    store.head(session, exchange.id)
    return session


def test_what_is_added_is_found_in_the_order_of_the_names_that_are_asked_for(
    library: DocumentLibrary,
) -> None:
    assert library.entries() == library.names() == []
    assert library.unread() == ()
    entry = library.add(PAPER, "/tmp/paper.md")
    assert (entry.name, entry.source, entry.sha256) == ("paper", "/tmp/paper.md", PAPER.sha256)
    library.add(NOTES, "https://example.org/notes")
    assert [one.name for one in library.entries()] == ["Notes", "paper"]
    assert library.find(["PAPER", "notes", "paper"]) == (PAPER, NOTES)
    assert library.names() == ["Notes", "paper"]
    assert library.unread() == (NOTES, PAPER), "the latest first"
    library.count(NOTES, "tiny", 12)
    library.count(NOTES, "tiny", 13)
    library.count(Document("gone", "gone"), "tiny", 5)
    assert dict(library.entries()[0].tokens) == {"tiny": 13}
    assert library.unread() == (PAPER,)


@pytest.mark.parametrize(
    ("name", "words"),
    [("paper", "with the same text"), ("PAPER", "with the same text"), ("", "be the name"), ("a b", "be the name"),
     ("a,b", "be the name"), ("\x1b[2J", "be the name"), ("x" * 65, "be the name"), (".hidden", "be the name")],
)  # fmt: skip
def test_a_name_that_cannot_be_is_one_line(library: DocumentLibrary, name: str, words: str) -> None:
    library.add(PAPER, "here")
    with pytest.raises(SessionError, match=words) as failure:
        library.add(Document(name, PAPER.text), "there")
    assert str(failure.value).isprintable()
    with pytest.raises(SessionError, match="with another text"):
        library.add(Document("paper", "else"), "there")
    assert [one.source for one in library.entries()] == ["here"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("papr", "did you mean paper"), ("zzz", "it has Notes, paper"), ("\x1b[31mred", "it has Notes, paper")],
)
def test_a_name_that_nobody_has_is_answered_with_those_that_are_there(
    library: DocumentLibrary, name: str, words: str
) -> None:
    with pytest.raises(SessionError, match="the library is empty"):
        library.find([name])
    library.add(PAPER, "")
    library.add(NOTES, "")
    for ask in (lambda: library.find(["paper", name]), lambda: library.remove(name)):
        with pytest.raises(SessionError, match=words) as failure:
            ask()
        assert str(failure.value).isprintable()


def test_a_session_keeps_its_documents_when_the_library_has_them_no_more(
    path: Path, library: DocumentLibrary, store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path))
    blocks = tmp_path / "kv" / "fingerprint" / f"{chunk_owner(PAPER.text)}.kv"
    blocks.parent.mkdir(parents=True)
    blocks.write_bytes(b"computed")
    library.add(PAPER, "here")
    library.add(NOTES, "there")
    first, second = begun(store, NOTES, PAPER), begun(store, PAPER)
    store.flush()
    assert library.remove("Paper").source == "here"
    assert not blocks.exists(), "what was computed of it goes with it"
    library.remove("notes")
    assert library.entries() == []
    assert store.load(first)[0].documents == (NOTES, PAPER)
    assert len(texts(path)) == 2
    store.delete(first)
    store.flush()
    assert len(texts(path)) == 1, "each text is kept once, as long as somebody has it"
    assert store.load(second)[0].documents == (PAPER,)
    store.delete(second)
    store.flush()
    assert texts(path) == []


def test_what_was_computed_for_a_session_goes_with_it(
    store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path))
    session, other = begun(store), begun(store)
    files = {name: tmp_path / "kv" / "fingerprint" / f"{name}.kv" for name in (session, other)}
    files[session].parent.mkdir(parents=True)
    for file in files.values():
        file.write_bytes(b"computed")
    store.delete(session)
    store.flush()
    assert store.problem == ""
    assert [file.exists() for file in files.values()] == [False, True]


def test_what_was_computed_goes_with_the_last_name_of_a_text(
    library: DocumentLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path))
    blocks = tmp_path / "kv" / "fingerprint" / f"{chunk_owner(PAPER.text)}.kv"
    blocks.parent.mkdir(parents=True)
    blocks.write_bytes(b"computed")
    library.add(PAPER, "here")
    library.add(Document("copy", PAPER.text), "there")
    library.remove("copy")
    assert blocks.exists()
    library.remove("paper")
    assert not blocks.exists()


def test_what_was_computed_after_a_deletion_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path))
    store = SessionStore.open()
    there, kept = begun(store, PAPER), begun(store)
    begun(store, NOTES)
    store.flush()

    def blocks(owner: str) -> Path:
        path = tmp_path / "kv" / "fingerprint" / f"{owner}.kv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"computed")
        return path

    papers, notes = (blocks(chunk_owner(one.text)) for one in (PAPER, NOTES))
    served, of_kept = blocks("served-0123"), blocks(kept)
    store.delete(there)
    store.flush()
    assert [path.exists() for path in (papers, notes)] == [False, True], "nobody has the document any more"
    late = blocks(there), blocks(chunk_owner(PAPER.text))  # another program goes on with it
    SessionStore.open(tmp_path / "another.db").close()
    assert all(path.exists() for path in late), "that is none of this database"
    SessionStore.open().close()
    assert not any(path.exists() for path in late)
    assert all(path.exists() for path in (notes, served, of_kept))
    store.close()


def test_documents_go_out_with_a_session_and_come_in_again(store: SessionStore) -> None:
    session = begun(store, PAPER, NOTES)
    info, tree, _ = store.load(session)
    again, same = from_json(exported(info, tree, "json"))
    assert again.documents == (PAPER, NOTES)
    copy = store.add(again, same.exchanges, same.head)
    store.flush()
    assert store.load(copy)[0].documents == (PAPER, NOTES)
    for form in ("md", "html"):
        assert "begun with documents from the library: paper, Notes" in exported(info, tree, form)  # type: ignore[arg-type]


@pytest.mark.parametrize("documents", ["x", [1], [{"name": "a"}], [{"name": 1, "text": "b"}], {"name": "a"}])
def test_wrong_documents_of_a_file_are_one_line(documents: object) -> None:
    import json

    whole = json.loads(exported(SessionInfo(model="m"), Tree(), "json"))
    whole["session"]["documents"] = documents
    with pytest.raises(SessionError, match="document") as failure:
        from_json(json.dumps(whole))
    assert "\n" not in str(failure.value)


def test_two_processes_that_add_the_same_name_at_once_leave_one(path: Path) -> None:
    connect(path).close()
    script = (
        "import sys; from pathlib import Path; from chatterm.backends.backend import Document\n"
        "from chatterm.sessions.library import DocumentLibrary\n"
        "sys.stdin.readline()\n"
        "try: DocumentLibrary(Path(sys.argv[1])).add(Document('paper', sys.argv[2]), sys.argv[2]); print('added')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", script, str(path), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[3],
            env={"PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        )
        for text in ("one", "two")
    ]
    said = sorted(process.communicate("\n")[0] for process in both)
    assert said[1] == "added\n"
    assert said[0].startswith("SessionError paper is already in the library, with another text")
    assert len(DocumentLibrary(path).entries()) == len(texts(path)) == 1


def test_a_disk_that_is_full_or_locked_or_damaged_is_one_line(
    path: Path, library: DocumentLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatterm.sessions.schema.LOCK_WAIT", 0.05)
    library.add(PAPER, "here")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SessionError, match="locked"):
            library.add(NOTES, "there")
        assert [entry.name for entry in library.entries()] == ["paper"], "it can still be read"
        other.execute("ROLLBACK")
    real = connect

    def full(where: Path | None) -> sqlite3.Connection:
        connection = real(where)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr("chatterm.sessions.library.connect", full)
        with pytest.raises(SessionError, match="no disk space left"):
            library.add(Document("book", "word " * 100_000), "there")
    assert library.find(["paper"]) == (PAPER,)
    path.write_bytes(b"nothing of the kind " * 1000)
    for wal in path.parent.glob("*-wal"):
        wal.unlink()
    with pytest.raises(SessionError, match="damaged"):
        library.entries()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("paper.pdf", "paper"),
        ("/home/me/Große Arbeit (2).md", "Große-Arbeit-2"),
        ("docs/", "docs"),
        ("../", "document"),
        ("https://example.org/a/page.html?x=1#part", "page"),
        ("https://example.org/", "example.org"),
        ("https://example.org", "example.org"),
        ("archive.tar.gz", "archive.tar"),
        (".bashrc", "bashrc"),
        ("x" * 99 + ".txt", "x" * 64),
    ],
)
def test_a_name_is_made_of_the_source(source: str, name: str) -> None:
    assert name_for(source) == name
