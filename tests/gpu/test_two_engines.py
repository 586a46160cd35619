"""Two engines in one process on one GPU: one records its steps while the other one is built, answers and is closed."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine import SamplingParams
from engine.execute.cuda.step_bench import GraphStopwatch
from tests.gpu.engines import CONFIGS, DEVICE, alone, an_engine, random_tokens
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
JOB = random_tokens(200, 1), SamplingParams(temperature=0.0, max_tokens=40)


def test_an_engine_is_built_answers_and_is_closed_while_another_thread_records(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen3"], dtype=torch.bfloat16)
    with an_engine(folder, offload=1 << 28) as engine:
        expected = alone(engine, JOB)
    stopwatch, stop = GraphStopwatch(), threading.Event()
    recordings: list[Any] = []
    errors: list[Exception] = []
    value = torch.zeros(16, device=DEVICE)

    def step() -> None:
        time.sleep(0.02)  # as long as a large model takes
        value.add_(1)

    def record() -> None:
        while not stop.is_set():
            try:
                recordings.append(stopwatch.record(step))
            except Exception as error:  # noqa: BLE001 - whatever it is, the test fails below
                errors.append(error)
            stop.wait(0.002)

    recorder = threading.Thread(target=record)
    recorder.start()
    try:
        for _ in range(3):
            with an_engine(folder, offload=1 << 28) as engine:
                assert alone(engine, JOB) == expected
                assert engine.pieces.decode_runner is not None
                assert engine.pieces.decode_runner.name.endswith(", CUDA graph")
    finally:
        stop.set()
        recorder.join()
    assert errors == []
    assert len(recordings) > 10
    before = float(value[0])
    stopwatch.seconds(recordings[:4])
    assert float(value[0]) == before + 5  # the first one runs twice
