"""Search inside a conversation, and what says that text has come below what is read."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.conversation.entries import AnswerEntry, UserEntry
from chatterm.conversation.find import Finder
from chatterm.markdown.lines import line_text
from chatterm.widgets.new_below import NewBelow
from tests.chatterm.driving import driven
from tests.chatterm.finding import found_by
from tests.chatterm.scripted import Script, ScriptedBackend

LONG = "\n\n".join(f"Paragraph {number} tells of a river." for number in range(60))


def marked(finder: Finder, entry: AnswerEntry | UserEntry) -> str:
    """What is marked, line by line."""
    found = []
    for row in range(entry.height):
        found += [t for t, names in finder.marked(entry, row, entry.line(row)) if "found" in names.split()]
    return "|".join(found)


@given(
    st.integers(12, 60),
    st.lists(st.sampled_from(["river", "a **River**", "`riverbed`", "sea", "- x"]), max_size=12),
)
def test_every_occurrence_is_found_at_any_width(width: int, words: list[str]) -> None:
    answer = AnswerEntry()
    answer.add(" ".join(["begin", *words]), reasoning=False)
    answer.footer = [("12 tokens · a river of figures", "muted")]
    finder = Finder("RIVER")
    found = found_by(finder, [answer], width)
    assert len(found) == sum("river" in word.lower() for word in words)
    assert marked(finder, answer).lower().replace("|", "") == "river" * len(found)


@pytest.mark.parametrize("width", [14, 20, 80])
def test_a_phrase_is_found_across_lines(width: int) -> None:
    answer, finder = AnswerEntry(), Finder("some  longer words here")
    answer.add("First some longer words here, last.", reasoning=False)
    (match,) = found_by(finder, [answer], width)
    assert marked(finder, answer).replace("|", " ") == "some longer words here"
    assert len(match.spans) == (1 if width == 80 else len({row for row, _, _ in match.spans}))


def test_a_folded_message_opens_where_something_is_found_in_it() -> None:
    entry = UserEntry("line\n" * 200 + "needle")
    entry.lay_out(40)
    low = entry.height
    assert found_by(Finder("haystack"), [entry], 40) == []
    assert entry.height == low
    assert len(found_by(Finder("needle"), [entry], 40)) == 1
    assert "needle" in line_text(entry.line(entry.height - 2))


def test_nothing_is_found_of_nothing() -> None:
    answer = AnswerEntry()
    answer.add("text", reasoning=False)
    assert found_by(Finder("  "), [answer], 40) == []


async def test_find_goes_from_match_to_match_and_back() -> None:
    async with driven(ScriptedBackend([Script(LONG), Script("No water here.")])) as driver:
        await driver.send("tell me of the sea")
        await driver.send("and now?")
        await driver.pilot.press("ctrl+f")
        await driver.types("Paragraph 3 tells")
        await driver.shows(" 1 of 1 ")
        assert "Paragraph 3 tells" in driver.text()
        await driver.pilot.press(*["backspace"] * 8)
        await driver.shows(" 7 of 60 ")  # the latest one in view
        await driver.pilot.press(*["up"] * 7)
        await driver.shows(" 60 of 60 ")
        assert "Paragraph 59 tells" in driver.text()
        await driver.pilot.press("enter")
        await driver.shows(" 1 of 60 ")
        assert "Paragraph 0 tells" in driver.text()
        await driver.types("zzz")
        await driver.shows("not found")
        await driver.pilot.press("escape")
        assert driver.transcript.finder is None
        assert driver.app.focused is driver.composer
        await driver.send("/find water")
        await driver.shows("1 of 1")
        await driver.pilot.press("escape")


async def test_find_in_an_empty_conversation_says_so() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.pilot.press("ctrl+f")
        assert driver.errors == ["There is nothing to search yet; /sessions searches earlier conversations."]


@pytest.mark.parametrize("by", ["end", "click", "ctrl+end"])
async def test_new_text_below_is_told_and_gone_to(by: str) -> None:
    gate = threading.Event()
    backend = ScriptedBackend([Script(LONG), Script("more and more " * 40, gate=gate, gate_after=2)])
    async with driven(backend) as driver:
        await driver.send("first")
        marker = driver.app.chat.query_one(NewBelow)
        assert not marker.display
        await driver.send("second", wait=False)
        await driver.until(lambda: driver.app.chat.conversation.turn and len(driver.answers[-1]) > 4)
        await driver.pilot.press("pageup", "pageup")
        await driver.until(lambda: not driver.transcript._follow)
        assert not marker.display  # nothing has come since
        top = driver.transcript.scroll_y
        gate.set()
        await driver.idle()
        await driver.shows("New text below")
        assert driver.transcript.scroll_y == top
        driver.composer.put("draft")
        await driver.pilot.press("home")
        await driver.pilot.press("end")  # is the composer's while text stands behind the cursor
        assert marker.display
        if by == "click":
            await driver.pilot.click(NewBelow)
        else:
            await driver.pilot.press(by)
        await driver.until(lambda: not marker.display)
        assert driver.transcript._follow
