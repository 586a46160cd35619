"""`chatterm run` with models of servers, from the command line on; nothing of the engine is imported for it."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from chatterm.cli.main import call
from chatterm.sessions.store import SessionStore
from chatterm.settings.paths import config_path
from tests.chatterm.remote.rough_server import Request, delta, events, rough, said, status, stream

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "gguf", "huggingface_hub"}


def fresh(*arguments: str) -> tuple[str, set[str]]:
    """What the command prints in a process of its own, and what it imported."""
    program = "import sys\nfrom chatterm.cli.main import call\ncall(sys.argv[1:])\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.splitlines()[-1].split())


def test_nothing_of_the_engine_is_imported_for_a_server() -> None:
    with rough(said("A", " river")) as server:
        said_there, modules = fresh("run", f"openai://{server.place}/tiny", "-p", "Hi", "--save")
    assert said_there == "A river\n"
    assert "httpx" in modules
    assert modules.isdisjoint(HEAVY)
    assert modules.isdisjoint({"engine.engine", "chatterm.backends.local", "textual"})


def test_nothing_of_http_is_imported_for_help() -> None:
    _, modules = fresh("run", "--help")
    assert modules.isdisjoint({*HEAVY, "httpx", "anyio", "keyring", "chatterm.backends.router"})


@pytest.fixture(autouse=True)
def without_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)


def test_a_remote_of_the_settings_and_its_session(capsys: pytest.CaptureFixture[str]) -> None:
    with rough(said("One."), said("Two.", prompt=30, cached=20)) as server:
        config_path().parent.mkdir(parents=True, exist_ok=True)
        config_path().write_text(f'[remotes.work]\nurl = "http://{server.place}"\n', "utf-8")
        assert call(["run", "work", "-p", "First", "--save"]) == 0
        assert call(["run", "--continue", "-p", "Second", "--json", "--stats"]) == 0
        assert [m["content"] for m in server.requests[1].json["messages"]] == ["First", "One.", "Second"]
    out, err = capsys.readouterr()
    answer = json.loads(out.splitlines()[-1])
    assert (answer["text"], answer["finish_reason"]) == ("Two.", "eos")
    assert (answer["stats"]["prompt_tokens"], answer["stats"]["cached_tokens"]) == (30, 20)
    assert "prompt 30 tokens (20 cached)" in err
    store = SessionStore.open()
    [info] = store.find("")
    assert info.model == "work/tiny"
    _, tree, _ = store.load(info.id)
    assert [exchange.model for exchange in tree.exchanges] == ["work/tiny"] * 2
    assert store.close()
    assert call(["sessions", "export", info.id, "--format", "md"]) == 0
    assert "## work/tiny" in capsys.readouterr().out


def test_an_answer_that_breaks_off_is_printed_as_far_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    with rough(stream(*events(delta("One, "), done=False), ends=False)) as server:
        assert call(["run", f"openai://{server.place}/tiny", "-p", "Hi"]) == 1
        out, err = capsys.readouterr()
        assert out == "One, \n"
        assert "closed the connection" in err
        assert call(["run", f"openai://{server.place}/tiny", "-p", "Hi", "--json"]) == 1
        answer = json.loads(capsys.readouterr().out)
        assert (answer["text"], answer["finish_reason"]) == ("One, ", "cancelled")


@pytest.mark.parametrize(
    "line",
    [
        ("run", "MODEL", "-p", "Hi"),
        ("run", "MODEL", "-p", "A", "-p", "B", "--parallel"),
        ("run", "MODEL", "--inline", "-p", "Hi"),
        ("batch", "MODEL", "FILE"),
    ],
    ids=lambda line: " ".join(line),
)
def test_what_a_script_waits_for_is_told(
    line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = io.StringIO()
    monkeypatch.setattr("sys.stderr", told)
    monkeypatch.setattr("chatterm.backends.remote.client.retry_delay", lambda *_: 0.5)  # without a last time

    def busy_until_told(request: Request, sock: socket.socket) -> bool | None:
        handler = said("x") if "limiting requests" in told.getvalue() else status(429)
        return handler(request, sock)

    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    with rough(busy_until_told) as server:
        model = f"openai://{server.place}/tiny"
        named = {"MODEL": model, "FILE": str(tmp_path / "in.jsonl")}
        assert call([named.get(word, word) for word in line]) == 0
    assert "chatterm: Waiting: the server is limiting requests; trying again in " in told.getvalue()


def test_several_prompts_and_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with rough(said("x")) as server:
        line = ["run", f"openai://{server.place}/tiny", "-p", "A", "-p", "B", "--parallel", "--json"]
        assert call(line) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2
        assert {request.json["messages"][0]["content"] for request in server.requests} == {"A", "B"}


@pytest.mark.parametrize(
    ("model", "code", "why"),
    [
        ("openai://127.0.0.1:9/m", 1, "cannot be reached"),
        ("https://example.org", 1, "is not the address of a model"),
        ("openai://me:key@h/m", 1, "not contain a user or a key"),
    ],
)
def test_what_is_wrong_is_one_line(
    model: str, code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", model, "-p", "Hi"]) == code
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1
    assert "key@" not in err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with rough(status(404)) as server:
        assert call(["run", f"openai://{server.place}/other", "-p", "Hi"]) == 1
        assert "has no model other; it has: tiny." in capsys.readouterr().err


def test_inline(capsys: pytest.CaptureFixture[str]) -> None:
    with rough(said("x", prompt=9)) as server:
        line = [
            "run",
            f"openai://{server.place}/tiny",
            "--inline",
            "-p",
            "Hi",
            "-p",
            "/cache",
            "-p",
            "/stats",
        ]
        assert call(line) == 1
        out, err = capsys.readouterr()
        assert "x\n" in out
        assert "KV cache is on" in err
        assert "prompt 9 tokens" in out
