"""Three, four and eight processes that compute a model together: heads and widths that do not divide, and few heads."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from models.files import ModelFiles
from tests.engine.gloo_ranks import Case, each_logits
from tests.models.checkpoints import random_model, tiny_llama, tiny_qwen3, write_checkpoint, write_gguf
from tests.models.families import FAMILIES, tiny_qwen3_moe

BLOCKS = tiny_llama(
    hidden_size=512, intermediate_size=768, num_attention_heads=16, num_key_value_heads=2, head_dim=128
)
CONFIGS = {
    "few heads of keys": tiny_qwen3(intermediate_size=288, vocab_size=163),
    "five heads": tiny_qwen3(num_attention_heads=5, num_key_value_heads=5, intermediate_size=72),
    "experts": tiny_qwen3_moe(moe_intermediate_size=96),
    "one norm of all heads": FAMILIES["olmo2"],
}


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Eight processes, forked from one that has imported what they need."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.engine.gloo_ranks"])
    pool = ProcessPoolExecutor(8, context)
    try:
        yield pool
    finally:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(wait=True)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    path = tmp_path_factory.mktemp("models")
    found: dict[str, Case] = {}
    for name, config in CONFIGS.items():
        (path / name).mkdir()
        found[name] = ModelFiles(name, write_checkpoint(path / name, config), None), "none"
    for kind in (Kind.Q8_0, Kind.Q4_K):
        file = write_gguf(path / f"{kind.name}.gguf", random_model(BLOCKS), kind)
        found[kind.name] = ModelFiles(kind.name, None, file), "auto"
    return found


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_all_have_the_logits_of_one(
    pool: ProcessPoolExecutor, cases: dict[str, Case], tmp_path: Path, ranks: int
) -> None:
    meeting = str(tmp_path / "meeting")
    jobs = [pool.submit(each_logits, rank, ranks, meeting, [*cases.values()]) for rank in range(ranks)]
    alone = each_logits(0, 1, meeting, [*cases.values()])
    of_each = [job.result() for job in jobs]
    for number, (name, expected) in enumerate(zip(cases, alone, strict=True)):
        first, *others = (found[number] for found in of_each)
        assert all(torch.equal(first, other) for other in others), f"{name}: the same bits everywhere"
        torch.testing.assert_close(
            first, expected, atol=5e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
