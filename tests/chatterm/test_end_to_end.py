"""From the keyboard to the weights and back: the real default model, in a real terminal."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

from chatterm.cli import call

ENTER = "\r"
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


@pytest.fixture
def person(smollm2: Path) -> Iterator[Person]:
    """In front of `chatterm run smollm2`."""
    child = pexpect.spawn(
        sys.executable,
        ["-m", "chatterm", "run", "smollm2", "--temperature", "0", "--max-tokens", "40"],
        cwd=str(Path(__file__).parents[2]),
        env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
        dimensions=(ROWS, COLUMNS),
        encoding="utf-8",
        codec_errors="replace",
    )
    yield Person(child)
    child.close(force=True)


def test_a_question_an_answer_figures_reset_and_quit(person: Person) -> None:
    person.waits_until(lambda seen: "tokens of context" in seen)  # the model is loaded
    person.types("What is the capital of France?" + ENTER)
    answered = person.waits_until(lambda seen: "first after" in seen)
    assert "Paris" in answered
    person.types("/stats" + ENTER)
    person.waits_until(lambda seen: "Statistics" in seen and "KV cache" in seen)
    person.types("/reset" + ENTER)
    person.waits_until(lambda seen: "Paris" not in seen)
    person.types("/quit" + ENTER)
    person.child.expect(pexpect.EOF, timeout=20)
    person.child.close()
    assert person.child.exitstatus == 0


def test_two_turns_without_a_screen_compute_only_what_is_new(
    smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    prompts = ["-p", "What is the capital of France?", "-p", "And of Italy?"]
    settings = ["--json", "--temperature", "0", "--max-tokens", "12", "--context", "512"]
    assert call(["run", str(smollm2), *prompts, *settings]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "Paris" in first["text"]
    assert "Rome" in second["text"]
    assert first["stats"]["cached_tokens"] == 0
    # The second turn finds prompt and answer; what ended the answer is not computed until it is a prompt.
    history = first["stats"]["prompt_tokens"] + first["stats"]["generated_tokens"]
    assert second["stats"]["cached_tokens"] == history - 1
