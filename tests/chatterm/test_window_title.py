"""What the program says to the window around the terminal, and when it has gone."""

import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events

from chatterm.app import way_back
from chatterm.screens.chat import window_title
from chatterm.sessions.store import SessionStore
from chatterm.terminal.title import BELL, attention, has_title, title_sequence
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend


@given(st.text())
def test_no_title_breaks_out_of_its_sequence(title: str) -> None:
    said = title_sequence(title)
    assert re.fullmatch(r"\x1b\]0;[^\x00-\x1f\x7f-\x9f]*\x07", said)
    for known in ({"TERM_PROGRAM": "iTerm.app"}, {"TERM": "foot-extra"}):
        shown = attention("notify", title, known)
        assert re.fullmatch(r"\x1b\](9;|777;notify;chatterm;)[^\x00-\x1f\x7f-\x9f]*\x07", shown)


def test_the_bell_stands_in_where_no_notification_is_known() -> None:
    assert attention("notify", "x", {"TERM": "xterm-256color"}) == BELL
    assert attention("notify", "x", {"TERM_PROGRAM": "WezTerm", "TMUX": "1"}) == BELL
    assert attention("bell", "x", {"TERM_PROGRAM": "WezTerm"}) == BELL
    assert attention("off", "x", {"TERM_PROGRAM": "WezTerm"}) == ""
    assert attention("notify", "a;b", {"TERM": "foot"}) == "\x1b]777;notify;chatterm;a,b\a"
    assert has_title({"TERM": "xterm"})
    assert not has_title({"TERM": "linux"})


class Window:
    """Stands in for the driver of a terminal."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.written: list[str] = []

    def show_title(self, title: str) -> None:
        if title not in self.titles[-1:]:
            self.titles.append(title)

    def write(self, data: str) -> None:
        self.written.append(data)


async def test_the_title_says_the_model_and_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Window()
    monkeypatch.setattr(window_title, "titled_driver", lambda app: window)
    async with driven(ScriptedBackend([Script("one two three", tokens_per_s=50)])) as driver:
        await driver.send("hello")
        await driver.until(lambda: window.titles[-1:] == ["ready - scripted - chatterm"])
    assert [title.split()[0] for title in window.titles] == ["loading", "ready", "answering", "ready"]


@pytest.mark.parametrize(
    ("is_long", "away", "stopped", "rings"),
    [
        (True, True, False, True),
        (False, True, False, False),
        (True, False, False, False),
        (True, True, True, False),
    ],
)
async def test_a_long_answer_rings_while_nobody_looks(
    is_long: bool, away: bool, stopped: bool, rings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window()
    monkeypatch.setattr(window_title, "titled_driver", lambda app: window)
    monkeypatch.setattr(window_title, "LONG", 0.0 if is_long else 1e9)
    gate = threading.Event()
    backend = ScriptedBackend([Script("said", gate=gate)])
    async with driven(backend) as driver:
        await driver.send("hello", wait=False)
        if away:
            driver.app.post_message(events.AppBlur())
            await driver.until(lambda: not driver.app.app_focus)
        if stopped:
            driver.app.chat.conversation.stop()
        gate.set()
        await driver.idle()
        assert window.written == ([BELL] if rings else [])


def test_leaving_says_how_to_come_back(tmp_path: Path) -> None:
    from chatterm.backends.backend import Exchange
    from chatterm.sessions.records import SessionInfo

    store = SessionStore.open(tmp_path / "s.db")
    empty = store.new(SessionInfo())
    assert way_back(store, empty) == ""
    assert way_back(store, None) == way_back(None, None) == ""
    first = store.new(SessionInfo())
    store.save(first, Exchange(1, None, "how to boil an egg", text="so", finish_reason="eos", created=1.0))
    assert way_back(store, first) == (
        "Saved: how to boil an egg\n"
        "  To continue: chatterm run --continue\n"
        f"  or, at any later time: chatterm run --session {first}"
    )
    second = store.new(SessionInfo())
    store.save(second, Exchange(1, None, "tea", text="so", finish_reason="eos", created=2.0))
    assert (
        way_back(store, first) == f"Saved: how to boil an egg\n  To continue: chatterm run --session {first}"
    )
    store.close()
