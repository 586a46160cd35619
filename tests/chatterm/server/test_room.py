"""Room for one more model: what is unloaded for it, what never is, and what is refused."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import ChatOptions, ModelError
from chatterm.server.channel_service import ChannelService
from chatterm.server.process import model_pool as host_module
from chatterm.server.process.generation_task import request_error
from chatterm.server.process.model_pool import ModelPool, PooledModel
from chatterm.server.service import ChatMessage, Generation, RequestError
from engine.cache.computing import MOST_ROWS, computing_bytes
from engine.cache.sizing import USEFUL_CONTEXT, beside_weights
from engine.errors import EngineError, GpuLostError, OutOfRoomError
from engine.machine import memory_check
from engine.machine.memory_check import MemoryNeed, mapped_bytes, memory_need
from engine.params import LoadOptions
from models.errors import NoRoomError, TooLargeError
from models.files import ModelFiles
from models.loading.load import load_model
from models.loading.plan import needed_bytes
from models.weights.share import Share
from tests.chatterm.server.conftest import Tinies, serving
from tests.engine.tiny import TinyEngine
from tests.fresh import examples
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint

CPU = torch.device("cpu")


@dataclass
class Memory:
    """Engines that take so many bytes each, of so many that there are."""

    total: int
    sizes: dict[str, int]
    beside: int = 0
    """What a useful conversation takes; a short one fits wherever the weights do."""
    loaded: list[Any] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.total - sum(self.sizes[engine.model_name] for engine in self.loaded)

    def find(self, model: str, on_progress: Any) -> ModelFiles:
        return ModelFiles(model)

    def need(self, files: ModelFiles, options: ChatOptions) -> MemoryNeed:
        return MemoryNeed(self.sizes[files.name], self.sizes[files.name], self.beside, self.free)

    def load(self, model: str, files: ModelFiles, options: ChatOptions, on_progress: Any) -> Any:
        size = self.sizes[model]
        if size > self.free:
            raise TooLargeError(f"The model needs {size} B; free some memory.")
        figures = SimpleNamespace(weight_bytes=size, host_bytes=0, kv_bytes=0, draft_bytes=0)
        engine = SimpleNamespace(
            model_name=model,
            is_closed=False,
            lost_gpu=False,
            tokenizer=SimpleNamespace(longest_token=8),
            context_length=64,
            figures=lambda: figures,
            mapped_bytes=0,
        )
        self.loaded.append(engine)
        return engine

    def close(self, engine: Any) -> None:
        self.loaded.remove(engine)
        self.unloaded.append(engine.model_name)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that are none are enough."""
    from engine.conversation import requests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "Requests", lambda engine, **options: None)
        patch.setattr(host_module, "tool_format", lambda tokenizer: None)
        patch.setattr(host_module, "canonical", lambda name: name)
        clock = iter(range(10**6))
        patch.setattr(host_module, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda: next(clock)))
        patch.setattr(host_module, "gc", SimpleNamespace(unfreeze=lambda: None, collect=lambda: None))
        yield


def host_of(memory: Memory) -> ModelPool:
    return ModelPool(ChatOptions(), None, memory)  # type: ignore[arg-type]


def used(host: ModelPool, *names: str) -> None:
    for name in names:
        host.release(host.acquire(name))


@pytest.mark.usefixtures("light")
def test_the_one_that_was_used_longest_ago_goes_first() -> None:
    memory = Memory(10, {"a": 4, "b": 3, "c": 3, "d": 5, "e": 3})
    host = host_of(memory)
    used(host, "a", "b", "c", "a")
    used(host, "e")  # b is enough
    assert memory.unloaded == ["b"]
    used(host, "d")
    assert memory.unloaded == ["b", "c", "a"]
    assert [held.name for held in host.held] == ["e", "d"]


@pytest.mark.usefixtures("light")
def test_what_fits_disturbs_nobody_and_a_useful_conversation_counts() -> None:
    memory = Memory(10, {"a": 4, "b": 4, "c": 2})
    host = host_of(memory)
    used(host, "a", "b", "c")
    assert not memory.unloaded
    crowded = Memory(10, {"a": 4, "b": 4}, beside=3)
    host = host_of(crowded)
    used(host, "a", "b")
    assert crowded.unloaded == ["a"]


@pytest.mark.usefixtures("light")
def test_one_in_use_stays_and_the_refusal_names_it() -> None:
    memory = Memory(10, {"a": 6, "b": 5, "c": 2})
    host = host_of(memory)
    busy = host.acquire("a")
    used(host, "c")
    with pytest.raises(ModelError) as caught:
        host.acquire("b")
    assert str(caught.value) == "The model needs 5 B; free some memory. Loaded here: a (6 B), c (2 B)."
    assert memory.unloaded == []  # without c it would not fit either
    host.release(busy)
    used(host, "b")
    assert memory.unloaded == ["c", "a"] or memory.unloaded == ["a"]


@pytest.mark.usefixtures("light")
def test_a_model_that_takes_more_than_was_expected() -> None:
    memory = Memory(10, {"a": 4, "b": 4, "c": 4})
    host = host_of(memory)
    used(host, "a", "b")
    memory.need = lambda files, options: MemoryNeed(0, 0, 0, 10)  # type: ignore[method-assign]
    used(host, "c")
    assert memory.unloaded == ["a"]


@pytest.mark.usefixtures("light")
def test_another_error_unloads_nothing() -> None:
    memory = Memory(10, {"a": 4, "b": 4})
    host = host_of(memory)
    used(host, "a")
    for error in (ModelError("It is damaged."), EngineError("--context is 3.")):
        memory.load = _raising(error)  # type: ignore[method-assign]
        with pytest.raises(type(error), match=str(error)):
            host.acquire("b")
    assert not memory.unloaded


@pytest.mark.usefixtures("light")
def test_one_that_an_error_has_ended_makes_room_for_itself() -> None:
    memory = Memory(10, {"a": 6})
    host = host_of(memory)
    used(host, "a")
    memory.loaded[0].is_closed = True
    used(host, "a")
    assert memory.unloaded == ["a"]
    lost, memory.loaded[0].is_closed = host.acquire("a"), True
    host.unload_unused(0.0)
    assert memory.unloaded == ["a"], "somebody uses it"
    assert not host.held
    host.release(lost)
    host.unload_unused(0.0)
    assert memory.unloaded == ["a", "a"]


@pytest.mark.usefixtures("light")
def test_a_gpu_that_is_lost_is_known_from_its_model_and_from_a_load() -> None:
    memory = Memory(10, {"a": 4, "b": 4})
    host = host_of(memory)
    used(host, "a")
    assert not host.lost_gpu
    memory.loaded[0].lost_gpu = True
    assert host.lost_gpu
    host = host_of(Memory(10, {"a": 4}))
    host.engines.load = _raising(GpuLostError("The GPU was lost."))  # type: ignore[method-assign]
    with pytest.raises(GpuLostError) as caught:
        host.acquire("a")
    assert host.lost_gpu
    told = request_error(caught.value)
    assert (told.status, told.code, told.retry_after_s) == (503, "engine_ended", 1.0)
    assert "Restart" not in told.message, "another engine process starts by itself"


def _raising(error: Exception) -> Any:
    def load(*arguments: Any) -> None:
        raise error

    return load


NAMES = "abcdef"
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=30)


@pytest.mark.usefixtures("light")
@examples(40)
@given(st.integers(1, 20), st.lists(st.integers(1, 12), min_size=6, max_size=6), STEPS)
def test_whatever_is_asked_for(total: int, sizes: list[int], steps: list[tuple[str, bool]]) -> None:
    """Only what nobody uses goes, the oldest first, only for a model that fits then, and no more than it needs."""
    memory = Memory(total, dict(zip(NAMES, sizes, strict=True)))
    host = host_of(memory)
    taken: list[PooledModel] = []
    for name, stays in steps:
        before = sorted((held for held in host.held if not held.users), key=lambda held: held.unused_since)
        idle, free, memory.unloaded = [held.name for held in before], memory.free, []
        was_there = host.find(name) is not None
        try:
            held = host.acquire(name)
        except NoRoomError:
            assert memory.unloaded == []
            assert free + sum(memory.sizes[one] for one in idle) < memory.sizes[name]
        else:
            gone = memory.unloaded
            assert gone == idle[: len(gone)]
            if was_there or not gone:
                assert not gone
            else:
                assert free + sum(memory.sizes[one] for one in gone[:-1]) < memory.sizes[name]
            taken.append(held)
            if not stays:
                host.release(taken.pop())
        assert all(held in host.held for held in taken)
        assert memory.free >= 0
        if len(taken) > 2:
            host.release(taken.pop(0))


# --- what a model needs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("room"), tiny_qwen3())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_are_counted_as_they_are_loaded(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda device: 10**6)
    need = memory_need(files_of(folder), LoadOptions("cpu", dtype))
    network = load_model(files_of(folder), dtype=getattr(torch, dtype), device=CPU)
    tables = needed_bytes(network.spec, getattr(torch, dtype), 256) - needed_bytes(
        network.spec, getattr(torch, dtype), 0
    )
    assert need.weights == network.nbytes + tables
    assert need.least == need.weights
    assert need.free == 10**6


def test_it_fits_where_a_useful_conversation_fits_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def need(free: int, context: int | None = None, mapped: int = 0) -> MemoryNeed:
        monkeypatch.setattr(memory_check, "available_bytes", lambda device: free)
        return memory_need(files_of(folder), LoadOptions("cpu", "float32", context=context), mapped)

    weights = need(0).weights
    per_token = 3 * 2 * 2 * 16 * 4
    assert need(0).beside == 2 * 256 * per_token  # half of what is free is for the KV
    assert not need(weights + 2 * 256 * per_token - 1).is_met
    assert need(weights + 2 * 256 * per_token).is_met
    assert need(0, context=32).beside == 2 * 32 * per_token
    assert not need(weights + 2 * 256 * per_token, mapped=1).is_met
    assert need(5, mapped=9).free == 0


def test_a_gpu_s_memory_is_asked_where_the_model_would_run_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    asked = []
    monkeypatch.setattr(memory_check, "pick_device", lambda name: SimpleNamespace(device=cuda))
    monkeypatch.setattr(memory_check, "pick_dtype", lambda name, device: torch.bfloat16)
    monkeypatch.setattr("engine.execute.loading.packs", lambda dtype, device: None)
    monkeypatch.setattr(memory_check, "available_bytes", lambda device: asked.append(device) or 10**9)
    found = memory_need(files_of(folder), LoadOptions(), mapped=10**8)
    assert asked == [cuda]
    assert found.free == 10**9  # mapped weights are in the host's memory
    spec = load_model(files_of(folder), dtype=torch.bfloat16, device=CPU).spec
    assert found.beside == beside_weights(spec, torch.bfloat16, cuda, None)
    assert found.beside > beside_weights(spec, torch.bfloat16, CPU, USEFUL_CONTEXT)
    eight = memory_need(files_of(folder), LoadOptions(tensor_parallel=8))
    assert eight.least == eight.weights == found.weights // 8
    two = memory_need(files_of(folder), LoadOptions(tensor_parallel=2))
    kv = [
        need.beside - computing_bytes(Share(0, ranks, spec).spec, MOST_ROWS, torch.bfloat16, cuda)
        for ranks, need in ((2, two), (8, eight))
    ]
    assert kv[0] == kv[1], "there are two heads of keys"
    assert eight.beside <= two.beside < found.beside


def test_mapped_weights_are_those_of_a_quantized_file_on_a_cpu() -> None:
    gguf, plain = ModelFiles("m", gguf=Path("m.gguf")), ModelFiles("m", folder=Path("m"))
    assert mapped_bytes(gguf, CPU, 7, True) == 7
    assert mapped_bytes(gguf, CPU, 7, False) == 0
    assert mapped_bytes(plain, CPU, 7, True) == 0
    assert mapped_bytes(gguf, torch.device("cuda"), 7, True) == 0


# --- through the channel


@dataclass
class Crowded(Tinies):
    """There is room for one model."""

    def load(self, *arguments: Any) -> TinyEngine:
        if any(not engine.is_closed for engine in self.made):
            raise OutOfRoomError("Too little memory: close other programs.")
        return super().load(*arguments)


async def test_a_second_model_waits_for_no_answer_and_takes_the_place_of_an_idle_one(
    runtime: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatterm.server.process.model_pool.local_names", lambda: {"tiny1", "tiny2"})

    async def ask(model: str) -> list[Any]:
        request = Generation(model=model, messages=(ChatMessage("user", "x"),), sampling={"max_tokens": 3})
        return [piece async for piece in service.generate(request)]

    with serving(checkpoint, engines=Crowded(checkpoint)) as served:
        service = ChannelService()
        await service.connect()
        host = served.calls.host
        assert await ask("tiny1")
        assert await ask("tiny2")
        assert [held.name for held in host.held] == ["tiny2"]
        busy = host.acquire("tiny2")
        with pytest.raises(RequestError) as caught:
            await ask("tiny1")
        assert caught.value.status == 503
        assert caught.value.message.startswith(
            "Too little memory: close other programs. Loaded here: tiny2 ("
        )
        host.release(busy)
        assert await ask("tiny1")
        await service.close()
