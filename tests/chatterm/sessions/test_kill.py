"""kill -9 in mid-answer: all but the last second is there, and what is there is whole."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import Store

ROOT = Path(__file__).resolve().parents[3]
WRITER = "tests.chatterm.sessions.writer"


@pytest.mark.parametrize("steps", [40, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_program_loses_at_most_a_second(path: Path, seed: int, steps: int) -> None:
    seconds = random.Random(seed).uniform(1.2, 2.2)
    writer = subprocess.Popen(
        [sys.executable, "-m", WRITER, str(path), str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert writer.stdout is not None
    session = writer.stdout.readline().strip()
    said: list[tuple[float, int, int]] = []
    begun = 0.0
    for line in writer.stdout:
        time, number, step = line.split()
        said.append((float(time), int(number), int(step)))
        begun = begun or said[0][0]
        if said[-1][0] - begun > seconds:
            break
    killed = monotonic()
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    store = Store.open(path)
    info, tree, _ = store.load(session)
    assert store.problem == ""
    old = [(number, step) for moment, number, step in said if moment < killed - 1.0]
    assert old, "it ran for more than a second"
    last_exchange, last_step = old[-1]
    assert (tree.exchanges[-1].id, len(tree.exchanges[-1].token_ids)) >= (last_exchange, last_step + 1)
    assert tree.head is not None
    assert tree.head >= last_exchange
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
        "from chatterm.sessions.store import Store; from chatterm.sessions.records import SessionInfo\n"
        "from chatterm.sessions.tree import Tree\n"
        "store = Store.open(Path(sys.argv[1])); session = store.new(SessionInfo(model='m'))\n"
        "store.save(session, Tree().add(None, 'hello', 'm')); assert store.close(), store.problem\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for writer in writers:
        assert writer.wait(60) == 0, writer.communicate()[1]
    store = Store.open(path)
    assert len(store.find()) == 4
    assert store.new(SessionInfo()) not in [info.id for info in store.find()]
    store.close()
