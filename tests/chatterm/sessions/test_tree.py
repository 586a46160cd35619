"""The tree of a session, driven by examples and by random programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import Exchange
from chatterm.sessions.tree import Tree, extent
from tests.fresh import examples


def ids(exchanges: list[Exchange]) -> list[int]:
    return [exchange.id for exchange in exchanges]


def grown() -> Tree:
    """1 - 2 - 3, an edit of 2 (4 - 5), and a retry of 5 (6)."""
    tree = Tree()
    for parent, user in ((None, "a"), (1, "b"), (2, "c"), (1, "B"), (4, "d"), (4, "d")):
        tree.add(parent, user, "m")
    return tree


def test_an_empty_tree() -> None:
    tree = Tree()
    assert tree.head is None
    assert tree.path(tree.head) == []
    assert tree.children(None) == []
    assert len(tree) == 0


def test_what_is_added_becomes_the_head() -> None:
    tree = Tree()
    first = tree.add(None, "hello", "smollm2")
    second = tree.add(first.id, "again", "qwen3")
    assert (first.id, first.parent, first.user, first.model) == (1, None, "hello", "smollm2")
    assert first.created > 0
    assert tree.head == second.id == 2
    assert tree.path(2) == [first, second]


def test_alternatives_of_a_message() -> None:
    tree = grown()
    assert ids(tree.siblings(2)) == ids(tree.siblings(4)) == [2, 4]
    assert ids(tree.siblings(5)) == [5, 6]
    assert ids(tree.children(None)) == [1]
    assert ids(tree.path(6)) == [1, 4, 6]


def test_a_leaf_is_the_end_of_the_branch_that_was_looked_at_last() -> None:
    tree = grown()
    assert tree.leaf(5) == 5
    tree.select(5)
    assert tree.leaf(2) == 3
    tree.select(3)
    assert ids(tree.path(tree.head)) == [1, 2, 3]
    assert tree.leaf(4) == 5, "5 was looked at last, although 6 is newer"


def test_what_lies_ahead() -> None:
    tree = grown()
    assert tree.branches == 3
    tree.select(5)
    tree.select(1)
    assert ids(tree.ahead(tree.head)) == [4, 5], "what was looked at last, not the newest"
    tree.select(None)
    assert ids(tree.ahead(tree.head)) == [1, 4, 5]
    assert tree.ahead(3) == []
    assert Tree().ahead(None) == []
    assert Tree().branches == 0


def test_an_edit_of_the_first_message_begins_anew_and_keeps_the_rest() -> None:
    tree = grown()
    again = tree.add(None, "A", "m")
    assert ids(tree.path(tree.head)) == [again.id]
    assert tree.leaf(1) == 6


def test_a_message_that_was_refused_is_taken_back() -> None:
    tree = grown()
    tree.add(6, "too long", "m")
    tree.drop(7)
    assert tree.head == 6
    assert 7 not in tree
    with pytest.raises(ValueError, match="after it"):
        tree.drop(4)


def test_a_tree_from_the_disk_in_any_order() -> None:
    tree = grown()
    tree.select(3)
    again = Tree(reversed(tree.exchanges), head=3)
    assert again.exchanges == tree.exchanges
    assert again.head == 3
    assert ids(again.siblings(2)) == [2, 4]


def test_damaged_records_still_make_a_tree() -> None:
    records = [Exchange(1, 2, "a"), Exchange(2, 1, "b"), Exchange(3, 99, "c"), Exchange(4, 4, "d")]
    tree = Tree(records, head=77)
    assert ids(tree.children(None)) == [1, 3, 4]
    assert ids(tree.path(2)) == [1, 2]
    assert tree.head == 4


def test_unknown_parents_are_refused() -> None:
    tree = Tree()
    with pytest.raises(KeyError):
        tree.add(5, "a", "m")
    assert len(tree) == 0
    assert tree.head is None


@given(st.data())
@examples(60)
def test_random_programs(data: st.DataObject) -> None:
    tree = Tree()
    for _ in range(data.draw(st.integers(1, 30))):
        known = [exchange.id for exchange in tree.exchanges]
        action = data.draw(st.sampled_from(["add", "select", "leaf", "drop"]))
        if action == "add" or not known:
            exchange = tree.add(data.draw(st.sampled_from([None, *known])), "x", "m")
            assert tree.head == exchange.id
            assert exchange.id not in known or exchange.id > max(known)
        elif action == "select":
            tree.select(data.draw(st.sampled_from([None, *known])))
        elif action == "leaf":
            id = data.draw(st.sampled_from(known))
            head = tree.leaf(id)
            tree.select(head)
            assert id in ids(tree.path(head))
            assert not tree.children(head)
        elif leaves := [id for id in known if not tree.children(id)]:
            tree.drop(data.draw(st.sampled_from(leaves)))
        for exchange in tree.exchanges:
            assert tree.path(exchange.id)[-1] is exchange
            assert exchange in tree.siblings(exchange.id)
        assert tree.head is None or tree.head in tree


@given(
    st.dictionaries(st.integers(1, 9), st.integers(0, 10) | st.none(), max_size=8),
    st.integers(1, 10) | st.none(),
)
def test_the_extent_is_that_of_the_tree(parents: dict[int, int | None], head: int | None) -> None:
    """Also of records that no program of ours wrote."""
    tree = Tree([Exchange(id, parent, "q") for id, parent in parents.items()], head)
    leaves = [exchange for exchange in tree.exchanges if not tree.children(exchange.id)]
    assert extent(parents, head) == (len(tree.path(tree.head)), len(leaves))
