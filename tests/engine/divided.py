"""A tiny model that several processes of a CPU compute together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.params import SamplingParams
from tests.engine.tiny import write_tokenizer
from tests.models.checkpoints import tiny_qwen3, write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
MORE_RANKS = tuple(map(int, os.environ.get("CHATTERM_RANKS", "").split()))
"""Numbers of ranks that are tried beside the usual ones."""
PROMPT = list(b"What is the capital of a country that has none, and why?")


def write_model(path: Path, config: Any = None) -> Path:
    """Its folder; `config` has 272 tokens."""
    write_checkpoint(path, config or tiny_qwen3(vocab_size=272, max_position_embeddings=512))
    write_tokenizer(path)
    return path


def load(folder: Path, ranks: int, **options: Any) -> Engine:
    """An engine around it, in fp32."""
    given = {"device": "cpu", "dtype": "float32", "threads": 1, "context": 400} | options
    return Engine.load(str(folder), tensor_parallel=ranks, **given)


@contextmanager
def loaded(folder: Path, ranks: int, **options: Any) -> Iterator[Engine]:
    """The same, closed afterwards."""
    engine = load(folder, ranks, **options)
    try:
        yield engine
    finally:
        engine.close()


def text(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    """The tokens of an answer."""
    return [event.token_id for event in engine.stream(prompt, params)]


def is_running(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
