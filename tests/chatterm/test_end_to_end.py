"""From the keyboard to the weights and back: the real default model, in a real terminal."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
import pytest

from chatterm.cli.main import call
from chatterm.sessions.store import SessionStore
from tests.counting import PATIENCE, until

ENTER = "\r"
ALT_UP, ALT_LEFT, ALT_RIGHT, ALT_G = "\x1b[1;3A", "\x1b[1;3D", "\x1b[1;3C", "\x1bg"
STORY = "Tell me a long story about a small boat."
CTRL_U, CTRL_HOME = "\x15", "\x1b[1;5H"
COLUMNS, ROWS = 100, 30


class Person:
    """Types into the terminal of a running chatterm and reads what stands on its screen."""

    def __init__(self, child: "pexpect.spawn[str]") -> None:
        self.child = child
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.Stream(self.screen)

    def sees(self) -> str:
        return "\n".join(self.screen.display)

    def waits_until(self, seen: Callable[[str], bool], seconds: float = 180) -> str:
        """Return the screen once `seen` says so; fail after `seconds`, or when chatterm has ended."""
        end = time.monotonic() + seconds
        while not seen(self.sees()):
            assert time.monotonic() < end, f"still not there after {seconds} s:\n{self.sees()}"
            try:
                self.stream.feed(self.child.read_nonblocking(1 << 16, timeout=0.1))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                pytest.fail(f"chatterm ended; the last screen:\n{self.sees()}")
        return self.sees()

    def types(self, text: str) -> None:
        self.child.send(text)


def runs(*options: str) -> Person:
    """Somebody in front of `chatterm run` with these options."""
    child = pexpect.spawn(
        sys.executable,
        ["-m", "chatterm", "run", *options, "--temperature", "0"],
        cwd=str(Path(__file__).parents[2]),
        env={
            **os.environ,
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            # The terminal gets its size once the program runs, and a busy machine may be too late with it.
            "COLUMNS": str(COLUMNS),
            "LINES": str(ROWS),
        },
        dimensions=(ROWS, COLUMNS),
        encoding="utf-8",
        codec_errors="replace",
    )
    return Person(child)


def test_stop_continue_edit_branch_kill_resume_figures_reset_and_quit(smollm2: Path) -> None:
    person = runs("smollm2", "--max-tokens", "400")
    person.waits_until(lambda seen: "tokens of context" in seen)
    person.types(STORY + ENTER)
    person.waits_until(lambda seen: len(said(seen)) > 60)
    person.types("\x1b")
    stopped = said(person.waits_until(lambda seen: "stopped" in seen))
    person.types(ALT_G)  # continue
    person.waits_until(lambda seen: "stopped" not in seen and len(said(seen)) > len(stopped) + 10)
    person.types("\x1b")
    assert said(person.waits_until(lambda seen: "stopped" in seen)).startswith(stopped)
    person.types("What is the capital of Germany?" + ENTER)
    person.waits_until(lambda seen: "Berlin" in seen and "stopped" not in seen.split("Germany?")[-1])
    person.waits_until(lambda seen: "first token after" in seen.split("Germany?")[-1])
    person.types(4 * ALT_UP)  # answer, question, answer, question
    person.waits_until(lambda seen: "e edit" in seen)
    person.types("e")
    person.waits_until(lambda seen: "sends this as a new branch" in seen)
    person.types(CTRL_U + "What is the capital of Japan?" + ENTER)
    person.waits_until(lambda seen: "< 2/2 >" in seen and "Tokyo" in seen and "first token after" in seen)
    person.types(ALT_LEFT)
    person.waits_until(lambda seen: "Berlin" in seen and "Tokyo" not in seen)
    store = SessionStore.open()
    until(lambda: (tree := store.load(store.find()[0].id)[1]).head == 2 and len(tree) == 3)
    assert store.close()
    person.child.kill(signal.SIGKILL)
    person.child.close(force=True)

    again = runs("--continue")
    again.waits_until(lambda seen: "Berlin" in seen)
    again.types(CTRL_HOME)
    again.waits_until(lambda seen: "< 1/2 >" in seen)
    again.types(ALT_RIGHT)
    again.waits_until(lambda seen: "Tokyo" in seen)
    again.types("/stats" + ENTER)
    again.waits_until(lambda seen: "Statistics" in seen and "cache hit rate" in seen)
    again.types("/reset" + ENTER)
    again.waits_until(lambda seen: "Tokyo" not in seen)
    again.types("/quit" + ENTER)
    again.child.expect(pexpect.EOF, timeout=PATIENCE)
    again.child.close()
    assert again.child.exitstatus == 0


def said(seen: str) -> str:
    """The text of the answer on the screen, without how it is broken into lines."""
    lines = seen.split("\n")
    first = next((row for row, line in enumerate(lines) if STORY in line), len(lines))
    last = next(
        (row for row, line in enumerate(lines) if "first token after" in line or "Write a message" in line), 0
    )
    return " ".join(" ".join(lines[first + 1 : last]).split())


def test_two_turns_without_a_screen_compute_only_what_is_new(
    smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    prompts = ["-p", "What is the capital of Germany?", "-p", "And of Japan?"]
    settings = ["--json", "--temperature", "0", "--max-tokens", "12", "--context", "512"]
    assert call(["run", str(smollm2), *prompts, *settings]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "Berlin" in first["text"]
    assert "Tokyo" in second["text"]
    assert first["stats"]["cached_tokens"] == 0
    # The second turn finds prompt and answer; what ended the answer is not computed until it is a prompt.
    history = first["stats"]["prompt_tokens"] + first["stats"]["generated_tokens"]
    assert second["stats"]["cached_tokens"] == history - 1
