"""Several programs in one session, which is deleted now and then: what one of them saves stands below what it knew."""

import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import Exchange, TokenEvent
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from tests.fresh import examples

PROGRAMS = 3


def said(tree: Tree) -> dict[str, tuple[str, ...]]:
    """Every message, and those on its path before it."""
    return {one.user: tuple(each.user for each in tree.path(one.parent)) for one in tree.exchanges}


@given(st.data())
@examples(40)
def test_what_is_saved_is_there_with_all_before_it(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sessions.db"
        stores = [SessionStore.open(path) for _ in range(PROGRAMS)]
        session, tree = stores[0].new(SessionInfo(model="m")), Tree()
        stores[0].save(session, tree.add(None, "first", "m"))
        stores[0].flush()
        trees = [tree, *(store.load(session)[1] for store in stores[1:])]
        expected = said(tree)
        for step in range(data.draw(st.integers(1, 15))):
            number = data.draw(st.integers(0, PROGRAMS - 1))
            store, tree = stores[number], trees[number]
            match data.draw(st.sampled_from(["ask", "ask", "answer", "load", "delete"])):
                case "delete":
                    with closing(sqlite3.connect(path)) as other, other:
                        other.execute("PRAGMA foreign_keys = ON")
                        other.execute("DELETE FROM sessions")
                    expected = {}
                    continue
                case "load" if expected:
                    trees[number] = store.load(session)[1]
                    continue
                case "answer" if open_ones := [one for one in tree.exchanges if one.finish_reason is None]:
                    answer(store, session, data.draw(st.sampled_from(open_ones)))
                case _:
                    parent = data.draw(st.sampled_from([None, *(one.id for one in tree.exchanges)]))
                    store.save(session, tree.add(parent, f"{number} asks at {step}", "m"))
            store.flush()
            expected |= said(tree)
            with closing(sqlite3.connect(path)) as other:
                other.row_factory = sqlite3.Row
                rows = {row["id"]: row for row in other.execute("SELECT id, parent, user FROM exchanges")}
            found = Tree(Exchange(id, row["parent"], row["user"]) for id, row in rows.items())
            assert said(found) == expected
        assert all(store.close() for store in stores)


def answer(store: SessionStore, session: str, exchange: Exchange) -> None:
    """Go on with it."""
    store.save(session, exchange)
    event = TokenEvent("x", 1, "answer")
    exchange.add((event,))
    store.say(session, exchange, (event,))
