"""Engines with small random models on a GPU, and several streams of one engine at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch

from engine import SamplingParams
from engine.cache.rows import Rows
from engine.engine import Engine
from engine.execute.build_options import BuildOptions
from engine.schedule.loop import Loop
from engine.schedule.sequence import Sequence
from models.loading.load import load_model
from models.network import Network
from tests.engine.inside import check_blocks, evict_all
from tests.engine.speculation import Oracle, speculate
from tests.engine.tiny import tiny_tokenizer
from tests.models.checkpoints import files_of, tiny_llama, tiny_qwen3

DEVICE = torch.device("cuda")
SIZES: dict[str, Any] = {"vocab_size": 272, "max_position_embeddings": 2048}
CONFIGS: dict[str, Any] = {
    "qwen3": tiny_qwen3(**SIZES, hidden_size=320, intermediate_size=704, head_dim=128, num_attention_heads=8),
    "llama": tiny_llama(
        **SIZES, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3
    ),
}
"""Heads of 128 and of 64, which have kernels of their own."""


class GpuEngine(Engine):
    """An engine with internals that tests look at."""

    network: Network


@contextmanager
def an_engine(
    folder: Path, dtype: torch.dtype = torch.bfloat16, ends: bool = False, **options: Any
) -> Iterator[GpuEngine]:
    """Provide an engine for a checkpoint; no token ends an answer unless `ends`. `options` are those of the engine;
    `room` is that of the weights on the GPU."""
    loop, room = Loop(), options.pop("room", None)
    network = loop.call(lambda: load_model(files_of(folder), dtype=dtype, device=DEVICE, room=room))
    tokenizer = tiny_tokenizer()
    if not ends:
        tokenizer.stop_ids = frozenset()
    given = BuildOptions(**({"attention": "sdpa", "block_size": 32, "context": 1500} | options))
    engine = loop.call(lambda: GpuEngine(loop, network, tokenizer, given, name="tiny", device=DEVICE))
    engine.network = network
    try:
        yield engine
        check_blocks(engine)
    finally:
        engine.close()


Job = tuple[list[int], SamplingParams]
"""A prompt, and the parameters of its answer."""


def start(engine: Engine, job: Job) -> Sequence:
    """Queue a job."""
    return engine.start(Rows.of(job[0]), job[1])


def rest(engine: Engine, sequence: Sequence) -> list[int]:
    """Return the tokens that have not been taken yet."""
    return [event.token_id for event in engine.events(sequence)]


def alone(engine: Engine, job: Job) -> list[int]:
    """Return the answer to a job without other streams."""
    return rest(engine, start(engine, job))


def at_once(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    """Return the answers to all jobs, started together."""
    return [rest(engine, sequence) for sequence in [start(engine, job) for job in jobs]]


def started_apart(engine: Engine, jobs: list[Job]) -> list[tuple[Sequence, int]]:
    """Return every stream with its first token; each starts after the previous one's: no two prompts share a step."""
    found = []
    for job in jobs:
        sequence = start(engine, job)
        found.append((sequence, next(engine.events(sequence)).token_id))
    return found


def one_after_the_other(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    """Return the answers to all jobs; each starts when the previous one has its first token."""
    return [[token, *rest(engine, sequence)] for sequence, token in started_apart(engine, jobs)]


def forget(engine: Engine) -> None:
    """Empty the prefix cache."""
    evict_all(engine)


def random_tokens(count: int, seed: int) -> list[int]:
    """Return random tokens; prompts of different seeds share no significant prefix."""
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_guesses(engine: Engine, jobs: list[Job]) -> None:
    """Compare answers with those for which right and wrong guesses are checked."""
    forget(engine)
    said = [alone(engine, job) for job in jobs]
    known = {at: [*prompt, *tokens] for at, ((prompt, _), tokens) in enumerate(zip(jobs, said, strict=True))}
    before = engine.engine_step.speculating
    speculate(engine, Oracle(answers=dict(known), random=Random(1)))
    forget(engine)
    assert [alone(engine, job) for job in jobs] == said
    engine.engine_step.speculating = before
