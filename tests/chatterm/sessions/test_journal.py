"""The journal on a file whose end is torn or damaged: what was whole before is there, and nothing else."""

import random
import shutil
from pathlib import Path

import pytest

from chatterm.backends.backend import Exchange, TokenEvent
from chatterm.backends.exchange import NO_TOKEN
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree

FRAME = 24 + 4096
"""Bytes of a page and its header in SQLite's write-ahead log."""


def token(number: int) -> TokenEvent:
    return TokenEvent(f"{number} ", number, "reasoning" if number < 40 else "answer")


def said(exchange: Exchange, count: int) -> bool:
    """Whether this answer is the first `count` tokens of `token`."""
    events = [token(number) for number in range(count)]
    expected = Exchange(0, None, "")
    expected.add(events)
    return (exchange.token_ids, exchange.text, exchange.reasoning, exchange.thinking_s) == (
        expected.token_ids,
        expected.text,
        expected.reasoning,
        float(count),
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[int, int]]:
    """A folder as a killed process leaves it, its session, and by size of the log the tokens committed then."""
    folder = tmp_path_factory.mktemp("written")
    store, tree = SessionStore.open(folder / "sessions.db"), Tree()
    session = store.new(SessionInfo(model="m"))
    exchange = tree.add(None, "go", "m")
    exchange.seed = 7
    store.save(session, exchange)
    store.head(session, exchange.id)
    store.flush()
    log = folder / "sessions.db-wal"
    sizes = {log.stat().st_size: 0}
    chance = random.Random(1)
    number = 0
    while number < 400:
        events = [token(number + more) for more in range(chance.randint(1, 12))]
        number += len(events)
        exchange.thinking_s = float(number)
        store.say(session, exchange, events)
        store.flush()
        sizes[log.stat().st_size] = number
    copy = tmp_path_factory.mktemp("killed") / "data"
    shutil.copytree(folder, copy)
    assert store.close()
    return copy, session, sizes


@pytest.mark.parametrize("damage", ["cut", "flip", "zeros", "nothing"])
def test_a_torn_record_is_dropped_and_those_before_it_are_not(
    written: tuple[Path, str, dict[int, int]], tmp_path: Path, damage: str
) -> None:
    folder, session, sizes = written
    first, last = min(sizes), max(sizes)
    chance = random.Random(damage)
    for round in range(25 if damage != "nothing" else 1):
        copy = tmp_path / str(round)
        shutil.copytree(folder, copy)
        log = copy / "sessions.db-wal"
        data = bytearray(log.read_bytes())
        assert len(data) == last
        at = chance.randrange(first, last) if damage != "nothing" else last
        if damage == "cut":
            del data[at:]
        elif damage == "flip":
            data[at] ^= 1 << chance.randrange(8)
        elif damage == "zeros":  # what a file system may leave of blocks that were never written
            at = max(at - at % 512, first)
            data[at:] = bytes(len(data) - at)
        log.write_bytes(data)
        kept = max(count for size, count in sizes.items() if size <= max(at, first))
        store = SessionStore.open(copy / "sessions.db")
        info, tree, _ = store.load(session)
        assert (store.problem, info.title, tree.head) == ("", "go", 1)
        assert tree[1].finish_reason is None
        assert tree[1].seed == 7
        assert said(tree[1], kept) if kept else tree[1].token_ids == []
        # and it goes on, as another run of the same answer
        store.save(session, tree[1])
        events = [token(kept), token(kept + 1)]
        tree[1].thinking_s = float(kept + 2)
        store.say(session, tree[1], events)
        assert store.close()
        again = SessionStore.open(copy / "sessions.db")
        assert said(again.load(session)[1][1], kept + 2)
        assert again.find(str(kept + 1)) if kept >= 40 else True, "what a crash left can be found"
        assert again.close()


def test_the_log_holds_about_a_page_for_a_record(written: tuple[Path, str, dict[int, int]]) -> None:
    _, _, sizes = written
    assert (max(sizes) - min(sizes)) / (len(sizes) - 1) < 2.5 * FRAME


def test_another_process_that_looks_takes_nothing_away(tmp_path: Path) -> None:
    store, tree = SessionStore.open(tmp_path / "sessions.db"), Tree()
    session = store.new(SessionInfo(model="m"))
    exchange = tree.add(None, "go", "m")
    store.save(session, exchange)
    for number in range(90):
        exchange.thinking_s = number + 1.0
        store.say(session, exchange, (token(number),))
        if number % 10 == 9:
            store.flush()
            other = SessionStore.open(store.path)  # it folds the journal
            assert said(other.load(session)[1][1], number + 1)
            assert other.find("41") == [] or number >= 41
            assert other.close()
    assert said(store.load(session)[1][1], 90)
    assert store.close()


def test_another_process_that_looks_doubles_no_answer_of_a_remote_model(tmp_path: Path) -> None:
    store, tree = SessionStore.open(tmp_path / "sessions.db"), Tree()
    session = store.new(SessionInfo(model="m"))
    exchange = tree.add(None, "go", "m")
    store.save(session, exchange)
    said = ""
    for word in ("one ", "two ", "three ", "four "):
        said += word
        store.say(session, exchange, (TokenEvent(word, NO_TOKEN, "answer"),))
        store.flush()
        assert store.load(session)[1][1].text == said
        other = SessionStore.open(store.path)  # it folds the journal
        found = other.load(session)[1][1]
        assert (found.text, found.token_ids) == (said, [])
        (info,) = other.find()
        assert info.tokens == 0
        assert other.close()
    assert store.close()
