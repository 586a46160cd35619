"""Random chats on a disk that is locked now and then: at any time it all reads well, and in the end it is on disk."""

import sqlite3
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import Document, Exchange, TokenEvent
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from tests.fresh import examples

NAMES = st.sampled_from(["one", "two", "three"])


class Expected:
    """What a store ought to hold."""

    def __init__(self, info: SessionInfo) -> None:
        self.info = info
        self.tree = Tree()
        self.draft = ""
        self.is_gone = False
        """Another program has deleted it; the next message brings it back."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatterm.sessions.schema.LOCK_WAIT", 0.0)
    monkeypatch.setattr("chatterm.sessions.fallback_database._RETRY", 0.0)


def check(store: SessionStore, expected: dict[str, Expected]) -> None:
    found = {info.id: info for info in store.find()}
    begun = {id: one for id, one in expected.items() if len(one.tree) and not one.is_gone}
    assert set(found) == set(begun)
    for id, one in begun.items():
        info, tree, draft = store.load(id)
        assert tree.exchanges == one.tree.exchanges
        assert (tree.head, draft, info.title, info.system) == (
            one.tree.head,
            one.draft,
            one.info.title,
            one.info.system,
        )
        assert info.documents == one.info.documents
        assert found[id].exchanges == info.exchanges == len(tree)
        leaves = sum(not tree.children(exchange.id) for exchange in tree.exchanges)
        counts = (len(tree.path(tree.head)), leaves)  # what is counted is what is shown
        assert (found[id].messages, found[id].branches) == (info.messages, info.branches) == counts
        assert found[id].tokens == sum(len(exchange.token_ids) for exchange in tree.exchanges)


DOCUMENTS = [Document(f"document {number}", f"text {number // 2}") for number in range(4)]


@given(st.data())
@examples(25)
def test_nothing_is_lost(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sessions.db"
        store = SessionStore.open(path)
        store.flush()
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("PRAGMA foreign_keys = ON")  # exchanges go with their session
        expected: dict[str, Expected] = {}
        prompts: list[str] = []
        for step in range(data.draw(st.integers(1, 25))):
            actions = ["new", "lock", "unlock", "prompt"] + [
                "say",
                "more",
                "head",
                "rename",
                "draft",
                "delete",
                "delete elsewhere",
            ] * bool(expected)
            action = data.draw(st.sampled_from(actions))
            if action == "new":
                documents = tuple(data.draw(st.lists(st.sampled_from(DOCUMENTS), max_size=3, unique=True)))
                info = SessionInfo(model="m", title=f"title {step}", documents=documents)
                expected[store.new(info)] = Expected(info)
            elif action == "lock" and not other.in_transaction:
                store.flush()
                other.execute("BEGIN IMMEDIATE")
            elif action == "unlock" and other.in_transaction:
                other.execute("ROLLBACK")
            elif action == "prompt":
                prompts.append(str(step))
                store.add_prompt(str(step))
            elif action == "delete elsewhere":
                one = expected[id := data.draw(st.sampled_from(list(expected)))]
                store.flush()
                if not store.problem and not other.in_transaction and len(one.tree) and not one.is_gone:
                    other.execute("DELETE FROM drafts WHERE session = ?", (id,))
                    other.execute("DELETE FROM sessions WHERE id = ?", (id,))
                    one.draft, one.is_gone = "", True
            elif action in ("say", "more", "head", "rename", "draft", "delete"):
                id = data.draw(st.sampled_from(list(expected)))
                change(store, id, expected, action, data, step)
            if data.draw(st.booleans()):
                check(store, expected)
                assert store.prompts(100) == prompts
        if other.in_transaction:
            other.execute("ROLLBACK")
        other.close()
        assert store.close()
        again = SessionStore.open(path)
        check(again, expected)
        assert again.prompts(100) == prompts
        for id, one in expected.items():
            if one.is_gone or not len(one.tree):
                with pytest.raises(SessionError):
                    again.load(id)
        assert again.close()


def go_on(store: SessionStore, id: str, exchange: Exchange, data: st.DataObject) -> int:
    """Say some tokens more; how many."""
    count = data.draw(st.integers(0, 3))
    for token in range(count):
        event = TokenEvent("x", token, data.draw(st.sampled_from(["answer", "reasoning"])))
        exchange.add((event,))
        exchange.thinking_s += 1.0
        store.say(id, exchange, (event,))
    return count


def change(
    store: SessionStore, id: str, expected: dict[str, Expected], action: str, data: st.DataObject, step: int
) -> None:
    one = expected[id]
    known = [exchange.id for exchange in one.tree.exchanges]
    if action == "say":
        exchange = one.tree.add(data.draw(st.sampled_from([None, *known])), f"message {step}", "m")
        store.save(id, deepcopy(exchange))
        store.head(id, exchange.id)
        one.is_gone = False
        go_on(store, id, exchange, data)
        if data.draw(st.booleans()):
            exchange.finish_reason = "eos"
            store.save(id, deepcopy(exchange))
    elif action == "more" and known:
        exchange = one.tree[data.draw(st.sampled_from(known))]
        if exchange.finish_reason is None and go_on(store, id, exchange, data):
            one.is_gone = False
    elif action == "head" and known:
        one.tree.select(data.draw(st.sampled_from([None, *known])))
        store.head(id, one.tree.head)
    elif action == "rename":
        one.info.title, one.info.system = f"renamed {step}", f"system {step}"
        store.update(id, title=one.info.title, system=one.info.system)
    elif action == "draft" and known:
        one.draft = data.draw(st.sampled_from(["", f"draft {step}"]))
        store.draft(id, one.draft)
    elif action == "delete":
        store.delete(id)
        del expected[id]
