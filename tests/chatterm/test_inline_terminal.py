"""`chatterm run --inline` as a person and as a shell meet it: real processes, the real default model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counting import PATIENCE

pexpect = pytest.importorskip("pexpect")

RUN = ["-m", "chatterm", "run"]
OPTIONS = ["--temperature", "0", "--context", "1024"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "CHATTERM_DATA": str(tmp_path), "TERM": "xterm-256color", "NO_COLOR": "1"}


def test_a_conversation_in_a_terminal(smollm2: Path, environment: dict[str, str]) -> None:
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
    command = [sys.executable, "-m", "chatterm", "sessions", "show", "Tell me a long story"]
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert "Say \nhello." in shown.stdout
    assert "never sent" not in shown.stdout


def test_a_pipe_and_then_one_more_question(smollm2: Path, environment: dict[str, str]) -> None:
    def chatterm(*arguments: str, typed: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *RUN, *arguments, "--max-tokens", "6"]
        return subprocess.run(
            command,
            env=environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    first = chatterm(str(smollm2), "--inline", *OPTIONS, typed="Hi.\n/undo\nHi.\n")
    assert first.returncode == 0
    answers = first.stdout.split("\n\n")
    assert answers[1] == f"Undone: Hi.\n{answers[0]}"
    second = chatterm("--continue", "--json", *OPTIONS, typed="And then?")
    assert second.returncode == 0
    assert '"prompt_tokens"' in second.stdout
    command = [sys.executable, "-m", "chatterm", "sessions", "show", "Hi."]
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert shown.stdout.index("Hi.") < shown.stdout.index("And then?")


def test_who_stops_reading_gets_no_complaint(smollm2: Path, environment: dict[str, str]) -> None:
    pipe = f"printf 'Hi.\\nHi.\\n' | '{sys.executable}' -m chatterm run '{smollm2}' --inline --max-tokens 4 | head -n 1"
    done = subprocess.run(
        ["sh", "-c", pipe], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stdout
    assert "Broken" not in done.stderr
    assert "Traceback" not in done.stderr
