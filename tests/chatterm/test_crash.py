"""kill -9 in mid-answer: no committed token is lost or doubled, and the answer goes on as if nothing had happened."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from select import select
from time import sleep

import pytest
from safetensors.torch import load_file, save_file

from chatterm.backends.backend import EngineError, Exchange, Outcome, TokenEvent
from chatterm.backends.local import LocalBackend
from chatterm.conversation.headless import Talk
from chatterm.sessions.store import SessionStore
from tests.chatterm.victim import MESSAGES, SAMPLING, backend_of
from tests.counting import PATIENCE, until
from tests.engine.inside import evict_all
from tests.engine.tiny import tiny_parts, write_tokenizer
from tests.fresh import seeds
from tests.models.checkpoints import tiny_qwen3, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
KILLS = seeds(4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model on the disk that says any bytes and ends its turn, but writes no other marker: an answer with one
    has other tokens once it was saved (`engine/conversation/import_turns.py`).
    """
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_parts().backend
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    write_checkpoint(
        folder, tiny_qwen3(vocab_size=vocabulary, max_position_embeddings=1024, tie_word_embeddings=False)
    )
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"] * 4  # so much that nothing of no weight is ever drawn
    end = tokenizer.token_to_id("<|im_end|>")
    head[[id for id in tokenizer.get_added_tokens_decoder() if id != end]] = 0
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def backend(model: Path) -> Iterator[LocalBackend]:
    backend = backend_of(model, dict(SAMPLING))
    backend.open()
    yield backend
    backend.close()


@dataclass
class Victims:
    process: "subprocess.Popen[bytes]"

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select([self.process.stdout], [], [], PATIENCE)[0], "the process says nothing"
        return self.process.stdout.readline().decode().strip()

    def kill_one(self, path: Path, seed: int | None, tokens: int, delay: float) -> tuple[int, int]:
        """Let one chat until `tokens` are committed, kill it after `delay` more; what was committed for sure."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path} {'-' if seed is None else seed}\n".encode())
        self.process.stdin.flush()
        pid = int(self.line())
        kept, whole = (0, 0), 0
        while tokens:
            line = self.line()
            if line == "done":
                break
            number, count = map(int, line.split())
            whole = kept[1] if number > max(kept[0], 1) else whole
            kept = number, count
            if whole + count >= tokens:
                break
        sleep(delay)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not _lives(pid))
        while select([self.process.stdout], [], [], 0)[0]:
            line = self.line()
            if line != "done" and len(line.split()) == 2:
                kept = tuple(map(int, line.split()))  # type: ignore[assignment]
        return kept


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def victims(model: Path) -> Iterator[Victims]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chatterm.victim", str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    yield Victims(process)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(PATIENCE)


def forget_all(backend: LocalBackend) -> None:
    """Nothing is left of what was computed, as in a new process."""
    engine = backend.engine
    assert engine is not None
    evict_all(engine)


def uninterrupted(
    backend: LocalBackend, path: list[Exchange], exchange: Exchange
) -> tuple[list[TokenEvent], Outcome]:
    """What the answer of `exchange` would have been."""
    forget_all(backend)
    backend.configure({"sampling": SAMPLING | {"seed": exchange.seed}})
    backend.load_path(path)
    events = list(backend.send(exchange.user))
    assert backend.last is not None
    return events, backend.last


def texts(events: list[TokenEvent]) -> tuple[str, str]:
    return tuple("".join(e.text for e in events if e.kind == kind) for kind in ("answer", "reasoning"))  # type: ignore[return-value]


def goes_on(
    backend: LocalBackend, path: Path, sampling: dict[str, object], committed: tuple[int, int]
) -> bool:
    """Go on with the session in `path` and compare; whether its answer was cut off."""
    store = SessionStore.open(path)
    latest = store.latest()
    if latest is None:
        assert committed == (0, 0)
        return False
    forget_all(backend)
    backend.configure({"sampling": sampling})
    talk = Talk(backend, store, latest.id)
    talk.begin()
    exchange = talk.tree[max(e.id for e in talk.tree.exchanges)]
    number, count = committed
    assert exchange.id >= number
    assert exchange.id > number or len(exchange.token_ids) >= count
    cut = exchange.finish_reason is None
    kept = len(exchange.token_ids)
    shown = exchange.text, exchange.reasoning
    added: list[TokenEvent] = []
    over = False
    if cut:
        assert backend.last is not None
        over = backend.last.finish_reason != "cancelled"
        if not over:
            added = list(talk.resume())
        elif backend.last.finish_reason != "length":  # killed between its last token and its end
            with pytest.raises(EngineError, match="complete"):
                list(talk.resume())
    done = backend.last
    assert done is not None
    events, whole = uninterrupted(backend, talk.tree.path(exchange.parent), exchange)
    ids = [event.token_id for event in events]
    assert list(done.token_ids) == list(whole.token_ids) == ids
    assert (done.text, done.reasoning, done.finish_reason) == (
        whole.text,
        whole.reasoning,
        whole.finish_reason,
    )
    if cut:
        assert shown == texts(events[:kept])
        assert [event.token_id for event in added] == ids[kept:]
    store.flush()
    if cut and not over:
        again = SessionStore.open(path)
        saved = again.load(latest.id)[1][exchange.id]
        assert (saved.token_ids, saved.text, saved.finish_reason) == (ids, whole.text, whole.finish_reason)
        assert again.close()
    assert store.close()
    return cut


def test_a_chat_that_is_killed_goes_on_from_the_very_token(
    victims: Victims, backend: LocalBackend, tmp_path: Path
) -> None:
    chance = random.Random(5 + KILLS.start)
    cut = 0
    for number in KILLS:
        path = tmp_path / str(number) / "sessions.db"
        seed = None if number % 3 == 0 else number
        tokens = chance.randrange(SAMPLING["max_tokens"] * len(MESSAGES))  # type: ignore[operator]
        committed = victims.kill_one(path, seed, tokens, chance.uniform(0, 0.02))
        sampling = SAMPLING | ({} if seed is None else {"seed": seed})
        cut += goes_on(backend, path, sampling, committed)
        shutil.rmtree(path.parent)
    assert cut > len(KILLS) / 4 or len(KILLS) < 20, "many of them were killed in mid-answer"
