"""The keyboard: long pastes do not go through the parser of keys, whatever way the terminal cuts them."""

import errno
import os
import sys
import textwrap
from io import StringIO
from pathlib import Path

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual.message import Message

from chatterm.terminal.driver import Keyboard, Pasted, PasteReader, TerminalOutput
from tests.counting import PATIENCE

BEGIN, END = "\x1b[200~", "\x1b[201~"


def read(pieces: list[str]) -> list[str | Pasted]:
    reader = PasteReader()
    found = [part for piece in pieces for part in reader.feed(piece)]
    assert not reader.is_inside
    return found


def test_a_paste_is_taken_whole() -> None:
    text = "line\r" * 200_000
    sent = f"a{BEGIN}{text}{END}b"
    pieces = [sent[start : start + 4096] for start in range(0, len(sent), 4096)]
    assert read(pieces) == ["a", Pasted(text), "b"]  # two characters are left for the parser of keys


def test_pastes_follow_each_other() -> None:
    assert read([f"{BEGIN}one{END}{BEGIN}{END}x{BEGIN}two{END}"]) == [
        Pasted("one"),
        Pasted(""),
        "x",
        Pasted("two"),
    ]


@given(
    st.text(alphabet="ab\x1b[201~\r", max_size=40).filter(lambda text: END not in text + "\x1b[201"),
    st.lists(st.integers(1, 7), max_size=60),
)
def test_the_end_may_be_cut_anywhere(text: str, sizes: list[int]) -> None:
    rest, pieces = text + END + "k", [BEGIN]
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    found = read([*pieces, rest])
    assert found[0] == Pasted(text)
    assert "".join(part for part in found[1:] if isinstance(part, str)) == "k"


def test_a_paste_that_never_ends_is_given_up() -> None:
    reader = PasteReader()
    assert list(reader.feed(f"{BEGIN}lost \x1b[20")) == []
    assert reader.is_inside
    assert reader.flush() == Pasted("lost ")
    assert list(reader.feed("x")) == ["x"]


def keys(events_: list[Message]) -> list[str]:
    return [event.key if isinstance(event, events.Key) else repr(event) for event in events_]


def test_escape_and_a_paste_right_behind_it() -> None:
    expected = ["escape", "Paste(text='text')", "x"]
    for pieces in (
        [f"\x1b{BEGIN}text{END}x"],
        ["\x1b", f"{BEGIN}text{END}x"],
        ["\x1b" + BEGIN, f"text{END}", "x"],
    ):
        keyboard = Keyboard()
        assert keys([event for piece in pieces for event in keyboard.feed(piece)]) == expected


def test_sequences_that_mean_nothing_take_nothing_along() -> None:
    keyboard = Keyboard()
    assert keys(list(keyboard.feed("a\x1b[99999999999ub\x1b[49:33uc\x1b[:Ad"))) == ["a", "b", "c", "d"]
    assert keys(list(keyboard.feed(f"{BEGIN}text{END}"))) == ["Paste(text='text')"]


@given(st.lists(st.text(alphabet="\x1b\x1b[[<?0123456789;:MmuABIRP~$yt48aé\0", max_size=20), max_size=6))
def test_no_bytes_stop_the_keyboard(pieces: list[str]) -> None:
    keyboard = Keyboard()
    for piece in pieces:
        list(keyboard.feed(piece))
        list(keyboard.tick(is_quiet=True))
    list(keyboard.feed(END + "\x1b" * 40 + "z" * 40))  # whatever was begun has ended
    assert keys(list(keyboard.feed(f"q{BEGIN}text{END}")))[-2:] == ["q", "Paste(text='text')"]


def test_nothing_is_drawn_once_the_terminal_is_gone() -> None:
    tries = 0

    class Terminal(StringIO):
        def flush(self) -> None:
            nonlocal tries
            tries += 1
            raise OSError(errno.EIO, "Input/output error")

    drawn = TerminalOutput(Terminal())
    for _ in range(3):
        drawn.write("a line")
        drawn.flush()
    assert tries == 1


def test_another_error_of_drawing_is_told() -> None:
    class Terminal(StringIO):
        def flush(self) -> None:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with pytest.raises(BlockingIOError):
        TerminalOutput(Terminal()).flush()


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.chatterm.test_composer import WritingApp

class App(WritingApp):
    def on_composer_submitted(self, message):
        self.exit(len(message.text))

app = App()
app.run()
print("SENT", app.return_value)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_real_terminal(tmp_path: Path) -> None:
    """Half a character at a time, a megabyte at once, and an editor that takes the terminal."""
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\ntest -t 0 && printf " edited" >> "$1"\n', encoding="utf-8")
    editor.chmod(0o755)
    root = str(Path(__file__).parents[2])
    child = pexpect.spawn(
        sys.executable,
        ["-c", textwrap.dedent(PROGRAM).format(root=root)],
        env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "VISUAL": str(editor)},
        dimensions=(24, 80),
        timeout=PATIENCE,
    )
    child.delaybeforesend = None
    child.expect(b"Write a message")
    child.send(b"caf\xc3")
    child.expect(b"caf")
    child.send(b"\xa9 ")
    child.expect("é".encode())
    child.send(f"{BEGIN}{'a line of some length, pasted' * 10}\r".encode())
    for _ in range(100):
        child.send(("a line of some length, pasted\r" * 340).encode())
    child.send(END.encode())
    child.expect(rb"pasted 34,001 lines")
    child.send(b"\x07")  # Ctrl+G
    child.expect(rb"pasted 34,00\d lines")
    child.send(b"\r")
    child.expect(rb"SENT (\d+)")
    assert child.match is not None
    assert int(child.match[1]) == len("café ") + 290 + 1 + 100 * 340 * 30 + len(" edited")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
