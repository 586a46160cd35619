"""Themes: complete, readable, a person's own, switched live; sixteen colours, no colours, ASCII."""

import os
import re
import sys
import textwrap
from asyncio import Handle
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pexpect
import pytest
from rich.color import Color as RichColor
from rich.color import ColorSystem, ColorType
from textual.color import Color
from textual.css.stylesheet import Stylesheet
from textual.dom import DOMNode
from textual.screen import Screen
from textual.theme import Theme

from chatterm.app import ChatApp
from chatterm.markdown.lines import cells
from chatterm.screens import themed_app
from chatterm.screens.themed_app import ParsedOnce, Terminal, this_terminal
from chatterm.settings.settings import SettingsError
from chatterm.settings.themes import (
    AUTO_THEME,
    DEFAULT_THEME,
    FOLDER,
    STYLESHEET,
    TERMINAL_THEME,
    load_theme,
    theme_names,
)
from chatterm.terminal.glyphs import ASCII, plain
from chatterm.widgets import slices
from chatterm.widgets.canvas import STYLES
from tests.chatterm.driving import PARSE_RULES, Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.counting import PATIENCE

NAMES = [path.stem for path in sorted(FOLDER.glob("*.toml"))]
SHADED = [name for name in NAMES if name != TERMINAL_THEME]
NEVER_TEXT = {"rule", "quote-bar"}
"""Styles of lines and bars."""


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in Color.parse(colour).normalized
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text: str, ground: str) -> float:
    low, high = sorted((luminance(text), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


def in_256_colours(colour: str) -> str:
    """What a terminal without true colours shows (macOS Terminal, many a session over ssh)."""
    return RichColor.parse(colour).downgrade(ColorSystem.EIGHT_BIT).get_truecolor().hex


def value(theme: Theme, name: str) -> str:
    """The colour that the stylesheet calls `$name`."""
    found = theme.variables.get(name) or getattr(theme, name)
    assert isinstance(found, str)
    return found


def roles() -> dict[str, dict[str, str]]:
    """By style: the colours that the stylesheet gives it, as names of the theme."""
    rules = re.findall(
        r"^(?:\.-tinted )?\.text--([\w-]+) \{(.*)\}", STYLESHEET.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name: dict(re.findall(r"([a-z-]+): \$([a-z]+)", body)) for name, body in rules}


def grounds(driver: Driver) -> set[str]:
    """The backgrounds that are on the screen."""
    return {
        Color.from_rich_color(style.bgcolor).hex.lower()
        for _, style, _ in driver.segments()
        if style is not None and style.bgcolor is not None
    }


def text_pairs() -> set[tuple[str, str]]:
    """Every colour of text with every ground that it stands on."""
    pairs = {("background", "primary"), ("foreground", "selection"), ("muted", "surface")}
    for style, colours in roles().items():
        if style in NEVER_TEXT or "color" not in colours:
            continue
        grounds = {"background", "surface"}
        if style.startswith("code"):
            grounds = {colours.get("background", "code")}
        pairs |= {(colours["color"], ground) for ground in grounds}
    # What lists show is also chosen; /think show puts everything of an answer beside the thinking's bar.
    return pairs | {(text, "panel") for text in ("foreground", "primary", "muted", "accent")}


def test_black_on_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_there_are_dark_and_light_ones() -> None:
    assert len(SHADED) >= 6
    assert theme_names() == sorted([AUTO_THEME, *NAMES])
    assert sum(not load_theme(name).dark for name in SHADED) >= 2
    assert sum(load_theme(name).dark for name in SHADED) >= 2


def test_an_unknown_theme_says_which_there_are() -> None:
    with pytest.raises(SettingsError, match=f"Unknown theme 'x'; choose one of: .*{DEFAULT_THEME}"):
        load_theme("x")


def test_the_stylesheet_knows_every_style() -> None:
    assert roles().keys() == STYLES
    assert ("comment", "code") in text_pairs()
    assert ("error", "surface") in text_pairs()


@pytest.mark.parametrize("name", SHADED)
def test_text_can_be_read(name: str) -> None:
    """Contrast of at least 4.5 (WCAG AA; AAA is 7) for every colour of text, on every ground that it stands on."""
    theme, least = load_theme(name), 7 if name == "contrast" else 4.5
    assert theme.variables.keys() == load_theme(DEFAULT_THEME).variables.keys()
    for text, ground in sorted(text_pairs()):
        colours = value(theme, text), value(theme, ground)
        assert contrast(*colours) >= least, f"${text} on ${ground}: {contrast(*colours):.2f}"
        fewer = in_256_colours(colours[0]), in_256_colours(colours[1])
        # The 256 colours of a terminal are coarse: a little below is the best that some grounds allow.
        assert contrast(*fewer) >= 3.9, f"${text} on ${ground} in 256 colours: {contrast(*fewer):.2f}"


@pytest.mark.parametrize("name", SHADED)
def test_quiet_lines_can_be_seen_and_stay_quiet(name: str) -> None:
    theme = load_theme(name)
    for ground in ("background", "surface"):
        assert 1.3 < contrast(value(theme, "faint"), value(theme, ground)) < 4.5
    assert value(theme, "background") != value(theme, "surface") != value(theme, "panel")


# --- a person's own ---


@pytest.fixture
def own(own_folders: Path) -> Path:
    folder = own_folders / "themes"
    folder.mkdir()
    return folder


def test_a_theme_of_ones_own_states_what_differs(own: Path) -> None:
    (own / "mine.toml").write_text('base = "snow"\n[colors]\nprimary = "#aa0000"\n', encoding="utf-8")
    (own / "ember.toml").write_text('[variables]\nmuted = "red"\n', encoding="utf-8")
    (own / "Not A Name\n.toml").write_text("", encoding="utf-8")
    assert theme_names() == sorted([AUTO_THEME, *NAMES, "mine"])
    mine, snow = load_theme("mine"), load_theme("snow")
    assert mine.primary == "#aa0000"
    assert (mine.background, mine.variables, mine.dark) == (snow.background, snow.variables, False)
    assert load_theme("ember").variables["muted"] == "red"
    assert load_theme("ember").background == load_theme(DEFAULT_THEME).background


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('[colors]\n\nprimry = "#fff"', "line 3: unknown colour primry; choose one of: primary, "),
        ('[variables]\nmuted = "#ggg"', "line 2: muted is '#ggg'; it must be a colour, as in"),
        ("[colors]\nprimary = 4", "line 2: primary is '4'; it must be a colour"),
        ('base = "plaid"', "line 1: base must be one of contrast, dusk, ember, "),
        ("dark = 1", "line 1: dark must be true or false."),
        ("colors = 1", "line 1: colors must be a table: write [colors] and its colours below it."),
        ('\ncolours = "x"', "line 2: unknown key colours; choose one of: base, dark, colors, variables."),
        ("[colors", "line 1: this is not TOML"),
    ],
)
def test_what_is_wrong_in_a_theme_is_said_with_its_line(own: Path, source: str, message: str) -> None:
    (own / "mine.toml").write_text(source, encoding="utf-8")
    with pytest.raises(SettingsError) as error:
        load_theme("mine")
    assert str(error.value).startswith(f"{own / 'mine.toml'}, {message}")


# --- what a terminal can show ---


@pytest.mark.parametrize(
    ("environment", "encoding", "expected"),
    [
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "utf-8", Terminal()),
        ({"TERM": "xterm-256color"}, "UTF-8", Terminal()),
        ({"TERM": "tmux-256color", "NO_COLOR": "1"}, "utf-8", Terminal(colours=False)),
        ({"TERM": "screen"}, "utf-8", Terminal(shades=False)),
        ({"TERM": "xterm"}, "ascii", Terminal(shades=False, unicode=False)),
        ({"TERM": "linux"}, "utf-8", Terminal(shades=False, unicode=False)),
        ({"TERM": "xterm-256color"}, "iso8859-1", Terminal(unicode=False)),
        ({}, "utf-8", Terminal(shades=False)),
        ({"TERM": "xterm-256color", "LC_ALL": "C"}, "utf-8", Terminal(unicode=False)),
    ],
)
def test_a_terminal_is_known_by_its_environment(
    environment: dict[str, str], encoding: str, expected: Terminal
) -> None:
    assert this_terminal(environment, encoding) == expected


def test_ascii_takes_the_same_room() -> None:
    for code, other in ASCII.items():
        assert other.isascii()
        assert cells(chr(code)) == cells(other) == 1
    assert plain("▌ a – “b” · ━━──… ▁▄▇") == '| a - "b" . ==--. _=#'


@pytest.mark.parametrize("name", SHADED)
async def test_the_screen_is_drawn_in_its_colours(name: str) -> None:
    theme = load_theme(name)
    async with driven(ScriptedBackend([Script("**bold** `code`")]), theme=name) as driver:
        await driver.send("q")
        assert {theme.background, theme.surface, theme.variables["code"]} <= grounds(driver)


async def test_themes_are_switched_live() -> None:
    async with driven(ScriptedBackend([Script("**bold** `code`")])) as driver:
        await driver.send("q")
        for name in ("snow", "dusk"):
            await driver.send(f"/theme {name}")
            assert driver.app.theme == name
            background = load_theme(name).background
            await driver.until(lambda ground=background: ground in grounds(driver))
            assert load_theme(name).variables["code"] in grounds(driver)


async def test_sixteen_colours_are_those_of_the_terminal() -> None:
    async with driven(ScriptedBackend([Script("`code`")]), terminal=Terminal(shades=False)) as driver:
        await driver.send("q")
        await driver.send("/theme snow")
        await driver.until(lambda: "16 colours" in " ".join(driver.text().split()))
        colours = {
            colour
            for _, style, _ in driver.segments()
            for colour in (style and style.color, style and style.bgcolor)
            if colour
        }
        assert all(colour.type in (ColorType.DEFAULT, ColorType.STANDARD) for colour in colours)
        assert any(colour.type is ColorType.STANDARD for colour in colours)
        await driver.types("/t")
        await driver.until(lambda: [t for t, s, _ in driver.segments() if "/t" in t and s and s.reverse])


async def test_no_color_shows_none() -> None:
    terminal = Terminal(colours=False)
    async with driven(ScriptedBackend([Script("`code`")]), terminal=terminal) as driver:
        await driver.send("q")
        await driver.send("/theme snow")
        await driver.until(lambda: "NO_COLOR is set" in " ".join(driver.text().split()))
        for _, style, _ in driver.segments():
            for colour in (style and style.color, style and style.bgcolor):
                assert colour is None or colour.is_default


@pytest.mark.parametrize("size", [(40, 16), (80, 24), (160, 45)])
async def test_ascii_holds_for_the_whole_screen(size: tuple[int, int]) -> None:
    answer = "# Title\n\n> quote\n\n- a\n  - b\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n---\n\n```python\nx = 1\n```\n"
    backend = ScriptedBackend([Script(answer, reasoning="so")], thinks=True)
    async with driven(backend, size, terminal=Terminal(unicode=False)) as driver:
        assert driver.text().isascii()
        await driver.send("q")
        for command in ("/think show", "/stats", "/help"):
            await driver.send(command)
            assert driver.text().isascii(), {c for c in driver.text() if not c.isascii()}
        await driver.pilot.press("ctrl+p")
        await driver.shows("/help")
        assert driver.text().isascii(), {c for c in driver.text() if not c.isascii()}


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from chatterm.app import run_app
from tests.chatterm.scripted import Script, ScriptedBackend
sys.exit(run_app(ScriptedBackend([Script("# Done\\n\\n> `quote`\\n\\n- item")]), theme="dusk"))
"""


async def test_a_theme_is_applied_in_slices_and_no_frame_shows_two(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, worst, parsed, drawn = 0, 0, Counter[object](), list[bool]()
    run, parse, update, display = Handle._run, themed_app.parse, ParsedOnce.update_nodes, ChatApp._display

    def piece() -> None:
        nonlocal pieces, worst
        pieces += 1
        worst = max(worst, pieces)

    def counted_run(self: Handle) -> None:
        nonlocal pieces
        pieces = 0
        run(self)

    def counted_parse(scope: str, css: str, place: object, *more: Any) -> Iterator[object]:
        parsed[place] += 1
        for rule in parse(scope, css, place, *more):
            piece()
            yield rule

    def counted_update(self: ParsedOnce, nodes: list[DOMNode], animate: bool = False) -> None:
        piece()
        update(self, nodes, animate)

    def noted_display(self: ChatApp, screen: Screen[Any], frame: Any) -> None:
        if frame is not None:
            drawn.append(self._is_restyling)
        display(self, screen, frame)

    monkeypatch.setattr(Stylesheet, "_parse_rules", PARSE_RULES)  # each application on its own, as in life
    async with driven(ScriptedBackend()) as driver:
        ticks = count()
        monkeypatch.setattr(slices, "monotonic", lambda: next(ticks) / 1000)
        monkeypatch.setattr(Handle, "_run", counted_run)
        monkeypatch.setattr(themed_app, "parse", counted_parse)
        monkeypatch.setattr(ParsedOnce, "update_nodes", counted_update)
        monkeypatch.setattr(ChatApp, "_display", noted_display)
        driver.app.use_theme("paper")
        await driver.until(lambda: parsed)
        driver.app.use_theme("dusk")  # before the other one is there
        await driver.pilot.pause()
        assert max(parsed.values()) == 2
        assert worst < 10 < len(parsed)
        assert drawn
        assert not any(drawn)
        wanted = load_theme("dusk").background
        assert driver.app.chat.styles.background.hex == driver.composer.screen.styles.background.hex == wanted
        parsed.clear()
        await driver.send("/stats")
        await driver.shows("Statistics")
    assert all(times == 1 for times in parsed.values())


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("environment", "wanted", "unwanted"),
    [
        (
            {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
            rb"\x1b\[[\d;]*[34]8;2;",
            rb"\x1b\[[\d;]*[34]8;5;",
        ),
        ({"TERM": "tmux-256color"}, rb"\x1b\[[\d;]*[34]8;5;", rb"\x1b\[[\d;]*[34]8;2;"),
        (
            {"TERM": "xterm-256color", "NO_COLOR": "1", "LC_ALL": "C"},
            rb"\x1b\[1;39;49m",
            rb"\x1b\[([\d;]+;)?([349][0-7]|[34]8;[25];\d+)[;m]|[\x80-\xff]",
        ),
        ({"TERM": "linux"}, rb"\x1b\[(1;)?3[1-7];49m", rb"\x1b\[[\d;]*[34]8;[25];|[\x80-\xff]"),
    ],
    ids=["true colours", "256 colours", "NO_COLOR and LC_ALL=C", "console"],
)
def test_a_real_terminal_gets_what_it_can_show(
    environment: dict[str, str], wanted: bytes, unwanted: bytes
) -> None:
    root = str(Path(__file__).parents[2])
    inherited = {k: v for k, v in os.environ.items() if k not in ("COLORTERM", "NO_COLOR", "TERM", "LC_ALL")}
    child = pexpect.spawn(
        sys.executable,
        ["-c", textwrap.dedent(PROGRAM).format(root=root)],
        env={"LC_ALL": "C.UTF-8", **inherited, **environment},
        dimensions=(16, 40),
        timeout=PATIENCE,
    )
    child.expect(b"ready")
    seen = child.before
    child.send(b"question\r")
    child.expect(b"item")
    seen += child.before + child.after
    child.send(b"/quit\r")
    child.expect(pexpect.EOF)
    seen += child.before
    child.close()
    assert child.exitstatus == 0
    assert re.search(wanted, seen)
    found = re.search(unwanted, seen)
    assert found is None, seen[max(found.start() - 40, 0) : found.end() + 40]
