"""A GPU whose kernels cannot be compiled, that is lost, or whose memory runs out: each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


def run(folder: Path, mode: str, **environment: str) -> tuple[dict[str, Any], str]:
    """What happened, and what was written to the terminal besides."""
    command = [sys.executable, "-m", "tests.gpu.trouble", str(folder), mode]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr


def test_without_a_c_compiler_plain_torch_answers_and_one_line_says_what_to_install(
    folder: Path, tmp_path: Path
) -> None:
    usual, _ = run(folder, "usual")
    assert usual["packed"]
    for number, environment in enumerate(({"CC": "/nothing"}, {"CC": "", "PATH": str(tmp_path)})):
        found, said = run(folder, "usual", TRITON_CACHE_DIR=str(tmp_path / str(number)), **environment)
        assert len(found["tokens"]) == len(usual["tokens"])
        assert not found["packed"]
        assert found["decode"] == "plain modules"
        (line,) = [note for note in found["notes"] if "Triton needs a C compiler" in note]
        assert line.startswith("Computed by plain PyTorch, which is slower: ")
        assert "fatal error" not in said


def test_where_the_fused_kernels_fail_packed_weights_are_expanded_by_a_kernel(folder: Path) -> None:
    found, _ = run(folder, "unfused")
    assert found["packed"]
    assert found["decode"] == "plain modules"
    assert len(found["tokens"]) == 128
    assert any("which is slower (no kernel image is available)" in note for note in found["notes"])


def test_a_gpu_that_is_lost_ends_the_engine_with_one_line(folder: Path) -> None:
    found, _ = run(folder, "lost")
    assert (found["closed"], found["lost"], len(found["errors"])) == (True, True, 4)
    for error in found["errors"]:
        assert error.startswith("The GPU was lost (")
        assert error.endswith("Restart chatterm.")


def test_memory_that_runs_out_in_a_step_costs_time_but_no_token(folder: Path) -> None:
    found, _ = run(folder, "short")
    assert found["chunks"][:3] == [200, 100, 100]
    assert len(found["tokens"]) == len(found["before"]) == 128
