"""The command line: options reach the backend; wrong usage is one line and exit code 2, a failure is 1."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from chatterm.backends.backend import (
    ChatOptions,
    EngineError,
    FinishReason,
    ModelError,
    Outcome,
    TokenEvent,
    TurnStats,
)
from chatterm.cli import constraints, options
from chatterm.cli.main import app, call
from chatterm.cli.prompts import checked_prompts
from chatterm.cli.usage import WrongUsage, command_line
from chatterm.screens.chat.commands import COMMANDS
from chatterm.sessions.store import SessionStore
from chatterm.settings.settings import SamplingSettings
from models.hub.catalogue import DEFAULT_MODEL
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.counting import PATIENCE


class EchoBackend:
    """Answers every prompt with the prompt; remembers how it was made. `failure` is raised by `open`."""

    made: "list[EchoBackend]"
    failure: BaseException | None
    info = None

    def __init__(self, model: str, options: ChatOptions) -> None:
        self.model = model
        self.options = options
        self.last: Outcome | None = None
        self.made.append(self)

    def figures(self) -> None:
        return None

    def notes(self) -> tuple[str, ...]:
        return ()

    def open(self, on_progress: Any = None) -> None:
        if self.failure is not None:
            raise self.failure

    def send(self, text: str) -> Iterator[TokenEvent]:
        yield TokenEvent(text, 0, "answer")
        self.last = Outcome(text, "", FinishReason.EOS, TurnStats(generated_tokens=1))

    def close(self) -> None: ...


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[EchoBackend]:
    made: list[EchoBackend] = []
    monkeypatch.setattr(EchoBackend, "made", made, raising=False)
    monkeypatch.setattr(EchoBackend, "failure", None, raising=False)
    monkeypatch.setattr("chatterm.backends.local.LocalBackend", EchoBackend)
    monkeypatch.delenv("CHATTERM_DEBUG", raising=False)
    pipe_in(monkeypatch, b"")
    return made


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_answer_and_every_option(backends: list[EchoBackend], capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "run org/name@rev -p hello --system Terse --temperature 0.5 --top-k 40 --top-p 0.9 --min-p 0.05 "
        "--repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty 0.2 --seed 7 --max-tokens 9 --stop A "
        "--stop B --context 512 --device cpu --dtype bfloat16 --think off --think-cache mask --theme dusk --stats "
        "--attention sdpa --no-graph --deterministic --quantize int8 --threads 3 --disk-gb 1.5"
    )
    assert call(line.split()) == 0
    assert capsys.readouterr().out == "hello\n"
    (backend,) = backends
    assert backend.model == "org/name@rev"
    assert backend.options == ChatOptions(
        device="cpu",
        dtype="bfloat16",
        quantize="int8",
        context=512,
        threads=3,
        attention="sdpa",
        deterministic=True,
        disk_gb=1.5,
        graphs=False,
        system="Terse",
        think="off",
        think_cache="mask",
        sampling={
            "temperature": 0.5,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
            "seed": 7,
            "max_tokens": 9,
            "stop": ("A", "B"),
        },
    )


def test_all_that_can_be_set_of_the_sampling_is_an_option() -> None:
    assert options.SAMPLING.keys() == {part.name for part in fields(SamplingSettings)}


def test_without_options_the_model_decides(backends: list[EchoBackend]) -> None:
    assert call(["run", "-p", "hello"]) == 0
    assert backends[0].model == DEFAULT_MODEL
    assert backends[0].options == ChatOptions()


def test_zero_is_a_choice_and_not_a_default(backends: list[EchoBackend]) -> None:
    assert call(["run", "-p", "x", "--temperature", "0", "--top-k", "0", "--seed", "0"]) == 0
    assert backends[0].options.sampling == {"temperature": 0.0, "top_k": 0, "seed": 0}


def test_json_and_several_turns(backends: list[EchoBackend], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "-p", "one", "-p", "two", "--json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]
    assert len(backends) == 1


def test_text_behind_the_model_is_asked_as_p_does(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", "some/model", "What is", "a tree?", "-p", "And a bush?"]) == 0
    assert capsys.readouterr() == ("What is a tree?\n\nAnd a bush?\n", "")
    assert [backend.model for backend in backends] == ["some/model"]


def test_a_question_in_the_place_of_the_model_is_told_apart(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", "What is a tree?"]) == 2
    assert "chatterm run -p TEXT" in capsys.readouterr().err
    assert backends == []


def test_what_p_asked_is_kept_and_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_folders: Path
) -> None:
    made: list[ScriptedBackend] = []

    def local(model: str, options: ChatOptions) -> ScriptedBackend:
        made.append(
            ScriptedBackend([Script(f"answer {len(made) + 1}")], model=model, sampling=options.sampling)
        )
        return made[-1]

    monkeypatch.setattr("chatterm.backends.local.LocalBackend", local)
    monkeypatch.setattr("sys.stdin", Terminal())
    assert call(["run", "scripted", "not kept"]) == 0
    assert not (own_folders / "data").exists()
    assert call(["run", "scripted", "one", "--save", "--temperature", "0.5"]) == 0
    assert call(["run", "--continue", "-p", "two"]) == 0
    assert call(["run", "--session", "one", "-p", "three", "--json"]) == 0
    assert capsys.readouterr().err == ""
    assert [backend.history[0] for backend in made[2:]] == [("one", "answer 2")] * 2
    assert made[3].sampling == {"temperature": 0.5}
    store = SessionStore.open(own_folders / "data" / "sessions.db")
    (kept,) = store.find()
    _, tree, _ = store.load(kept.id)
    store.close()
    assert [(e.user, e.text) for e in tree.path(tree.head)] == [
        ("one", "answer 2"),
        ("two", "answer 3"),
        ("three", "answer 4"),
    ]


def test_standard_input_is_the_prompt_or_stands_before_it(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "grüße\n".encode())
    assert call(["run"]) == 0
    pipe_in(monkeypatch, b"text\n")
    assert call(["run", "-p", "shorten"]) == 0
    assert capsys.readouterr().out == "grüße\ntext\n\nshorten\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run -p x --temperature -1", "temperature is -1.0"),
        ("run -p x --temperature nan", "temperature is nan"),
        ("run -p x --temperature inf", "temperature is inf; it must be a finite number"),
        ("run -p x --temperature=-inf", "temperature is -inf; it must be 0 (greedy) or more"),
        ("run -p x --temperature 1e400", "temperature is inf; it must be a finite number"),
        ("batch smollm2 x.jsonl --temperature inf", "temperature is inf; it must be a finite number"),
        ("run -p x --presence-penalty nan", "presence_penalty is nan; it must be from -2 to 2"),
        ("run -p x --repetition-penalty inf", "repetition_penalty is inf; it must be from 0.01 to 100"),
        ("run -p x --temperature warm", "--temperature"),
        ("run -p x --top-p 0", "top_p is 0.0"),
        ("run -p x --max-tokens 0", "max_tokens is 0"),
        ("run -p x --seed -1", "seed is -1"),
        ("run -p x --context 0", "--context"),
        ("run -p x --disk-gb inf", "--disk-gb is inf"),
        ("run -p x --device tpu", "--device"),
        (
            "run -p x --device cuda:x",
            "--device: Unknown device 'cuda:x'; it must be auto, cpu, cuda, or one GPU",
        ),
        ("doctor --device tpu", "--device: Unknown device 'tpu'"),
        ("run -p x --dtype int8", "--dtype"),
        ("run -p x --attention best", "--attention"),
        ("run -p x --no-graph=maybe", "--no-graph"),
        ("doctor now", "now"),
        ("run -p x --think maybe", "--think"),
        ("run -p x --think-cache none", "--think-cache"),
        ("run -p x --nonsense", "--nonsense"),
        ("run -p", "-p"),
        ("run -p x --theme plaid", "choose one of: auto, contrast, dusk"),
        ("run --inline --theme plaid", "Unknown theme 'plaid'"),
        ("frobnicate", "frobnicate"),
        ("pull", "MODEL"),
        ("rm smollm2", "--yes"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    assert call(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("chatterm: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert backends == []


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use cannot be deleted there")
@pytest.mark.parametrize("arguments", ["run", "run smollm2 -p hi", "run --inline", "doctor", "sessions list"])
def test_a_deleted_working_folder_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert call(arguments.split()) == 2
    assert capsys.readouterr() == (
        "",
        "chatterm: The current folder no longer exists; cd to one that does, and start again.\n",
    )


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_wrong_usage(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    assert call(["run", "-p", prompt]) == 2
    assert "The prompt is empty" in capsys.readouterr().err
    assert backends == []


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_empty_standard_input_is_wrong_usage(
    backends: list[EchoBackend],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    data: bytes,
) -> None:
    pipe_in(monkeypatch, data)
    assert call(["run"]) == 2
    assert "standard input had no text" in capsys.readouterr().err
    assert backends == []


def test_a_choice_that_does_not_exist_is_told_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "m", "-p", "x", "--quantize", "int3"]) == 2
    assert "Invalid value for '--quantize': 'int3' is not one of 'auto'" in capsys.readouterr().err


def test_bytes_that_are_no_utf8_are_refused() -> None:
    with pytest.raises(WrongUsage, match="not UTF-8"):
        checked_prompts([], io.BytesIO(b"\xc3\x28"))
    with pytest.raises(WrongUsage, match="not UTF-8"):
        checked_prompts(["\udcff"], io.BytesIO(b""))
    with pytest.raises(WrongUsage, match="not UTF-8"):
        constraints.parse_constraint(None, False, "\udcff")


@pytest.mark.parametrize(
    "words",
    [["sessions", "search"], ["sessions", "rename", "x"], ["config", "set", "model.name"]],
)
def test_words_that_are_no_utf8_are_refused_in_a_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([*words, "a\udcff"]) == 2
    assert "The command line is not UTF-8 text" in capsys.readouterr().err


def test_the_screen_opens_on_a_terminal_only(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, str | None]] = []

    def run_app(backend: Any, *, theme: str | None, **_: Any) -> int:
        opened.append((backend, theme))
        return 0

    monkeypatch.setattr("chatterm.app.run_app", run_app)
    monkeypatch.setattr("sys.stdin", Terminal())
    assert call(["run"]) == 2
    assert "The chat screen needs a terminal" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdout", Terminal())
    assert call(["run", "--json"]) == 2
    assert call(["run", "--stats"]) == 2
    assert call(["run", "--theme", "plaid"]) == 2
    assert "plaid" in capsys.readouterr().err
    assert opened == []
    assert call(["run", "some/model", "--theme", "ember"]) == 0
    [(opened_with, theme)] = opened
    assert opened_with._now is backends[-1]
    assert theme == "ember"
    assert backends[-1].model == "some/model"


@pytest.mark.parametrize("error", [ModelError("No such model. Try smollm2."), EngineError("No room.")])
def test_a_failure_is_one_line_and_exit_code_1(
    backends: list[EchoBackend],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    monkeypatch.setattr(EchoBackend, "failure", error)
    assert call(["run", "-p", "x"]) == 1
    assert capsys.readouterr().err == f"chatterm: {error}\n"


def test_errors_cannot_command_the_terminal(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EchoBackend, "failure", ModelError("No \x1b[2Jmodel\nhere."))
    assert call(["run", "-p", "x"]) == 1
    assert capsys.readouterr().err == "chatterm: No model here.\n"


def test_a_bug_is_one_line_and_its_traceback_is_there_on_request(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EchoBackend, "failure", ZeroDivisionError("by zero"))
    assert call(["run", "-p", "x"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "ZeroDivisionError: by zero" in err
    assert "CHATTERM_DEBUG=1" in err
    monkeypatch.setenv("CHATTERM_DEBUG", "1")
    assert call(["run", "-p", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_is_exit_code_130(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EchoBackend, "failure", KeyboardInterrupt())
    assert call(["run", "-p", "x"]) == 130
    assert capsys.readouterr().err == ""


def test_help_names_every_command_and_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--help"]) == 0
    bare = capsys.readouterr().out
    for command in ("run", "pull", "list", "rm", "show", "doctor"):
        assert command in bare
    assert call(["run", "--help"]) == 0
    assert f"Default: {DEFAULT_MODEL}" in capsys.readouterr().out


def test_without_arguments_it_is_the_chat(
    backends: list[EchoBackend], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call([]) == 2
    assert "The prompt is empty" in capsys.readouterr().err
    pipe_in(monkeypatch, b"hello")
    assert call([]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert [backend.model for backend in backends] == [DEFAULT_MODEL]


def test_no_help_says_that_a_flag_takes_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [[]]
    for command in commands:
        assert call([*command, "--help"]) == 0
        said = capsys.readouterr().out
        assert "--help" in said
        assert "-h" in said.split()
        assert "<bool>" not in said, command
        found = command_line(app)
        for name in command:
            found = found.commands[name]
        commands += [[*command, name] for name in getattr(found, "commands", ())]
    assert ["mcp", "add"] in commands


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"]) == 0
    assert capsys.readouterr().out.startswith("chatterm ")


def test_the_pages_name_every_command() -> None:
    root = Path(__file__).parents[2]
    readme = (root / "README.md").read_text(encoding="utf-8")
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert f"`chatterm {name}" in readme
    chat = (root / "docs" / "chat.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"`/{command.name}" in chat


# A process of its own, whose backend speaks until it is stopped.
ENDLESS = """
import time
import chatterm.backends.local
from chatterm.backends.backend import FinishReason, Outcome, TokenEvent, TurnStats

class Endless:
    model, last, info = "endless", None, None
    def __init__(self, model, options): pass
    def open(self, on_progress=None): pass
    def figures(self): return None
    def notes(self): return ()
    def send(self, text):
        while True:
            yield TokenEvent("word ", 0, "answer")
            time.sleep(0.002)
    def close(self): pass

chatterm.backends.local.LocalBackend = Endless
from chatterm.cli.main import main
main(["run", "-p", "x"])
"""


def endless() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CHATTERM_DEBUG": ""},
    )


def test_ctrl_c_keeps_what_was_printed() -> None:
    with endless() as process:
        assert process.stdout is not None
        first = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert (first + rest).endswith(b"word \n")
    assert err == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="nothing here is always full")
@pytest.mark.parametrize(
    ("to", "code", "said"),
    [
        (">/dev/full", 1, "The disk is full; make room, or write to another one."),
        (">&-", 2, "Standard output is closed; start again without >&-, or with > FILE."),
    ],
)
def test_an_output_that_takes_nothing_is_one_line(to: str, code: int, said: str) -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {to}', "sh", sys.executable, "-c", ENDLESS],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CHATTERM_DEBUG": ""},
        timeout=PATIENCE,
    )
    assert ended.returncode == code
    assert ended.stderr.decode() == f"chatterm: {said}\n"


def test_a_reader_that_went_away_ends_it_quietly() -> None:
    with endless() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=PATIENCE)
    assert process.returncode == 1
    assert err == b""


def test_ctrl_c_while_it_still_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    ended = subprocess.run(
        [sys.executable, "-m", "chatterm", "list"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"},
        cwd=tmp_path,
        timeout=PATIENCE,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")
