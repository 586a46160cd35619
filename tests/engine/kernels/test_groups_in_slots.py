"""An engine whose answers come from slots of a decode runner, with layers whose windows have rows of their own."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine import SamplingParams, build
from engine.cache import kv_needs
from engine.cache.rows import Rows
from engine.engine import Engine
from engine.execute import compatibility
from engine.execute.cuda.decode_runner import DecodeRunner
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.verify import Checking
from engine.execute.runner import Runner
from engine.sampling.device_sampler import DeviceSampler
from tests.engine.keeping import heard
from tests.engine.test_decode_runner import Event
from tests.engine.tiny import tiny_engine
from tests.models.families import tiny_gemma3, tiny_lfm2

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_groups.py does the same"),
    pytest.mark.usefixtures("few_programs"),
]
SLOTS, BLOCK, CONTEXT = 4, 16, 160
SIZES: dict[str, Any] = {
    "vocab_size": 272, "max_position_embeddings": 512, "hidden_size": 64, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "gemma3": tiny_gemma3(
        **SIZES, head_dim=64, sliding_window=20, layer_types=["sliding_attention", "full_attention"]
    ),
    "lfm2": tiny_lfm2(**SIZES, layer_types=["conv", "full_attention"]),
}


def in_slots(pieces: build.Pieces, reason: str | None) -> None:
    """Decode in slots, by fused kernels in the interpreter."""
    cache, network = pieces.cache, pieces.network
    sampler = DeviceSampler(272, SLOTS, torch.device("cpu"))
    slots = Slots(SLOTS, SLOTS, CONTEXT // BLOCK + 1, sampler.token, cache.pools)
    program = FusedDecoder(network, cache, slots.given, pdl=False)
    checking = Checking(program, sampler, slots, BLOCK)
    pieces.decode_runner = DecodeRunner(program, sampler, slots, CONTEXT, None, Event, checking)


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have slots taken back soon, and rows released by group, as on a GPU."""
    monkeypatch.setattr(kv_needs, "BRANCH_WINDOWS", (1, 0))
    monkeypatch.setattr(compatibility, "not_native", lambda spec: "as on a GPU")
    monkeypatch.setattr(Runner, "go_native", lambda *_: None)


def answers(engine: Engine, prompts: list[list[int]], most: int) -> list[list[tuple[int, float]]]:
    params = SamplingParams(temperature=0.0, max_tokens=most, logprobs=0)
    asked = [engine.start(Rows.of(prompt), params) for prompt in prompts]
    return [heard(engine, sequence) for sequence in asked]


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_plain_modules_with_all_rows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Streams that cross windows, end at different times, share beginnings and become alike: the ends of full blocks
    are merged while others decode, and slots that were released are taken by others."""
    rng = Random(name)
    stem = [rng.randrange(250) for _ in range(60)]
    # When the first two merge their block at row 64, the third takes the slot that this frees, two rows behind.
    rounds = [
        ([stem[:50], stem[:50], [*stem[:31], 7]], 20),
        ([[*stem[:50], 9], stem[:50], stem[:14]], 9),
    ]
    found: list[list[list[tuple[int, float]]]] = []
    options = {"context": CONTEXT, "max_chunk": 32, "block_size": BLOCK, "streams": 3, "fused": True}
    for fused in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(build, "_tell", in_slots if fused else lambda *_: None)
            if not fused:
                patched.setattr("engine.cache.kv_needs.layer_groups", lambda *_: [])
            with tiny_engine(tmp_path, CONFIGS[name], **options) as engine:
                assert bool(engine.pieces.cache.pools) is fused
                engine.tokenizer.stop_ids = frozenset()
                assert (engine.pieces.decode_runner is not None) is fused
                for part in engine.pieces.cache.parts if fused else ():
                    part[:, :, :-BLOCK] = float("nan")  # which nobody has written
                found.append([answer for each in rounds for answer in answers(engine, *each)])
                engine.check()
    for mine, theirs in zip(*found, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs]
        assert [chance for _, chance in mine] == pytest.approx([chance for _, chance in theirs], abs=1e-3)
