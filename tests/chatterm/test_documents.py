"""Documents that a conversation begins with: an engine of ours computes each once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatterm.backends.backend import ChatOptions, ContextFullError, Document
from chatterm.backends.documents import list_names, with_documents
from chatterm.backends.local import LocalBackend
from engine.conversation.turns import Answer, Turn
from tests.chatterm.test_crash import model  # noqa: F401 - a fixture
from tests.counting import until

OPTIONS = ChatOptions("cpu", "float32", context=512, sampling={"seed": 3, "max_tokens": 4})
PAPER = Document(
    "paper", "paper.md:\n```md\nKV blocks are found by the chain of their keys. Again and again.\n```"
)
NOTES = Document("notes", "notes.txt:\n```txt\nBuy milk; read the paper; sleep well.\n```")


@pytest.fixture(autouse=True)
def _kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path / "data"))


@pytest.fixture
def backend(model: Path) -> Iterator[LocalBackend]:  # noqa: F811
    found = opened(model)
    yield found
    found.close()


def opened(folder: Path, *documents: Document, **options: object) -> LocalBackend:
    found = LocalBackend(str(folder), ChatOptions(**{**_fields(), "documents": documents, **options}))
    found.open()
    return found


def _fields() -> dict[str, object]:
    return {"device": "cpu", "dtype": "float32", "context": 512, "sampling": OPTIONS.sampling}


def is_quiet(backend: LocalBackend) -> bool:
    return backend.figures().warmed is None and all(chunk.is_read for chunk in backend.engine.chunks.list())


def is_written(backend: LocalBackend) -> bool:
    return not backend.engine.loop.call(lambda: backend.engine.disk.has_writes)


def asked(backend: LocalBackend, text: str) -> tuple[int, int]:
    """Tokens of the prompt that were there, and that were computed."""
    list(backend.send(text))
    stats = backend.last.stats
    return stats.cached_tokens, stats.prefilled_tokens


def length(backend: LocalBackend) -> int:
    """Tokens that the conversation begins with."""
    return len(backend.chat.begun_with(backend._begins))


def test_it_stands_behind_the_system_prompt_as_it_is() -> None:
    assert with_documents(None, ()) is None
    assert with_documents("Be brief.", ()) == "Be brief."
    assert with_documents(None, [PAPER]) == PAPER.text
    assert with_documents("Be brief.", [PAPER, NOTES]) == f"Be brief.\n\n{PAPER.text}\n\n{NOTES.text}"
    assert list_names([PAPER, NOTES]) == "paper, notes"


def test_none_of_its_tokens_is_computed_again_today(backend: LocalBackend) -> None:
    used = backend.used_tokens
    backend.configure({"documents": (PAPER,)})
    whole = length(backend)
    assert backend.used_tokens == whole > used
    until(lambda: is_quiet(backend))
    (chunk,) = backend.engine.chunks.list()
    assert (chunk.name, chunk.present, chunk.pinned) == ("paper", whole, True)
    cached, computed = asked(backend, "a question")
    assert cached == whole
    backend.reset()
    assert backend.options.documents == (PAPER,), (
        "they are of the next conversation, too, until somebody closes them"
    )
    cached, computed = asked(backend, "and another")
    assert cached >= whole > computed


def test_and_tomorrow(model: Path) -> None:  # noqa: F811
    first = opened(model, PAPER)
    until(lambda: is_quiet(first))
    until(lambda: is_written(first))
    whole, size = length(first), first.figures().block_size
    expected = [event.token_id for event in first.send("a question")]
    first.close()
    again = opened(model, PAPER)
    assert [event.token_id for event in again.send("a question")] == expected
    until(lambda: is_quiet(again))
    assert again.last.stats.prefilled_tokens < again.last.stats.prompt_tokens - whole + size
    assert again.figures().disk.restored_tokens == whole // size * size, "each block once"
    again.close()


def test_one_that_is_read_for_later_is_there_later(backend: LocalBackend) -> None:
    count = backend.read(PAPER)
    until(lambda: is_quiet(backend))
    assert 0 < count < 512
    assert backend.options.documents == ()
    backend.configure({"documents": (PAPER,)})
    whole = length(backend)
    assert asked(backend, "a question")[0] == whole
    backend.configure({"system": "Be brief."})
    assert backend.options.system == "Be brief."
    assert backend.read(NOTES) > 0
    assert length(backend) > whole


def test_the_order_that_shares_most_is_told(backend: LocalBackend) -> None:
    backend.configure({"documents": (NOTES,)})
    until(lambda: is_quiet(backend))
    backend.configure({"documents": (NOTES, PAPER)})
    assert not any("In the order" in note for note in backend.notes())
    backend.configure({"documents": (PAPER, NOTES)})
    (note,) = [note for note in backend.notes() if "In the order" in note]
    assert note.startswith("In the order notes,paper, ")
    backend.configure({"documents": ()})
    until(lambda: is_quiet(backend))
    assert not any(chunk.pinned for chunk in backend.engine.chunks.list())


def test_one_that_is_too_long_changes_nothing_and_says_how_long(backend: LocalBackend) -> None:
    long = Document("book", "word " * 2000)
    backend.configure({"documents": (PAPER,)})
    for attempt in (lambda: backend.configure({"documents": (long,)}), lambda: backend.read(long)):
        with pytest.raises(
            ContextFullError, match=r"book: [\d,]+ tokens do not fit into a context of 512"
        ) as failure:
            attempt()
        assert "\n" not in str(failure.value)
    assert backend.options.documents == (PAPER,)
    assert asked(backend, "a question")[1] > 0


def test_one_that_is_too_long_for_the_model_is_said_when_that_is_loaded(model: Path) -> None:  # noqa: F811
    found = opened(model, Document("book", "word " * 2000))
    assert any("book: " in note for note in found.notes())
    with pytest.raises(ContextFullError):
        list(found.send("a question"))
    found.close()


def test_a_question_goes_first_and_the_rest_is_read_once(backend: LocalBackend) -> None:
    engine = backend.engine
    engine.loop.call(lambda: setattr(engine.pieces.scheduler, "idle_chunk", 1))
    backend.configure({"documents": (PAPER, NOTES)})
    whole = length(backend)
    assert sum(asked(backend, "a question")) >= whole
    until(lambda: is_quiet(backend))
    assert backend.engine.chunks.list()[0].present == whole
    backend.chat.load([Turn("a question", Answer(text="an answer"))])
    assert asked(backend, "and then?")[0] >= whole
