"""No text from outside can command the terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.terminal.sanitize import cleaned, is_safe, one_line, visible

ANYTHING = st.text(alphabet=st.characters(codec=None), max_size=200) | st.text(
    alphabet="\x1b[]P\\\x07\x9b\x9d0;1mA\n\t\r\u202e\ud800\x00", max_size=60
)


@given(ANYTHING)
def test_nothing_unsafe_is_left(text: str) -> None:
    for result in (visible(text), cleaned(text), one_line(text)):
        assert is_safe(result)
        allowed = {"\n", "\t"}
        assert not [c for c in result if unicodedata.category(c) in ("Cc", "Cs") and c not in allowed]


@given(ANYTHING)
def test_cleaning_twice_changes_nothing(text: str) -> None:
    assert cleaned(cleaned(text)) == cleaned(text)
    assert visible(visible(text)) == visible(text)


@given(ANYTHING, st.integers(min_value=0, max_value=200))
def test_visible_does_not_depend_on_how_a_stream_is_cut(text: str, cut: int) -> None:
    assert visible(text[:cut]) + visible(text[cut:]) == visible(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, ümläut, 漢字, 👩‍🚀\n\tindented", "plain, ümläut, 漢字, 👩‍🚀\n\tindented"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0;2\x1b\\sixel", "sixel"),
        ("\x9b2Jc1", "c1"),
        ("\x9d52;c;aGk=\x9cclip", "clip"),
        ("unfinished \x1b]0;evil\nnext line", "unfinished \nnext line"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("bell\x07 null\x00 del\x7f", "bell null del"),
        ("abc\u202edef", "abcdef"),
        ("half \ud83d", "half \ufffd"),
        ("end \x1b", "end "),
    ],
)
def test_cleaned(text: str, expected: str) -> None:
    assert cleaned(text) == expected


def test_visible_shows_what_the_model_wrote() -> None:
    assert visible("\x1b[2J\x07\x9b\u202e") == "␛[2J␇\ufffd\ufffd"


def test_one_line_is_one_short_line() -> None:
    assert one_line("  a\n\n b\x1b[1m c ") == "a b c"
    assert one_line("x" * 1000, limit=10) == "x" * 9 + "…"
