"""What a command must not import, proven in fresh processes."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "gguf", "numpy", "jinja2")


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def imported(code: str, *arguments: str) -> set[str]:
    """The top-level packages that are imported once `code` ran in a fresh process."""
    program = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = run("-c", program, *arguments)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["doctor", "--help"], ["run", "-p", ""]]
)
def test_the_command_line_imports_no_model_code(arguments: list[str]) -> None:
    found = imported("from chatterm.cli import main; main()", *arguments)
    assert "typer" in found
    assert found.isdisjoint({*HEAVY, "textual"})


MODULES = ["chatterm.local", "chatterm.oneshot", "chatterm.model_commands", "chatterm.doctor"]


@pytest.mark.parametrize("module", MODULES)
def test_a_command_starts_without_torch(module: str) -> None:
    found = imported(f"import {module}")
    assert "models" in found
    assert found.isdisjoint({"torch", "transformers", "textual"})


def test_the_screen_stands_before_torch_is_there() -> None:
    found = imported("import chatterm.app")
    assert "textual" in found
    assert found.isdisjoint({"torch", "transformers", "numpy"})


def test_help_takes_less_than_300_ms_of_work() -> None:
    best = float("inf")
    for _ in range(8):  # processor time, and the best of several: other work on the machine must not decide
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("-m", "chatterm", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert done.returncode == 0
        assert "run" in done.stdout
        if best < 0.3:
            break
    assert best < 0.3
