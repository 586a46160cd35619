"""The decode runner on a GPU: fused kernels, CUDA graphs and the reference give the same tokens and correct logits."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.stepping import bare_seconds
from engine import SamplingParams
from engine.cache.host_memory import PromptCosts
from engine.engine import Engine
from engine.errors import EngineError
from tests.engine.inside import check_blocks
from tests.gpu.engines import CONFIGS as FUSED
from tests.gpu.engines import SIZES, an_engine
from tests.models.checkpoints import reference_model, run_reference, tiny_qwen3, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton")

CONFIGS = FUSED | {"unusual": tiny_qwen3(**SIZES)}  # head_dim 16: no fused kernels
PROMPT = torch.randint(256, (301,), generator=torch.Generator().manual_seed(0)).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp(request.param), CONFIGS[request.param], dtype=torch.bfloat16
    )


def tokens(engine: Engine, params: SamplingParams = GREEDY) -> list[int]:
    return [event.token_id for event in engine.stream(PROMPT, params)]


def check_greedy(folder: Path, answer: list[int]) -> None:
    """Assert that every token is the most likely one by transformers in fp32, up to the rounding of bf16."""
    logits = run_reference(reference_model(folder), [*PROMPT, *answer])[len(PROMPT) - 1 : -1]
    regret = logits.max(-1).values - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    assert (regret < 0.02 * logits.abs().max()).all()


def test_what_decoding_evicts_comes_back_from_host_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether offloading pays is measured, so it depends on other users of the GPU and the bus.
    monkeypatch.setattr(PromptCosts, "worth_it", True)
    other = [(7 * i) % 251 for i in range(1480)]

    # No more host memory than needed: the system may refuse to pin much, and takes long for it.
    with an_engine(folder, num_blocks=48, offload=1 << 25) as engine:
        blocks, cache = engine.pieces.blocks, engine.pieces.cache

        def rows() -> torch.Tensor:
            runs = cache.slots(blocks.path(other), 0, len(other))
            return torch.cat([cache.kv[:, :, first:end] for first, end in runs], dim=2).clone()

        assert cache.host is not None
        cache.host.prepare(wait=True)
        assert cache.host.nbytes >= 47 * cache.host.block_bytes, "the system refuses to pin so little"
        assert engine.warm(other) == len(other)
        before = engine.loop.call(rows)
        assert len(tokens(engine, SamplingParams(temperature=0.0, max_tokens=700))) == 700
        assert engine.warm(other) == 0
        assert torch.equal(engine.loop.call(rows), before)
        check_blocks(engine)


@pytest.mark.parametrize("options", [{}, {"graphs": False}, {"fused": False}, {"decode_runner": False}])
def test_greedy_tokens_are_those_of_transformers(folder: Path, options: dict[str, Any]) -> None:
    with an_engine(folder, **options) as engine:
        answer = tokens(engine)
        notes = (
            engine.figures().notes
        )  # for the model with head_dim 16, a note says that it runs without fused kernels
        assert all("unusual" in str(folder) and "head_dim of 16" in note for note in notes)
        assert engine.warm([*PROMPT, *answer[:-1]]) == 0  # all rows that were written can be found
        check_blocks(engine)
    check_greedy(folder, answer)


def test_the_program_is_named(folder: Path) -> None:
    with an_engine(folder) as engine:
        fused = "unusual" not in str(folder)
        assert engine.figures().decode == ("fused kernels" if fused else "plain modules") + ", CUDA graph"
    with an_engine(folder, graphs=False, fused=False) as engine:
        assert engine.figures().decode == "plain modules"


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=7, max_tokens=60),
        SamplingParams(temperature=1.1, top_p=0.8, repetition_penalty=1.2, seed=8, max_tokens=60),
        SamplingParams(temperature=1.0, min_p=0.05, presence_penalty=0.5, seed=9, max_tokens=60),
    ],
)
def test_a_graph_gives_what_the_same_step_gives_without(folder: Path, params: SamplingParams) -> None:
    with an_engine(folder, torch.bfloat16) as engine:
        recorded = [tokens(engine, params) for _ in range(2)]
    with an_engine(folder, torch.bfloat16, graphs=False) as engine:
        assert [tokens(engine, params)] * 2 == recorded


def test_an_answer_may_cross_buckets_and_blocks(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=800)
    with an_engine(folder) as engine:
        check_greedy(folder, tokens(engine, params))


def test_two_at_a_time_and_one_after_the_other(folder: Path) -> None:
    params = SamplingParams(temperature=0.8, top_k=30, seed=3, max_tokens=40)
    with an_engine(folder) as engine:
        alone = tokens(engine, params)
        one, two = engine.stream(PROMPT, params), engine.stream(PROMPT[:100], params)
        both = [], []
        for _ in range(40):
            both[0].append(next(one).token_id)
            both[1].append(next(two).token_id)
        assert both[0] == alone
        check_blocks(engine)


def test_cancelling_keeps_the_engine_whole(folder: Path) -> None:
    with an_engine(folder) as engine:
        before = tokens(engine)
        stream = engine.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=500))
        first = [next(stream).token_id for _ in range(5)]
        stream.close()
        assert first == before[:5]
        assert tokens(engine) == before
        check_blocks(engine)


def test_the_context_ends_an_answer(folder: Path) -> None:
    with an_engine(folder) as engine:
        prompt = (PROMPT * 5)[:1490]
        events = list(engine.stream(prompt, SamplingParams(temperature=0.0)))
        assert len(events) == 10
        check_blocks(engine)


def test_damaged_weights_end_the_turn_with_a_line(folder: Path) -> None:
    with an_engine(folder) as engine:
        good = tokens(engine)
        norm = engine.network.final_norm.weight
        kept = norm.clone()
        engine.loop.call(lambda: norm.fill_(float("nan")))
        with pytest.raises(EngineError, match="not a number"):
            tokens(engine)
        engine.loop.call(lambda: norm.copy_(kept))
        assert tokens(engine) == good


def test_the_bare_loop_can_be_measured(folder: Path) -> None:
    with an_engine(folder) as engine:
        assert bare_seconds(engine, 100, 8) > 0
        assert len(tokens(engine)) == 60


def test_the_kernels_of_a_step_want_the_memory_divided_alike() -> None:
    from engine.kernels.triton.embedding import embedding_kernel
    from engine.kernels.triton.launch import split_alike

    weight = torch.randn(4, 64, device="cuda")
    active, token = (torch.tensor([n], device="cuda") for n in (0, 1))
    out = torch.empty(1, 64, device="cuda")
    kernel = embedding_kernel[(1, 1)](active.int(), token, weight, out, SIZE=64, BLOCK=64)
    split_alike(kernel)
    value = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute(ctypes.byref(value), 9, ctypes.c_void_p(kernel.function))
    assert value.value == 100
    assert torch.equal(out[0], weight[1])
