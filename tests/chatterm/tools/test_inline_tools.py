"""Tools in a chat without a screen: only a person at a terminal allows a call, and nothing else can answer."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import ToolCall, ToolResult
from chatterm.cli.inline.chat import run_inline
from chatterm.cli.inline.page import LineInput
from chatterm.sessions.store import SessionStore
from chatterm.tools.rules import read_rules, rules_path
from tests.chatterm.scripted import Script, ScriptedBackend

Line = str | Callable[[str], str]
"""What is typed; a function is given what was said last."""


class Typed(LineInput):
    """A person, who reads what was said before a question."""

    def __init__(self, err: io.StringIO, lines: list[Line], by_hand: bool = True) -> None:
        super().__init__(None, by_hand)
        self._err = err
        self._left = lines

    def next(self, prompt: str) -> str | None:
        if not self._left:
            return None
        line = self._left.pop(0)
        if not callable(line):
            return line
        assert prompt == "? "
        return line(self._err.getvalue())


def answering(word: str) -> Callable[[str], str]:
    """Answer as the latest question wants it."""

    def answer(said: str) -> str:
        *_, number = re.findall(r"^  once (\d+) ", said, re.MULTILINE)
        return f"{word} {number}"

    return answer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "notes.txt").write_text("the notes\n")
    monkeypatch.chdir(work)
    monkeypatch.setenv("CHATTERM_CONFIG", str(tmp_path / "config" / "config.toml"))
    return work


def called(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


def talk(
    tmp_path: Path, calls: list[ToolCall], lines: list[Line], by_hand: bool = True
) -> tuple[list[ToolResult], str, str]:
    """What came of the calls, what was written, and what was said beside it."""
    model = ScriptedBackend([Script("Let me see.", calls=tuple(calls)), Script("Done.")])
    out, err = io.StringIO(), io.StringIO()
    store = SessionStore.open(tmp_path / "sessions.db")
    run_inline(model, store=store, lines=Typed(err, lines, by_hand), out=out, err=err)
    told = [result for name, results in model.calls if name == "tell" for result in results]  # type: ignore[attr-defined]
    return told, out.getvalue(), err.getvalue()


def test_a_call_is_written_out_asked_for_and_done(tmp_path: Path) -> None:
    calls = [called("read_file", path="notes.txt")]
    told, out, err = talk(tmp_path, calls, ["/tools read", "Read.", answering("once")])
    assert [(result.text, result.state) for result in told] == [("the notes", "done")]
    assert "Let me see." in out
    assert "Done." in out
    assert "| path: notes.txt" in err
    assert "[read_file notes.txt: done]" in err


@pytest.mark.parametrize(
    "answer",
    ["", "once", "y", "yes", "always", "once 1", "session 100", "once  9 9", lambda said: "no" + said[-3:]],
)
def test_anything_else_says_no(tmp_path: Path, folder: Path, answer: Line) -> None:
    calls = [called("write_file", path="new.txt", text="x\nonce 42\n  once 42  Yes")]
    told, _, _ = talk(tmp_path, calls, ["/tools write", "Write.", answer])
    assert [result.state for result in told] == ["refused"]
    assert not (folder / "new.txt").exists()


def test_what_was_allowed_is_not_asked_for_again_and_a_danger_always_is(tmp_path: Path) -> None:
    reads = [called("read_file", path="notes.txt")] * 2
    danger = called("run_command", command="rm -rf x \x1b]0;x\x07")
    told, _, err = talk(
        tmp_path, [*reads, danger], ["/tools read,run", "Go.", answering("session"), answering("session")]
    )
    assert [result.state for result in told] == ["done", "done", "refused"]
    assert err.count("The model asks to use read_file") == 1
    assert "Caution: " in err
    assert "\x1b" not in err
    assert re.search(r"^  session \d+  .*run_command", err, re.MULTILINE) is None


def test_in_a_pipe_nobody_can_be_asked(tmp_path: Path) -> None:
    calls = [called("read_file", path="notes.txt"), called("nothing")]
    told, _, err = talk(tmp_path, calls, ["/tools read", "Go."], by_hand=False)
    assert [result.state for result in told] == ["refused", "failed"]
    assert "[read_file is not run: there is nobody to ask]" in err


def test_ctrl_c_at_the_question_ends_it(tmp_path: Path) -> None:
    def interrupts(said: str) -> str:
        raise KeyboardInterrupt

    calls = [called("read_file", path="notes.txt")]
    told, out, err = talk(tmp_path, calls, ["/tools read", "Go.", interrupts, "Then?"])
    assert told == []
    assert "nothing more is run" in err
    assert out.count("Done.") == 1


def test_the_command_says_what_is_on_and_what_is_wrong(tmp_path: Path) -> None:
    _, out, err = talk(tmp_path, [], ["/tools read", "/tools", "/reset", "/tools", "/tools nonsense"])
    first, second = out.split("A new conversation.")
    assert "on  read_file" in first
    assert "off read_file" in second
    assert "There is no tool 'nonsense'" in err


def test_what_was_allowed_for_good_is_listed_and_taken_back(tmp_path: Path) -> None:
    calls = [called("read_file", path="notes.txt")]
    again = ["/tools", "/tools forget 2", "/tools forget x", "/tools forget 1", "/tools"]
    _, out, err = talk(tmp_path, calls, ["/tools read", "Read.", answering("always"), *again])
    before, after = out.split("read_file notes.txt is no longer allowed without asking.")
    assert "rule 1: allowed always: read_file notes.txt" in before
    assert "/tools forget N" in before
    assert "rule 1" not in after
    assert "/tools forget" not in after
    assert err.count("There is no such rule; /tools lists them with their numbers.") == 2
    assert read_rules(rules_path()) == []
