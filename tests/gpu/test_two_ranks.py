"""A model that two or more processes compute together with fused kernels and graphs. Two may share one GPU: slow.

Kernels of two processes on one GPU take turns, so each exchange waits for the other's turn.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.cache.rows import Rows
from engine.engine import Engine
from engine.errors import EngineError
from engine.events import TokenEvent
from engine.params import SamplingParams
from engine.schedule.sequence import Sequence
from engine.schedule.speculating import Speculating
from tests.engine.speculation import Eager, Oracle, speculate
from tests.engine.tiny import tiny_parts
from tests.gpu.engines import SIZES
from tests.models.checkpoints import tiny_qwen3, write_checkpoint
from tests.models.families import tiny_qwen3_moe
from tests.models.hybrids import tiny_qwen3_5_moe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    pytest.importorskip("triton")
    from engine.execute.cuda.all_reduce import AllReduce
    from engine.execute.cuda.all_reduce_layout import AllReduceLayout
    from engine.execute.cuda.peer_memory import share_memory
    from tests.engine.kernels.two_ranks import run_ranks

SIZE, ROWS, STEPS, LAYERS = 4096, 8, 6, 3
COLUMNS = 5000
MORE = [ranks for ranks in (4, 8) if ranks <= torch.cuda.device_count()]
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
PROMPT = list(b"What is the capital of a country that has none, and why?")


def numbers(rank: int, place: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * place + rank)
    return torch.randn(shape, generator=generator).cuda()


def exchanged(rank: int, ranks: int, meeting: str) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return the sums and the logits of each step; the last steps are replayed from a graph."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(meeting, ranks)  # type: ignore[attr-defined]

    def swap(data: bytes) -> list[bytes]:
        store.set(f"memory/{rank}", data)
        return [bytes(store.get(f"memory/{other}")) for other in range(ranks)]

    plan = AllReduceLayout(ranks, ROWS, SIZE, COLUMNS, ranks * COLUMNS - 2, LAYERS)
    peers = AllReduce(share_memory(plan.nbytes, rank, device, swap), plan, rank, device, torch.bfloat16, True)
    from engine.execute.cuda.slots import StepInput

    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    active = torch.arange(ROWS, dtype=torch.int32, device=device)
    token = torch.arange(ROWS, device=device) if rank == 0 else torch.zeros(ROWS, dtype=torch.int64).cuda()
    given = StepInput(active, token, nothing, (nothing,), nothing, nothing, nothing)
    parts = [numbers(rank, place, ROWS, SIZE) for place in range(plan.sums)]
    residual = numbers(7, 99, ROWS, SIZE).bfloat16()
    logits = numbers(rank, 77, ROWS, COLUMNS).bfloat16()
    outs = [torch.zeros(ROWS, SIZE, dtype=torch.bfloat16, device=device) for _ in parts]

    def step() -> torch.Tensor:
        peers.begin(given, ROWS, COLUMNS * rank, COLUMNS * (rank + 1))
        for part, out in zip(parts, outs, strict=True):
            peers.add(part, residual, out)
        return peers.join_columns(logits)

    found: tuple[list[list[torch.Tensor]], list[torch.Tensor]] = [], []
    graph, joined = None, None
    for number in range(STEPS):
        if number == STEPS // 2:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                joined = step()
        if graph is not None:
            graph.replay()
        else:
            joined = step()
        torch.cuda.synchronize()
        assert not peers.is_lost
        assert joined is not None
        found[0].append([out.cpu() for out in outs])
        found[1].append(joined.cpu())
        assert token.tolist() == list(range(ROWS))
    return found


@pytest.mark.parametrize("ranks", [2, *MORE])
def test_sums_and_logits_of_several_processes(tmp_path: Path, ranks: int) -> None:
    (first, logits), *others = run_ranks(ranks, exchanged, ranks, str(tmp_path / "meeting"))
    residual = numbers(7, 99, ROWS, SIZE).bfloat16().cpu()
    for step, one in enumerate(first):
        for place, mine in enumerate(one):
            total = torch.zeros(ROWS, SIZE)
            for rank in range(ranks):  # in this order
                total += numbers(rank, place, ROWS, SIZE).cpu()
            assert all(torch.equal(mine, theirs[step][place]) for theirs, _ in others)
            assert torch.equal(mine, (total + residual.float()).bfloat16())
    parts = [numbers(rank, 77, ROWS, COLUMNS).bfloat16().cpu() for rank in range(ranks)]
    assert all(torch.equal(found, torch.cat(parts, 1)[:, :-2]) for found in logits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, tiny_qwen3(**SIZES, **SHAPE, num_hidden_layers=3))
    tiny_parts().backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    changes = {"moe_intermediate_size": 256, "num_hidden_layers": 2, "decoder_sparse_step": 1}
    write_checkpoint(path, tiny_qwen3_moe(**SIZES, **SHAPE, **changes))
    tiny_parts().backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of its three layers are delta nets; all have experts."""
    path = tmp_path_factory.mktemp("nets")
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    changes: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": kinds, "head_dim": 128}
    changes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "moe_intermediate_size": 256}
    changes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "hidden_size": 512}
    write_checkpoint(path, tiny_qwen3_5_moe(**SIZES | changes, shared_expert_intermediate_size=256))
    tiny_parts().backend.save(str(path / "tokenizer.json"))
    return path


@contextmanager
def loaded(folder: Path, ranks: int, patch: pytest.MonkeyPatch, **options: Any) -> Iterator[Engine]:
    """Load an engine that never ends an answer by itself, with the requested ranks however few GPUs there are."""
    import engine.engine as module

    patch.setattr(module, "check_parallel", lambda ranks, device: None)
    load = module.load_tokenizer

    def endless(files: Any) -> Any:
        tokenizer = load(files)
        tokenizer.stop_ids = frozenset()
        return tokenizer

    with patch.context() as inner:
        inner.setattr(module, "load_tokenizer", endless)
        model = Engine.load(
            str(folder), device="cuda", context=512, tensor_parallel=ranks, attention="triton", **options
        )
    try:
        yield model
    finally:
        model.close()


def answer(engine: Engine, count: int = 256, **params: Any) -> list[TokenEvent]:
    return list(engine.stream(PROMPT, SamplingParams(**{"temperature": 0.0, "max_tokens": count} | params)))


@pytest.mark.parametrize("count", [2, *MORE])
@pytest.mark.parametrize("model", ["folder", "experts", "nets"])
def test_the_text_is_that_of_one_gpu(
    model: str, count: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = request.getfixturevalue(model), {}
    for name, ranks, dtype in (("truth", 1, "float32"), ("one", 1, "auto"), ("two", count, "auto")):
        with loaded(folder, ranks, monkeypatch, dtype=dtype) as engine:
            found[name] = answer(engine, logprobs=4)
            if ranks > 1:
                assert "fused kernels, CUDA graph" in engine.figures().decode, engine.figures().notes
                again = [event.token_id for event in answer(engine, logprobs=4)]
                assert again == [event.token_id for event in found[name]], "run after run"
    one, two = found["one"], found["two"]
    for event, other in zip(one, two, strict=True):
        if event.token_id != other.token_id:
            chances = dict(event.top)
            assert event.logprob is not None
            assert event.logprob - chances.get(other.token_id, -99.0) < 0.05, "they part only at ties"
            break
    errors = {}
    for name in ("one", "two"):
        errors[name] = 0.0
        for event, true in zip(found[name], found["truth"], strict=True):
            if event.token_id != true.token_id:
                break
            assert event.logprob is not None
            assert true.logprob is not None
            errors[name] = max(errors[name], abs(event.logprob - true.logprob))
    print("errors of log-probabilities against fp32:", errors)
    assert errors["two"] <= 1.5 * errors["one"] + 0.01


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_one_line_soon(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    with loaded(folder, 2, monkeypatch) as engine:
        assert engine._ranks is not None
        (rank,) = engine._ranks._ranks
        stream = engine.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=400))
        for _ in range(5):
            next(stream)
        os.kill(rank.process.pid, how)
        began = monotonic()
        with pytest.raises(EngineError, match="Load the model again") as failure:
            for _ in stream:
                pass
        print(f"{how.name}: {monotonic() - began:.1f} s")
        assert "\n" not in str(failure.value)
        assert monotonic() - began < 20, "ten seconds, and what a busy machine adds"
        with pytest.raises(EngineError, match="Load the model again"):
            answer(engine)
    assert rank.process.poll() is not None


def guessed(engine: Engine, seed: int, speculation: str = "auto") -> Sequence:
    """An answer, sampled where `seed` is odd, to a prompt of its own."""
    params = SamplingParams(temperature=float(seed % 2), seed=seed, max_tokens=80, speculation=speculation)
    sequence = engine.start(Rows.of([seed, *PROMPT]), params)
    for _ in engine.events(sequence):
        pass
    return sequence


@pytest.mark.parametrize("model", ["folder", "nets"])
def test_guesses_change_nothing(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right and wrong ones; and steps of one row go on where guesses end."""
    accepted = 0
    with loaded(request.getfixturevalue(model), 2, monkeypatch) as engine:
        for seed in range(8):
            engine.engine_step.speculating = None
            plain = guessed(engine, seed)
            speculate(engine, Oracle(answers={0: list(plain.rows.token_ids)}, random=Random(seed)))
            again = guessed(engine, seed)
            assert again.generated == plain.generated, f"seed {seed}"
            accepted += again.accepted
    assert accepted > 50


@pytest.mark.parametrize("model", ["folder", "nets"])
def test_a_draft_model_of_rank_0_changes_nothing(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(model)
    with loaded(folder, 2, monkeypatch) as engine:
        plain = [guessed(engine, seed, "off").generated for seed in range(4)]
    with loaded(folder, 2, monkeypatch, draft=str(folder)) as engine:
        assert engine.drafts is not None, engine.figures().notes
        engine.engine_step.speculating = Speculating(engine.pieces.scheduler, Eager(), drafts=engine.drafts)
        sequences = [guessed(engine, seed, "draft") for seed in range(4)]
        assert [sequence.generated for sequence in sequences] == plain
        assert sum(sequence.accepted for sequence in sequences) > 50


def test_streams_side_by_side(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a step get the same bits as alone; with more rows than the limit for few, a different path is used."""
    from concurrent.futures import ThreadPoolExecutor

    with loaded(folder, 2, monkeypatch, streams=20) as engine:
        params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24) for seed in range(20)]

        def text(each: SamplingParams) -> list[int]:
            return [event.token_id for event in engine.stream(PROMPT, each)]

        alone = [text(each) for each in params[:3]]
        with ThreadPoolExecutor(20) as pool:
            assert list(pool.map(text, params[:3])) == alone
            together = list(pool.map(text, params))
        assert [len(tokens) for tokens in together] == [24] * 20


def test_a_conversation_with_recurrent_layers_goes_on_where_it_was(
    nets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an answer, after parts of one, and after one that is left out of the text: from states of every rank."""
    from tests.engine.keeping import answer as answered

    params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=0)
    with loaded(nets, 2, monkeypatch) as engine:
        tokens = [token for token, _ in answered(engine, PROMPT, params)[0]]
        for count in (59, 40, 20, 0):
            text = [*PROMPT, *tokens[:count], 7]
            found, computed = answered(engine, text, params)
            assert computed == 1
            engine.loop.call(engine.pieces.blocks.evict_all)
            afresh, computed = answered(engine, text, params)
            assert computed == len(text)
            for (token, logprob), (other, wanted) in zip(found, afresh, strict=True):
                assert abs(logprob - wanted) < 0.1
                if token != other:
                    break  # at a tie
            answered(engine, PROMPT, params)
        engine.loop.call(engine.pieces.blocks.check)
