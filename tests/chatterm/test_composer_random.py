"""Random keys, pastes, clicks and sizes: the composer never fails, and is a plain text area but for its labels."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from textual import events
from textual.app import App, ComposeResult
from textual.screen import Screen
from textual.widgets import TextArea

from chatterm.terminal.sanitize import cleaned
from chatterm.widgets.canvas import STYLE_CLASSES
from chatterm.widgets.completion import Completion
from chatterm.widgets.composer import Composer
from tests.counting import PATIENCE
from tests.fresh import examples

KEYS = sorted(TextArea._merge_bindings().key_to_bindings)
OWN_KEYS = ("ctrl+o", "ctrl+j", "shift+enter", "enter", "tab", "escape", "up", "down")
LONG = ("row\n" * 12, "x" * 2001, "wide 漢字\ttab\r\n" * 15)

key = st.tuples(st.just("key"), st.sampled_from(KEYS))
typed = st.tuples(st.just("type"), st.text("ab (){}[]漢é\t", min_size=1, max_size=4))
line_break = st.tuples(st.just("key"), st.just("ctrl+j"))
pasted = st.tuples(
    st.just("paste"), st.sampled_from(["one", "a b\nc", "\n", "x\r\ny\rz\n", "漢\tb\x1b[0m\n\n"])
)
folded = st.tuples(st.just("paste"), st.sampled_from(LONG))
size = st.tuples(st.just("width"), st.integers(1, 40))
click = st.tuples(st.just("click"), st.tuples(st.integers(-2, 40), st.integers(-2, 12), st.booleans()))
plain_steps = st.lists(st.one_of(key, key, key, typed, line_break, pasted, size, click), max_size=25)
own_key = st.tuples(st.just("key"), st.sampled_from(OWN_KEYS))
marked = st.tuples(st.just("type"), st.sampled_from(["/", "@", "/he", '@"a', "@x.py "]))
any_steps = st.lists(
    st.one_of(key, key, typed, line_break, pasted, folded, own_key, marked, size, click), max_size=25
)


class Plain(Screen[None]):
    COMPONENT_CLASSES = STYLE_CLASSES


class Two(App[None]):
    """The composer and what it is compared with. Unexpected errors end the application."""

    def get_default_screen(self) -> Plain:
        return Plain()

    def compose(self) -> ComposeResult:
        self.completion = Completion()
        self.composer = Composer()
        self.offering = Composer(completion=self.completion)
        self.plain = TextArea(soft_wrap=True, compact=True, highlight_cursor_line=False, tab_behavior="focus")
        yield from (self.composer, self.plain, self.offering, self.completion)


class Programs:
    """One application in a loop of its own, for any number of programs."""

    def __init__(self, app: Two) -> None:
        self.app = app

    async def fresh(self, *areas: TextArea) -> None:
        for area in areas:
            area.load_text("")
            area.styles.width, area.styles.height = 40, 6
            area.styles.overflow_y = (
                "hidden"  # a scroll bar comes a moment later, and lines wrap otherwise then
            )
            area.history.checkpoint_timer = float("inf")  # not by the clock: both get the same checkpoints
        self.app._clipboard = ""
        await self.settle(areas[0])

    async def step(self, area: TextArea, kind: str, value: Any) -> None:
        if kind == "key":
            await self.press(area, value, None)
        elif kind == "type":
            for character in value:
                await self.press(
                    area, events.Key("x", character).key if character != "\t" else "tab", character
                )
        elif kind == "paste":
            text = value if isinstance(area, Composer) else cleaned(value)
            await area._on_paste(events.Paste(text))
        elif kind == "width":
            area.styles.width = value
            await self.settle(area)
        else:
            await self.click(area, *value)
        area.render_lines(area.size.region)
        while len(self.app.screen_stack) > 1:
            await self.app.pop_screen()

    async def settle(self, area: TextArea) -> None:
        """Lay the area out now: what a key does depends on how lines are wrapped."""
        for _ in range(3):
            for _ in range(5):
                await asyncio.sleep(0)
            self.app.screen._on_timer_update()
        while not area._message_queue.empty():
            await asyncio.sleep(0)

    async def press(self, area: TextArea, key: str, character: str | None) -> None:
        event = events.Key(key, character)
        if isinstance(area, Composer):
            await area._on_key(event)
            return
        for binding in area._bindings.key_to_bindings.get(key, []) if character is None else ():
            if await self.app.run_action(binding.action, area):
                return
        if key == "ctrl+j":
            area.insert("\n")
            area.scroll_cursor_visible()
        elif key == "tab":
            area.insert("    ")
        else:
            await area._on_key(event)

    async def click(self, area: TextArea, x: int, y: int, is_drag: bool) -> None:
        def mouse(kind: type[events.MouseEvent], x: int) -> Any:
            return kind(area, x, y, 0, 0, 1, False, False, False)

        await area._on_mouse_down(mouse(events.MouseDown, x))
        if is_drag:
            await area._on_mouse_move(mouse(events.MouseMove, x + 3))
        await area._on_mouse_up(mouse(events.MouseUp, x))
        if isinstance(area, Composer):
            area.on_click(mouse(events.Click, x))

    async def compare(self, program: list[tuple[str, Any]]) -> None:
        app = self.app
        await self.fresh(app.composer, app.plain)
        for kind, value in program:
            before = app.clipboard
            await self.step(app.composer, kind, value)
            copied, app._clipboard = app.clipboard, before
            await self.step(app.plain, kind, value)
            assert app.composer.text == app.plain.text
            assert app.composer.selection == app.plain.selection
            assert app.clipboard == copied

    async def survive(self, program: list[tuple[str, Any]]) -> None:
        composer = self.app.offering
        await self.fresh(composer)
        composer.styles.overflow_y = "auto"
        composer.put("")
        for kind, value in program:
            await self.step(composer, kind, value)
            composer.read_only = False
            row, column = composer.cursor_location
            line = composer.document.get_line(row)
            spans = composer.pastes.spans(line)
            assert 0 <= column <= len(line)
            assert not [span for span in spans if span[0] < column < span[1]]
            rest = composer.text
            for label in composer.pastes._texts:
                rest = rest.replace(label, "")
            assert "paste" not in rest  # no part of a label is left
            assert composer.pastes.unfold(composer.text) == composer.full_text


@contextmanager
def programs() -> Iterator[Any]:
    """Runs a coroutine function of `Programs` in the application's loop."""
    app, ready, over = Two(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def live() -> None:
        async with app.run_test(size=(60, 40)) as pilot:
            await pilot.pause()
            ready.set()
            await over.wait()

    failed: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(live())
        except BaseException as error:  # noqa: BLE001 (the test raises it)
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(PATIENCE)

    async def within(method: str, program: list[tuple[str, Any]]) -> None:
        with app._context():
            await getattr(Programs(app), method)(program)
            assert app._exception is None

    def execute(method: str, program: list[tuple[str, Any]]) -> None:
        asyncio.run_coroutine_threadsafe(within(method, program), loop).result(120)

    try:
        yield execute
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE)
    if failed:
        raise failed[0]


FEW = examples(25)


def test_without_labels_it_is_a_text_area() -> None:
    with programs() as execute:

        @FEW
        @example([("key", "ctrl+k")])
        @example([("key", "ctrl+x")])
        @example([("type", "a"), ("key", "ctrl+j"), ("key", "ctrl+k"), ("key", "ctrl+z")])
        @given(plain_steps)
        def run(program: list[tuple[str, Any]]) -> None:
            execute("compare", program)

        run()


def test_nothing_a_person_does_breaks_it() -> None:
    with programs() as execute:

        @FEW
        @given(any_steps)
        def run(program: list[tuple[str, Any]]) -> None:
            execute("survive", program)

        run()
