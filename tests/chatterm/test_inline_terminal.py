"""`chatterm run --inline` as a person and as a shell meet it: real processes, the real default model."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatterm.cli.main import call
from tests.counting import PATIENCE

pexpect = pytest.importorskip("pexpect")

RUN = ["-m", "chatterm", "run"]
OPTIONS = ["--temperature", "0", "--context", "1024"]


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command of this process prints: starting one takes longer."""
    assert call(list(arguments)) == 0
    return capsys.readouterr().out


def test_a_conversation_in_a_terminal(
    smollm2: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*RUN, str(smollm2), "--inline", *OPTIONS]
    child = pexpect.spawn(sys.executable, arguments, env=environment, encoding="utf-8", timeout=PATIENCE)
    try:
        child.expect("Ctrl-D quits.\r\n")
        child.expect("> ")
        child.sendline("Tell me a long story about a dragon.")
        child.expect("dragon\\.\r\n.*dragon")
        child.sendintr()
        child.expect("stopped; /continue resumes it")
        child.expect("\n> ")
        child.sendline("/continue")
        child.expect("/continue\r\n.*[a-z]{3}")
        child.sendintr()
        child.expect("\n> ")
        child.send("never sent")
        child.expect("never sent")
        for _ in range(20):  # readline does not wake for a signal that comes just before it waits for keys
            child.sendintr()
            if child.expect(["\n> ", pexpect.TIMEOUT], timeout=2) == 0:
                break
        child.sendline("Say \\")
        child.expect("\n\\. ")
        child.sendline("hello.")
        child.expect("hello.\r\n.*[A-Za-z]{2}.*\r\n\r\n> ")
        assert "\x1b[3" not in child.before
        child.sendeof()
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0
    finally:
        child.close(force=True)
    saved = shown(capsys, "sessions", "show", "Tell me a long story")
    assert "Say \nhello." in saved
    assert "never sent" not in saved


def test_a_pipe_and_then_one_more_question(
    smollm2: Path,
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = subprocess.run(
        [sys.executable, *RUN, str(smollm2), "--inline", *OPTIONS, "--max-tokens", "6"],
        env=environment,
        input="Hi.\n/undo\nHi.\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    answers = first.stdout.split("\n\n")
    assert answers[1] == f"Undone: Hi.\n{answers[0]}"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"And then?")))
    assert '"prompt_tokens"' in shown(capsys, "run", "--continue", "--json", *OPTIONS, "--max-tokens", "6")
    saved = shown(capsys, "sessions", "show", "Hi.")
    assert saved.index("Hi.") < saved.index("And then?")


def test_who_stops_reading_gets_no_complaint(smollm2: Path, environment: dict[str, str]) -> None:
    pipe = f"printf 'Hi.\\nHi.\\n' | '{sys.executable}' -m chatterm run '{smollm2}' --inline --max-tokens 4 | head -n 1"
    done = subprocess.run(
        ["sh", "-c", pipe], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stdout
    assert "Broken" not in done.stderr
    assert "Traceback" not in done.stderr
