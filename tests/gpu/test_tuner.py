"""Tuning on a GPU: every candidate keeps the bits of rows, a real step is measured, and the result is used."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.build import build
from engine.cache.kv_cache import KVCache
from engine.execute.build_options import BuildOptions
from engine.execute.cuda.decode_runner import DecodeRunner, make_decode_runner
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.kernel_configs import KernelConfigs, numbers, table_cuts
from engine.execute.cuda.tuner import Tuner, every, machine_identity, model_identity
from engine.execute.tuning import store
from engine.execute.tuning.store import Tuning
from models.loading.load import load_model
from models.network import Network
from tests.gpu.test_decode_rows import CONFIGS, GPU, MOST, SLOTS, logits_of, placed
from tests.models.checkpoints import files_of, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTHS = [3, 640, 1300, 10_240]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder = write_checkpoint(tmp_path_factory.mktemp("tuner"), CONFIGS["qwen3"], dtype=torch.bfloat16)
    return load_model(files_of(folder), dtype=torch.bfloat16, device=GPU)


@pytest.fixture(scope="module")
def cache(network: Network) -> KVCache:
    heads = network.spec.attention
    sizes = (len(network.spec.layers), sum(LENGTHS) // 32 + 200, 32, heads.kv_heads, heads.head_dim)
    cache = KVCache.uniform(*sizes, torch.bfloat16, GPU)
    cache.kv.normal_(generator=torch.Generator(GPU).manual_seed(1))
    return cache


def test_every_candidate_gives_rows_their_own_bits_and_nearly_the_same_numbers(
    network: Network, cache: KVCache
) -> None:
    def runner() -> DecodeRunner:
        made = make_decode_runner(network, cache, "triton", MOST, SLOTS, None, True)
        placed(made, cache, LENGTHS)
        return made

    first = runner()
    program = first.program
    assert isinstance(program, FusedDecoder)
    usual = logits_of(first, [0, 1, 2, 3], LENGTHS).float()
    table = program.cuts
    known = {name: tuple(map(numbers, cuts)) for name, cuts in table.candidates.items()}
    tried = 0
    for chosen in every(known):
        program.cuts = table.with_(chosen)
        try:
            together = logits_of(first, [0, 1, 2, 3], LENGTHS)
        except Exception as error:  # noqa: BLE001 - too large for this GPU, and never chosen
            print(chosen, repr(error)[:100])
            continue
        tried += 1
        error = (together.float() - usual).norm(dim=-1) / usual.norm(dim=-1)
        assert error.max() < 2e-2, chosen
        for slot in range(4):
            assert torch.equal(logits_of(first, [slot], LENGTHS)[0], together[slot]), (chosen, slot)
    assert tried > 4


def test_tuning_finds_something_to_keep_leaves_the_cache_alone_and_can_be_looked_into(
    network: Network, cache: KVCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path))
    before = cache.kv.clone()
    tuner = Tuner.of(network, cache, True, "tiny", lambda job: job(), lambda: False)
    found = tuner.run()
    print(found)
    assert torch.equal(cache.kv, before)
    assert tuner.kept() == found
    assert set(found.seconds) == {"1", "16", "prompt"}
    assert all(0 < after <= once for once, after in found.seconds.values())
    parts = tuner.profile(tmp_path / "trace.json")
    assert {part.layer for part in parts} == {None, *range(len(network.spec.layers))}
    assert {part.name for part in parts} >= {"q, k, v", "attention", "o", "gate and up", "down", "head"}
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_next_start_uses_what_was_found(
    network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CHATTERM_CACHE", str(tmp_path))
    name = "1 to 8 rows: 4096 x 1024"

    def cuts(**options: Any) -> KernelConfigs:
        pieces = build(network, GPU, BuildOptions(context=1024, **options))
        assert pieces.decode_runner is not None
        assert isinstance(pieces.decode_runner.program, FusedDecoder)
        return pieces.decode_runner.program.cuts

    def taken(**options: Any) -> tuple[int, ...]:
        return numbers(cuts(**options).product(1, 4096, 1024, False, None))

    usual = taken()
    table = table_cuts(GPU)
    table.product(1, 4096, 1024, False, None)
    other = numbers(table.candidates[name][-1])
    assert usual != other
    identity = {**machine_identity(GPU), "model": model_identity(network)}
    store.keep(identity, Tuning("tiny", {name: other}, {"1": (2e-4, 1e-4)}))
    assert taken() == other
    assert taken(tune=False) == taken(deterministic=True) == usual
