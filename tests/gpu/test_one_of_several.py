"""A model on the second GPU of several: nothing of it is on the first."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.repeating import write_repeating

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

CHAT = """
import sys, torch
from engine import Engine, SamplingParams
engine = Engine.load(sys.argv[1], device=sys.argv[2], context=2048, offload_gb=0.1)
print(engine.figures().decode)
params = SamplingParams(temperature=0.0, max_tokens=40)
print([event.token_id for event in engine.stream([id % 250 for id in range(5, 900)], params)])
engine.close()
memory = torch._C._cuda_hasPrimaryContext
print(torch.device(sys.argv[2]), [memory(number) for number in range(2)])
"""


def test_it_answers_the_same_on_the_second_and_leaves_the_first_alone(tmp_path: Path) -> None:
    write_repeating(tmp_path / "model", hidden=320, head_dim=128)  # heads that the fused kernels have

    def told(device: str) -> list[str]:
        command = [sys.executable, "-c", CHAT, str(tmp_path / "model"), device]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    first, second = told("cuda:0"), told("cuda:1")
    assert first[:2] == second[:2]
    assert first[0].startswith("fused kernels")
    assert first[2] == "cuda:0 [True, False]"
    assert second[2] == "cuda:1 [False, True]"
