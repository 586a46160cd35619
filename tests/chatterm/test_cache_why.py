"""/cache why: the counts of each turn, and in words where and why its prompt parted from the cache."""

from dataclasses import replace

import pytest

from chatterm.backends.backend import Exchange, TurnStats
from chatterm.conversation.cache_why import each_why_line, explained, longest_prompt
from chatterm.markdown.lines import line_cells, line_text
from chatterm.sessions.as_json import from_json, to_json
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.tree import Tree
from engine.events import Cause, Parting
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend

TEXTS = {1: "<think>", 2: "\n\n", 3: " red", 4: "\x1b[2J"}
PARTING = Parting(117, 3, True, 1, 2, Cause.THINKING)
STATS = TurnStats(1240, 1200, 40, warmed_tokens=953, parting=PARTING)


def exchange(number: int, stats: TurnStats | None = STATS, model: str = "m") -> Exchange:
    figures = stats.to_dict() if stats is not None else {}
    return Exchange(number, number - 1 or None, f"question {number}", "a", stats=dict(figures), model=model)


def said(*path: Exchange, models: tuple[str, ...] = ("m",), width: int = 300) -> str:
    return "\n".join(
        map(line_text, each_why_line(explained(path, models, TEXTS.get), longest_prompt(path), width))
    )


def test_a_turn_is_told_in_numbers_and_words() -> None:
    lines = said(exchange(1, TurnStats(40, 0, 40)), exchange(2)).splitlines()
    assert lines[0].split() == ["▪", "reused", "▪", "prewarmed", "▪", "computed"]
    assert lines[1].split()[:3] == ["1", "question", "1"]
    assert lines[1].split()[-3:] == ["0", "0", "40"]
    assert lines[2].split()[-3:] == ["247", "953", "40"]
    assert lines[3].strip() == (
        "Answer 3 differs from the cached text at token 118: cached <think>, needed \\n\\n "
        "(its thinking is left out of the history)."
    )
    assert lines[-1] == (
        "You waited for 80 of 1,280 prompt tokens; 953 were prewarmed while you read and typed."
    )


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_its_words(cause: Cause) -> None:
    parting = replace(PARTING, cause=cause, message=0 if cause is Cause.SYSTEM else 3, in_answer=False)
    text = said(exchange(1, replace(STATS, parting=parting)))
    if cause is Cause.STATE:
        assert "Message 3 was computed again from token 118 on: what recurrent" in text
        return
    assert ("The system prompt differs" if cause is Cause.SYSTEM else "Message 3 differs") in text
    assert text.splitlines()[2].endswith(").")


def test_where_nothing_was_cached_no_token_is_named() -> None:
    parting = Parting(0, 1, False, -1, 2, Cause.EVICTED)
    text = said(exchange(1, replace(STATS, parting=parting)))
    assert "Nothing was cached from token 1 on, in message 1: it was evicted to make room." in text


def test_another_model_is_the_reason_where_it_answered() -> None:
    opened = replace(STATS, parting=Parting(0, 1, False, -1, 2, Cause.OPENED))
    assert "before the model was loaded" in said(exchange(1, opened))
    text = said(exchange(1, None, "other"), exchange(2, opened))
    assert "it was answered by other, and models do not share a cache" in text


def test_tokens_of_a_model_that_is_not_loaded_are_numbers() -> None:
    assert "cached token 1, needed token 2" in said(exchange(1, model="other"))
    assert "cached token 1, needed token 2" in said(exchange(1), models=())


def test_tokens_show_nothing_that_a_terminal_obeys() -> None:
    text = said(exchange(1, replace(STATS, parting=replace(PARTING, cached=4, wanted=3))))
    assert "\x1b" not in text
    assert "needed ␣red" in text


def test_turns_without_figures_and_a_branch_without_turns() -> None:
    assert "There are no messages" in said()
    text = said(exchange(1, None))
    assert text.splitlines()[1].split()[-3:] == ["–", "–", "–"]
    assert "no statistics for these turns" in text


@pytest.mark.parametrize("width", [20, 43, 44, 60, 64, 78, 160])
def test_it_fits(width: int) -> None:
    draft = Parting(1200, 4, False, 3, 2, Cause.DRAFT)
    turns = [
        exchange(1, TurnStats(123_456, 0, 123_456)),
        exchange(2, None),
        exchange(3, replace(STATS, draft_parting=draft)),
    ]
    turns[0].user = "A long message\x1b[2J " * 30
    lines = list(each_why_line(explained(turns, ("m",), TEXTS.get), longest_prompt(turns), width))
    assert all(line_cells(line) <= width for line in lines)
    assert "draft was changed" in " ".join(line_text(line).strip() for line in lines)


def test_the_figures_survive_a_session() -> None:
    draft = Parting(1200, 4, False, 3, 2, Cause.DRAFT)
    before = exchange(1, replace(STATS, draft_parting=draft))
    _, tree = from_json(to_json(SessionInfo(), Tree([before], 1)))
    assert said(*tree.exchanges) == said(before)


async def test_the_command_shows_it_over_the_conversation() -> None:
    async with driven(ScriptedBackend([Script(cached=4)]), size=(100, 30)) as driver:
        await driver.send("/cache why")
        await driver.shows("There are no messages")
        await driver.pilot.press("escape")
        await driver.send("hello")
        driver.app.chat.conversation.path[0].stats.update(PARTING.to_dict("parting_"))
        await driver.send("/cache why")
        await driver.shows("You waited for 6 of 10 prompt tokens.")
        await driver.shows("cached <think>, needed Water")
        await driver.pilot.press("escape")
        await driver.send("/cache what")
        assert any("takes one of: why" in error for error in driver.errors)
