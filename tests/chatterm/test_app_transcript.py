"""Long conversations and fast answers: reading stays calm, typing stays quick."""

import asyncio
import threading

import pytest
from textual import events
from textual.strip import Strip

from chatterm.conversation.entries import NoticeEntry
from chatterm.markdown.lines import Line, line_text
from chatterm.screens.chat.screen import _FRAME, ChatScreen
from chatterm.sessions.tree import Tree
from chatterm.widgets.transcript import Transcript
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend

PROSE = "Some **prose** with `code`, and a list:\n\n- one\n- two\n\n```python\nx = f(1)\n```\n\n"


def fill(driver: Driver, turns: int) -> None:
    """Open a session with that many turns."""
    tree = Tree()
    for number in range(turns):
        exchange = tree.add(tree.head, f"Question {number}?", "scripted")
        exchange.text, exchange.finish_reason = f"Answer {number}. {PROSE}", "eos"
    driver.app.chat.conversation.open(None, tree)


async def test_it_follows_the_end_until_one_scrolls_up() -> None:
    gate = threading.Event()
    script = Script("line\n\n" * 60, gate=gate, gate_after=40)
    async with driven(ScriptedBackend([script])) as driver:
        fill(driver, 5)
        await driver.send("q", wait=False)
        await driver.until(lambda: len("".join(driver.answers[-1:])) >= 160)
        await driver.pilot.pause()
        transcript = driver.transcript
        assert transcript.scroll_y == transcript.max_scroll_y
        await driver.pilot.press("pageup", "pageup")
        before, place = [line[:70].rstrip() for line in driver.text().split("\n")[:12]], transcript.scroll_y
        gate.set()
        await driver.idle()
        assert transcript.scroll_y == place < transcript.max_scroll_y
        assert [line[:70].rstrip() for line in driver.text().split("\n")[:12]] == before
        await driver.pilot.press("ctrl+end")
        await driver.pilot.pause()
        assert transcript.scroll_y == transcript.max_scroll_y
        await driver.pilot.press("ctrl+home")
        await driver.shows("Question 0?")


async def test_what_one_reads_stays_when_the_width_changes() -> None:
    async with driven(ScriptedBackend(), (100, 24)) as driver:
        fill(driver, 60)
        transcript = driver.transcript
        await driver.shows("Question 59?")
        await driver.until(lambda: all(entry.is_laid_out(transcript._width) for entry in transcript.entries))
        transcript.scroll_to(y=transcript._start(transcript.entries[60]), animate=False, immediate=True)
        await driver.until(lambda: "Question 30?" in driver.text().split("\n")[1])
        await driver.pilot.resize_terminal(60, 24)
        await driver.until(lambda: all(entry.is_laid_out(transcript._width) for entry in transcript.entries))
        await driver.pilot.pause()
        assert "Question 30?" in driver.text().split("\n")[1]


async def test_two_thousand_messages_open_and_scroll(monkeypatch: pytest.MonkeyPatch) -> None:
    # What cannot be seen follows while nobody waits: here, never.
    monkeypatch.setattr(Transcript, "_lay_out_rest", lambda _: None)
    async with driven(ScriptedBackend()) as driver:
        fill(driver, 1000)
        await driver.shows("Answer 999.")
        assert sum(entry.height > 0 for entry in driver.transcript.entries) < 20
        await driver.pilot.press("pageup")
        await driver.shows("Answer 998.")


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each frame of the screens that follow, how often the transcript was painted in it."""
    frames: list[int] = []
    frame, update = ChatScreen._frame, Transcript.update

    def noted(screen: ChatScreen) -> None:
        frames.append(0)
        frame(screen)

    def counted(transcript: Transcript) -> None:
        if frames:
            frames[-1] += 1
        update(transcript)

    monkeypatch.setattr(ChatScreen, "_frame", noted)
    monkeypatch.setattr(Transcript, "update", counted)
    return frames


async def test_a_key_waits_for_a_frame_or_two_while_tokens_pour_in(frames: list[int]) -> None:
    async with driven(ScriptedBackend([Script(PROSE * 4000, tokens_per_s=2000)])) as driver:
        fill(driver, 200)
        await driver.send("go", wait=False)
        await driver.until(lambda: driver.answers[-1])
        waited = []
        for number in range(60):
            await asyncio.sleep(0.005)
            before = len(frames)
            driver.composer.post_message(events.Key("x", "x"))
            while len(driver.composer.text) == number:
                await asyncio.sleep(0)
            waited.append(len(frames) - before)
        assert not driver.app.chat.is_idle, "the answer ended too early to show anything"
        assert max(waited) <= 2
        await driver.pilot.press("escape")
        await driver.idle()
        assert "stopped" in driver.text()


async def test_a_frame_paints_once_however_many_tokens_came(frames: list[int]) -> None:
    assert _FRAME >= 1 / 30
    async with driven(ScriptedBackend([Script("word " * 4000, tokens_per_s=8000)])) as driver:
        frames.clear()
        await driver.send("go")
        assert driver.answers[-1] == "word " * 4000
        assert sum(painted > 1 for painted in frames) <= 4, "where the answer begins and ends"
        assert sum(frames) < 2000, "of 5,000 tokens"


async def test_selected_text_is_what_stands_there() -> None:
    async with driven(ScriptedBackend([Script("alpha beta gamma\n\ndelta epsilon")])) as driver:
        await driver.send("q")
        lines = driver.text().split("\n")
        row = next(y for y, line in enumerate(lines) if "alpha" in line)
        start = lines[row].index("beta")
        await driver.pilot.mouse_down(offset=(start, row))
        await driver.pilot.hover(offset=(start + 3, row + 2))
        await driver.pilot.mouse_up(offset=(start + 3, row + 2))
        await driver.pilot.press("ctrl+c")
        assert driver.app.clipboard.startswith("beta gamma\n\n")
        assert "delta" in driver.app.clipboard


async def test_lines_that_are_kept_are_those_that_would_be_drawn() -> None:
    text = "\n\n".join(f"paragraph {n} with **strong** words\n\n- item {n}" for n in range(60))
    async with driven(ScriptedBackend([Script(text=text, tokens_per_s=1500)])) as driver:
        transcript = driver.transcript

        def is_up_to_date() -> bool:
            kept = driver.segments()
            transcript._drawn.clear()
            return kept == driver.segments()

        await driver.send("q", wait=False)
        while not driver.app.chat.is_idle:
            await driver.pilot.pause(0.02)
            assert is_up_to_date()
        await driver.shows("item 59")
        dark = driver.segments()
        driver.app.chat.action_run_command("theme", "paper")
        await driver.pilot.pause()
        assert driver.segments() != dark
        assert is_up_to_date()


async def test_lines_that_move_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with driven(
        ScriptedBackend([Script(text="\n\n".join(f"paragraph {n}" for n in range(80)))])
    ) as driver:
        await driver.send("q")
        drawn, cropped, before = list[str](), Transcript._cropped, driver.transcript.scroll_y

        def noted(self: Transcript, line: Line, width: int) -> Strip:
            drawn.append(line_text(line))
            return cropped(self, line, width)

        monkeypatch.setattr(Transcript, "_cropped", noted)
        driver.transcript.show_head(NoticeEntry("above"))
        await driver.until(lambda: driver.transcript.scroll_y > before)
        assert drawn == []
        driver.transcript.edge(-1)
        await driver.shows("above")
        assert any("above" in text for text in drawn)


async def test_the_scroll_bar_comes_after_a_growing_answer() -> None:
    text = "\n\n".join(f"paragraph {n}" for n in range(80))
    async with driven(ScriptedBackend([Script(text=text)])) as driver:
        await driver.send("q")
        transcript = driver.transcript
        bar = transcript.vertical_scrollbar
        await driver.until(lambda: bar.window_virtual_size == transcript.virtual_size.height)
        await driver.until(lambda: bar.position == transcript.max_scroll_y)
