"""A theme that is dark or light as the terminal is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events

from chatterm.screens.themed_app import ThemedApp, this_terminal
from chatterm.terminal.background import BackgroundReported
from chatterm.terminal.driver import Keyboard
from tests.chatterm.driving import driven
from tests.chatterm.scripted import ScriptedBackend

DARK, LIGHT = "\x1b]11;rgb:1c1c/1c1c/2020\x1b\\", "\x1b]11;rgb:ff/fd/f0\x07"
MODES = {"\x1b[?997;1n": "dark", "\x1b[?997;2n": "light", DARK: "dark", LIGHT: "light"}


def read(keyboard: Keyboard, pieces: list[str]) -> list[str]:
    found = [event for piece in pieces for event in keyboard.feed(piece)] + list(keyboard.tick(is_quiet=True))
    return [
        ("dark" if event.is_dark else "light")
        if isinstance(event, BackgroundReported)
        else event.key
        if isinstance(event, events.Key)
        else repr(event)
        for event in found
    ]


@given(
    st.lists(st.sampled_from([*MODES, "a", "b", "\x1b[A"]), min_size=1, max_size=6),
    st.lists(st.integers(1, 12), max_size=8),
)
def test_reports_are_read_wherever_the_input_is_cut(parts: list[str], sizes: list[int]) -> None:
    text, pieces = "".join(parts), []
    for size in sizes:
        # An Escape by itself is a key: terminals write its sequence at once.
        size += text[:size].endswith("\x1b")
        pieces.append(text[:size])
        text = text[size:]
    expected = [MODES.get(part, "up" if part == "\x1b[A" else part) for part in parts]
    assert read(Keyboard(), [*pieces, text]) == expected


@pytest.mark.parametrize("keys", ["\x1b]", "\x1b]11;rgb:12", "\x1b[?9", "\x1b]11;rgb:zz/1/1\x07"])
def test_what_is_no_report_ends(keys: str) -> None:
    keyboard = Keyboard()
    read(keyboard, [keys])
    assert read(keyboard, [LIGHT])[-1] == "light"


async def test_the_theme_follows_the_terminal() -> None:
    async with driven(ScriptedBackend(), theme="auto") as driver:
        assert driver.app.theme == "graphite"
        for is_dark, shown in ((False, "paper"), (True, "graphite"), (False, "paper")):
            driver.app.post_message(BackgroundReported(is_dark))
            await driver.until(lambda shown=shown: driver.app.theme == shown)
        driver.app.use_theme("moss")
        driver.app.post_message(BackgroundReported(True))
        await driver.idle()
        assert driver.app.theme == "moss"


@pytest.mark.parametrize(("value", "shown"), [("0;15", "paper"), ("15;0", "graphite"), ("", "graphite")])
def test_what_is_known_before_it_answers(value: str, shown: str) -> None:
    terminal = this_terminal({"COLORFGBG": value, "TERM": "xterm-256color"}, "utf-8")
    assert ThemedApp(theme="auto", terminal=terminal).theme == shown
