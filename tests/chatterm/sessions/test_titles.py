"""Titles, names of sessions, and when they were used."""

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.title import title_question
from chatterm.sessions.dates import stamp, when_text
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.titles import LIMIT, given_title, made_title, make_title, matching_line, pick
from chatterm.terminal.sanitize import is_safe


@pytest.mark.parametrize(
    ("message", "title"),
    [
        ("Why is the sky blue?", "Why is the sky blue?"),
        ("\n\n   # A heading\nmore", "A heading"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("- buy milk\n- and eggs", "buy milk"),
        ("1. first", "first"),
        ("*p = 3", "*p = 3"),
        ("**User: How do rivers move sediment?", "How do rivers move sediment?"),
        ("**User:** How *do* `they`?", "How do they?"),
        ("user: (see [the page](http://x.y)) snake_case_name", "(see the page) snake_case_name"),
        ("Human:\n> # Rivers **move", "Rivers **move"),
        ("A user: who is that?", "A user: who is that?"),
        ("\x1b]0;owned\x07\x1b[31mred\x1b[0m text", "red text"),
        ("a\tb\u202ec", "a bc"),
        ("", "Untitled"),
        ("\n \n", "Untitled"),
        ("###", "###"),
        (
            "Please explain to me, in as few words as you can, what a prefix cache is",
            "Please explain to me, in as few words as you can, what a…",
        ),
        ("x" * 100, "x" * 59 + "…"),
        ("日本語" * 30, ("日本語" * 20)[:59] + "…"),
    ],
)
def test_the_title_of_a_message(message: str, title: str) -> None:
    assert make_title(message) == title


@given(st.text())
def test_a_title_is_short_safe_and_never_empty(message: str) -> None:
    title = make_title(message)
    assert 0 < len(title) <= LIMIT
    assert is_safe(title)
    assert "\n" not in title


def test_a_title_that_a_person_gives() -> None:
    assert given_title("  my \x1b[1mtalk\n") == "my talk"
    for nothing in ("", "  ", "\x1b[1m\n"):
        with pytest.raises(SessionError, match="title is empty"):
            given_title(nothing)


SESSIONS = [
    SessionInfo(id="aaaa1111", title="Prefix caches"),
    SessionInfo(id="aaaa2222", title="prefix"),
    SessionInfo(id="bbbb3333", title="Eviction of prefix blocks"),
    SessionInfo(id="cccc4444", title="bbbb"),
]


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("aaaa1111", "aaaa1111"),
        ("PREFIX", "aaaa2222"),
        ("prefix c", "aaaa1111"),
        ("evic", "bbbb3333"),
        ("blocks", "bbbb3333"),
        ("bbbb", "cccc4444"),
        ("bbbb3", "bbbb3333"),
    ],
)
def test_a_name_means_a_session(name: str, id: str) -> None:
    assert pick(SESSIONS, name).id == id


def test_a_name_that_means_none_or_several() -> None:
    with pytest.raises(SessionError, match=r"Several sessions match .aaaa.: aaaa1111 .*, aaaa2222"):
        pick(SESSIONS, "aaaa")
    for name in ("nothing", "", "\x1b[2J"):
        with pytest.raises(SessionError, match="Unknown session") as caught:
            pick(SESSIONS, name)
        assert is_safe(str(caught.value))


def test_when_something_was() -> None:
    now = datetime(2026, 3, 12, 15, 0).timestamp()

    def ago(**parts: float) -> str:
        return when_text(now - timedelta(**parts).total_seconds(), now)

    assert ago(seconds=5) == ago(seconds=-900) == "just now"
    assert ago(minutes=5, seconds=59) == "5 min ago"
    assert ago(hours=2) == "13:00"
    assert ago(hours=20) == "yesterday"
    assert ago(days=3) == "Mon 15:00"
    assert ago(days=20) == "20 Feb"
    assert ago(days=400) == "5 Feb 2025"
    assert stamp(now) == "2026-03-12 15:00"
    for garbage in (-1e300, 1e300, float("inf")):
        assert when_text(garbage, now)
        assert stamp(garbage)


@given(
    st.lists(st.text(alphabet="ab \n", max_size=30), max_size=4), st.sets(st.sampled_from(["a", "bb", "aba"]))
)
def test_the_matching_line_holds_as_many_words_as_any(texts: list[str], words: set[str]) -> None:
    def count(line: str) -> int:
        return sum(word in line for word in words)

    line = matching_line(iter(texts), sorted(words))
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    assert count(line) == max(map(count, lines), default=0)
    assert words or not lines or line == " ".join(lines[0].split())


def test_a_long_line_is_shown_where_it_matches() -> None:
    assert matching_line(["x " * 500 + "the NEEDLE here"], ["needle"]).startswith("…x x")
    assert "NEEDLE here" in matching_line(["x " * 500 + "the NEEDLE here"], ["needle"])[:80]
    assert is_safe(matching_line(["\x1b[2J needle"], ["needle"]))


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("Boiling an egg", "Boiling an egg"),
        ('\n"**Boiling an Egg**."\nI hope this helps', "Boiling an Egg"),
        ("Title: The blue sky", "The blue sky"),
        ("# **Title:** The `blue` sky", "The blue sky"),
        ("**User: The blue sky", "The blue sky"),
        ("", ""),
        ("...", ""),
        ("12", ""),
        ("Sure! Here is a title:", ""),
        ("I cannot do that", ""),
        ("the the the the the", ""),
        ("hahahahahahahaha", ""),
        ("one two three four five six seven eight nine ten eleven", ""),
        ("x" * 61, ""),
        ("\x1b[31mred\x1b[0m sky", "red sky"),
        ("なぜ空は青いのか", "なぜ空は青いのか"),
    ],
)
def test_a_title_that_a_model_made(said: str, title: str) -> None:
    assert made_title(said) == title


@given(st.text())
def test_a_made_title_is_safe_and_bounded(said: str) -> None:
    title = made_title(said)
    assert is_safe(title)
    assert "\n" not in title
    assert len(title) <= LIMIT
    assert is_safe(title_question(said, said))
    assert len(title_question(said * 100, said * 100)) < 1500
