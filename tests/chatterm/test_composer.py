"""The composer by itself: history, pastes, attached files, completion of paths, another editor, drafts."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.app import ComposeResult
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Static

from chatterm.conversation.attachments import MessageWithFiles
from chatterm.screens.paste import PasteScreen, PasteView
from chatterm.screens.themed_app import ThemedApp
from chatterm.settings.themes import STYLESHEET
from chatterm.widgets import composer as composing
from chatterm.widgets.canvas import STYLE_CLASSES
from chatterm.widgets.completion import Completion
from chatterm.widgets.composer import Composer

LOOKS = 1000


class WritingScreen(Screen[None]):
    COMPONENT_CLASSES = STYLE_CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Composer.Submitted] = []
        self.problems: list[str] = []
        self.drafts: list[str] = []

    def compose(self) -> ComposeResult:
        completion = Completion(id="completion")
        yield Static("", id="columns")
        yield completion
        yield Composer(completion=completion, on_draft=self.drafts.append, id="composer")

    def on_mount(self) -> None:
        self.query_one(Composer).focus()

    def on_composer_submitted(self, message: Composer.Submitted) -> None:
        self.sent.append(message)
        self.query_one(Composer).put("")

    def on_composer_problem(self, message: Composer.Problem) -> None:
        self.problems.append(message.text)

    def on_folding_area_paste_opened(self, message: Composer.PasteOpened) -> None:
        screen = PasteScreen(message.label, message.text, can_unfold=message.can_unfold)
        self.app.push_screen(screen, message.done)


class WritingApp(ThemedApp):
    CSS_PATH = STYLESHEET

    def __init__(self) -> None:
        super().__init__()
        self.writing = WritingScreen()

    def on_mount(self) -> None:
        self.push_screen(self.writing)


class Writer:
    """One running composer."""

    def __init__(self, app: WritingApp, pilot: Pilot[int]) -> None:
        self.app = app
        self.pilot = pilot
        self.screen = app.writing
        self.composer = app.writing.query_one(Composer)
        self.completion = app.writing.query_one(Completion)

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(LOOKS):
            if condition():
                return
            await self.pilot.pause(0.01)
        raise AssertionError(f"not in time; the composer has {self.composer.text!r}")

    async def types(self, text: str) -> None:
        for key in ("space" if c == " " else "at" if c == "@" else c for c in text):
            await self.pilot.press(key)

    async def pastes(self, text: str) -> None:
        before = self.composer.text
        self.composer.post_message(events.Paste(text))
        await self.until(lambda: self.composer.text != before)

    async def sends(self, text: str | None = None) -> Composer.Submitted:
        if text is not None:
            self.composer.put(text)
        count = len(self.screen.sent)
        await self.pilot.press("enter")
        await self.until(lambda: len(self.screen.sent) > count)
        return self.screen.sent[-1]

    def shown(self) -> str:
        return "\n".join(strip.text.rstrip() for strip in self.app.screen._compositor.render_strips())


@asynccontextmanager
async def writing(size: tuple[int, int] = (80, 24)) -> AsyncIterator[Writer]:
    app = WritingApp()
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Writer(app, pilot)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the application was started in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- history ---


async def test_up_and_down_go_through_what_was_sent_and_keep_the_draft() -> None:
    async with writing() as writer:
        writer.composer.load_history(["from yesterday"])
        await writer.sends("first")
        await writer.sends("second\nof two lines")
        await writer.types("draft")
        seen = []
        for key in ("up", "up", "up", "up", "down", "down", "down", "down"):
            await writer.pilot.press(key)
            seen.append(writer.composer.text)
        assert seen == [
            "second\nof two lines",
            "first",
            "from yesterday",
            "from yesterday",
            "first",
            "second\nof two lines",
            "draft",
            "draft",
        ]


async def test_inside_of_several_lines_up_moves_the_cursor() -> None:
    async with writing() as writer:
        await writer.sends("sent")
        await writer.types("a")
        await writer.pilot.press("ctrl+j")
        await writer.types("b")
        await writer.pilot.press("up")
        assert writer.composer.text == "a\nb"
        assert writer.composer.cursor_location == (0, 1)
        await writer.pilot.press("up")
        assert writer.composer.text == "sent"
        await writer.pilot.press("down")
        assert writer.composer.text == "a\nb"


async def test_a_changed_entry_is_a_draft_of_its_own() -> None:
    async with writing() as writer:
        await writer.sends("one")
        await writer.sends("two")
        await writer.pilot.press("up", "up")
        await writer.types("!")
        assert writer.composer.text == "one!"
        await writer.pilot.press("up")
        assert writer.composer.text == "two"
        await writer.pilot.press("down")
        assert writer.composer.text == "one!"


async def test_history_brings_back_a_whole_paste() -> None:
    async with writing() as writer:
        text = "\n".join(f"line {n}" for n in range(30))
        await writer.pastes(text)
        assert (await writer.sends()).text == text
        await writer.pilot.press("up")
        assert writer.composer.full_text == text


async def test_a_second_enter_sends_nothing_twice() -> None:
    async with writing() as writer:
        writer.composer.put("once")
        for _ in range(3):
            writer.composer.post_message(events.Key("enter", "\r"))
        await writer.until(lambda: writer.screen.sent)
        await writer.sends("again")
        await writer.sends("again")
        assert [message.text for message in writer.screen.sent] == ["once", "again", "again"]


# --- pastes ---


async def test_a_long_paste_is_folded_and_sent_whole() -> None:
    async with writing() as writer:
        text = "".join(f"row {n}\n" for n in range(1204))
        await writer.types("see ")
        await writer.pastes(text)
        assert writer.composer.text == "see [pasted 1,204 lines]"
        assert "[pasted 1,204 lines]" in writer.shown()
        await writer.types(" ok")
        message = await writer.sends()
        assert message.text == message.recall == f"see {text} ok"
        assert message.shown == "see [pasted 1,204 lines] ok"


async def test_a_paste_of_a_megabyte_is_not_laid_out() -> None:
    """The work of the screen is counted: characters that are wrapped, and lines that are drawn."""
    async with writing() as writer:
        text = "a line of some length, pasted\r" * 34_000
        wrapped = 0
        document = writer.composer.wrapped_document
        original = document.wrap_range

        def counting(start: object, old_end: object, new_end: object) -> None:
            nonlocal wrapped
            wrapped += len(document.document.text)
            original(start, old_end, new_end)  # type: ignore[arg-type]

        document.wrap_range = counting  # type: ignore[method-assign]
        await writer.pastes(text)
        await writer.types("xyz")
        assert wrapped < 200
        assert writer.composer.document.line_count == 1
        message = await writer.sends()
        assert message.text == text.replace("\r", "\n") + "xyz"


async def test_two_pastes_of_one_size_are_two() -> None:
    async with writing() as writer:
        one, two = "1\n" * 20, "2\n" * 20
        await writer.pastes(one)
        await writer.pastes(two)
        await writer.pastes(one)
        first, second = "[pasted 20 lines]", "[pasted 20 lines, no. 2]"
        assert writer.composer.text == first + second + first
        assert (await writer.sends()).text == one + two + one


async def test_typed_labels_and_labels_in_pastes_are_text() -> None:
    async with writing() as writer:
        label = "[pasted 20 lines]"
        assert (await writer.sends(label)).text == label
        inner = f"{label}\n" * 20
        await writer.pastes(inner)
        assert (await writer.sends()).text == inner


async def test_a_label_goes_as_a_whole_and_comes_back() -> None:
    async with writing() as writer:
        text = "x" * 5000
        await writer.types("a")
        await writer.pastes(text)
        assert writer.composer.text == "a[pasted 5,000 characters]"
        await writer.types("b")
        await writer.pilot.press("left", "left")
        assert writer.composer.cursor_location == (0, 1)
        await writer.pilot.press("right")
        assert writer.composer.cursor_location == (0, 26)
        await writer.pilot.press("backspace")
        assert writer.composer.text == "ab"
        await writer.pilot.press("ctrl+z")
        assert writer.composer.full_text == f"a{text}b"
        await writer.pilot.press("home", "delete", "delete")
        assert writer.composer.text == "b"


async def test_a_paste_is_opened_unfolded_and_removed() -> None:
    async with writing() as writer:
        text = "\n".join(f"row {n}" for n in range(40))
        await writer.types("a")
        await writer.pastes(text)
        await writer.pilot.press("ctrl+o")
        await writer.until(lambda: isinstance(writer.app.screen, PasteScreen))
        await writer.pilot.pause()
        assert "row 0" in writer.shown()
        assert "row 39" not in writer.shown()
        await writer.pilot.press("end")
        await writer.until(lambda: "row 39" in writer.shown())
        await writer.pilot.press("escape")
        assert writer.composer.text == "a[pasted 40 lines]"
        await writer.pilot.press("ctrl+o")
        await writer.until(lambda: isinstance(writer.app.screen, PasteScreen))
        await writer.pilot.press("u")
        assert writer.composer.text == f"a{text}"
        await writer.pilot.press("ctrl+z")
        await writer.pilot.press("ctrl+o")
        await writer.until(lambda: isinstance(writer.app.screen, PasteScreen))
        await writer.pilot.press("delete")
        assert writer.composer.text == "a"


async def test_a_click_opens_a_paste() -> None:
    async with writing() as writer:
        await writer.pastes("x\n" * 40)
        await writer.pilot.click("#composer", offset=(6, 1))
        await writer.until(lambda: isinstance(writer.app.screen, PasteScreen))
        assert await writer.pilot.click("PasteView")


@pytest.mark.parametrize(
    "line", ["x" * 1_000_000, "wide 漢字 and\ttabs " * 20_000], ids=["one line", "wide characters"]
)
async def test_every_character_of_an_opened_paste_can_be_reached(line: str) -> None:
    async with writing((40, 20)) as writer:
        await writer.pastes(line)
        await writer.pilot.press("ctrl+o")
        await writer.until(lambda: isinstance(writer.app.screen, PasteScreen))
        await writer.pilot.pause()
        view = writer.app.screen.query_one(PasteView)
        width, rows = view.scrollable_content_region.width, view.virtual_size.height
        step = view._steps[0]
        assert (rows - 1) * step < len(line) <= rows * step
        for row in (0, rows // 2, rows - 1):
            view.scroll_to(y=row, animate=False, force=True)
            assert view.render_line(0).cell_length == view.size.width
            part = line[row * step : (row + 1) * step] if view.scroll_offset.y == row else ""
            assert part.expandtabs(4).strip() in view.render_line(0).text
            assert len(part) <= width


async def test_a_very_long_text_that_is_put_is_folded_too() -> None:
    async with writing() as writer:
        text = "one line\n" * 5000
        writer.composer.put(text)
        assert writer.composer.text == "[pasted 5,000 lines]"
        writer.composer.put_back("before")
        assert writer.composer.full_text == f"before\n{text}"


# --- files ---


async def test_what_looks_like_a_file_and_is_none_is_sent_at_the_second_enter(folder: Path) -> None:
    (folder / "src").mkdir()
    async with writing() as writer:
        for text, problem in (
            ("sum up @missing.txt", "There is no file missing.txt. Press Enter again to send it as text."),
            (
                "look into @src.",
                "src is a folder; write @src/ to attach the files in it. Press Enter again to send it as text.",
            ),
        ):
            writer.composer.put(text)
            writer.completion.close()
            await writer.pilot.press("enter")
            await writer.until(lambda: writer.screen.problems)
            assert writer.screen.problems.pop() == problem
            assert not writer.screen.sent
            assert writer.composer.text == text
            writer.composer._sent = ("", 0.0)  # half a second passes
            await writer.pilot.press("enter")
            await writer.until(lambda: writer.screen.sent)
            assert writer.screen.sent.pop().text == text
            assert not writer.screen.problems


async def test_another_text_is_asked_about_again(folder: Path) -> None:
    async with writing() as writer:
        for text in ("see @missing.txt", "see @other.txt", "see @missing.txt"):
            writer.composer.put(text)
            writer.completion.close()
            await writer.pilot.press("enter")
            await writer.until(lambda: writer.screen.problems)
            assert text[5:] in writer.screen.problems.pop()
        assert not writer.screen.sent


async def test_an_attached_file_follows_the_message(folder: Path) -> None:
    (folder / "a b.py").write_text("print('```')\n", encoding="utf-8")
    (folder / "notes.txt").write_text("keep", encoding="utf-8")
    async with writing() as writer:
        text = 'Explain @"a b.py", then see @notes.txt. Mail me@notes.txt or @nobody.'
        message = await writer.sends(text)
        assert message.shown == message.recall == text
        assert message.text == (
            "Explain a b.py, then see notes.txt. Mail me@notes.txt or @nobody."
            "\n\na b.py:\n````py\nprint('```')\n````\n\nnotes.txt:\n```txt\nkeep\n```"
        )


async def test_labels_in_attached_files_and_mentions_in_pastes_are_text(folder: Path) -> None:
    (folder / "f.txt").write_text("[pasted 20 lines]", encoding="utf-8")
    async with writing() as writer:
        paste = "see @f.txt\n" * 20
        await writer.pastes(paste)
        await writer.types(" with @f.txt ")
        message = await writer.sends()
        assert message.text == f"{paste} with f.txt\n\nf.txt:\n```txt\n[pasted 20 lines]\n```"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "see @image.png",
            "image.png is a picture, and the models on this machine read text only; describe it in words, "
            "or choose a remote model that sees.",
        ),
        ("see @big.txt", "big.txt has 1.1 MB; at most 1.0 MB can be attached."),
        ("see @./missing.txt", "There is no file ./missing.txt. Press Enter again to send it as text."),
        ("see @sub/missing.txt", "There is no file sub/missing.txt. Press Enter again to send it as text."),
        ("see @sub/", "sub/ has no text files to attach."),
        ("see @pipe", "pipe is not a regular file; only text files can be attached."),
        ("see @latin", "latin is not a text file; only text (UTF-8) can be attached."),
    ],
)
async def test_what_cannot_be_attached_is_said_and_nothing_is_sent(
    folder: Path, text: str, problem: str
) -> None:
    import os

    (folder / "image.png").write_bytes(b"\x89PNG\r\n\0\0")
    (folder / "big.txt").write_text("x" * 1_100_000, encoding="utf-8")
    (folder / "latin").write_bytes("für".encode("latin-1"))
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    async with writing() as writer:
        writer.composer.put(text)
        writer.completion.close()
        await writer.pilot.press("enter")
        await writer.until(lambda: writer.screen.problems)
        assert writer.screen.problems[0].startswith(problem)
        assert not writer.screen.sent
        assert writer.composer.text == text
        await writer.types("x")
        assert writer.composer.text == f"{text}x"


async def test_files_that_are_there_are_marked_and_counted(folder: Path) -> None:
    (folder / "notes.txt").write_text("keep", encoding="utf-8")

    def marked(writer: Writer) -> list[str]:
        composer = writer.composer
        lines = [composer.get_line(row) for row in range(composer.document.line_count)]
        return [line.plain[span.start : span.end] for line in lines for span in line.spans]

    async with writing() as writer:
        writer.composer.put("first\nsee @notes.txt, @nobody")
        await writer.until(lambda: marked(writer) == ["@notes.txt"])
        assert writer.composer.sending_text == (
            "first\nsee notes.txt, @nobody\n\nnotes.txt:\n```txt\nkeep\n```"
        )
        await writer.types(" @./missing")
        whole = "first\nsee notes.txt, @nobody @./missing\n\nnotes.txt:\n```txt\nkeep\n```"
        await writer.until(lambda: writer.composer.sending_text == whole)  # as the second Enter sends it
        assert marked(writer) == ["@notes.txt"]


async def test_attached_text_is_cleaned(folder: Path) -> None:
    (folder / "evil.txt").write_bytes(b"\x1b]0;owned\x07red \x1b[31mtext\r\nnext")
    async with writing() as writer:
        assert (await writer.sends("@evil.txt ")).text == "evil.txt\n\nevil.txt:\n```txt\nred text\nnext\n```"


async def test_paths_are_completed(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "main.py").write_text("x", encoding="utf-8")
    (folder / "src" / ".hidden").write_text("x", encoding="utf-8")
    (folder / "setup.cfg").write_text("x", encoding="utf-8")
    (folder / "ev\x1b[31mil").write_text("x", encoding="utf-8")
    async with writing() as writer:
        await writer.types("look at @")
        await writer.until(lambda: "setup.cfg" in writer.shown())
        assert "il" not in writer.shown()
        await writer.types("sr")
        await writer.until(lambda: "setup.cfg" not in writer.shown())
        await writer.pilot.press("tab")
        assert writer.composer.text == "look at @src/"
        await writer.until(lambda: "src/main.py" in writer.shown())
        assert ".hidden" not in writer.shown()
        await writer.pilot.press("down", "enter")
        assert writer.composer.text == "look at @src/main.py "
        await writer.until(lambda: not writer.completion.display)
        assert not writer.screen.sent
        assert (await writer.sends()).text.endswith("src/main.py:\n```py\nx\n```")


async def test_enter_sends_a_path_that_is_written_whatever_it_may_become(folder: Path) -> None:
    (folder / "docs").mkdir()
    (folder / "docs" / "a.md").write_text("inside", encoding="utf-8")
    async with writing() as writer:
        await writer.types("look at @docs/")
        await writer.until(lambda: "docs/a.md" in writer.shown())
        await writer.pilot.press("enter")
        await writer.until(lambda: writer.screen.problems)
        assert "Press Enter again to attach and send it." in writer.screen.problems[0]
        assert writer.composer.text == "look at @docs/"


async def test_a_path_is_completed_inside_of_a_text(folder: Path) -> None:
    (folder / "my notes.txt").write_text("x", encoding="utf-8")
    async with writing() as writer:
        writer.composer.put("see  now\nand then")
        writer.composer.move_cursor((0, 4))
        await writer.types("@my")
        await writer.until(lambda: "my notes.txt" in writer.shown())
        await writer.pilot.press("escape")
        await writer.until(lambda: not writer.completion.display)
        await writer.pilot.press("backspace", "y")
        await writer.until(lambda: writer.completion.display)
        await writer.pilot.press("tab")
        assert writer.composer.text == 'see @"my notes.txt"  now\nand then'
        assert writer.composer.cursor_location == (0, 20)
        await writer.pilot.press("ctrl+z")
        assert writer.composer.text == "see @my now\nand then"


# --- drafts and the other editor ---


async def test_drafts_are_given_away_whole() -> None:
    async with writing() as writer:
        text = "long\n" * 30
        await writer.types("see ")
        await writer.pastes(text)
        await writer.until(lambda: writer.screen.drafts[-1:] == [f"see {text}"])
        await writer.sends()
        await writer.until(lambda: writer.screen.drafts[-1:] == [""])


async def test_the_last_draft_is_given_away_at_the_end() -> None:
    async with writing() as writer:
        screen = writer.screen
        await writer.types("unfinished")
    assert screen.drafts[-1] == "unfinished"


async def test_without_a_terminal_or_an_editor_the_draft_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "no-such-editor --wait")
    async with writing() as writer:
        await writer.types("draft")
        await writer.pilot.press("ctrl+g")
        await writer.until(lambda: writer.screen.problems)
        monkeypatch.setenv("VISUAL", "true")
        await writer.pilot.press("ctrl+g")
        await writer.until(lambda: len(writer.screen.problems) == 2)
        assert writer.screen.problems == [
            "VISUAL names the editor no-such-editor, which was not found.",
            "An editor cannot run in this terminal.",
        ]
        assert writer.composer.text == "draft"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("see @https://example.org/a", 20.0),
        ('see @"https://example.org/a b"', 20.0),
        ("see @https.txt", 5.0),
    ],
)
async def test_a_page_has_more_time_than_a_file(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composing, "attach", lambda shown, *_, **__: MessageWithFiles(shown))
    async with writing() as writer:
        waits = list[float]()
        set_timer = writer.composer.set_timer

        def timed(delay: float, *arguments: Any, **more: Any) -> Any:
            waits.append(delay)
            return set_timer(delay, *arguments, **more)

        monkeypatch.setattr(writer.composer, "set_timer", timed)
        await writer.sends(text)
        assert max(waits) == seconds
