"""`/library` in the chat: list, add, begin a conversation, remove; what is read shows how far it is."""

import random
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from chatterm.backends.backend import CachedChunk, Document, EngineError
from chatterm.commands.completing import choice_completions, path_start
from chatterm.commands.library import Add, Open, Remove, library_lines, suggested, told
from chatterm.conversation.cache_map import cache_lines
from chatterm.conversation.document_source import keep_document
from chatterm.markdown.lines import line_cells, line_text
from chatterm.screens.chat import documents
from chatterm.screens.library import LibraryList, LibraryPicker, about_text, entry_line
from chatterm.sessions.library import DocumentLibrary, LibraryEntry
from chatterm.sessions.records import SessionError
from chatterm.sessions.store import SessionStore
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.chatterm.test_app_random import KEYS, check
from tests.fresh import seeds


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SessionStore]:
    """In a folder with two documents."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path / "data"))
    (tmp_path / "paper.md").write_text("# Blocks\n\nThey are shared.")
    (tmp_path / "my notes.txt").write_text("Buy milk.")
    opened = SessionStore.open()
    yield opened
    opened.close()


def a_backend(**options: object) -> ScriptedBackend:
    return ScriptedBackend([Script("An answer.")] * 9, counts={"paper": 12, "notes": 5}, **options)  # type: ignore[arg-type]


def chunk(name: str, present: int, tokens: int = 12, branches: int = 0, is_read: bool = True) -> CachedChunk:
    return CachedChunk(name, tokens, True, present, 0, branches, 1000, is_read)


async def added(driver: Driver) -> None:
    await driver.send("/library add paper.md")
    await driver.until(lambda: "is in the library" in " ".join(driver.notices))
    await driver.send("/library add 'my notes.txt' as notes")
    await driver.until(lambda: "notes is in the library" in " ".join(driver.notices))


async def opens(driver: Driver, *names: str) -> None:
    """Begin a conversation on these."""
    await driver.send(f"/library open {' '.join(names)}")
    await driver.until(
        lambda: any(f"A new conversation with {', '.join(names)} begins." in text for text in driver.told)
    )


async def test_what_is_added_is_read_and_counted(store: SessionStore) -> None:
    backend = a_backend()
    async with driven(backend, store=store, size=(140, 45)) as driver:
        backend.chunks = (chunk("paper", 4, is_read=False),)
        await driver.send("/library add paper.md")
        await driver.shows("4 of 12 tokens")
        assert DocumentLibrary().entries()[0].tokens == {}, "it is not read yet"
        backend.chunks = (chunk("paper", 12),)
        await driver.until(lambda: "paper was read: 12 tokens." in driver.notices)
        await driver.until(lambda: DocumentLibrary().entries()[0].tokens == {"scripted": 12})
        await driver.send("/library")
        await driver.shows("12 tokens")
        assert DocumentLibrary().entries()[0].source.endswith("paper.md")
        await driver.pilot.press("escape")


@pytest.mark.parametrize("error", [None, SessionError("It cannot be fetched.")])
async def test_fetching_is_said_while_it_lasts(
    error: SessionError | None, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Event()

    def fetched(*arguments: Any) -> Any:
        gate.wait()
        if error is not None:
            raise error
        return keep_document(*arguments)

    monkeypatch.setattr(documents, "keep_document", fetched)
    async with driven(a_backend(), store=store) as driver:
        try:
            await driver.send("/library add paper.md", wait=False)
            await driver.shows("The document is being fetched…")
            driver.app.chat.hint("Another hint.", 0.0)
            await driver.shows("The document is being fetched…")
        finally:
            gate.set()
        await driver.idle()
        assert "is being fetched" not in driver.text()
        assert driver.errors == ([] if error is None else [str(error)])


async def test_a_narrow_screen_shows_how_far_reading_is(store: SessionStore) -> None:
    backend = a_backend(chunks=(chunk("paper", 4, is_read=False),))
    async with driven(backend, store=store, size=(80, 24)) as driver:
        await driver.shows("reading paper 4 of 12 tokens")


async def test_what_the_shell_added_is_read_when_a_model_is_there(store: SessionStore) -> None:
    DocumentLibrary().add(Document("paper", "text"), "here")
    DocumentLibrary().add(Document("notes", "more text"), "there")
    backend = a_backend(chunks=(chunk("paper", 12), chunk("notes", 5, 5)))
    async with driven(backend, store=store) as driver:
        await driver.until(
            lambda: [e.tokens for e in DocumentLibrary().entries()] == [{"scripted": 5}, {"scripted": 12}]
        )
        assert [call for call in backend.calls if call[0] == "read"] == [("read", "notes"), ("read", "paper")]
        assert driver.notices == [], "nobody asked for it now"


async def test_a_conversation_begins_on_documents_and_its_session_goes_on_with_them(
    store: SessionStore,
) -> None:
    backend = a_backend()
    async with driven(backend, store=store, size=(140, 45)) as driver:
        await added(driver)
        await driver.send("hello")
        await driver.send("/library open notes PAPER")
        await driver.until(lambda: [one.name for one in backend.documents] == ["notes", "paper"])
        await driver.shows("A new conversation with notes, paper begins.")
        assert driver.questions == []
        assert "/sessions opens it" in driver.told[-1]
        await driver.shows("notes · paper")
        await driver.send("and this?")
        begun = driver.app.chat.conversation.saved.session
        assert begun is not None
        await driver.send("/library remove paper")
        await driver.until(lambda: "paper is removed" in " ".join(driver.notices))
        await driver.send("/reset")
        await driver.until(lambda: backend.documents == ())
        assert "/library open notes paper" in driver.told[-1]
        await driver.send(f"/sessions {begun}")
        await driver.until(lambda: [one.name for one in backend.documents] == ["notes", "paper"])
        await driver.send("/sessions hello")
        await driver.until(lambda: driver.questions == ["hello"] and backend.documents == ())
        store.delete(begun)
        store.flush()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/library open papr", "did you mean paper"),
        ("/library remove zzz", "it has notes, paper"),
        ("/library add nofile", "There is no file or folder 'nofile'"),
        ("/library add paper.md", "is already in the library, with the same text"),
        ("/library add 'my notes.txt' as Paper", "with another text"),
        ("/library add paper.md as a,b", "cannot be the name of a document"),
        ("/library frobnicate", "takes add, open or remove"),
        ("/library open", "/library open needs a name"),
        ("/library add", "/library add needs a file"),
        ("/library add http://127.0.0.1:1/", "cannot be fetched"),
    ],
)
async def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    store: SessionStore, line: str, words: str
) -> None:
    backend = a_backend()
    async with driven(backend, store=store) as driver:
        await added(driver)
        before = [entry.name for entry in DocumentLibrary().entries()]
        await driver.send(line)
        await driver.until(lambda: driver.errors)
        assert words in driver.errors[-1]
        assert "\n" not in driver.errors[-1]
        assert [entry.name for entry in DocumentLibrary().entries()] == before
        assert backend.documents == ()


async def test_documents_that_are_too_long_leave_the_conversation_as_it_is(store: SessionStore) -> None:
    backend = a_backend(context_length=10)
    async with driven(backend, store=store) as driver:
        await added(driver)
        await driver.send("hello")
        await driver.send("/library open paper")
        await driver.until(lambda: driver.errors)
        assert driver.questions == ["hello"]
        assert backend.documents == ()


async def test_a_session_whose_documents_are_too_long_here_is_opened_without_them(
    store: SessionStore,
) -> None:
    backend = a_backend()
    async with driven(backend, store=store) as driver:
        await added(driver)
        await opens(driver, "paper")
        await driver.send("about paper")
        await opens(driver, "notes")
        await driver.send("about notes")
        backend.context_length = 10
        await driver.send("/sessions about paper")
        await driver.until(lambda: driver.questions == ["about paper"] and driver.errors)
        await driver.until(lambda: backend.documents == ())
        assert "too long" in driver.errors[-1]


async def test_while_an_answer_runs_no_conversation_begins(store: SessionStore) -> None:
    import threading

    gate = threading.Event()
    backend = ScriptedBackend([Script("An answer.", gate=gate)])
    async with driven(backend, store=store) as driver:
        DocumentLibrary().add(Document("paper", "text"), "here")
        await driver.send("hello", wait=False)
        await driver.send("/library open paper", wait=False)
        await driver.until(lambda: driver.errors)
        assert "Esc stops it" in driver.errors[-1]
        gate.set()
        await driver.idle()
        assert backend.documents == ()


async def test_what_is_sent_meanwhile_comes_back_and_is_no_part_of_the_conversation_before(
    store: SessionStore,
) -> None:
    backend = a_backend()
    async with driven(backend, store=store) as driver:
        await added(driver)
        await driver.send("hello")
        screen = driver.app.chat
        screen.documents._open_documents(DocumentLibrary().find(["paper"]))
        screen.writing.send_as_it_is("about the paper", "about the paper")
        await driver.until(lambda: backend.documents and driver.composer.text == "about the paper")
        assert ("send", "about the paper") not in backend.calls
        assert driver.questions == []
        await driver.pilot.press("enter")
        await driver.idle()
        assert driver.questions == ["about the paper"]


async def test_a_session_that_begins_at_once_after_a_reset_has_no_documents(store: SessionStore) -> None:
    import threading

    documents = (Document("paper", "text"),)
    gate = threading.Event()
    backend = a_backend(documents=documents, load_gate=gate)
    async with driven(backend, store=store, ready=False) as driver:
        await driver.send("/reset", wait=False)
        await driver.send("hello", wait=False)
        assert backend.documents == documents, "the model is still loading"
        gate.set()
        await driver.until(lambda: driver.answers == ["An answer."])
        await driver.idle()
        assert backend.documents == ()
        session = driver.app.chat.conversation.saved.session
        assert session is not None
        assert store.load(session)[0].documents == ()


async def test_where_nothing_is_saved_the_library_is_there_all_the_same(store: SessionStore) -> None:
    backend = a_backend()
    async with driven(backend) as driver:
        await added(driver)
        await driver.send("/library open paper")
        await driver.until(lambda: backend.documents == DocumentLibrary().find(["paper"]))


async def test_a_server_reads_nothing_ahead(store: SessionStore) -> None:
    DocumentLibrary().add(Document("paper", "text"), "here")
    backend = a_backend(is_remote=True)
    async with driven(backend, store=store) as driver:
        await opens(driver, "paper")
        assert not any(name == "read" for name, _ in backend.calls)


async def test_the_panel_says_what_is_shared_and_what_that_saves(store: SessionStore) -> None:
    backend = a_backend(chunks=(chunk("paper", 12, branches=3),))
    async with driven(backend, store=store, size=(140, 45)) as driver:
        await added(driver)
        await driver.send("/library open paper")
        await driver.shows("12 of 12")
        await driver.shows("3 branches on it")
        await driver.shows("save 24 kB")


def test_the_map_of_the_cache_says_it_too() -> None:
    from tests.chatterm.snapshots.test_screens import blocks

    text = "\n".join(map(line_text, cache_lines(blocks(), 100, chunks=[chunk("paper", 12, branches=3)])))
    assert "paper: 12 of 12 tokens in the cache; 3 branches share it, which saves 24 kB." in text


def test_what_is_told() -> None:
    assert told("") is told("  ") is None
    assert told("add paper.md") == Add("paper.md", "paper")
    assert told("add my notes.txt as notes") == Add("my notes.txt", "notes")
    assert told("add 'as is.md'") == Add("as is.md", "as-is")
    assert told("add https://example.org/x.html as x") == Add("https://example.org/x.html", "x")
    assert told("open a b,c, d") == Open(("a", "b", "c", "d"))
    assert told("remove a") == Remove("a")


def test_names_and_paths_are_offered(store: SessionStore) -> None:
    assert choice_completions("/library o") == ["/library open "]
    assert suggested("open ") == []
    DocumentLibrary().add(Document("paper", "text"), "here")
    DocumentLibrary().add(Document("Notes", "text"), "there")
    assert choice_completions("/library open n") == ["/library open Notes"]
    assert choice_completions("/library open Notes ") == ["/library open Notes paper"]
    assert choice_completions("/library remove Notes ") == []
    assert path_start("/library add pa") == len("/library add ")
    assert path_start("/library open pa") is None


@pytest.mark.parametrize("width", [20, 40, 76, 136])
def test_the_list_fits_any_width(width: int) -> None:
    entries = [
        LibraryEntry("paper", "/home/me/" + "deep/" * 30 + "paper.md", "0", 1.0, 40_000, {}),
        LibraryEntry("大" * 32, "https://example.org/\x1b[2J", "1", 2.0, 4, {"tiny": 3}),
    ]
    lines = library_lines(entries, ["paper"], "tiny", width)
    assert all(line_cells(line) <= width for line in lines)
    text = "".join(map(line_text, lines))
    assert "\x1b" not in text
    assert "10,000 tokens" in " ".join(text.split())


# -- the picker


async def picker(driver: Driver) -> LibraryPicker:
    await driver.send("/library")
    await driver.shows("Type to search")
    screen = driver.app.screen
    assert isinstance(screen, LibraryPicker)
    return screen


def names_in(screen: LibraryPicker) -> list[str]:
    return [entry.name for entry in screen.query_one(LibraryList).items]


async def test_several_are_chosen_in_an_order(store: SessionStore) -> None:
    backend = a_backend()
    async with driven(backend, store=store, size=(140, 45)) as driver:
        await added(driver)
        screen = await picker(driver)
        await driver.until(lambda: names_in(screen) == ["notes", "paper"])
        await driver.pilot.press("tab", "tab", "down", "tab", "up", "tab")
        await driver.shows("begins a conversation with paper, notes")
        await driver.pilot.press("enter")
        await driver.until(lambda: [one.name for one in backend.documents] == ["paper", "notes"])
        await driver.shows("A new conversation with paper, notes begins.")


async def test_what_is_chosen_stays_chosen_while_another_is_searched_for(store: SessionStore) -> None:
    backend = a_backend()
    async with driven(backend, store=store, size=(140, 45)) as driver:
        await added(driver)
        screen = await picker(driver)
        await driver.until(lambda: names_in(screen))
        await driver.pilot.press(*"paper")
        await driver.until(lambda: names_in(screen) == ["paper"])
        await driver.pilot.press("tab", *["backspace"] * 5, *"milk notes")
        await driver.until(lambda: names_in(screen) == [])
        await driver.pilot.press(*["backspace"] * 10, *"notes")
        await driver.until(lambda: names_in(screen) == ["notes"])
        await driver.pilot.press("tab", "enter")
        await driver.until(lambda: [one.name for one in backend.documents] == ["paper", "notes"])


async def test_words_that_are_typed_choose_and_escape_opens_nothing(store: SessionStore) -> None:
    backend = a_backend()
    async with driven(backend, store=store) as driver:
        await added(driver)
        screen = await picker(driver)
        await driver.until(lambda: names_in(screen))
        await driver.pilot.press(*"nowhere")
        await driver.shows("No matches.")
        await driver.pilot.press("enter", "tab", "ctrl+d", "escape")
        await driver.until(lambda: driver.app.screen is not screen)
        assert backend.documents == ()
        screen = await picker(driver)
        await driver.until(lambda: names_in(screen))
        await driver.pilot.press(*"PAPER.MD")
        await driver.until(lambda: names_in(screen) == ["paper"])
        await driver.pilot.press("enter")
        await driver.until(lambda: [one.name for one in backend.documents] == ["paper"])


async def test_a_click_begins_on_one(store: SessionStore) -> None:
    backend = a_backend()
    async with driven(backend, store=store) as driver:
        await added(driver)
        screen = await picker(driver)
        await driver.until(lambda: names_in(screen))
        await driver.pilot.click(LibraryList, offset=(6, 1))
        await driver.until(lambda: [one.name for one in backend.documents] == ["paper"])


async def test_removing_asks_first(store: SessionStore) -> None:
    async with driven(a_backend(), store=store) as driver:
        await added(driver)
        screen = await picker(driver)
        await driver.until(lambda: names_in(screen))
        await driver.pilot.press("ctrl+d")
        await driver.shows("Remove notes?")
        await driver.pilot.press("n")
        await driver.shows("Ctrl+D removes")
        assert DocumentLibrary().names() == ["notes", "paper"]
        await driver.pilot.press("ctrl+d", "y")
        await driver.until(lambda: names_in(screen) == ["paper"])
        assert DocumentLibrary().names() == ["paper"]
        await driver.pilot.press("ctrl+d", "y")
        await driver.shows("The library is empty")
        await driver.pilot.press("ctrl+d", "enter", "escape")


async def test_what_comes_after_it_was_left_breaks_nothing(store: SessionStore) -> None:
    async with driven(a_backend(), store=store) as driver:
        await added(driver)
        screen = await picker(driver)
        await driver.until(lambda: names_in(screen))
        await driver.pilot.press("escape")
        await driver.until(lambda: not screen.children)
        await screen._read()
        await driver.pilot.pause()


async def test_what_another_process_adds_is_shown_and_read(store: SessionStore) -> None:
    backend = a_backend(chunks=(chunk("paper", 4, is_read=False), chunk("notes", 5, 5, branches=3)))
    async with driven(backend, store=store, size=(140, 45)) as driver:
        screen = await picker(driver)
        await driver.shows("The library is empty")
        DocumentLibrary().add(Document("paper", "text"), "here")
        await driver.shows("33%")
        await driver.until(lambda: ("read", "paper") in backend.calls)
        DocumentLibrary().add(Document("notes", "other text"), "there")
        await driver.until(lambda: names_in(screen) == ["notes", "paper"])
        backend.chunks = (chunk("paper", 12), chunk("notes", 5, 5, branches=3))
        await driver.shows("saves 10 kB")
        await driver.until(
            lambda: [e.tokens for e in DocumentLibrary().entries()] == [{"scripted": 5}, {"scripted": 12}]
        )
        assert [call for call in backend.calls if call[0] == "read"] == [("read", "paper"), ("read", "notes")]


async def test_a_library_that_cannot_be_read_is_one_line(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(library: DocumentLibrary) -> list[LibraryEntry]:
        raise SessionError("The disk says no.")

    entries = DocumentLibrary.entries
    async with driven(a_backend(), store=store) as driver:
        monkeypatch.setattr(DocumentLibrary, "entries", fails)
        screen = await picker(driver)
        await driver.shows("The disk says no.")
        await driver.pilot.press("enter", "tab", "down", "ctrl+d")
        monkeypatch.setattr(DocumentLibrary, "entries", entries)
        await driver.until(lambda: not screen.query_one("#picker-note").display)
        await driver.pilot.press("escape")
        await driver.until(lambda: driver.app.screen is not screen)


@pytest.mark.parametrize("width", [14, 40, 69, 116])
@pytest.mark.parametrize(
    "found",
    [
        None,
        chunk("paper", 0),
        chunk("paper", 5, is_read=False),
        chunk("notes, paper", 12, branches=9_999_999),
    ],
)
def test_a_line_of_the_picker_fits_any_width(width: int, found: CachedChunk | None) -> None:
    for name in ("paper", "大" * 32):
        entry = LibraryEntry(name, "/home/me", "0", 1.0, 40_000_000, {"tiny": 3})
        line = entry_line(entry, found, "tiny", "1 ", width, 2e9)
        assert "not read yet" not in line_text(entry_line(entry, None, "", "  ", width, 2e9))
        assert line_cells(line) <= width
    assert "\n" not in about_text(entry, found, "tiny")


@pytest.mark.parametrize("seed", seeds(2))
async def test_random_use(store: SessionStore, seed: int) -> None:
    chance = random.Random(seed)
    backend = a_backend(chunks=(chunk("paper", 12), chunk("notes", 5, 5)))
    lines = (
        "/library", "/library add paper.md", "/library add my notes.txt as notes", "/library open paper",
        "/library open notes paper", "/library remove paper", "/library remove notes", "/library open", "/reset",
        "hello", "/sessions hello", "/undo", "/redo", "/cache", "/stop", "/model other", "/library add .",
    )  # fmt: skip
    async with driven(backend, store=store) as driver:
        driver.app.chat.copy_with = lambda _: "xclip"
        for _ in range(40):
            if chance.random() < 0.3:
                await driver.pilot.press(*chance.choices((*KEYS, "alt+l", "f3"), k=chance.randrange(1, 4)))
            else:
                driver.composer.put(chance.choice(lines))
                driver.composer.focus()
                await driver.pilot.press("enter")
            if chance.random() < 0.3:
                await driver.done()
                if driver.app.chat.is_idle:
                    check(driver, backend)
        await driver.pilot.press("escape", "escape", "escape")
        await driver.done()
        talk, session = driver.app.chat.conversation, driver.app.chat.conversation.saved.session
        if session is not None and talk.tree.head is not None:
            info, tree, _ = store.load(session)
            assert [e.user for e in tree.exchanges] == [e.user for e in talk.tree.exchanges]
            assert info.documents == talk.documents == backend.documents


def test_an_argument_that_is_none_is_one_line() -> None:
    with pytest.raises(EngineError, match="takes add, open or remove"):
        told("x" * 500)
