"""What a saved session has computed is brought back from the disk: when it is continued, opened, and branched."""

from pathlib import Path

import pytest

from chatterm.backends.backend import ChatOptions
from chatterm.backends.local import LocalBackend
from chatterm.conversation.headless import Talk
from chatterm.sessions.store import SessionStore
from engine.cache.offload import common_prefix
from tests.chatterm.test_crash import model  # noqa: F401 - a fixture
from tests.counting import until

OPTIONS = ChatOptions("cpu", "float32", context=512, sampling={"seed": 3, "max_tokens": 40})


def opened(folder: Path) -> LocalBackend:
    backend = LocalBackend(str(folder), OPTIONS)
    backend.open()
    return backend


def is_written(backend: LocalBackend) -> bool:
    return not backend.engine.loop.call(lambda: backend.engine.disk.has_writes)


def settled(backend: LocalBackend) -> int:
    """Wait until idle work is over; how many tokens came from the disk so far."""
    until(lambda: backend.figures().warmed is None)
    assert not backend.figures().disk.problem
    return backend.figures().disk.restored_tokens


@pytest.mark.parametrize("policy", ["exact", "mask"])
def test_a_session_and_its_branches_come_back_while_they_are_read(
    model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path / "data"))
    backend, store = opened(model), SessionStore.open(tmp_path / "sessions.db")
    backend.configure({"think_cache": policy})
    talk = Talk(backend, store)
    for message in ("a first message of some length", "a second one"):
        list(talk.ask(message))
        backend.settle()
    whole = backend.chat.history
    talk.undo()
    list(talk.ask("another second one, to go on from the first"))
    branch = backend.chat.history
    backend.settle()
    until(lambda: is_written(backend))
    backend.close()
    store.flush()

    backend = opened(model)
    backend.configure({"think_cache": policy})
    size = backend.figures().block_size
    again = Talk(backend, store, talk.saved.session)
    again.begin()
    assert again.path[-1].user.startswith("another")
    first = settled(backend)
    assert backend.chat.history == branch
    assert first >= len(branch) // size * size
    again.saved.select(2)
    backend.load_path(again.path)
    assert again.path[-1].user == "a second one"
    own = len(whole) // size - common_prefix(whole.keys, branch.keys) // size
    assert own > 0
    assert settled(backend) - first >= own * size
    assert backend.chat.history == whole
    backend.close()
    assert store.close()


def test_what_the_last_answer_computed_is_there_right_after_quitting(
    model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHATTERM_DATA", str(tmp_path / "data"))
    backend, store = opened(model), SessionStore.open(tmp_path / "sessions.db")
    talk = Talk(backend, store)
    list(talk.ask("a first message of some length"))
    history = backend.chat.history
    computed = backend.engine.cached_rows(history)
    size = backend.figures().block_size
    backend.close()  # nobody waited for anything
    store.flush()

    backend = opened(model)
    Talk(backend, store, talk.saved.session).begin()
    assert settled(backend) >= computed // size * size > 0
    backend.close()
    assert store.close()
