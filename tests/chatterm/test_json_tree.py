"""Answers that are JSON, as trees."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatterm.conversation.entries import AnswerEntry
from chatterm.conversation.json_tree import JsonTree
from chatterm.markdown.lines import line_cells, line_text
from chatterm.terminal.sanitize import is_safe
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    LEAVES, lambda below: st.lists(below) | st.dictionaries(st.text(), below), max_leaves=25
)
WHOLE = st.lists(VALUES, min_size=1) | st.dictionaries(st.text(), VALUES, min_size=1)


def leaves(value: Any) -> int:
    below = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return sum(map(leaves, below)) if below else 1


@given(WHOLE, st.integers(1, 90), st.lists(st.integers(0, 200), max_size=6))
@example({"a\u2028b": "c\u2029d"}, 40, [])
def test_any_json_is_shown_whole_and_harmless_and_can_be_folded(
    value: Any, width: int, rows: list[int]
) -> None:
    tree = JsonTree.of(" \n" + json.dumps(value, ensure_ascii=False, indent=1) + "\n")
    assert tree is not None
    assert int(tree.count.split()[0].replace(",", "")) == leaves(value)
    whole = list(tree.lines(width))
    assert all(is_safe(text) and "\n" not in text for line in whole for text, _ in line)
    if width >= 40:
        assert max(map(line_cells, whole)) <= width
    for row in rows:
        before = tree.lines(width)
        changed = tree.toggle(row)
        assert changed == (tree.lines(width) != before)
    tree.fold(is_open=False)
    assert tree.is_folded == tree.has_depth
    assert len(tree.lines(90)) >= len(value)
    assert all(
        tree.toggle(row) for row, line in enumerate(tree.lines(width)) if line_text(line).startswith("▸")
    )
    tree.fold(is_open=True)
    assert tree.lines(width) == whole


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "7", '"a"', "{", '{"a": 1} and', '{"a": NaN}', "[" * 100_000, "[" + "1," * 9_000 + "1]",
     '{"a": "' + "x" * 300_000 + '"}', "Here: {}"],
)  # fmt: skip
def test_everything_else_stays_text(text: str) -> None:
    assert JsonTree.of(text) is None


def test_numbers_and_names_stand_as_they_were_written() -> None:
    big = "9" * 5000
    tree = JsonTree.of('{"n": 1.10, "n": ' + big + ', "a\\u001b[2J": true, "list": [null, {}]}')
    assert tree is not None
    text = "\n".join(line_text(line) for line in tree.lines(100))
    assert "n: 1.10" in text
    assert text.replace("\n", "").replace(" ", "").count("9") == 5000
    assert "\x1b" not in text
    assert "2: {}" in text


def test_an_answer_is_a_tree_once_it_is_over_and_its_source_stays() -> None:
    entry = AnswerEntry()
    for piece in ('{"name": "Anna", ', '"tags": ["a", "b"]}'):
        entry.add(piece, reasoning=False)
        entry.lay_out(60)
        assert entry.tree is None
    entry.settle()

    def shown() -> str:
        entry.lay_out(60)
        return "\n".join(line_text(entry.line(row)) for row in range(entry.height))

    assert "JSON, 3 values · show the text" in shown()
    assert "1: " in shown()
    tags = next(row for row in range(entry.height) if "tags" in line_text(entry.line(row)))
    assert entry.click(tags, 4).what == "fold"
    assert "▸ tags · 2 items" in shown()
    assert entry.click(tags - 1, 4).what == "message"
    for expected in ('{"name": "Anna"', "name: ", "▸ tags", '{"name": "Anna"'):
        entry.change_view()
        assert expected in shown()
    assert entry.source_text == '{"name": "Anna", "tags": ["a", "b"]}'
    entry.add(" more", reasoning=False)
    assert entry.tree is None
    assert "more" in shown()


async def test_in_the_chat_a_key_changes_how_it_is_shown() -> None:
    async with driven(ScriptedBackend([Script('{"city": "Rome", "at": [41, 12]}'), Script("no")])) as driver:
        await driver.send("where")
        assert "▾ at" in driver.text()
        driver.app.chat.select(driver.app.chat.transcript.entries[-1])
        await driver.pilot.press("z")
        await driver.shows("▸ at · 2 items")
        await driver.pilot.press("z")
        await driver.shows('{"city": "Rome"')
        await driver.pilot.press("escape")
        await driver.send("again")
        driver.app.chat.select(driver.app.chat.transcript.entries[-1])
        await driver.pilot.press("z")
        await driver.until(lambda: any("answer that is JSON" in text for text, _ in driver.said))
