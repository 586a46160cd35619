"""`--tensor-parallel`: a rank that is killed leaves one line and a saved conversation, and Ctrl-C leaves nobody."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chatterm.sessions.store import SessionStore
from tests.counting import PATIENCE, until
from tests.engine.divided import is_running, write_model
from tests.models.checkpoints import tiny_qwen3

ROOT = Path(__file__).resolve().parents[2]
LONG = tiny_qwen3(vocab_size=272, max_position_embeddings=16_384)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), LONG)


def ranks_of(pid: int) -> list[int]:
    """Its children that are ranks."""
    found = [
        int(child)
        for children in Path(f"/proc/{pid}/task").glob("*/children")
        for child in children.read_text().split()
    ]
    return [child for child in found if b"parallel/start.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def answering(folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", list[int]]]:
    """A chat in the middle of a long answer, in a process group of its own; and its ranks."""
    command = [sys.executable, "-m", "chatterm", "run", str(folder), "-p", "Why?", "--save", "--no-server"]
    options = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--tensor-parallel", "2"]
    sampling = ["--max-tokens", "16000", "--temperature", "0"]
    with subprocess.Popen(
        [*command, *options, *sampling],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(8), process.stderr and process.stderr.read()
            ranks = ranks_of(process.pid)
            assert len(ranks) == 1
            yield process, ranks
        finally:
            process.kill()


def test_a_rank_that_is_killed_leaves_a_line_and_the_conversation(folder: Path, own_folders: Path) -> None:
    with answering(folder) as (process, ranks):
        os.kill(ranks[0], signal.SIGKILL)
        _, told = process.communicate(timeout=PATIENCE)
    *_, line = told.decode().strip().splitlines()
    assert "the conversation is intact. Load the model again." in line
    assert "Traceback" not in told.decode()
    assert process.returncode == 1
    until(lambda: not any(map(is_running, ranks)))
    store = SessionStore.open()
    try:
        session = store.latest()
        assert session is not None
        (exchange,) = store.exchanges(session.id)
        assert exchange.user == "Why?"
        assert len(exchange.token_ids) > 0
    finally:
        store.close()


def test_ctrl_c_ends_all(folder: Path) -> None:
    with answering(folder) as (process, ranks):
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, told.decode()
    assert "Traceback" not in told.decode()
    until(lambda: not any(map(is_running, ranks)))
