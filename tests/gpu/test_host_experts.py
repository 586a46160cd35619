"""Experts in host memory with a real GPU: graphs that call the host, bits, fetching, memory given back."""

import ctypes
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.decode_runner import DecodeRunner
from engine.execute.cuda.fetched_experts import stacks
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.prefill import FusedPrefill
from engine.kernels.native import library as native
from engine.kernels.native.library import Pool
from engine.params import SamplingParams
from models.loading.load import load_model
from models.network import Network
from models.reference.decoder import Decoder
from models.spec import FeedForward
from models.weights.block_formats import Kind
from models.weights.formats.blocks import dequantize
from tests.engine.host_split import split
from tests.gpu import test_decode_rows as rows_of_steps
from tests.gpu.engines import alone, an_engine, at_once, forget, random_tokens
from tests.gpu.test_experts import BF16, ERNIE, GPU, QWEN, a_spec, drawn, errors
from tests.models.checkpoints import files_of, random_model, write_checkpoint, write_gguf
from tests.models.families import tiny_qwen3_moe

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(native.problem() is not None, reason="needs the native kernels"),
]
pytest.importorskip("triton")
SPECS = {
    "qwen": a_spec(2048, QWEN, QWEN, QWEN),
    "ernie": a_spec(2560, ERNIE, FeedForward(1024), ERNIE),
}
MOVED = {"qwen": {1, 2}, "ernie": {2}}
CONFIG = tiny_qwen3_moe(
    vocab_size=272,
    hidden_size=320,
    intermediate_size=704,
    head_dim=128,
    num_attention_heads=8,
    max_position_embeddings=2048,
    moe_intermediate_size=160,
    num_experts=16,
    num_experts_per_tok=4,
    decoder_sparse_step=1,
)


def is_pinned(memory: torch.Tensor) -> bool:
    """Whether it is pinned where it begins: torch looks where its storage begins, which may be on another page."""
    own = (ctypes.c_uint8 * memory.nbytes).from_address(memory.data_ptr())
    return torch.frombuffer(own, dtype=torch.uint8).is_pinned()


@pytest.fixture(scope="module", params=list(SPECS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def network(name: str) -> Network:
    """Return a network with layers on the GPU before, and in one case after, those in host memory."""
    return split(drawn(SPECS[name], BF16), MOVED[name])


@pytest.fixture(scope="module")
def host(network: Network) -> Iterator[HostExperts]:
    found = HostExperts(network, Pool())
    found.prepare(fetches=True, fixed=False)
    assert found.problem is None
    assert all(is_pinned(stack) for weights in network.on_host.values() for stack in stacks(weights))
    print(found.told(len(network.layers)), found.costs)
    yield found
    memory = [stack for weights in network.on_host.values() for stack in stacks(weights)]
    found.close()
    assert not any(is_pinned(stack) for stack in memory)


@pytest.fixture(scope="module")
def cache(network: Network) -> KVCache:
    heads = network.spec.attention
    blocks = sum(length // 32 + 40 for length in rows_of_steps.LENGTHS) + rows_of_steps.SLOTS * 60
    cache = KVCache.uniform(len(network.layers), blocks, 32, heads.kv_heads, heads.head_dim, BF16, GPU)
    cache.kv.normal_(generator=torch.Generator(GPU).manual_seed(1))
    return cache


def test_up_to_eight_rows_get_the_bits_that_each_gets_alone(
    network: Network, cache: KVCache, host: HostExperts
) -> None:
    """Twice without graphs, and from then on with captured ones."""
    runner, random, lengths = (
        rows_of_steps.runner_of(network, cache, on_host=host),
        Random(0),
        rows_of_steps.LENGTHS,
    )
    rows_of_steps.placed(runner, cache, lengths)
    single = [rows_of_steps.logits_of(runner, [slot], lengths)[0] for slot in range(len(lengths))]
    for count in (2, 2, 3, 4, 5, 6, 7, 8, 8, 8):
        slots = random.sample(range(len(lengths)), count)
        together = rows_of_steps.logits_of(runner, slots, lengths)
        assert all(torch.equal(row, single[slot]) for row, slot in zip(together, slots, strict=True))


@pytest.mark.parametrize("count", [1, 8, 40])
def test_steps_are_as_near_to_the_truth_as_those_with_all_experts_on_the_gpu(
    name: str, network: Network, cache: KVCache, host: HostExperts, count: int
) -> None:
    lengths, whole = (rows_of_steps.LENGTHS[:8] * 5)[:count], drawn(SPECS[name], BF16)
    exact, kept, found = drawn(SPECS[name], torch.float32), cache.kv.clone(), []
    wide = KVCache.uniform(len(exact.layers), len(kept[0, 0]) // 32, 32, *kept.shape[-2:], torch.float32, GPU)
    wide.kv.copy_(kept)
    for runner, memory in (
        (rows_of_steps.runner_of(network, cache, graphs=False, on_host=host), cache),
        (rows_of_steps.runner_of(whole, cache, graphs=False), cache),
        (rows_of_steps.runner_of(exact, wide, graphs=False, fused=False), wide),
    ):
        rows_of_steps.placed(runner, memory, lengths)
        found.append(rows_of_steps.logits_of(runner, list(range(count)), lengths))
        cache.kv.copy_(kept)
    ours, theirs = (errors(logits, found[2]) for logits in found[:2])
    print(f"{count} rows: median {ours.median():.2e} of {theirs.median():.2e}, most {ours.max():.2e}")
    assert ours.median() <= 1.25 * theirs.median()


@pytest.mark.parametrize("graphs", [True, False])
def test_sequences_that_join_and_leave_get_the_tokens_that_they_get_alone(
    network: Network, cache: KVCache, host: HostExperts, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, runner_of = [], rows_of_steps.runner_of

    def with_host(*given: Any) -> DecodeRunner:
        made.append(runner_of(*given, on_host=host))
        return made[-1]

    monkeypatch.setattr(rows_of_steps, "runner_of", with_host)
    rows_of_steps.test_sequences_that_join_and_leave_get_the_tokens_that_they_get_alone(
        network, cache, graphs
    )
    recorded = made[0]._graphs
    assert (recorded is not None) == graphs
    if recorded is not None:
        assert recorded.problem is None
        assert recorded._graphs


@pytest.mark.parametrize("tokens", [1, 40, 300, 1500])
@pytest.mark.parametrize("fetches", [False, True])
def test_prompts_are_as_near_to_the_truth_as_those_with_all_experts_on_the_gpu(
    name: str,
    network: Network,
    host: HostExperts,
    tokens: int,
    fetches: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "fetch_from", 1 if fetches else None)
    ids, found = torch.arange(tokens, device=GPU) * 7 % 512, []
    heads, exact = network.spec.attention, drawn(SPECS[name], torch.float32)
    for program, dtype in (
        (FusedPrefill(network, host), BF16),
        (FusedPrefill(drawn(SPECS[name], BF16)), BF16),
        (Decoder(exact), torch.float32),
    ):
        cache = KVCache.uniform(
            len(network.layers), tokens // 32 + 1, 32, heads.kv_heads, heads.head_dim, dtype, GPU
        )
        plan = SdpaBackend(cache).plan(StepBatch((Span(tuple(range(tokens // 32 + 1)), 0, tokens),)))
        with torch.inference_mode():
            for _ in range(2):  # the second time, buffers are reused
                hidden = program.forward(ids, torch.arange(tokens, device=GPU), plan)
            found.append(program.logits(hidden).float())
    if fetches:
        assert torch.equal(found[0], found[1])  # by the same kernels
    ours, theirs = (errors(logits, found[2]) for logits in found[:2])
    print(f"{tokens} tokens: median {ours.median():.2e} of {theirs.median():.2e}, most {ours.max():.2e}")
    assert ours.median() <= 1.25 * theirs.median()


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
def test_blocks_are_expanded_on_the_gpu_as_on_the_cpu(kind: Kind) -> None:
    network = split(drawn(SPECS["qwen"], BF16), {0, 1, 2}, kind)
    host = HostExperts(network, Pool())
    host.prepare(fetches=True, fixed=True)
    fetched = host.fetched
    for _ in range(3):  # a buffer that is overwritten too early would show
        fetched.begin()
        for layer, weights in network.on_host.items():
            torch.cuda._sleep(2_000_000)
            first = fetched.take(layer).experts[0]
            taken = first.gate_up.weight.as_strided((128, 1536, 2048), (1536 * 2048, 2048, 1)).clone()
            fetched.give_back(layer)
            for expert in (0, 77, 127):
                parts = [
                    torch.empty(part.rows, part.columns) for part in weights.experts[expert].gate_up.parts
                ]
                for part, numbers in zip(weights.experts[expert].gate_up.parts, parts, strict=True):
                    dequantize(part.data, part.format, numbers)
                assert torch.equal(taken[expert].cpu(), torch.cat(parts).to(BF16)), (layer, expert)
    host.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("moe"), CONFIG, dtype=BF16)


def room_of(folder: Path) -> int:
    """Return less room than all weights need."""
    return load_model(files_of(folder), dtype=BF16, device=GPU).nbytes * 3 // 4


JOBS = [
    (random_tokens(n, n), SamplingParams(temperature=0.8, seed=n, max_tokens=24))
    for n in (5, 40, 90, 300, 700, 1100)
]


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_serves_several_at_once_as_each_alone(folder: Path, deterministic: bool) -> None:
    room = room_of(folder)
    options = {"deterministic": True, "attention": "triton"} if deterministic else {}
    with an_engine(folder, room=lambda _: room, **options) as engine:
        (line,) = [note for note in engine.figures().notes if note.startswith("The experts of ")]
        assert "of 4 layers are in host memory" in line
        assert "CUDA graph" in engine.figures().decode
        host = engine.pieces.on_host
        assert host is not None
        host.fetch_from = host.fetch_from or 200  # whatever was measured, both ways are used
        single = []
        for job in JOBS:
            forget(engine)
            single.append(alone(engine, job))
        again = [alone(engine, job) for job in JOBS]  # from the cache
        assert [len(tokens) for tokens in again] == [24] * len(JOBS)
        for prompt, params in JOBS:  # cancelled, while others run
            stream = engine.stream(prompt[::-1], params)
            next(stream)
            stream.close()
        together = at_once(engine, JOBS)
        assert [len(tokens) for tokens in together] == [24] * len(JOBS)
        # Otherwise a prompt computed with others may have its experts fetched, but not when it is alone.
        if deterministic:
            assert again == single == together


def test_memory_is_given_back_and_a_gguf_file_keeps_its_blocks(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(CONFIG), GGMLQuantizationType.Q4_0)
    gc.collect()
    torch.cuda.empty_cache()
    before, whole = torch.cuda.memory_allocated(), load_model(files_of(path), dtype=BF16, device=GPU)
    room = whole.nbytes * 3 // 4
    del whole
    with an_engine(path, room=lambda _: room) as engine:
        formats = {
            part.format
            for weights in engine.network.on_host.values()
            for expert in weights.experts
            for part in (*expert.gate_up.parts, *expert.down.parts)
        }
        assert formats == {Kind.Q4_0}
        assert not engine.network.is_quantized
        assert engine.pieces.on_host is not None
        assert engine.pieces.on_host.problem is None
        assert len(alone(engine, JOBS[3])) == 24
        memory = [stack for weights in engine.network.on_host.values() for stack in stacks(weights)]
        assert all(is_pinned(stack) for stack in memory)
        del engine.network
    assert not any(is_pinned(stack) for stack in memory)
    del engine
    for _ in range(20):
        gc.collect()
        if torch.cuda.memory_allocated() <= before + (1 << 20):
            break
        time.sleep(0.1)
    assert torch.cuda.memory_allocated() <= before + (64 << 20)
