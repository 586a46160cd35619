"""What the engine process has freed goes back to the system."""

import asyncio
import subprocess
import sys
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest

from chatterm.server.process import engine_process
from chatterm.server.process.model_pool import ModelPool

_PROGRAM = """
import threading
from chatterm.server.process.memory import _trim, trim_heap
from benchmarks.load import own_bytes

def work():
    kept = [bytes(1000) for _ in range(200_000)]
    last.append(bytes(1000))

last = []
for thread in [threading.Thread(target=work) for _ in range(3)]:
    thread.start()
    thread.join()
before = own_bytes()
trim_heap()
print(_trim() is not None, before - own_bytes())
"""


def test_memory_that_threads_have_freed_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    can, given = done.stdout.split()
    if can != "True":
        pytest.skip("the allocator of this system has no malloc_trim")
    assert int(given) > 50 * 2**20


@dataclass
class Models:
    """A host whose models a test changes."""

    held: list[str] = field(default_factory=list)
    looks: int = 0
    lost_gpu: bool = False

    def unload_unused(self, now: float) -> None:
        self.looks += 1

    async def look(self) -> None:
        """Until they have been seen."""
        before = self.looks
        while self.looks < before + 2:
            await asyncio.sleep(0.001)


async def test_garbage_is_looked_for_everywhere_when_a_model_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(engine_process, "_LOOK", 0.001)
    for name in ("leave_out", "search_all"):
        monkeypatch.setattr(engine_process, name, partial(done.append, name))
    models = Models()
    calls = engine_process.EngineProcess(cast(ModelPool, models), freezes=True)
    running = asyncio.create_task(calls.run())
    for held in ([], ["a"], ["a"], ["a", "b"], ["b"], ["c"]):
        models.held = held
        await models.look()
    calls.ended.set()
    await running
    calls.workers.close()
    assert done == ["leave_out", "leave_out", "search_all", "search_all"]


async def test_the_search_does_not_find_what_is_gone_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds in use is left out of later searches."""
    seen: list[object] = []
    models = Models([Models()])  # type: ignore[list-item]
    gone = weakref.ref(models.held[0])
    monkeypatch.setattr(engine_process, "_LOOK", 0.001)
    monkeypatch.setattr(engine_process, "leave_out", lambda: None)
    monkeypatch.setattr(engine_process, "search_all", lambda: seen.append(gone()))
    calls = engine_process.EngineProcess(cast(ModelPool, models), freezes=True)
    running = asyncio.create_task(calls.run())
    await models.look()
    models.held = []
    await models.look()
    calls.ended.set()
    await running
    calls.workers.close()
    assert seen == [None]


def test_what_is_left_out_is_garbage_all_the_same_when_everything_is_searched() -> None:
    program = """
import gc, weakref
from chatterm.server.gc_tuning import leave_out, search_all
class Model: pass
model = Model()
model.itself, gone = model, weakref.ref(model)
leave_out()
del model
gc.collect()
assert gone() is not None
search_all()
assert gone() is None
"""
    subprocess.run([sys.executable, "-c", program], check=True)
