"""Networks with recurrent layers on disk: after a restart a conversation goes on from its states."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

from chatterm.conversation.figures import SessionStats
from chatterm.conversation.stats import stats_lines
from chatterm.markdown.lines import line_text
from engine import ContextFullError
from engine.cache import kv_needs
from engine.conversation.chat import Turn
from engine.schedule.prompt_logits import PromptLogits
from engine.store import disk, record_writer
from engine.store.digests import root
from engine.store.records import HEADER
from models.recurrences import DeltaNet
from tests.counting import PATIENCE
from tests.engine.hybrid import NET, SPEC, hybrid_engine, hybrid_network
from tests.engine.keeping import answer, keep, saved, until_written
from tests.engine.test_chat_paths import copies
from tests.engine.test_chat_random import OPERATIONS, one
from tests.engine.tiny import TinyEngine
from tests.fresh import seeds

PROMPT = [(17 * i) % 250 for i in range(121)]


@contextmanager
def hybrid_on_disk(store: Path, fingerprint: str = "as it is", **options: Any) -> Iterator[TinyEngine]:
    """An engine with a tier on disk, over a network with recurrent layers."""
    with patch.object(disk, "PATIENCE_S", (PATIENCE, PATIENCE)), hybrid_engine(**options) as engine:
        keep(engine, store, fingerprint)
        yield engine


def test_after_a_restart_only_what_is_new_is_computed(tmp_path: Path) -> None:
    with hybrid_on_disk(tmp_path) as engine:
        first, computed = answer(engine, PROMPT)
        assert computed == len(PROMPT)
        told = PROMPT + [token for token, _ in first]
        engine.warm(told)  # the last token of an answer has no row before
        saved(engine, "one", told)
        expected, _ = answer(engine, [*told, 5, 6, 7])
    with hybrid_on_disk(tmp_path) as engine:
        again, computed = answer(engine, [*told, 5, 6, 7])
        figures = engine.figures().disk
        assert again == expected
        assert computed == 3
        assert figures is not None
        assert figures.restored_tokens == len(told)
        assert figures.problem == ""
        said = " ".join(map(line_text, stats_lines(300, None, SessionStats(), None, engine.figures())))
        assert f"{figures.blocks} blocks and pieces of states · 0 tokens written, 133 tokens restored" in said
        engine.check()


@pytest.mark.parametrize("seed", seeds(4))
def test_random_conversations_over_restarts(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    monkeypatch.setattr(kv_needs, "MOST_MARKS", rng.choice([0, 8, 48]))
    monkeypatch.setattr(record_writer, "MOST_STATES", rng.choice([1, 5, 8]))
    turns: list[Turn] = []
    loaded: list[list[Turn]] = [[]]
    brought = 0
    for _ in range(4):
        options: dict[str, Any] = {"num_blocks": rng.choice([None, 110]), "max_chunk": rng.choice([16, 64])}
        with hybrid_on_disk(tmp_path, **options) as engine:
            engine.pieces.scheduler.logits = PromptLogits(0)  # every answer has a script
            chat = engine.chat("a system prompt of some length")
            chat.owner = "chat"
            chat.load(copies(turns))
            for operation in ("settle", *rng.choices(OPERATIONS, k=12), "send"):
                if operation == "load":
                    loaded.append(copies(chat.turns))
                    chat.load(copies(rng.choice(loaded)))
                try:
                    one(engine, chat, rng, operation)
                except (ContextFullError, StopIteration):
                    chat.load(copies(chat.turns[: len(chat.turns) // 2]))
                engine.check()
            chat.settle(wait=True)
            assert engine.disk is not None
            if rng.random() < 0.7:
                engine.disk.finish()
            figures = engine.figures().disk
            assert figures is not None
            assert figures.problem == ""
            brought += figures.restored_tokens
            turns = copies(chat.turns)
    assert brought > 0


Writes = list[tuple[str, int, bytes]]
"""What was written in which file at which byte, in order."""
Answers = list[tuple[list[int], list[tuple[int, float]]]]
"""Prompts, and the tokens of their answers with their log-probabilities."""
TALK = [PROMPT[:40], *([7, 8, 9, *PROMPT[n : n + 20]] for n in range(6))]


@pytest.fixture(scope="module")
def written() -> Writes:
    """All that is written of a conversation, over the states of which later ones are written."""
    found: Writes = []

    def recorded(fd: int, data: memoryview, at: int) -> int:
        found.append((Path(f"/proc/self/fd/{fd}").readlink().name, at, bytes(data)))
        return write_now(fd, data, at)

    write_now = os.pwrite
    few = patch.object(record_writer, "MOST_STATES", 4)
    watched = patch.object(os, "pwrite", recorded)
    with TemporaryDirectory() as store, few, watched, hybrid_on_disk(Path(store)) as engine:
        told: list[int] = []
        for message in TALK:
            told += message
            told += [token for token, _ in answer(engine, told)[0]]
            engine.warm(told)
            saved(engine, "one", told)
    ends = [at + len(data) for name, at, data in found if name == "one.kv"]
    assert ends != sorted(ends), "some were written over others"
    return found


@pytest.fixture(scope="module")
def expected() -> Answers:
    """The prompts of the conversation and their answers, without a disk."""
    found, told = Answers(), list[int]()
    with hybrid_engine() as engine:
        for message in TALK:
            told = told + message
            found.append((told, answer(engine, told)[0]))
            told = told + [token for token, _ in found[-1][1]]
    return found


def replay(store: Path, written: Writes, last: bytes = b"") -> Path:
    """Write the same again, of the last write only `last`. Return the file of the conversation."""
    folder = store / root({"all": "as it is"}).hex()[:24]
    folder.mkdir()
    for number, (name, at, data) in enumerate(written, 1):
        with (folder / name).open("r+b" if (folder / name).exists() else "w+b") as file:
            file.seek(at)
            file.write(last if last and number == len(written) else data)
    return folder / "one.kv"


def test_states_that_were_written_over_others_are_found(
    written: Writes, expected: Answers, tmp_path: Path
) -> None:
    replay(tmp_path, written)
    with hybrid_on_disk(tmp_path) as engine:
        prompt, said = expected[-1]
        told = prompt + [token for token, _ in said]
        assert answer(engine, [*told, 5, 6, 7])[1] == 3


@pytest.mark.parametrize("seed", seeds(8))
def test_what_was_cut_off_while_it_was_written_is_never_read(
    seed: int, written: Writes, expected: Answers, tmp_path: Path
) -> None:
    rng = Random(seed)
    count = rng.randint(1, len(written))
    replay(tmp_path, written[:count], written[count - 1][2][: rng.randint(1, 10**6)])
    with hybrid_on_disk(tmp_path) as engine:
        for prompt, said in rng.sample(expected, 3):
            assert answer(engine, prompt)[0] == said
        figures = engine.figures().disk
        assert figures is not None
        assert figures.problem == ""
        engine.check()


@pytest.mark.parametrize("seed", seeds(6))
def test_a_damaged_file_changes_no_token(
    seed: int, written: Writes, expected: Answers, tmp_path: Path
) -> None:
    rng = Random(seed)
    path = replay(tmp_path, written)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 3, 30])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    with hybrid_on_disk(tmp_path) as engine:
        for prompt, said in rng.sample(expected, 3):
            assert answer(engine, prompt)[0] == said
        engine.check()


def test_the_states_of_another_network_or_type_are_computed_again(
    written: Writes, expected: Answers, tmp_path: Path
) -> None:
    replay(tmp_path, written)
    prompt, said = expected[-1]
    with hybrid_on_disk(tmp_path, "other weights") as engine:
        assert answer(engine, prompt) == (said, len(prompt))
    wider = replace(SPEC, layers=(replace(NET, mixer=DeltaNet(2, 4, 32, 16, conv_width=4)), *SPEC.layers[1:]))
    with hybrid_on_disk(tmp_path, network=hybrid_network(wider)) as engine:
        assert answer(engine, prompt)[1] == len(prompt), "nothing of it has the right size"
        figures = engine.figures().disk
        assert figures is not None
        assert figures.problem == ""


def test_old_states_make_room_for_new_ones(tmp_path: Path) -> None:
    told, taken, begun = PROMPT[:30], list[int](), list[int]()
    with hybrid_on_disk(tmp_path, context=900) as engine:
        assert engine.disk is not None
        for turn in range(16):
            told = [*told, turn, *PROMPT[:20]]
            told += [token for token, _ in answer(engine, told)[0]]
            engine.warm(told)
            saved(engine, "one", told)
            begun.append(len(told) // 4)
            taken.append(engine.loop.call(lambda: engine.taken_on_disk("one")))
        record = engine.disk._buffers.block_bytes + HEADER
        assert taken[-1] - taken[8] <= (begun[-1] - begun[8] + 2 * 8) * record, "blocks, and parts of one"
    with hybrid_on_disk(tmp_path, context=900) as engine:
        assert answer(engine, [*told, 5, 6, 7])[1] == 3
        assert answer(engine, [*told[:-8], 5, 6, 7])[1] < len(told), "a state before the end"


def test_states_count_in_the_limit_of_the_folder(tmp_path: Path) -> None:
    talks = [[number, *PROMPT] for number in range(6)]
    with hybrid_engine() as engine:
        tier = keep(engine, tmp_path, most=200 * 1024)
        for number, talk in enumerate(talks):
            engine.warm(talk)
            saved(engine, f"talk-{number}", talk)
            assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 200 * 1024
        assert tier.problem == ""
    with hybrid_engine() as engine:
        keep(engine, tmp_path)
        assert answer(engine, [*talks[-1], 5, 6, 7])[1] == 3
        assert answer(engine, [*talks[0], 5, 6, 7])[1] == len(talks[0]) + 3, "it made room for later ones"


def test_a_chunk_of_the_library_goes_on_from_its_state(tmp_path: Path) -> None:
    with hybrid_on_disk(tmp_path) as engine:
        engine.chunks.keep(PROMPT, "paper", wait=True, owner="chunk-paper")
        until_written(engine)
        expected, _ = answer(engine, [*PROMPT, 5, 6, 7])
        before = (path := next(tmp_path.rglob("chunk-paper.kv"))).stat().st_size
        saved(engine, "one", [*PROMPT, 5, 6, 7])
        assert path.stat().st_size == before
    with hybrid_on_disk(tmp_path) as engine:
        assert answer(engine, [*PROMPT, 5, 6, 7]) == (expected, 3)
