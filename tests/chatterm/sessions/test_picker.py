"""The session picker, driven by keys and by the mouse."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from textual.app import App
from textual.pilot import Pilot

from chatterm.screens.notes import Choices, Note
from chatterm.screens.sessions import SessionList, SessionPicker
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from chatterm.settings.themes import STYLESHEET, load_theme
from tests.chatterm.driving import LOOKS
from tests.chatterm.sessions.saved import conversation

OPEN = "open"
"""What the result is before the picker was left."""


class Host(App[None]):
    CSS_PATH = STYLESHEET

    def __init__(self, picker: SessionPicker) -> None:
        super().__init__()
        self.register_theme(load_theme("graphite"))
        self.theme = "graphite"
        self.picker = picker
        self.result: str | None = OPEN

    def on_mount(self) -> None:
        self.push_screen(self.picker, self.take)

    def take(self, result: str | None) -> None:
        self.result = result


class Hands:
    """A person in front of the picker."""

    def __init__(self, host: Host, pilot: Pilot[None]) -> None:
        self.host = host
        self.press = pilot.press
        self.click = pilot.click
        self._pilot = pilot

    @property
    def text(self) -> str:
        return "\n".join(strip.text.rstrip() for strip in self.host.screen._compositor.render_strips())

    @property
    def titles(self) -> list[str]:
        return [info.title for info in self.host.picker.query_one(SessionList).items]

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(LOOKS):
            if condition():
                await self._pilot.pause()
                return
            await self._pilot.pause(0.01)
        raise AssertionError(f"not in time; the screen shows:\n{self.text}")

    async def shows(self, text: str) -> None:
        await self.until(lambda: text in self.text)


@asynccontextmanager
async def picking(
    store: SessionStore, current: str | None = None, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[Hands]:
    host = Host(SessionPicker(store, current))
    async with host.run_test(size=size) as pilot:
        hands = Hands(host, pilot)
        await hands.until(lambda: hands.host.picker.is_attached)
        await hands.until(lambda: hands.titles or "no sessions yet" in hands.text)
        yield hands


@pytest.fixture
def ids(store: SessionStore) -> list[str]:
    """Three sessions, oldest first."""
    found = [conversation(store, text, "and more")[0] for text in ("red apples", "green pears", "blue plums")]
    store.flush()
    return found


async def test_enter_opens_the_chosen_one_and_escape_none(store: SessionStore, ids: list[str]) -> None:
    async with picking(store) as hands:
        assert hands.titles == ["blue plums", "green pears", "red apples"]
        await hands.press("down", "down", "down", "up", "enter")
        await hands.until(lambda: hands.host.result != OPEN)
        assert hands.host.result == ids[1]
    async with picking(store) as hands:
        await hands.press("escape")
        await hands.until(lambda: hands.host.result != OPEN)
        assert hands.host.result is None


async def test_a_click_opens(store: SessionStore, ids: list[str]) -> None:
    async with picking(store) as hands:
        await hands.click(SessionList, offset=(5, 2))
        await hands.until(lambda: hands.host.result != OPEN)
        assert hands.host.result == ids[0]


async def test_search_in_titles_and_messages(store: SessionStore, ids: list[str]) -> None:
    async with picking(store) as hands:
        await hands.press(*"pears")
        await hands.until(lambda: hands.titles == ["green pears"])
        await hands.press(*" said")
        await hands.until(lambda: hands.titles == ["green pears"])
        await hands.press(*" nowhere")
        await hands.until(lambda: "No matches." in hands.text)
        await hands.press("enter")
        assert hands.host.result == OPEN


async def test_rename(store: SessionStore, ids: list[str]) -> None:
    async with picking(store) as hands:
        await hands.press(*"blue")
        await hands.until(lambda: hands.titles == ["blue plums"])
        await hands.press("f2", *" and figs", "enter")
        await hands.until(lambda: hands.titles == ["blue plums and figs"])
        await hands.press("ctrl+r", "ctrl+u", "enter")
        await hands.shows("title is empty")
        await hands.press("escape")
        assert hands.host.result == OPEN
        await hands.until(lambda: "title is empty" not in hands.text)
    assert [info.title for info in store.find()] == ["blue plums and figs", "green pears", "red apples"]


async def test_delete_asks_first(store: SessionStore, ids: list[str]) -> None:
    async with picking(store) as hands:
        for keep in ("n", "x", "escape", "enter", "down"):
            await hands.press("ctrl+d")
            await hands.shows("Delete “")
            await hands.press(keep)
            await hands.until(lambda: "Delete “" not in hands.text)
        assert len(store.find()) == 3
        assert hands.host.result == OPEN
        await hands.press("pageup", "ctrl+d", "y")
        await hands.until(lambda: hands.titles == ["green pears", "red apples"])
        assert [info.id for info in store.find()] == [ids[1], ids[0]]
        await hands.press(*"app")  # the keys search again
        await hands.until(lambda: hands.titles == ["red apples"])


async def test_everything_works_with_the_mouse(store: SessionStore, ids: list[str]) -> None:
    async with picking(store) as hands:
        await hands.click(Choices, offset=(30, 0))
        await hands.shows("Delete “blue plums”")
        column = len("Delete “blue plums” and all of its branches? · ")
        await hands.click(Choices, offset=(column + 2, 0))
        await hands.until(lambda: hands.titles == ["green pears", "red apples"])
        await hands.click(Choices, offset=(16, 0))
        await hands.shows("New title")
        await hands.click(Choices, offset=(20, 0))
        await hands.click(Choices, offset=(46, 0))
        await hands.until(lambda: hands.host.result is None)


async def test_the_session_one_is_in_cannot_be_deleted(store: SessionStore, ids: list[str]) -> None:
    async with picking(store, current=ids[2]) as hands:
        await hands.shows("● blue plums")
        await hands.press("ctrl+d")
        await hands.shows("This session is open")
    assert len(store.find()) == 3


async def test_it_says_that_nothing_is_saved(store: SessionStore, ids: list[str]) -> None:
    assert store.close()
    store.path.write_bytes(b"broken" * 1000)
    broken = SessionStore.open(store.path)
    conversation(broken, "in memory")
    async with picking(broken) as hands:
        assert hands.titles == ["in memory"]
        await hands.until(lambda: "damaged" in hands.text)
    broken.close()


async def test_no_sessions_yet(store: SessionStore) -> None:
    async with picking(store) as hands:
        await hands.press("enter", "f2", "ctrl+d", "down")
        await hands.shows("no sessions yet")
        assert hands.host.result == OPEN


@pytest.mark.parametrize("size", [(40, 12), (20, 8), (200, 60)])
async def test_no_size_breaks_it(store: SessionStore, ids: list[str], size: tuple[int, int]) -> None:
    conversation(store, "日本語 " * 30)
    for number in range(60):
        conversation(store, f"many {number}")
    async with picking(store, size=size) as hands:
        assert all(len(line) <= size[0] for line in hands.text.split("\n"))
        await hands.press(*["pagedown"] * 7, "enter")
        await hands.until(lambda: hands.host.result != OPEN)
        assert hands.host.result == ids[0]


async def test_what_comes_after_it_was_left_breaks_nothing(store: SessionStore, ids: list[str]) -> None:
    async with picking(store) as hands:
        picker, chosen = hands.host.picker, hands.host.picker.query_one(SessionList).chosen
        await hands.press("escape")
        await hands.until(lambda: not picker.children)
        await picker._look_into(chosen, "")
        await picker._find("pears", 0.0)
        await picker._look_into(None, "")


async def test_the_preview_shows_the_line_that_matches(store: SessionStore, ids: list[str]) -> None:
    long = "word " * 40 + "the needle stands here"
    conversation(store, "hay", f"first line\n{long}\nlast line", "more hay")
    async with picking(store, size=(80, 30)) as hands:
        await hands.shows("You said: more hay")  # nothing is searched: the latest line
        await hands.shows("3 messages · 9 tokens generated")
        await hands.press(*"needle")
        await hands.shows("the needle stands here")
        preview = hands.host.picker.query_one("#picker-about")
        assert isinstance(preview, Note)
        assert [text for text, style in preview.build(70)[0] if style == "found"] == ["needle"]
        await hands.press("ctrl+u", *"pears")
        await hands.shows("You said: green pears")
        await hands.press("ctrl+u", *"nowhere")
        await hands.until(lambda: preview.build(70) == [[]])


async def test_tokens_that_nobody_counted_are_not_told(store: SessionStore) -> None:
    session, tree = store.new(SessionInfo(model="openai://host/model")), Tree()
    exchange = tree.add(tree.head, "hello", "openai://host/model")
    exchange.text, exchange.finish_reason = "Hello.", "eos"
    store.save(session, exchange)
    store.head(session, tree.head)
    async with picking(store, size=(90, 30)) as hands:
        await hands.shows("1 message")
        await hands.shows("Hello.")
        assert "generated" not in hands.text


async def test_branches_are_counted_and_only_what_is_shown_are_messages(store: SessionStore) -> None:
    session, tree = conversation(store, "one", "two")
    for _ in range(2):
        other = tree.add(1, "another two", "m")
        other.finish_reason = "eos"
        store.save(session, other)
    store.head(session, other.id)
    async with picking(store, size=(90, 30)) as hands:
        await hands.shows("2 messages, 3 branches")
