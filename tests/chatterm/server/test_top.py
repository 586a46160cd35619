"""`chatterm top`: what it asks, how it counts, how it looks, and how it ends."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from chatterm.backends.protocol import ServerStatus
from chatterm.cli import top
from chatterm.cli.main import call
from chatterm.server.service import Latency, Metrics, ModelMetrics
from engine.schedule.metrics import percentile
from tests.chatterm.server.conftest import Gate, Served

RUN = ["run", "tiny", "-p", "Name a river.", "--max-tokens", "4", "--seed", "3", "--json"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a second."""
    monkeypatch.setattr(sys, "stdin", None)
    sleeping(monkeypatch, lambda seconds: None)


def sleeping(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
    monkeypatch.setattr(top, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))


def model(name: str = "qwen3:0.6b", **figures: Any) -> ModelMetrics:
    usual = {"running": 3, "waiting": 2, "preempted": 1, "users": 6, "kv_usage": 0.43, "preemptions": 9}
    counters = {"prompt_tokens": 2000, "cached_tokens": 1500, "generated_tokens": 300}
    latency = {"first_token": Latency(0.0451, 1.2), "between_tokens": Latency(0.0062, 12.0)}
    sizes = {"weight_bytes": 1_190_000_000, "kv_bytes": 4_000_000_000}
    return ModelMetrics(model=name, **{**usual, **counters, **latency, **sizes, **figures})


def look(at: float, *models: ModelMetrics, address: str = "http://127.0.0.1:8642") -> top.StatusSample:
    status = ServerStatus(pid=4242, uptime_s=3900, address=address, terminals=2, models=())
    return top.StatusSample(at, status, Metrics(models=models, terminals=2))


def lines(view: top.TopView, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as shown:
        console.print(top.table(view, width))
    return [line.rstrip() for line in shown.get().splitlines()]


def test_the_table() -> None:
    before = model(prompt_tokens=1000, cached_tokens=900, generated_tokens=100)
    shown = lines(top.make_view([look(10.0, before), look(14.0, model())]))
    assert shown[0] == "chatterm serve at http://127.0.0.1:8642; up 1 h 5 min; 2 terminals attached"
    figures = {line[:26].strip(): line[26:].strip() for line in shown[2:]}
    assert figures == {
        "": "",
        "Weights": "1.2 GB",
        "KV cache": "4.0 GB",
        "KV cache in use": "43%",
        "Prefix hits": "75%",
        "Clients": "6",
        "Running": "3",
        "Waiting": "2",
        "Preempted": "1",
        "Prompt tokens/s": "100",
        "Answer tokens/s": "50",
        "Time to first token, p50": "45.1 ms",
        "Time to first token, p99": "1,200 ms",
        "Between tokens, p50": "6.2 ms",
        "Between tokens, p99": "12.0 s",
    }


@pytest.mark.parametrize("width", [40, 80, 140])
def test_it_fits(width: int) -> None:
    models = [model(f"a-model-with-a-very-long-name-{number}" * 3) for number in range(12)]
    shown = lines(top.make_view([look(1.0, *models)]), width)
    assert len(shown) <= 22  # two more say how to leave
    assert max(map(len, shown)) <= width
    assert "more models; see chatterm ps" in " ".join(shown)


def test_what_nobody_knows_yet_is_a_dash() -> None:
    fresh = model(prompt_tokens=0, cached_tokens=0, first_token=None, between_tokens=None)
    shown = lines(top.make_view([look(1.0), look(2.0, fresh)]))
    assert sum(line.endswith(" -") for line in shown) == 7
    assert "No model is loaded" in lines(top.make_view([look(1.0)]))[-1]


def test_a_model_that_was_loaded_again_has_no_negative_rate() -> None:
    view = top.make_view(
        [look(1.0, model()), look(2.0, model(prompt_tokens=0, cached_tokens=0, generated_tokens=0))]
    )
    assert view.rates["qwen3:0.6b"] == top.ModelRate(0, 0)


def test_what_the_server_says_controls_no_terminal() -> None:
    shown = "\n".join(
        lines(top.make_view([look(1.0, model("[red]\x1b[31m\nx"), address="\x1b]0;title\x07here")]))
    )
    assert "\x1b" not in shown
    assert "[red]" in shown
    assert "chatterm serve at here; up" in shown


def test_one_look_at_a_server_that_answers(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["top", "--once"]) == 0
    assert "No model is loaded" in capsys.readouterr().out
    assert call(RUN) == 0  # a terminal's answer counts as any other
    answered = json.loads(capsys.readouterr().out)["stats"]
    assert call(["top", "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    view = msgspec.json.decode(line, type=top.TopView)
    (figures,) = view.metrics.models
    assert figures.model == "tiny"
    assert figures.generated_tokens == answered["generated_tokens"] > 1
    assert figures.prompt_tokens == answered["prompt_tokens"]
    assert figures.first_token is not None
    assert figures.between_tokens is not None
    assert (figures.running, figures.waiting, figures.preempted) == (0, 0, 0)
    assert view.rates["tiny"] == top.ModelRate(0, 0)
    assert call(["top", "--once"]) == 0
    assert "Time to first token, p50" in capsys.readouterr().out


def test_what_runs_is_counted(served: Served) -> None:
    held = served.calls.host.acquire("tiny")
    gate = Gate(held.engine)
    events = held.engine.stream([1, 2, 3])
    next(events)
    assert held.engine.traffic().running == 1
    gate.open()
    events.close()
    served.calls.host.release(held)


def test_without_a_server(runtime: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["top", "--json"]) == 1
    assert "No chatterm server is running" in capsys.readouterr().err
    assert call(["top"]) == 2
    assert "needs a terminal" in capsys.readouterr().err


def test_the_server_ends_while_it_is_watched(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter(range(3))

    def wait(seconds: float) -> None:
        if next(waits, None) == 2:
            served.end()

    sleeping(monkeypatch, wait)
    assert call(["top", "--json"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) >= 2
    assert said.err == "The chatterm server has ended.\n"


def test_ctrl_c_is_how_one_leaves(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    sleeping(monkeypatch, interrupted)
    assert call(["top", "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_signal_to_end_leaves_the_view_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip("Windows has no such signal")
    waits = iter([lambda: os.kill(os.getpid(), number)])  # once: a view that goes on fails

    def kept(number: int, frame: object) -> None:
        """What was there before."""

    sleeping(monkeypatch, lambda seconds: next(waits)())
    monkeypatch.setattr(top, "look", lambda link: look(10.0, model()))
    before = signal.signal(number, kept)
    try:
        with pytest.raises(SystemExit) as ended:
            top._live(None, 1.0)  # type: ignore[arg-type]
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) is kept
    finally:
        signal.signal(number, before)


def test_percentiles() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert percentile([3.0], 0.5) == percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) is None
