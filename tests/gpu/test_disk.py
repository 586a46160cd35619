"""The KV cache on disk with a GPU: after a restart the tokens and the probabilities are the same, to the bit."""

from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.cache.host_memory import PromptCosts
from engine.store import buffers
from tests.engine.keeping import answer, keep, saved
from tests.gpu.engines import CONFIGS, an_engine, at_once
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DETERMINISTIC: dict[str, Any] = {"attention": "triton", "block_size": 32, "deterministic": True}
WAYS: dict[str, dict[str, Any]] = {
    "sdpa": {"attention": "sdpa"},
    "triton": {"attention": "triton", "block_size": 32},
    "flash": {"attention": "flash", "block_size": 256},
    "int8": {"attention": "triton", "block_size": 32, "kv_dtype": "int8"},
    "fp8": {"attention": "triton", "block_size": 32, "kv_dtype": "fp8"},
    "deterministic": DETERMINISTIC,
}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
LENGTH = 1024
"""Length of a beginning: whole blocks of every size."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), CONFIGS["qwen3"], dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the tier although a GPU computes the rows of such a small model faster than a disk gives them."""
    monkeypatch.setattr(PromptCosts, "worth_it", True)


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    attention = WAYS[request.param]["attention"]
    if attention != "sdpa":
        pytest.importorskip({"triton": "triton", "flash": "flash_attn"}[attention])
    return WAYS[request.param]


def beginning(number: int, length: int = LENGTH) -> list[int]:
    return Random(number).choices(range(250), k=length)


def drawn(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=40, logprobs=1)


def test_after_a_restart_the_same_bits(model: Path, tmp_path: Path, way: dict[str, Any]) -> None:
    prompts = [[*beginning(number), 7, 8, number] for number in range(4)]
    with an_engine(model, context=1400, streams=5, **way) as engine:
        keep(engine, tmp_path / "kv")
        # The stored rows are in the cache before they are asked for, as after a restart.
        for number, prompt in enumerate(prompts):
            engine.warm(prompt[:LENGTH])
            saved(engine, f"talk-{number}", prompt[:LENGTH])
        expected = [answer(engine, prompt, drawn(n))[0] for n, prompt in enumerate(prompts)]
    with an_engine(model, context=1400, streams=5, **way) as engine:
        tier = keep(engine, tmp_path / "kv")
        for number, prompt in enumerate(prompts):
            found, computed = answer(engine, prompt, drawn(number))
            assert computed == 3
            assert found == expected[number], f"conversation {number}"
        assert (tier.restored, tier.problem) == (4 * LENGTH, "")


@needs_triton
def test_what_comes_while_others_decode_is_right(model: Path, tmp_path: Path) -> None:
    prompts = [[*beginning(number), 9, number] for number in range(3)]
    jobs = [(prompt, drawn(number)) for number, prompt in enumerate(prompts)]
    options = {"context": 1400, "streams": 5, **DETERMINISTIC}
    with an_engine(model, **options) as engine:
        keep(engine, tmp_path / "kv")
        for number, prompt in enumerate(prompts):
            engine.warm(prompt[:LENGTH])
            saved(engine, f"talk-{number}", prompt[:LENGTH])
        expected = at_once(engine, jobs)
    with an_engine(model, **options) as engine:
        tier = keep(engine, tmp_path / "kv")
        other = (beginning(99, 50), SamplingParams(temperature=0.0, max_tokens=200))
        assert at_once(engine, [other, *jobs])[1:] == expected
        assert tier.restored == 3 * LENGTH


def test_more_than_the_buffers_hold_goes_through_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [*beginning(5, 1280), 7]
    with an_engine(model, context=1400) as engine:
        keep(engine, tmp_path / "kv")
        engine.warm(prompt[:-1])
        saved(engine, "talk", prompt[:-1])
        expected, _ = answer(engine, prompt, drawn(5))
    monkeypatch.setitem(buffers.GROUP_BYTES, "cuda", 1)
    with an_engine(model, context=1400) as engine:
        tier = keep(engine, tmp_path / "kv")
        assert tier._buffers.each == 1
        assert answer(engine, prompt, drawn(5)) == (expected, 1)


@needs_triton
@pytest.mark.parametrize("damage", range(6))
def test_a_bit_that_is_flipped_changes_no_text(model: Path, tmp_path: Path, damage: int) -> None:
    prompt = [*beginning(6), 7]
    with an_engine(model, context=1400, **DETERMINISTIC) as engine:
        keep(engine, tmp_path / "kv")
        engine.warm(prompt[:-1])
        saved(engine, "talk", prompt[:-1])
        expected, _ = answer(engine, prompt, drawn(6))
    path = next((tmp_path / "kv").rglob("talk.kv"))
    data = bytearray(path.read_bytes())
    data[Random(damage).randrange(len(data))] ^= 1 << damage % 8
    path.write_bytes(data)
    with an_engine(model, context=1400, **DETERMINISTIC) as engine:
        tier = keep(engine, tmp_path / "kv")
        found, computed = answer(engine, prompt, drawn(6))
        assert found == expected
        assert computed > 1
        assert tier.restored == len(prompt) - computed
