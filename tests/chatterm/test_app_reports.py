"""What is said without being part of the conversation: reports over it, remarks at the composer, its head."""

from collections.abc import Sequence
from math import inf
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.style import Style

from chatterm.backends.backend import EngineError
from chatterm.conversation.preset import Preset, PresetEntry, preset_lines
from chatterm.markdown.lines import line_cells, line_text
from chatterm.screens.backdrop import Backdrop
from chatterm.screens.report import ReportScreen, ReportView
from chatterm.widgets.remarks import Remark, Remarks, remarks_lines
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.covering import each_value_once
from tests.fresh import examples

SIZES = [(40, 12), (80, 24), (140, 45)]


def report_of(driver: Driver) -> ReportView:
    assert isinstance(driver.app.screen, ReportScreen)
    return driver.app.screen.query_one(ReportView)


async def test_three_times_f1_is_one_help_and_leaves_no_trace() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.send("hello")
        before = list(driver.transcript.entries)
        await driver.pilot.press("f1", "f1", "f1")
        await driver.shows("Show commands and keys")
        assert len(driver.app.screen_stack) == 3
        assert driver.transcript.entries == before
        await driver.pilot.press("f1")
        assert driver.app.screen is driver.app.chat
        assert driver.transcript.entries == before


@pytest.mark.parametrize("key", ["escape", "q", "enter", "f2", "ctrl+c"])
async def test_every_way_back_from_a_report(key: str) -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.pilot.press("f2")
        await driver.shows("There are no answers yet.")
        await driver.pilot.press(key)
        assert driver.app.screen is driver.app.chat
        assert driver.composer.text == ""
        assert not driver.transcript.entries


async def test_the_key_of_another_report_shows_that_one_instead() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.pilot.press("f1", "f2")
        await driver.shows("There are no answers yet.")
        await driver.pilot.press("f9")
        await driver.shows("/set NAME VALUE")
        assert len(driver.app.screen_stack) == 3
        await driver.pilot.press("ctrl+r", "escape")  # no key of the conversation means anything here
        assert driver.app.screen is driver.app.chat
        assert driver.errors == []


@each_value_once
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("command", ["/help", "/stats", "/cache why", "/set", "/system"])
async def test_a_report_can_be_read_to_its_end(size: tuple[int, int], command: str) -> None:
    backend = ScriptedBackend(system="Be terse.\n" * 60)
    async with driven(backend, size=size) as driver:
        await driver.send("hello")
        await driver.send(command, wait=False)
        await driver.until(lambda: isinstance(driver.app.screen, ReportScreen))
        view = report_of(driver)
        await driver.until(lambda: view.virtual_size.height)
        assert all(line_cells(line) <= view.virtual_size.width for line in view._lines)
        if view.virtual_size.height > size[1]:
            await driver.pilot.press("down")
            await driver.until(lambda: view.scroll_y == 1)
            view.post_message(_wheel(view))
            await driver.until(lambda: view.scroll_y > 1)
        await driver.pilot.press("end")
        last = next(line_text(line).strip() for line in reversed(view._lines) if line_text(line).strip())
        await driver.until(lambda: last[:20] in driver.text())


def _wheel(view: ReportView) -> object:
    from textual.events import MouseScrollDown

    return MouseScrollDown(view, 2, 2, 0, 0, 0, False, False, False, 2, 2)


# --- remarks ---


async def test_an_error_stands_at_the_composer_and_not_in_the_conversation() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.send("/theme nonsense")
        await driver.shows("Unknown theme 'nonsense'")
        assert not driver.transcript.entries
        remarks = driver.app.chat.query_one(Remarks)
        assert remarks.region.bottom < driver.composer.region.y + 1
        assert driver.composer.region.y - remarks.region.bottom <= 1
        await driver.pilot.press("escape")
        await driver.until(lambda: not remarks.display)


async def test_a_message_that_is_refused_is_back_with_the_reason_above_it() -> None:
    backend = ScriptedBackend([Script(error=EngineError("It does not fit."))])
    async with driven(backend) as driver:
        await driver.send("too long", wait=False)
        await driver.shows("It does not fit.")
        assert driver.composer.text == "too long"
        await driver.pilot.pause(0.1)  # the text that was given back is no key of the person
        remarks = driver.app.chat.query_one(Remarks)
        assert not any(remark.is_old for remark in remarks._remarks)
        await driver.types("!")
        await driver.until(lambda: all(remark.is_old for remark in remarks._remarks))


async def test_a_remark_stays_for_some_seconds_and_until_something_is_written() -> None:
    async with driven(ScriptedBackend()) as driver:
        remarks, now = driver.app.chat.query_one(Remarks), monotonic() + 1e6
        remarks.say("One.", "error", "", now)
        remarks.expire(now + 1000)
        assert remarks.texts == ["One."]
        remarks.written("x", now + 1)
        assert remarks.texts == ["One."]
        remarks.expire(now + 1000)
        assert remarks.texts == []
        remarks.say("Two.", "error", "x", now)
        remarks.say("Two.", "error", "x", now)
        remarks.say("Three.", "notice", "x", now)
        assert remarks.texts == ["Two.", "Three."]
        remarks.written("xy", now + 1)
        remarks.say("Four.", "notice", "xy", now + 1)
        assert remarks.texts == ["Four."]
        remarks.stand("No disk.")
        remarks.written("z", now + 1000)
        remarks.dismiss()
        assert remarks.texts == ["No disk."]
        remarks.stand("")
        assert not remarks.display


@examples(60)
@given(
    st.lists(st.tuples(st.text(max_size=200), st.sampled_from(["notice", "error"])), max_size=3),
    st.integers(4, 120),
    st.integers(2, 20),
)
def test_remarks_fit(said: list[tuple[str, str]], width: int, most: int) -> None:
    remarks = [Remark(text, kind, "", inf) for text, kind in said]
    lines = remarks_lines(remarks, width, most)
    assert len(lines) <= most
    assert all(line_cells(line) <= width for line in lines)
    assert bool(lines) == bool(said)


# --- the head ---


async def test_the_head_says_what_holds_and_a_new_conversation_what_it_keeps() -> None:
    async with driven(ScriptedBackend(system="Be terse.")) as driver:
        await driver.shows("System prompt  Be terse.")
        await driver.send("hello")
        assert isinstance(driver.transcript.entries[0], PresetEntry)
        await driver.send("/set temperature 0.2")
        await driver.shows("Sampling  temperature 0.2")
        await driver.send("/system Be kind.")
        await driver.shows("System prompt  Be kind.")
        await driver.pilot.press("ctrl+n")
        await driver.shows("A new conversation. It keeps the system prompt and temperature 0.2.")
        await driver.shows("System prompt  Be kind.")
        assert [type(entry).__name__ for entry in driver.transcript.entries] == ["PresetEntry", "NoticeEntry"]
        await driver.send("/system none")
        await driver.send("/set default")
        await driver.until(lambda: not isinstance(driver.transcript.entries[0], PresetEntry))
        await driver.pilot.press("ctrl+n")
        await driver.until(lambda: driver.told == ["A new conversation."])


async def test_a_long_system_prompt_is_folded_and_a_click_opens_it() -> None:
    backend = ScriptedBackend(system="\n".join(f"Rule {n}." for n in range(12)))
    async with driven(backend, size=(80, 40)) as driver:
        await driver.send("hello")
        await driver.shows("▸ 9 more lines")
        assert "Rule 11." not in driver.text()
        await driver.pilot.click(driver.transcript, offset=(10, 2))
        await driver.shows("Rule 11.")
        await driver.pilot.click(driver.transcript, offset=(10, 2))
        await driver.until(lambda: "Rule 11." not in driver.text())


@examples(60)
@given(st.text(min_size=1, max_size=400), st.integers(16, 120), st.booleans())
def test_the_head_fits(system: str, width: int, is_open: bool) -> None:
    lines, left = preset_lines(Preset.of(system, {"stop": ["a" * 90], "top_k": 3}), width, is_open=is_open)
    assert all(line_cells(line) <= width for line in lines)
    assert not (is_open and left)


@pytest.mark.parametrize("theme", ["graphite", "paper", "terminal"])
async def test_a_screen_over_the_conversation_looks_as_textual_draws_it(
    theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ScriptedBackend([Script("Some **bold** text.\n\n```python\nx = 1\n```\n")])
    async with driven(backend, (100, 30), theme) as driver:
        await driver.send("Tell me of rivers")
        pictures = []
        for _ in range(2):
            driver.app.chat.action_run_command("help", "")
            await driver.shows("Esc closes")
            await driver.pilot.pause()
            pictures.append([(segment.text, segment.style) for segment in driver.segments()])
            await driver.pilot.press("escape")
            await driver.until(lambda: driver.app.screen is driver.app.chat)
            for name in ("render", "_on_screen_resume", "_on_timer_update"):
                monkeypatch.delattr(Backdrop, name, raising=False)
        assert joined(pictures[0]) == joined(pictures[1])


async def test_a_new_layout_of_a_report_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with driven(ScriptedBackend(), (100, 30)) as driver:
        driver.app.chat.action_run_command("help", "")
        await driver.shows("Esc closes")
        await driver.pilot.pause()
        frames: list[object] = []
        monkeypatch.setattr(driver.app, "_display", lambda screen, frame: frames.append(frame))
        screen = driver.app.screen
        screen.refresh(layout=True)
        screen._on_timer_update()
        assert len(frames) == 1


def joined(segments: Sequence[tuple[str, Style | None]]) -> list[tuple[str, Style | None]]:
    """Return each character with what can be seen of its style."""
    return [
        (
            character,
            style and (style.color, style.bgcolor, style.bold, style.italic, style.underline, style.reverse),
        )
        for text, style in segments
        for character in text
    ]
