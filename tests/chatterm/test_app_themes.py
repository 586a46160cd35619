"""Themes: complete, readable, and the screen draws with them."""

import pytest
from textual.color import Color

from chatterm.backend import EngineError
from chatterm.themes import DEFAULT_THEME, load_theme, theme_names
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend

NAMES = theme_names()
CODE = ("comment", "keyword", "string", "number", "name", "builtin")


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in Color.parse(colour).normalized
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text: str, ground: str) -> float:
    low, high = sorted((luminance(text), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


def test_black_on_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_there_are_dark_and_light_ones() -> None:
    assert len(NAMES) >= 3
    assert DEFAULT_THEME in NAMES
    assert {load_theme(name).dark for name in NAMES} == {True, False}


def test_an_unknown_theme_says_which_there_are() -> None:
    with pytest.raises(EngineError, match=f"no theme 'x'; there are .*{DEFAULT_THEME}"):
        load_theme("x")


@pytest.mark.parametrize("name", NAMES)
def test_text_can_be_read(name: str) -> None:
    """Contrast of at least 4.5 (WCAG AA) for every colour that text has, on every ground that it stands on."""
    theme = load_theme(name)
    assert theme.variables.keys() == load_theme(DEFAULT_THEME).variables.keys()
    code, comments = theme.variables["code"], [theme.variables[part] for part in CODE]
    texts = [
        theme.foreground,
        theme.variables["muted"],
        theme.primary,
        theme.accent,
        theme.warning,
        theme.error,
    ]
    pairs = [(text, ground) for text in texts for ground in (theme.background, theme.surface)]
    pairs += [(text, code) for text in [*comments, theme.foreground, theme.accent, theme.variables["muted"]]]
    pairs += [(theme.primary, theme.panel), (theme.variables["muted"], theme.panel)]
    for text, ground in pairs:
        assert text is not None
        assert ground is not None
        assert contrast(text, ground) >= 4.5, f"{text} on {ground}: {contrast(text, ground):.2f}"


@pytest.mark.parametrize("name", NAMES)
async def test_the_screen_is_drawn_in_its_colours(name: str) -> None:
    theme = load_theme(name)
    async with driven(ScriptedBackend([Script("**bold** `code`")]), theme=name) as driver:
        await driver.send("q")
        backgrounds = {
            Color.from_rich_color(style.bgcolor).hex.lower()
            for _, style, _ in driver.segments()
            if style is not None and style.bgcolor is not None
        }
        assert theme.background in backgrounds
        assert theme.surface in backgrounds
        assert theme.variables["code"] in backgrounds
