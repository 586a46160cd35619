"""The commands of the shell beside a server: run attaches, ps looks, stop ends, serve is all of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chatterm.cli.main import call
from chatterm.cli.serve import load_first
from chatterm.settings.durations import duration_text, parse_duration
from engine.errors import EngineError
from tests.chatterm.server.conftest import ROOT, Served, serving

RUN = ["run", "tiny", "-p", "Name a river.", "--max-tokens", "4", "--seed", "3", "--json"]
_PROGRAM = """
import sys
from chatterm.cli.main import call
code = call(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(autouse=True)
def no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_an_attached_command_imports_no_engine(served: Served) -> None:
    done = run(*RUN)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["stats"]["generated_tokens"] == 4 or answer["finish_reason"] == "eos"
    modules = set(done.stderr.splitlines()[-1].split())
    heavy = {"torch", "transformers", "tokenizers", "numpy", "textual", "asyncio", "huggingface_hub"}
    assert modules.isdisjoint({*heavy, "models.hub.catalogue", "engine.core"})
    assert "chatterm.backends.process" in modules


@pytest.mark.parametrize("words", [["ps"], ["top", "--once"], ["top", "--json", "--once"], ["stop"]])
def test_looking_at_a_server_imports_no_engine_and_no_screen(words: list[str], served: Served) -> None:
    held = served.calls.host.acquire("tiny")  # there is something to look at
    done = run(*words)
    assert done.returncode == 0, done.stderr
    modules = set(done.stderr.splitlines()[-1].split())
    heavy = {"torch", "transformers", "tokenizers", "numpy", "textual", "asyncio", "starlette", "uvicorn"}
    assert modules.isdisjoint({*heavy, "engine.core", "chatterm.app", "chatterm.backends.local"})
    assert "chatterm.cli.servers" in modules
    served.calls.host.release(held)


def test_the_same_answer_attached_and_again(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for _ in range(2):
        assert call(RUN) == 0
        answers.append(json.loads(capsys.readouterr().out)["text"])
    assert answers[0] == answers[1]
    assert call(["run", "tiny", "-p", "One", "-p", "Two", "--parallel", "--max-tokens", "3"]) == 0
    assert "==> One <==" in capsys.readouterr().out


def test_without_the_server_nobody_knows_the_model(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([*RUN, "--no-server"]) == 1
    assert "Unknown model" in capsys.readouterr().err
    assert call([*RUN, "--threads", "3"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("chatterm: The running server was started with another --threads")


def test_ps_tells_what_is_loaded(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["ps"]) == 0
    assert "No model is loaded" in capsys.readouterr().out
    assert call(RUN) == 0
    capsys.readouterr()
    assert call(["ps"]) == 0
    out = capsys.readouterr().out
    assert f"process {os.getpid()}" in out
    assert "tiny" in out
    assert "until the server ends" in out
    assert call(["ps", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in status["models"]] == ["tiny"]


def test_stop_ends_it(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.calls.agreed = "another"  # also one of another version
    assert call(["stop"]) == 0
    assert "has ended" in capsys.readouterr().out
    assert call(["stop"]) == 1
    assert call(["ps"]) == 1
    assert capsys.readouterr().err.count("No chatterm server is running") == 2


def test_serve_is_a_process_that_ends_with_its_parent(runtime: Path) -> None:
    """The real one, with no model."""
    command = [sys.executable, "-c", _PROGRAM, "serve", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("Ready"):
            break
    assert said[-2].startswith("The HTTP API is at http://127.0.0.1:")
    assert call(["ps"]) == 0
    second = run("serve", "--port", "0")  # there is one already
    assert second.returncode == 1
    assert "HTTP API" not in second.stderr
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait() == 0, rest
    assert "Shutting down" in rest
    assert "torch" not in rest.splitlines()[-1].split()
    assert call(["ps"]) == 1
    process.stderr.close()


def test_a_start_that_fails_promises_nothing(runtime: Path, tmp_path: Path) -> None:
    done = run("serve", str(tmp_path), "--port", "0")  # a folder without a model
    assert done.returncode == 1
    *said, modules = done.stderr.splitlines()
    assert len(said) == 1
    assert said[0].startswith("chatterm: ")
    assert "chatterm.server.supervisor" in modules.split()


def test_an_engine_process_that_crashes_is_started_again(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", _PROGRAM, "serve", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    pids, said = [], []
    for line in process.stderr:
        said.append(line)
        if line.startswith("Ready"):
            assert call(["ps", "--json"]) == 0
            pids.append(json.loads(capsys.readouterr().out)["pid"])
            if len(pids) < 3:
                os.kill(pids[-1], signal.SIGKILL)
            else:
                assert call(["stop"]) == 0
    assert process.wait() == 0
    assert len(set(pids)) == 3
    ends = [line.partition("; ")[2] for line in said if "ended unexpectedly (exit code -9)" in line]
    assert ends == ["another one starts.\n", "another one starts in 1 s.\n"]
    process.stderr.close()


def test_a_model_that_stays_for_no_time_is_loaded_all_the_same(runtime: Path, checkpoint: Path) -> None:
    with serving(checkpoint, keep_alive_s=0.0) as served:
        load_first("tiny")
        assert served.tinies.made


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30m", 1800), ("1h30m", 5400), ("90", 90), ("0", 0), ("1.5h", 5400), ("2d", 172800), ("Forever", None)],
)
def test_times(text: str, seconds: float | None) -> None:
    assert parse_duration(text, "--keep-alive") == seconds


@pytest.mark.parametrize("text", ["", "soon", "5x", "m", "-5m", "1h30", "1 2"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(EngineError, match="keep-alive"):
        parse_duration(text, "--keep-alive")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (61, "1 min 1 s"),
        (1800, "30 min"),
        (5400, "1 h 30 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
