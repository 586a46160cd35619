"""Nothing that one does holds the screen up for longer, the longer the conversation is."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual import events
from textual.geometry import Size
from textual.selection import Selection

from chatterm.backends.backend import Compaction, Exchange, TurnStats
from chatterm.conversation import cache_why, entry_cache
from chatterm.conversation.compaction import Room
from chatterm.conversation.entries import AnswerEntry, Entry, UserEntry
from chatterm.conversation.entry_cache import EntryCache
from chatterm.conversation.visible_history import summarised
from chatterm.markdown import plain
from chatterm.markdown.blocks import parser
from chatterm.markdown.lines import Line, Run, wrapped
from chatterm.markdown.plain import PlainText
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from chatterm.widgets import slices
from chatterm.widgets.stack import Stack
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend

ROWS = "\n".join(f"{number}: a row of the river" for number in range(4000))
MOST = 2_500
"""Rows that one turn of the event loop may read or lay out: some pieces of either, and a page or two."""
MOST_EXCHANGES = 250
"""Exchanges that one turn of the event loop may make, mark, place or tell of: as many lines as a report has at once."""


class Rows:
    """Counts rows that are read and laid out, in the turn of the event loop that had most to do."""

    def __init__(self) -> None:
        self.worst = 0
        self._now = 0

    def more(self, rows: int = 1) -> None:
        self._now += rows
        self.worst = max(self.worst, self._now)

    def turn(self) -> None:
        self._now = 0


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Counts; a slice is four pieces, on a machine of any speed."""
    found, line, run, parse = Rows(), Entry.line, asyncio.Handle._run, parser().parse

    def counted_line(self: Entry, row: int) -> Line:
        found.more()
        return line(self, row)

    def counted_wrapped(runs: Sequence[Run], width: int) -> Iterator[Line]:
        for made in wrapped(runs, width):
            found.more()
            yield made

    def counted_parse(source: str) -> object:
        found.more(source.count("\n"))
        return parse(source)

    def counted_run(self: asyncio.Handle) -> None:
        found.turn()
        run(self)

    monkeypatch.setattr(Entry, "line", counted_line)
    monkeypatch.setattr(plain, "wrapped", counted_wrapped)
    monkeypatch.setattr(parser(), "parse", counted_parse)
    monkeypatch.setattr(asyncio.Handle, "_run", counted_run)
    ticks = count()
    monkeypatch.setattr(slices, "monotonic", lambda: next(ticks) / 1000)
    monkeypatch.setattr(slices, "asyncio", SimpleNamespace(sleep=lambda _: asyncio.sleep(0)))
    return found


def long_conversation() -> Tree:
    """One long message, one long answer, and many short ones."""
    tree = Tree()
    for number in range(120):
        exchange = tree.add(tree.head, ROWS if number == 40 else f"Question {number}?", "scripted")
        exchange.text = (
            f"```\n{ROWS[: len(ROWS) // 2]}\n```"
            if number == 80
            else f"Answer {number} tells\n\n- of\n- rivers\n" * 4
        )
        exchange.reasoning, exchange.finish_reason = "A thought.\n" * 3, "eos"
    return tree


async def test_no_action_takes_longer_the_longer_the_conversation_is(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worst: dict[str, int] = {}
    async with driven(ScriptedBackend([Script("A new answer.")]), (100, 40)) as driver:
        chat, transcript = driver.app.chat, driver.transcript
        chat.copy_with = lambda text: "a program"

        async def do(name: str, action: Callable[[], object]) -> None:
            rows.worst = 0
            action()
            await driver.pilot.pause()
            await driver.until(
                lambda: all(entry.is_laid_out(transcript._width) for entry in transcript.entries)
            )
            await driver.idle()
            worst[name] = rows.worst

        async def find(text: str, said: str) -> None:
            rows.worst = 0
            chat.finding.look_for(text)
            await driver.shows(said)
            worst[f"find {text}"] = rows.worst

        await do("open", lambda: chat.conversation.open(None, long_conversation()))
        chat.finding.open()
        await find("r", "1,000+ found")
        await find("question 110", "1 of 1")
        await find("1999: a row", "of 2")
        await find("not there", "not found")
        chat.finding.close()
        for name, action in {
            "narrower": lambda: driver.app.post_message(events.Resize(Size(60, 24), Size(60, 24))),
            "wider": lambda: driver.app.post_message(events.Resize(Size(100, 40), Size(100, 40))),
            "panel": lambda: chat.action_run_command("panel", ""),
            "theme": lambda: driver.app.use_theme("paper"),
            "thinking": lambda: chat.action_run_command("think", "show"),
            "first": lambda: chat.action_edge(-1),
            "page": lambda: chat.action_page(1),
            "last": lambda: chat.action_edge(1),
            "select": lambda: chat.action_run_command("select", "prev"),
            "select long": lambda: transcript.select(transcript.entries[80]),
            "copy": lambda: chat.action_run_command("copy", ""),
            "copy all": lambda: chat.action_run_command("copy", "all"),
            "copy code": lambda: chat.action_run_command("copy", "code"),
            "stats": lambda: chat.action_run_command("stats", ""),
            "compact": lambda: chat.action_run_command("compact", ""),
            "palette": driver.app.action_command_palette,
            "cache": lambda: chat.action_run_command("cache", "why"),
            "export": lambda: chat.action_run_command("export", "html"),
            "pin": lambda: chat.action_run_command("pin", "1"),
            "retry": lambda: chat.action_run_command("retry", ""),
            "branch": lambda: chat.action_run_command("branch", "prev"),
            "undo": lambda: chat.action_run_command("undo", ""),
            "redo": lambda: chat.action_run_command("redo", ""),
            "edit": lambda: chat.action_run_command("edit", "41"),
            "reset": lambda: chat.action_run_command("reset", ""),
        }.items():
            await do(name, action)
            if driver.app.screen is not chat:
                await driver.pilot.press("escape")
    assert {name: most for name, most in worst.items() if most > MOST} == {}


@pytest.fixture
def exchanges(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Counts the exchanges that the screen's thread goes through one by one."""
    found, run, screen = Rows(), asyncio.Handle._run, get_ident()

    def counted_run(self: asyncio.Handle) -> None:
        found.turn()
        run(self)

    def counted(owner: object, name: str) -> None:
        does = getattr(owner, name)

        def counts(*arguments: object, **more: object) -> object:
            if get_ident() == screen:
                found.more()
            return does(*arguments, **more)

        monkeypatch.setattr(owner, name, counts)

    monkeypatch.setattr(asyncio.Handle, "_run", counted_run)
    counted(entry_cache, "finished_answer_entry")
    counted(EntryCache, "entries_of")
    counted(EntryCache, "mark")
    counted(AnswerEntry, "changed")
    counted(Stack, "add")
    counted(cache_why, "Explained")
    return found


async def test_no_action_goes_through_all_exchanges_at_once(
    exchanges: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worst: dict[str, int] = {}
    narrow, wide = Size(60, 24), Size(100, 40)
    tree, figures = Tree(), TurnStats(40, 0, 40).to_dict()
    for number in range(4 * MOST_EXCHANGES):
        exchange = tree.add(tree.head, f"Question {number}?", "scripted")
        exchange.text, exchange.finish_reason, exchange.stats = f"Answer {number}.", "eos", dict(figures)
    store = SessionStore.open(tmp_path / "sessions.db")
    session = store.add(SessionInfo(title="Rivers", model="scripted"), tree.exchanges, tree.head)
    scripts = [Script("A new answer."), Script("A new answer."), Script("From the other.")]
    async with driven(ScriptedBackend(scripts), (100, 40), store=store) as driver:
        chat, do = driver.app.chat, driver.app.chat.action_run_command
        for name, action, text in [
            ("open", lambda: chat.sessions.open(session), "Answer 999."),
            ("send", lambda: chat.writing.send_as_it_is("hello", "hello"), "A new answer."),
            ("undo", lambda: do("undo", ""), "Answer 999."),
            ("retry", lambda: do("retry", ""), "< 2/2 >"),
            ("branch", lambda: do("branch", "prev"), "< 1/2 >"),
            ("undo more", lambda: do("undo", ""), "Answer 998."),
            ("redo", lambda: do("redo", ""), "Answer 999."),
            ("cache", lambda: do("cache", "why"), "1000  Question 999?"),
            ("model", lambda: do("model", "other"), "Now chatting with other"),
            ("answer", lambda: chat.writing.send_as_it_is("hello", "hello"), "From the other."),
            ("narrower", lambda: driver.app.post_message(events.Resize(narrow, narrow)), "From the other."),
            ("wider", lambda: driver.app.post_message(events.Resize(wide, wide)), "From the other."),
            ("theme", lambda: driver.app.use_theme("paper"), "From the other."),
            ("thinking", lambda: do("think", "show"), "From the other."),
            ("pin", lambda: do("pin", "1"), "From the other."),
            ("edit", lambda: do("edit", "1"), "Question 0?"),
            ("compact", lambda: do("compact", ""), "Make room"),
            ("palette", lambda: driver.app.action_command_palette(), "/retry [N]"),
            ("stats", lambda: do("stats", ""), "cache hit rate"),
        ]:
            exchanges.worst = 0
            action()
            if name == "cache":
                await driver.shows("▪ computed")
                await driver.idle()
                await driver.pilot.press("end")
            await driver.shows(text)
            await driver.idle()
            worst[name] = exchanges.worst
            if driver.app.screen is not chat or chat.editing is not None:
                await driver.pilot.press("escape")
        answers = [entry for entry in driver.transcript.entries if isinstance(entry, AnswerEntry)]
        assert len(answers) > 4 * MOST_EXCHANGES
        assert [answer.model for answer in answers] == ["scripted"] * (len(answers) - 1) + ["other"]
    store.close()
    assert {name: most for name, most in worst.items() if most > MOST_EXCHANGES} == {}


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.booleans()), min_size=5), st.data())
def test_what_is_shown_anew_is_all_that_is_new(
    made: list[tuple[int, str, bool]], data: st.DataObject
) -> None:
    tree = Tree()
    for back, model, is_summarised in made:
        exchange = tree.add(max(len(tree) - back, 0) or None, "q", model)
        exchange.compaction = Compaction(summary="s") if is_summarised else None
    branch, before, before_behind = EntryCache(tree), list[Exchange](), 0
    for _ in range(5):
        path = tree.path(data.draw(st.sampled_from([None, *(exchange.id for exchange in tree.exchanges)])))
        changed = data.draw(st.lists(st.sampled_from(path), max_size=1)) if path else []
        for exchange in changed:
            exchange.compaction = None if exchange.compaction else Compaction(summary="t")
        first, behind = branch.turn_to(path, changed), summarised(path)
        assert path[:first] == before[:first]
        assert not any(exchange in path[:first] for exchange in changed)
        assert behind == before_behind or first < min(n for n in (behind, before_behind) if n)
        assert (branch.compacted, set(branch.models)) == (behind, {exchange.model for exchange in path})
        assert all(branch.seen[exchange.parent, exchange.user] == exchange.id for exchange in path)
        before, before_behind = path, behind


async def test_a_long_selection_is_copied_whole(rows: Rows) -> None:
    async with driven(ScriptedBackend(), (100, 40)) as driver:
        tree = Tree()
        exchange = tree.add(None, "The rows?", "scripted")
        exchange.text, exchange.finish_reason = f"```\n{ROWS}\n```", "eos"
        driver.app.chat.conversation.open(None, tree)
        await driver.until(lambda: driver.transcript.virtual_size.height > 4000)
        driver.app.chat.selections = {driver.transcript: Selection(None, None)}
        rows.worst = 0
        await driver.pilot.press("ctrl+c")
        await driver.until(lambda: driver.app.clipboard)
        assert ROWS in driver.app.clipboard
        assert rows.worst < MOST


async def test_steps_that_are_typed_at_once_are_all_taken() -> None:
    async with driven(ScriptedBackend([Script("river\n\n" * 30)])) as driver:
        await driver.send("q")
        await driver.pilot.press("ctrl+f", *"river", "enter", "enter", "up", "enter")
        await driver.shows(" 2 of 30 ")


@given(st.lists(st.tuples(st.sampled_from(["add", "cut", "resize"]), st.integers(0, 9), st.integers(0, 4))))
def test_a_stack_knows_where_each_begins(steps: list[tuple[str, int, int]]) -> None:
    stack, heights = Stack(), list[int]()
    for step, place, height in steps:
        if step == "add":
            stack.add(height)
            heights.append(height)
        elif step == "cut":
            stack.cut(min(place, len(heights)))
            del heights[place:]
        elif place < len(heights):
            stack.resize(place, height)
            heights[place] = height
    starts = list(accumulate(heights, initial=0))
    assert [stack.start(index) for index in range(len(heights) + 1)] == starts
    assert stack.height == starts[-1]
    for row in range(-1, starts[-1] + 2):
        below = sum(start <= row for start in starts[:-1])
        assert stack.at(row) == below - 1


def test_a_long_text_is_laid_out_in_pieces_and_keeps_what_was_read() -> None:
    text = PlainText(ROWS, "user")
    while not text.step(80):
        pass
    before = text.lines(80)
    assert not text.step(20)
    assert len(before) == ROWS.count("\n") + 1
    assert len(text.lines(20)) > len(before)


def test_a_folded_message_of_any_length_opens_in_pieces() -> None:
    entry = UserEntry(ROWS)
    assert entry.step(80)
    low = entry.height
    entry.unfold()
    assert not entry.step(80)
    assert entry.height == low  # as before, until all of it is there
    entry.lay_out(80)
    assert entry.height == ROWS.count("\n") + 2


def test_what_a_summary_stands_for_is_counted_once() -> None:
    looked = count()

    class Counted(Exchange):
        @property
        def text(self) -> str:
            next(looked)
            return "word " * 10

        @text.setter
        def text(self, _: str) -> None:
            """Ignore what is given."""

    path = [Counted(number, number - 1 or None, "q") for number in range(1, 401)]
    assert 0 < Room(path, "", 10_000, 40_000).default_count < 400
    assert next(looked) < 4 * 400
