"""Programs that are killed while they write what they have cached, or read it: the text is the same as without."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from select import select
from time import monotonic, sleep
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.store.records import scan
from tests.counting import PATIENCE, until
from tests.engine.inside import evict_all
from tests.engine.restarted import READING, WRITING, load, played
from tests.engine.tiny import TEMPLATE, tiny_parts, write_tokenizer
from tests.fresh import seeds
from tests.models.checkpoints import tiny_qwen3, write_checkpoint
from tests.models.hybrids import tiny_qwen3_5

ROOT = Path(__file__).resolve().parents[2]
CONVERSATIONS = seeds(3)
KILLS = 4
"""Of a conversation at most."""
COMPUTED = (
    {"quantize": "int8"},
    {"quantize": "int4", "dtype": "float32"},
    {"quantize": "int8", "kv_dtype": "int8"},
)
"""Ways to compute in which a row has the same bits, whoever computes it how."""
THINKS = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
WORDS = ("light", "harbour", "green", "hill", "storm", "two", "keeper", "boat", "ü", "why", "and", "?")


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that thinks before every answer, and says any bytes; one has recurrent layers."""
    folder = tmp_path_factory.mktemp("model")
    template = TEMPLATE.replace(
        "{{- '<|im_start|>assistant\\n' }}\n{%- if enable", f"{THINKS}\n{{%- if enable"
    )
    assert template != TEMPLATE
    tokenizer = tiny_parts(template).backend
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    shape = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 1024}
    make = {"qwen3": tiny_qwen3, "qwen3.5": partial(tiny_qwen3_5, linear_value_head_dim=32)}[request.param]
    config = make(vocab_size=vocabulary, tie_word_embeddings=False, **shape)
    write_checkpoint(folder, config)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    said = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "</think>")]
    head[[id for id in tokenizer.get_added_tokens_decoder() if id not in said]] = 0
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, template)
    return folder


@dataclass
class Lives:
    process: "subprocess.Popen[bytes]"

    def line(self) -> Any:
        assert self.process.stdout is not None
        assert select([self.process.stdout], [], [], PATIENCE)[0], "the process says nothing"
        return json.loads(self.process.stdout.readline())

    def one(
        self, order: dict[str, Any], lines: int, delay: float, moment: int | None = None
    ) -> list[dict[str, Any]]:
        """Have one go on until it has said so many `lines`, kill it after `delay` more, or before that at a `moment`
        that the shared byte tells of; the answers that it told."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        pid, told, shared = self.line(), [], Path(order["shared"])
        while len(told) < lines and (not told or told[-1] != "done"):
            told.append(self.line())
            assert "failed" not in told[-1], told[-1]["failed"]
        until_then = monotonic() + delay
        while monotonic() < until_then and (moment is None or shared.read_bytes()[0] != moment):
            sleep(0.0005)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not _lives(pid))
        # What it was saying when it was killed may be cut off: an answer that nobody has heard.
        while select([self.process.stdout], [], [], 0)[0]:
            rest = os.read(self.process.stdout.fileno(), 1 << 20)
            assert rest, "it has ended"
        return [line for line in told if isinstance(line, dict)]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.restarted"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    yield Lives(process)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(PATIENCE)


def conversation(random: Random, number: int) -> dict[str, Any]:
    """What will be asked, how, and from which place on."""

    def words(most: int) -> str:
        return " ".join(random.choices(WORDS, k=random.randint(1, most)))

    steps, length = [], 0
    for _ in range(random.randint(2, 5)):
        kept = random.randrange(length) if length > 1 and random.random() < 0.3 else length
        length = kept + 1
        steps.append(
            {
                "keep": kept,
                "text": (text := words(12)),
                "typed": sorted(random.choices(range(len(text) + 1), k=random.choice([0, 1, 4]))),
                "reads": random.choice([None, 0.0, random.uniform(0, 0.1)]),
                "pause": random.choice([0.0, random.uniform(0, 0.2)]),
                "params": {
                    "temperature": random.choice([0.0, 0.7, 1.0]),
                    "seed": random.randrange(1 << 30),
                    "max_tokens": random.randint(1, 60),
                },
            }
        )
    return {
        "name": f"talk-{number}",
        "system": random.choice([None, words(20)]),
        "think_cache": random.choice(["exact", "mask"]),
        "options": random.choice(COMPUTED),
        "steps": steps,
    }


def without_restart(engine: Engine, talk: dict[str, Any]) -> list[dict[str, Any]]:
    """What is said in a process that goes on."""
    evict_all(engine)
    said: list[dict[str, Any]] = []
    for number in range(len(talk["steps"])):
        said.append(json.loads(json.dumps(played(engine, talk, said, number))))
    return said


def torn(store: Path) -> bool:
    """Whether the end of a file is no whole record."""
    for path in store.rglob("*.kv"):
        with path.open("rb") as file:
            end = max((record.end for record in scan(file.fileno())), default=0)
            if end < path.stat().st_size:
                return True
    return False


def test_what_is_said_after_a_kill_is_what_would_have_been_said(
    model: Path, lives: Lives, tmp_path: Path
) -> None:
    engines: dict[str, Engine] = {}
    seen: Counter[str] = Counter()
    shared, found = tmp_path / "shared", 0
    try:
        for number in CONVERSATIONS:
            random = Random(number)
            talk = conversation(random, number)
            how = json.dumps(talk["options"])
            if how not in engines:
                engines[how] = load(str(model), talk["options"])
            expected = without_restart(engines[how], talk)
            store, said = tmp_path / str(number), list[dict[str, Any]]()
            for life in range(KILLS + 2):
                # In the end one says it all and writes all it has to; another is asked for the last answer again.
                calm = life >= KILLS
                said = [] if life == KILLS else said[: len(expected) - (life > KILLS)]
                shared.write_bytes(b"\0")
                order = {
                    "model": str(model),
                    "store": str(store),
                    "shared": str(shared),
                    "talk": talk,
                    "said": said,
                    "waits": calm,
                    "piece": random.choice([0, 500, 4000]),
                    "pause": random.uniform(0, 0.004),
                }
                # At once after it began to ask, it reads; after it has heard an answer, it writes.
                lines = random.choice([1, random.randint(0, 2 * (len(expected) - len(said)))])
                delay = random.choice([random.uniform(0, 0.02), random.expovariate(20)])
                moment = random.choice([None, READING, WRITING])
                waits = delay if moment is None else 0.3
                told = lives.one(order, 99 if calm else lines, 0.0 if calm else waits, moment)
                for one in told:
                    assert one["problem"] == ""
                    assert one["told"] == expected[len(said)]["told"], f"conversation {number}, {len(said)}"
                    said.append(one)
                    seen["answers"] += 1
                seen["restored"] += told[-1]["restored"] if told else 0
                seen["killed"] += 1
                seen[{WRITING: "writing", READING: "reading"}.get(shared.read_bytes()[0], "else")] += 1
                seen["torn"] += torn(store)
            found += told[-1]["restored"]
            assert len(said) == len(expected)
    finally:
        for engine in engines.values():
            engine.close()
    print(dict(seen))
    assert found > 0, "the disk was of use"
