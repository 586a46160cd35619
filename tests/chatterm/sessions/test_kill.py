"""kill -9 in mid-answer: tokens reach the disk while it runs; they survive, and what is there is whole."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from tests.counting import PATIENCE, until
from tests.fresh import seeds

ROOT = Path(__file__).resolve().parents[3]
WRITER = "tests.chatterm.sessions.writer"


@pytest.mark.parametrize("steps", [40, 10_000])
@pytest.mark.parametrize("seed", seeds(3))
def test_a_killed_program_loses_nothing_that_another_could_see(
    path: Path, seed: int, steps: int, request: pytest.FixtureRequest
) -> None:
    wanted = random.Random(seed).randrange(50, 400)
    writer = subprocess.Popen(
        [sys.executable, "-m", WRITER, str(path), str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    request.addfinalizer(writer.kill)
    assert writer.stdout is not None
    session = writer.stdout.readline().strip()
    with closing(sqlite3.connect(path)) as reader:

        def kept() -> tuple[int, int]:
            """What is on the disk: the latest exchange, and how many tokens of it."""
            (last,) = reader.execute("SELECT max(id) FROM exchanges").fetchone()
            query = "SELECT length(token_ids) / 4 + (SELECT coalesce(sum(length(ids)), 0) / 4 FROM journal "
            query += "WHERE exchange = exchanges.id) FROM exchanges WHERE id = ?"
            return (last, *reader.execute(query, (last,)).fetchone()) if last else (0, 0)

        until(lambda: steps * (kept()[0] - 1) + kept()[1] >= wanted)
        before = kept()
        os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    store = SessionStore.open(path)
    info, tree, _ = store.load(session)
    assert store.problem == ""
    assert (tree.exchanges[-1].id, len(tree.exchanges[-1].token_ids)) >= before
    assert tree.head is not None
    assert tree.head >= before[0] - 1
    assert info.title == "question 1"
    for exchange in tree.exchanges:
        assert exchange.text == "".join(f"{token} " for token in exchange.token_ids)
        assert exchange.token_ids == list(range(len(exchange.token_ids)))
    assert all(exchange.finish_reason == "eos" for exchange in tree.exchanges[:-1])
    # and it goes on
    exchange = tree.add(tree.head, "go on", "m")
    store.save(session, exchange)
    assert store.load(session)[1][exchange.id].user == "go on"
    assert store.close()


def test_processes_that_start_together_make_one_database(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from chatterm.sessions.store import SessionStore; from chatterm.sessions.records import SessionInfo\n"
        "from chatterm.sessions.tree import Tree\n"
        "store = SessionStore.open(Path(sys.argv[1])); session = store.new(SessionInfo(model='m'))\n"
        "store.save(session, Tree().add(None, 'hello', 'm')); assert store.close(), store.problem\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for writer in writers:
        assert writer.wait(PATIENCE) == 0, writer.communicate()[1]
    store = SessionStore.open(path)
    assert len(store.find()) == 4
    assert store.new(SessionInfo()) not in [info.id for info in store.find()]
    store.close()
