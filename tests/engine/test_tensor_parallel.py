"""Several processes that compute one model: the same text as one, and one line when one of them is lost."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import build
from engine.batch import Span, StepBatch
from engine.cache.copies import Offload, Restore
from engine.cache.host_memory import HostKV
from engine.cache.kv_cache import KVCache
from engine.cache.rows import Rows
from engine.device import DeviceChoice
from engine.engine import Engine
from engine.errors import EngineError
from engine.execute.group import Group
from engine.machine import memory_check
from engine.machine.memory_check import MemoryNeed, fewest_ranks
from engine.parallel import ranks
from engine.parallel.messages import GivenBlock, GivenCopy, GivenStep, of_copy, of_host, of_step, read_message
from engine.params import LoadOptions, SamplingParams
from models.files import ModelFiles
from tests.counting import until
from tests.engine.divided import GREEDY, MORE_RANKS, PROMPT, is_running, load, loaded, text, write_model
from tests.engine.inside import offload
from tests.models.families import tiny_gemma3, tiny_qwen3_moe


def make_span(start: int, count: int, big: int) -> Span:
    """One with numbers of all sizes."""
    tokens = tuple(range(big, big + count))
    return Span(tuple(range(-(-(start + count) // 4))), start, count, tokens, tokens, count // 2, start // 2)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most of its layers see the last 7 rows."""
    config = tiny_gemma3(vocab_size=272, max_position_embeddings=4096)
    return write_model(tmp_path_factory.mktemp("windows"), config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("ranks", [2, *MORE_RANKS])
def test_the_text_is_that_of_one_process(folder: Path, ranks: int) -> None:
    sampled = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
    with loaded(folder, 1) as one, loaded(folder, ranks) as two:
        for params in (GREEDY, sampled):
            assert text(two, PROMPT, params) == text(one, PROMPT, params)
        longer = PROMPT + text(one, PROMPT) + list(b" And then?")
        assert text(two, longer) == text(one, longer), "what it wrote is found in the cache, on every rank"
        assert two.figures().weight_bytes >= one.figures().weight_bytes
        processes = [rank.process for rank in two._ranks._ranks]
    assert all(process.poll() is not None for process in processes)


def test_prompts_are_cut_and_streams_run_side_by_side(folder: Path) -> None:
    prompts = [PROMPT[start:] * repeats for start, repeats in ((0, 1), (3, 4), (9, 2))]
    with loaded(folder, 1) as one, loaded(folder, 3, streams=3) as three:
        alone = [text(one, prompt) for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda prompt: text(three, prompt), prompts)) == alone


def test_a_conversation_with_a_mixture_of_experts_is_that_of_one_process(tmp_path: Path) -> None:
    """What is computed ahead, a turn that is taken back, and the cache of all that."""
    path = write_model(tmp_path, tiny_qwen3_moe(vocab_size=272, max_position_embeddings=512))
    said = []
    for count in (1, 2):
        with loaded(path, count) as engine:
            chat = engine.chat("Be brief.")
            texts = []
            for message in ("Why?", "And why that?"):
                chat.prepare(message)
                texts.append([event.token_id for event in chat.send(message, GREEDY)])
                chat.settle()
            texts.append([event.token_id for event in chat.retry(GREEDY)])
            said.append(texts)
            assert engine.figures().blocks_cached > 0
    assert said[0] == said[1]


def test_what_a_divided_model_does_without_is_told(folder: Path, tmp_path: Path) -> None:
    given = {"draft": str(folder), "disk": tmp_path}
    with loaded(folder, 2, **given) as engine:
        figures, told = engine.figures(), "\n".join(engine.figures().notes)
        assert "2 processes compute the model together." in told
        assert "No draft model is used: draft models need" in told
        assert "it is divided among several processes" in told
        assert figures.disk is not None
        assert "the model is divided" in figures.disk.problem
        assert text(engine, PROMPT)


def test_layers_with_a_window_keep_only_its_rows_on_every_rank(windows: Path) -> None:
    """Texts with a common beginning, side by side, and one from which rows were taken out."""
    prompts = [PROMPT, [*PROMPT[:40], 7], PROMPT * 20, [*PROMPT * 20, 9], PROMPT[::-1] * 30]
    found = []
    for count in (1, 2):
        with loaded(windows, count, streams=2, context=2048) as engine:
            blocks = engine.pieces.blocks
            assert all(pool.num_slots < blocks.num_blocks / 2 for pool in engine.pieces.cache.pools)
            assert len(engine.pieces.cache.pools) == 1
            with ThreadPoolExecutor(2) as threads:
                answers = list(threads.map(lambda prompt: text(engine, prompt), prompts))
            answers.append(text(engine, PROMPT * 3))
            found.append([*answers, text_of_the_rest(engine)])
            engine.loop.call(blocks.check)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["folder", "windows"])
def test_blocks_are_offloaded_on_every_rank(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def host_memory(cache: KVCache, *_: object) -> HostKV:
        return HostKV(cache.block, cache.block_size, 1 << 28, cache.every_group)

    monkeypatch.setattr(build, "_host_memory", host_memory)
    with loaded(request.getfixturevalue(name), 2) as engine:
        told = [*PROMPT * 4, *text(engine, PROMPT * 4), 7]
        expected = text(engine, told)
        engine.loop.call(lambda: offload(engine.pieces.blocks))
        text(engine, PROMPT[::-1] * 5)  # overwrites the blocks
        assert text(engine, told) == expected
        figures = engine.figures().offload
        assert figures is not None
        assert figures.restored_tokens > 3 * len(PROMPT)
        host = engine.pieces.cache.host
        host.costs.brought, host.costs.computed = 1.0, 0.1
        assert text(engine, told) == expected, "computed, now that this is faster"
        assert engine.pieces.cache.host is None


def text_of_the_rest(engine: Engine) -> list[tuple[int, float]]:
    """The answer to a text from which rows were taken out, with the tokens' log-probabilities, rounded."""
    hidden = engine.hide(Rows.of(PROMPT * 3), [(5, 40)])
    for token in b" So?":
        hidden.append(token)
    events = engine.events(engine.start(hidden, replace(GREEDY, logprobs=0)))
    return [(event.token_id, round(event.logprob, 2)) for event in events if event.logprob is not None]


def test_rows_move_up_on_every_rank(folder: Path) -> None:
    with loaded(folder, 1) as one, loaded(folder, 2) as two:
        found = []
        for engine in (one, two):
            found.append(text_of_the_rest(engine))
        assert found[0] == found[1]


def test_a_rank_that_cannot_load_says_why(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    encode = ranks.encode_load
    # Rank 0 reads the model that is there, the others one that is not.
    monkeypatch.setattr(
        ranks, "encode_load", lambda files, options: encode(replace(files, folder=tmp_path / "none"), options)
    )
    with pytest.raises(EngineError, match="none") as failure:
        Engine.load(str(broken), device="cpu", dtype="float32", tensor_parallel=2)
    assert "\n" not in str(failure.value)


def open_files() -> set[tuple[str, str]]:
    """The descriptors that this process has open, with what they are."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one for this folder
            found.add((each.name, str(each.readlink())))
    return found


@pytest.mark.parametrize("what", ["TemporaryDirectory", "Ring"])
def test_ranks_that_cannot_be_started_leave_no_open_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Where there is no room for a file, or no memory."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(ranks, what, fails)
    before = open_files()
    with pytest.raises(
        EngineError, match=r"cannot be started \(No space left\). Choose a smaller"
    ) as failure:
        load(folder, 3)
    assert failure.value.__context__ is not None, "nothing is closed only because the error is forgotten"
    assert not open_files() - before
    assert not [thread.name for thread in enumerate_threads() if thread.name == "ranks"]


def test_ranks_that_do_not_meet_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("No space left on device")

    monkeypatch.setattr("torch.distributed.FileStore", fails)
    with pytest.raises(
        EngineError, match=r"to each other \(No space left on device\)\. If .* --tensor-parallel 1\.$"
    ):
        Group.join(tmp_path / "meeting", 0, 2, torch.device("cpu"))


def test_nothing_holds_a_closed_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds it when the server then searches for garbage is left out of later searches."""
    how_lost = ranks._how_lost

    def slow(rank: ranks._Rank) -> str:
        Event().wait(0.3)
        return how_lost(rank)

    monkeypatch.setattr(ranks, "_how_lost", slow)
    with loaded(folder, 2):
        pass
    assert not [thread.name for thread in enumerate_threads() if thread.name.startswith("rank ")]


@pytest.mark.parametrize(
    ("is_stopped", "platform"), [(False, sys.platform), (True, sys.platform), (True, "another")]
)
def test_ranks_end_with_the_first_however_that_ends(folder: Path, is_stopped: bool, platform: str) -> None:
    program = (
        "import sys; from functools import partial; from engine.engine import Engine;"
        "from engine.parallel import ranks; ranks._start = partial(ranks._start, platform=sys.argv[2]);"
        "e = Engine.load(sys.argv[1], device='cpu', dtype='float32', threads=1, context=64, tensor_parallel=2);"
        "print(*[rank.process.pid for rank in e._ranks._ranks], flush=True);"
        "[list(e.stream([1, 2, 3])) for _ in range(10_000)]"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder), platform],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the ranks' next parent is in another
    ) as first:
        assert first.stdout is not None
        pids = [int(pid) for pid in first.stdout.readline().split()]
        if is_stopped:
            os.kill(pids[0], signal.SIGSTOP)
        first.kill()
    assert len(pids) == 1
    try:
        until(lambda: not any(map(is_running, pids)))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)


def test_ranks_outlive_the_thread_that_loaded_them(folder: Path) -> None:
    """Linux tells them when the thread that started them ends."""
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(load, folder, 2).result()
    try:
        assert len(text(engine, PROMPT)) == GREEDY.max_tokens
    finally:
        engine.close()


@pytest.mark.parametrize(("count", "why"), [(-2, "must be 1 or more"), (17, "16 are the most")])
def test_no_number_of_processes_is_refused(folder: Path, count: int, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        Engine.load(str(folder), device="cpu", tensor_parallel=count)


@pytest.mark.parametrize(
    ("there", "share", "found"),
    [(1, 0.1, 1), (3, 1.0, 1), (3, 0.6, 2), (3, 0.4, 3), (6, 0.2, 6), (6, 0.1, 6)],
)
def test_auto_takes_as_few_gpus_as_have_room(
    monkeypatch: pytest.MonkeyPatch, there: int, share: float, found: int
) -> None:
    """`share` is what one has of the memory that is needed."""
    gpu, needed = DeviceChoice(torch.device("cuda")), 10**9
    monkeypatch.setattr(memory_check, "pick_device", lambda name: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(memory_check, "available_memory", lambda device: int(needed * share))
    monkeypatch.setattr(
        memory_check,
        "need_of_plan",
        lambda _, options: MemoryNeed(
            needed // options.tensor_parallel, needed // options.tensor_parallel, 0, 0
        ),
    )
    monkeypatch.setattr(memory_check, "_plan", lambda *_: None)
    assert fewest_ranks(ModelFiles("any"), LoadOptions()) == found


def test_a_cpu_is_not_divided_unasked(folder: Path) -> None:
    with loaded(folder, 0) as engine:
        assert engine._ranks is None


@given(
    st.lists(st.builds(make_span, st.integers(0, 40), st.integers(1, 9), st.integers(0, 2**40)), max_size=4)
)
def test_a_step_is_told_as_it_is(spans: list[Span]) -> None:
    slots = [{block: 7 - block for block in span.blocks[-2:]} for span in spans]
    step = GivenStep(StepBatch(tuple(spans)), slots)
    assert read_message(of_step(step)) == step
    runs = [(span.start, span.stop) for span in spans]
    copy = GivenCopy(runs, runs[::-1], len(runs))
    assert read_message(of_copy(copy)) == copy


@pytest.mark.parametrize(
    "given", [GivenBlock(Offload(3, (2**40,)), 3), GivenBlock(Restore((2**40, 1), 3, 2), 7), None]
)
def test_a_block_from_or_to_host_memory_is_told_as_it_is(given: GivenBlock | None) -> None:
    assert read_message(of_host(given)) == given
