"""The engine with native kernels: what it samples from is what the plain modules compute for the whole prompt."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Engine, EngineError, SamplingParams
from engine import engine as engine_module
from engine.batch import StepBatch
from engine.cache.rows import Rows
from engine.execute import runner
from engine.execute.build_options import BuildOptions
from engine.execute.cpu import products
from engine.execute.loading import load_here, plan_here
from engine.execute.runner import Runner
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError
from engine.params import LoadOptions
from engine.schedule.computing import Computing
from engine.schedule.cpu_load import OtherPrograms
from engine.schedule.loop import Loop
from engine.schedule.scheduler import PromptChunk
from engine.schedule.sequence import Priority, Sequence
from engine.store.disk import DiskTier
from models.files import ModelFiles
from models.loading.load import load_model
from models.network import Network
from models.text.tokenizer import Tokenizer
from tests.covering import each_value_once
from tests.engine.inside import evict_all
from tests.engine.tiny import tiny_tokenizer
from tests.models.checkpoints import files_of, run, tiny_qwen3, write_checkpoint

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, speculation="off")


TOLERANCE = {"none": 1e-4, "int8": 0.1}
"""Of the largest logit: sums in another order; activations rounded to int8, which rows this short average little."""


@pytest.fixture(scope="module", params=TOLERANCE)
def quantize(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, quantize: str) -> Network:
    folder = tmp_path_factory.mktemp("native")
    write_checkpoint(folder, tiny_qwen3(vocab_size=272, hidden_size=64, max_position_embeddings=512))
    return load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize=quantize)


@contextmanager
def an_engine(model: Network, *, fused: bool = True) -> Iterator[Engine]:
    tokenizer = tiny_tokenizer()
    tokenizer.stop_ids = frozenset()
    with a_native_engine(model, tokenizer, fused=fused) as engine:
        yield engine


@contextmanager
def a_native_engine(
    model: Network,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine of small blocks and chunks, unless `options` say otherwise."""
    options = {"block_size": 4, "max_chunk": 16, "threads": 2, **options}
    tokenizer = tokenizer or tiny_tokenizer()
    engine = Engine(Loop(), model, tokenizer, BuildOptions(**options), name="tiny", device=CPU)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def engine(model: Network) -> Iterator[Engine]:
    if (reason := native.problem()) is not None:
        pytest.skip(reason)
    with an_engine(model) as engine:
        assert engine.figures().decode.startswith("native kernels, ")
        yield engine


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Tensor]]:
    """The tokens before every sampled one, and the logits that it was drawn from."""
    found: list[tuple[list[int], Tensor]] = []
    run = Computing.run

    def record(
        self: Computing, chunks: list[PromptChunk], disk: DiskTier | None
    ) -> list[tuple[PromptChunk, list[Tensor]]]:
        drawn = run(self, chunks, disk)
        for chunk, rows in drawn:
            for count, row in enumerate(rows):
                found.append(([*chunk.sequence.rows.token_ids, *chunk.guesses[:count]], row.clone()))
        return drawn

    monkeypatch.setattr(Computing, "run", record)
    return found


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answer(engine: Engine, token_ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return [event.token_id for event in engine.stream(token_ids, params)]


def check(model: Network, sampled: list[tuple[list[int], Tensor]]) -> None:
    tolerance = TOLERANCE["int8" if model.is_quantized else "none"]
    assert sampled
    for ids, row in sampled:
        expected = run(model, ids)[-1]
        assert (row - expected).abs().max() < tolerance * expected.abs().max()


@each_value_once
@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 70])
def test_prompts_of_any_length_and_their_answers(
    engine: Engine, model: Network, sampled: list[tuple[list[int], Tensor]], length: int
) -> None:
    answer(engine, prompt(length))
    answer(engine, prompt(length))  # all but the last row is there
    answer(engine, [*prompt(length), 7])
    assert len(sampled) == 3 * 12
    check(model, sampled)


def test_several_sequences_at_once(
    engine: Engine, model: Network, sampled: list[tuple[list[int], Tensor]]
) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 40, 9)]
    sequences = []
    engine.loop.call(lambda: sequences.extend(engine.start(Rows.of(ids), GREEDY) for ids in prompts))
    together = [[event.token_id for event in engine.events(sequence)] for sequence in sequences]
    check(model, sampled)
    assert together == [answer(engine, ids) for ids in prompts]


def test_a_warmed_row_alone_is_as_good_as_any(
    engine: Engine, model: Network, sampled: list[tuple[list[int], Tensor]]
) -> None:
    for length in (1, 2, 3, 10):
        engine.warm(prompt(length))
    assert not sampled
    answer(engine, prompt(20))
    check(model, sampled)


def test_the_same_seed_gives_the_same_tokens_as_the_plain_modules(
    engine: Engine, model: Network, quantize: str
) -> None:
    if quantize != "none":
        pytest.skip("rounded activations may give another token")
    params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=3, max_tokens=20)
    with an_engine(model, fused=False) as plain:
        assert plain.figures().decode == "plain modules"
        assert answer(engine, prompt(9), params) == answer(plain, prompt(9), params)


def test_what_was_cached_gives_the_logits_of_a_fresh_prompt(
    engine: Engine, sampled: list[tuple[list[int], Tensor]]
) -> None:
    one = replace(GREEDY, max_tokens=1)
    answer(engine, prompt(50), one)
    evict_all(engine)
    for length in (1, 7, 24, 25, 49):
        engine.warm(prompt(50)[:length])
    answer(engine, prompt(50), one)
    (_, fresh), (_, cached) = sampled
    assert (fresh - cached).abs().max() < 1e-4 * fresh.abs().max()


def test_torch_gets_its_threads_for_what_it_computes_only(engine: Engine, quantize: str) -> None:
    stream = engine.stream(prompt(30), replace(GREEDY, max_tokens=5))
    list(stream)
    assert engine.loop.call(torch.get_num_threads) == 1
    engine.warm(prompt(9, seed=1))
    assert engine.loop.call(torch.get_num_threads) == (2 if quantize == "none" else 1)


@pytest.mark.parametrize("busy", [False, True])
def test_beside_busy_programs_idle_work_keeps_to_one_core(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(OtherPrograms, "are_busy", lambda self: busy)
    monkeypatch.setattr(OtherPrograms, "free", 2)
    alone: list[tuple[bool, int]] = []
    run = Runner.run

    def record(self: Runner, batch: StepBatch) -> list[Tensor]:
        assert self.pool is not None
        alone.append((self.pool.working == 1, torch.get_num_threads()))
        return run(self, batch)

    monkeypatch.setattr(Runner, "run", record)
    idle = [Sequence(Rows.of(prompt(20, seed)), Priority.IDLE) for seed in (1, 2)]
    engine.submit(idle[0])
    idle[0].finished.wait()
    warmed = len(alone)
    answer(engine, prompt(16), replace(GREEDY, max_tokens=2))
    engine.submit(idle[1])
    idle[1].finished.wait()
    torch_threads = 1 if engine.pieces.runner.all_native else 2
    of_idle_work = alone[:warmed] + alone[warmed + 2 :]
    assert {one_core for one_core, _ in of_idle_work} == {busy}
    assert not busy or {threads for _, threads in of_idle_work} == {1}
    assert alone[warmed : warmed + 2] == [(False, torch_threads), (False, 1)]


def test_kernels_that_do_not_start_are_said_and_the_plain_modules_answer(
    model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NativeError("2 threads cannot be started")

    monkeypatch.setattr(Runner, "go_native", refuse)
    with an_engine(model) as engine:
        assert engine.figures().decode == "plain modules"
        (note,) = engine.figures().notes
        assert "2 threads cannot be started" in note
        assert len(answer(engine, prompt(5))) == 12


def hide_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu.products.problem", "runner.unsupported"):
        monkeypatch.setattr(f"engine.execute.{name}", lambda *_: "there is no compiler")


def test_without_the_library_quantized_files_are_expanded(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_the_library(monkeypatch)
    engine = Engine.load(str(smollm2), device="cpu", context=64)
    try:
        assert engine.figures().weight_bytes > 250e6
        assert engine.figures().decode == "plain modules"
        assert engine.figures().notes == (
            "Quantised weights were expanded, so decoding is slower (there is no compiler).",
        )
        question = engine.tokenizer.encode("The capital of France is")
        (token,) = answer(engine, question, replace(GREEDY, max_tokens=1))
        assert engine.tokenizer.decode([token]).strip() == "Paris"
    finally:
        engine.close()


def test_without_the_library_blocks_that_were_asked_for_are_kept_and_said_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, tiny_qwen3(vocab_size=272, hidden_size=64))
    hide_the_library(monkeypatch)
    plan = plan_here(files_of(tmp_path), torch.float32, CPU, LoadOptions(quantize="int8"))
    network = load_here(plan)
    assert network.is_quantized
    assert plan.notes == ("Weights are expanded in every step, which is slow (there is no compiler).",)
    with an_engine(network) as engine:
        assert engine.figures().decode == "plain modules"
        assert len(answer(engine, prompt(5))) == 12


def test_mapped_weights_are_no_memory_for_the_cache(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "available_memory", lambda device: 300_000_000)
    engine = Engine.load(str(smollm2), device="cpu", quantize="auto")
    try:
        left = 300_000_000 - engine.figures().weight_bytes
        assert 0.45 * left < engine.figures().kv_bytes <= 0.5 * left
    finally:
        engine.close()


def test_quantized_files_stay_as_they_are(smollm2: Path) -> None:
    if (reason := native.problem()) is not None:
        pytest.skip(reason)
    files = ModelFiles("smollm2", gguf=smollm2, note="Which model it is.")
    engine = Engine.load(files, device="cpu", context=64, threads=1)
    try:
        figures = engine.figures()
        assert figures.notes == (files.note,)
        assert figures.weight_bytes < 110e6
        assert figures.decode.startswith("native kernels, ")
        assert figures.attention in ("native", "sdpa")  # portable kernels leave prompts to torch
    finally:
        engine.close()


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_an_impossible_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(EngineError, match=f"--threads is {threads}; it must be from 1 to"):
        Engine.load("smollm2", device="cpu", threads=threads)


def test_mapped_weights_are_copied_while_nobody_asks_for_anything(smollm2: Path) -> None:
    if (reason := native.problem()) is not None:
        pytest.skip(reason)
    engine = Engine.load(str(smollm2), device="cpu", context=64)
    try:
        question = engine.tokenizer.encode("The capital of France is")
        answers = [answer(engine, question)]
        mapped = engine.mapped_bytes + engine.copied_bytes
        assert mapped == engine.figures().weight_bytes
        if not engine.loop.call(lambda: engine.pieces.runner.while_idle() or engine.copied_bytes):
            pytest.skip("no kernels here read copies, or memory is short")
        while engine.loop.call(engine.pieces.runner.while_idle):
            pass  # the loop does the same when it has nothing to do
        assert engine.copied_bytes > 0.9 * mapped
        assert engine.mapped_bytes == mapped - engine.copied_bytes
        answers.append(answer(engine, question))
        assert answers[0] == answers[1]
    finally:
        engine.close()
    assert engine.copied_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "held"),
    [(torch.bfloat16, torch.float16), (torch.float16, torch.float16), (torch.float32, torch.float32)],
    ids=str,
)
def test_the_cache_has_fp16_where_native_kernels_compute_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, held: torch.dtype
) -> None:
    if (reason := products.problem()) is not None:
        pytest.skip(reason)
    write_checkpoint(tmp_path, tiny_qwen3(vocab_size=272, hidden_size=64))
    for quantize in ("int8", "none"):
        model = load_model(files_of(tmp_path), dtype=dtype, device=CPU, quantize=quantize)
        with a_native_engine(model) as engine:
            native = engine.pieces.runner._native
            assert native is not None
            assert native.takes_prompts or quantize == "none"
            expected = held if native.takes_prompts else dtype
            assert engine.pieces.cache.kv.dtype == engine.pieces.cache.k[0].dtype == expected
            assert engine.pieces.cache.k[0].data_ptr() == engine.pieces.cache.kv.data_ptr()
            assert answer(engine, prompt(20))

    def refuse(*_: object) -> None:
        raise NativeError("a test refuses it")

    monkeypatch.setattr(runner, "NativeDecoder", refuse)
    model = load_model(files_of(tmp_path), dtype=dtype, device=CPU, quantize="int8")
    with a_native_engine(model) as engine:
        assert engine.pieces.cache.kv.dtype == dtype
        assert answer(engine, prompt(20))
