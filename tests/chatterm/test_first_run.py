"""The first run without a model: when something is offered, what, and what becomes of the choice."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch
from huggingface_hub import constants

from chatterm.cli import first_run
from chatterm.cli.first_run import ask, candidates, choose_model, first_model, is_first_time
from chatterm.cli.main import call
from chatterm.settings.reading import load_settings
from engine.machine.expected import NATIVE, PROGRAMS, Here, Speed, catalogue_speed
from models.hub import download as hub
from models.hub.catalogue import DEFAULT_MODEL, HUB_FILES, QWEN3
from tests.models.hub_server import HubServer

PATIENCE = first_run._PATIENCE
FAST = Here(torch.device("cpu"), torch.bfloat16, PROGRAMS[NATIVE], True, 60e9, 16 * 10**9)
"""A laptop whose memory reads 60 GB/s."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def server(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub on this machine with the models of the catalogue, which are too small to be true; an empty cache."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHATTERM_CACHE", str(own_folders / "cache"))
    with HubServer() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_folders / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(first_run, "_PATIENCE", 60.0)  # however busy this machine is
        for file in HUB_FILES.values():
            running.repo(file.repo, {file.file: b"GGUF"})
        yield running


def sit_down(monkeypatch: pytest.MonkeyPatch, typed: str = "") -> Terminal:
    """From now on the standard streams are a terminal, of which standard error comes back."""
    err = Terminal()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr("engine.machine.report.look_here", lambda device, dtype: FAST)
    return err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models of the chats that were opened."""
    models: list[str] = []

    def run_app(backend: "object", **_: object) -> int:
        models.append(backend.model)  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr("chatterm.app.run_app", run_app)
    return models


@pytest.mark.parametrize(
    ("typed", "model"), [("1\n", "qwen3:4b-q4"), ("2\n", DEFAULT_MODEL), ("\n", DEFAULT_MODEL)]
)
def test_the_choice_is_asked_for_once_and_remembered(
    server: HubServer,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    own_folders: Path,
    typed: str,
    model: str,
) -> None:
    terminal = sit_down(monkeypatch, "what?\n" + typed)
    assert call(["run"]) == 0
    assert started == [model]
    assert "qwen3:4b-q4  2.5 GB to download  about 16" in terminal.getvalue()
    assert "smollm2      93 MB to download   about" in terminal.getvalue()
    assert terminal.getvalue().count("1 or 2") == 2
    assert load_settings(own_folders / "config.toml").model.name == model
    asked = len(server.requests)
    assert call(["run"]) == 0
    assert started == [model, model]
    assert (len(server.requests), terminal.getvalue().count("1 or 2")) == (asked, 2)


def test_a_choice_that_is_not_made_is_none(
    server: HubServer, started: list[str], monkeypatch: pytest.MonkeyPatch, own_folders: Path
) -> None:
    sit_down(monkeypatch)
    assert call(["run"]) == 0  # standard input ends
    assert started == [DEFAULT_MODEL]
    assert not (own_folders / "config.toml").exists()


@pytest.mark.parametrize("arguments", [["run", "some/model"], ["run", "-p", "x"], ["list"]])
def test_whoever_knows_what_to_run_is_not_asked(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("asked")

    sit_down(monkeypatch)
    monkeypatch.setattr(first_run, "first_model", never)
    monkeypatch.setattr("chatterm.app.run_app", lambda *_, **__: 0)
    monkeypatch.setattr("chatterm.cli.oneshot.answer", lambda *_, **__: None)
    assert call(arguments) == 0
    assert server.requests == []


def test_a_pipe_is_not_asked(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sit_down(monkeypatch)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("chatterm.app.run_app", lambda *_, **__: 0)
    assert call(["run"]) == 0
    assert server.requests == []


def test_without_the_hub_the_default_just_starts(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = sit_down(monkeypatch)
    server.answer = lambda path: 503
    assert first_model("auto", "auto") is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(server.requests)
    assert first_model("auto", "auto") is None
    assert len(server.requests) == before
    assert terminal.getvalue() == ""


def test_a_hub_that_does_not_answer_is_not_waited_for(server: HubServer) -> None:
    repo = next(iter(HUB_FILES.values())).repo
    assert hub.in_reach(repo, 30.0)

    asked = Event()
    server.answer = lambda path: asked.wait(60.0) and None
    assert not hub.in_reach(repo, 0.05)
    asked.set()


def test_whoever_has_chatted_or_downloaded_before_is_not_asked(
    server: HubServer, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_first_time()
    monkeypatch.setattr("models.hub.sources.local_models", lambda: [type("M", (), {"name": "a/b"})])
    assert not is_first_time()
    monkeypatch.setattr("models.hub.sources.local_models", lambda: [type("M", (), {"name": DEFAULT_MODEL})])
    assert is_first_time()
    assert 0 < PATIENCE <= 1.5
    (own_folders / "data").mkdir()
    (own_folders / "data" / "sessions.db").touch()
    assert not is_first_time()


def offered(here: Here, disk: float = 1e12) -> str | None:
    best = choose_model([catalogue_speed(name, here) for name in candidates(here)], int(disk))
    return best.name if best is not None else None


@pytest.mark.parametrize(
    ("bandwidth", "free", "disk", "name"),
    [
        (60e9, 16e9, 1e12, "qwen3:4b-q4"),
        (60e9, 3e9, 1e12, "qwen3:1.7b-q8"),  # the memory decides
        (60e9, 16e9, 3e9, "qwen3:0.6b-q8"),  # the disk
        (200e9, 64e9, 1e12, "qwen3:14b-q4"),  # the bandwidth
        (20e9, 16e9, 1e12, "qwen3:0.6b-q8"),
        (5e9, 16e9, 1e12, None),
        (60e9, 5e8, 1e12, None),
        (None, 16e9, 1e12, None),
    ],
)
def test_the_largest_that_fits_and_runs_well_is_offered(
    bandwidth: float | None, free: float, disk: float, name: str | None
) -> None:
    assert offered(replace(FAST, bandwidth=bandwidth, free=int(free)), disk) == name


def test_a_gpu_gets_what_is_not_quantized() -> None:
    program = PROGRAMS["fused kernels, CUDA graph"]
    here = Here(torch.device("cuda"), torch.bfloat16, program, False, 3e12, 80 * 10**9)
    assert candidates(here) == list(QWEN3)
    assert offered(here) == "qwen3:8b"


def test_a_default_that_is_here_is_not_downloaded() -> None:
    err = io.StringIO()
    speeds: list[Speed] = [catalogue_speed(name, FAST) for name in ("qwen3:4b-q4", DEFAULT_MODEL)]
    assert ask((speeds[0], replace(speeds[1], download_bytes=0)), lambda: "2\n", err) == DEFAULT_MODEL
    assert "smollm2      on this machine     about" in err.getvalue()
