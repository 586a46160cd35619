"""A model that two processes compute together with fused kernels and graphs. They may share one GPU: that is slow.

Kernels of two processes on one GPU take turns, so each exchange waits for the other's turn.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.engine import Engine
from engine.errors import EngineError
from engine.events import TokenEvent
from engine.params import SamplingParams
from tests.engine.tiny import tiny_tokenizer
from tests.gpu.engines import SIZES
from tests.models.checkpoints import tiny_qwen3, write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    pytest.importorskip("triton")
    from engine.execute.cuda.exchange import Exchange, Plan
    from engine.execute.cuda.peer_memory import share_memory
    from tests.engine.kernels.two_ranks import run_ranks

SIZE, ROWS, STEPS, LAYERS = 4096, 8, 6, 3
PROMPT = list(b"What is the capital of a country that has none, and why?")


def numbers(rank: int, place: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * place + rank)
    return torch.randn(shape, generator=generator).cuda()


def exchanged(rank: int, meeting: str) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Of each step the sums and the logits; the last steps are replayed from a graph."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(meeting, 2)  # type: ignore[attr-defined]

    def swap(data: bytes) -> list[bytes]:
        store.set(f"memory/{rank}", data)
        return [bytes(store.get(f"memory/{other}")) for other in range(2)]

    plan = Plan(ranks=2, rows=ROWS, size=SIZE, columns=5000, vocab=9998, layers=LAYERS)
    peers = Exchange(share_memory(plan.nbytes, rank, device, swap), plan, rank, device, torch.bfloat16, True)
    from engine.execute.cuda.slots import StepInput

    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    active = torch.arange(ROWS, dtype=torch.int32, device=device)
    token = torch.arange(ROWS, device=device) if rank == 0 else torch.zeros(ROWS, dtype=torch.int64).cuda()
    given = StepInput(active, token, nothing, nothing, nothing, nothing)
    parts = [numbers(rank, place, ROWS, SIZE) for place in range(plan.sums)]
    residual = numbers(7, 99, ROWS, SIZE).bfloat16()
    logits = numbers(rank, 77, ROWS, 5000).bfloat16()
    outs = [torch.zeros(ROWS, SIZE, dtype=torch.bfloat16, device=device) for _ in parts]

    def step() -> torch.Tensor:
        peers.begin(given, ROWS, 5000 * rank, 5000 * (rank + 1))
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


def test_sums_and_logits_of_two_processes(tmp_path: Path) -> None:
    (first, logits), (second, _) = run_ranks(2, exchanged, str(tmp_path / "meeting"))
    residual = numbers(7, 99, ROWS, SIZE).bfloat16().cpu()
    for one, other in zip(first, second, strict=True):
        for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            x, y = (numbers(rank, place, ROWS, SIZE).cpu() for rank in (0, 1))
            assert torch.equal(mine, theirs)
            assert torch.equal(mine, (x + y + residual.float()).bfloat16())
    whole = torch.cat([numbers(rank, 77, ROWS, 5000).bfloat16().cpu() for rank in (0, 1)], 1)[:, :9998]
    assert all(torch.equal(found, whole) for found in logits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
    write_checkpoint(path, tiny_qwen3(**SIZES, **shape, num_hidden_layers=3))
    tiny_tokenizer()._backend.save(str(path / "tokenizer.json"))
    return path


@contextmanager
def loaded(folder: Path, ranks: int, patch: pytest.MonkeyPatch, **options: Any) -> Iterator[Engine]:
    """One that never ends an answer by itself; as many ranks as asked for, however few GPUs there are."""
    import engine.engine as module

    patch.setattr(module, "check_parallel", lambda ranks, device: None)
    load = module.load_tokenizer

    def endless(files: Any) -> Any:
        tokenizer = load(files)
        tokenizer.stop_ids = frozenset()
        return tokenizer

    with patch.context() as inner:
        inner.setattr(module, "load_tokenizer", endless)
        engine = Engine.load(
            str(folder), device="cuda", context=512, tensor_parallel=ranks, attention="triton", **options
        )
    try:
        yield engine
    finally:
        engine.close()


def answer(engine: Engine, count: int = 256, **params: Any) -> list[TokenEvent]:
    return list(engine.stream(PROMPT, SamplingParams(**{"temperature": 0.0, "max_tokens": count} | params)))


def test_the_text_is_that_of_one_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name, ranks, dtype in (("truth", 1, "float32"), ("one", 1, "auto"), ("two", 2, "auto")):
        with loaded(folder, ranks, monkeypatch, dtype=dtype) as engine:
            found[name] = answer(engine, logprobs=4)
            if ranks == 2:
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


def test_streams_side_by_side(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a step get what they get alone, and more of them than the few go another way."""
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
