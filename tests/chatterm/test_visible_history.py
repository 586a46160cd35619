"""What the model sees of a branch: everything that was said, but for what was compacted; and it survives the disk."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import Compaction, EngineError, Exchange
from chatterm.conversation.attachments import attach, attached_files, without_files
from chatterm.conversation.compaction import Room, checked_summary, summary_request, ways
from chatterm.conversation.headless import Talk
from chatterm.conversation.visible_history import seen, sees_last, summarised
from chatterm.sessions.as_json import from_json, to_json
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from tests.chatterm.scripted import Script, ScriptedBackend

compactions = st.none() | st.builds(Compaction, st.none() | st.text(max_size=8), st.booleans())
branches = st.lists(st.tuples(st.booleans(), compactions), max_size=8).map(
    lambda made: [
        Exchange(
            n, n - 1 or None, f"message {n}", text="said", finish_reason="eos", is_pinned=p, compaction=c
        )
        for n, (p, c) in enumerate(made, 1)
    ]
)


@given(branches)
def test_what_is_pinned_or_came_after_the_summary_is_seen_as_it_was_said(path: list[Exchange]) -> None:
    end, found = summarised(path), seen(path)
    real = [exchange for exchange in found if exchange.id]
    assert real == [exchange for n, exchange in enumerate(path) if n >= end or exchange.is_pinned]
    assert sum(not exchange.id for exchange in found) == bool(end and path[end - 1].compaction.summary)  # type: ignore[union-attr]
    assert sees_last(path) == (bool(found) and found[-1].id == (path[-1].id if path else 0))


@given(branches, st.integers(1, 5000), st.integers(64, 5000))
def test_every_way_can_be_gone_from_any_branch(path: list[Exchange], used: int, context: int) -> None:
    room = Room(path, "system", used, context)
    for way in ways(room, room.default_count) if path else []:
        if way.kind == "summary":
            request = summary_request(room, room.default_count)
            assert [m.role for m in request.messages[-2:]][-1] == "user"
            assert summarised(path) < room.default_count <= len(path)


@given(st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_the_content_of_attached_files_can_be_left_out_again(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    names = [f"f{n}.md" for n in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        (folder / name).write_bytes(text.replace("\0", "").encode("utf-8", "replace"))
    attached = attach("look at " + " ".join("@" + name for name in names), folder)
    message = "\n\n".join([attached.message, *attached.blocks])
    assert attached_files(message) == names
    left = without_files(message)
    assert left.startswith(attached.message)
    assert attached_files(left) == []
    assert without_files("no\n\nfile:\nhere") == "no\n\nfile:\nhere"


@given(branches)
def test_sessions_in_files_keep_it(path: list[Exchange]) -> None:
    _, tree = from_json(to_json(SessionInfo(), Tree(path, len(path) or None)))
    assert [(e.is_pinned, e.compaction) for e in tree.exchanges] == [
        (e.is_pinned, e.compaction) for e in path
    ]


def test_the_store_keeps_it_and_a_talk_goes_on_with_it(tmp_path: Path) -> None:
    store = SessionStore.open(tmp_path / "s.db")
    try:
        backend = ScriptedBackend([Script("an answer")])
        backend.open()
        talk = Talk(backend, store)
        for text in ("one", "two"):
            list(talk.ask(text))
        talk.pin(talk.path[0])
        talk.compact("start")
        assert [question for question, _ in backend.history] == ["one"]
        with pytest.raises(EngineError, match="no longer sees this answer"):
            talk.resume()
        again = Talk(backend, store, talk.saved.session)
        again.begin()
        assert [question for question, _ in backend.history] == ["one"]
        again.compact("off")
        assert [question for question, _ in backend.history] == ["one", "two"]
    finally:
        store.close()


def test_a_second_summary_is_made_of_the_first_one() -> None:
    path = [Exchange(n, n - 1 or None, f"message {n}", text="said " * 20) for n in range(1, 6)]
    path[1] = replace(path[1], compaction=Compaction("the first summary"))
    room = Room(path, "", 500, 600)
    said = summary_request(room, 4).messages[0].content
    assert "the first summary" in said
    path[3].compaction = checked_summary(room, 4, "both")
    assert [exchange.id for exchange in seen(path)] == [0, 5]
    path[3].compaction = None
    assert [exchange.id for exchange in seen(path)] == [0, 3, 4, 5]
