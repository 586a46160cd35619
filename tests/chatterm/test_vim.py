"""Vim's keys: what they do to a text, that random keys lose nothing, and that the composer follows."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatterm.settings.settings import ComposerSettings, Settings
from chatterm.widgets.vim import Vim, VimText
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend

KEYS = "hjklwbe0$^ggGiaIAoOxddDdwd$cwccCyyYpPuvVft.r123 q;"


def press(vim: Vim, key: str) -> None:
    """As a composer does: what is not vim's is typed."""
    if not vim.press(key) and len(key) == 1:
        text, at = vim.now.text, vim.now.at
        vim.take(text[:at] + key + text[at:], at + 1)


def after(text: str, keys: str, at: int = 0) -> VimText:
    vim = Vim()
    vim.take(text, at)
    vim.press("escape")
    vim.take(text, at)
    for key in keys.replace("<esc>", "\0"):
        press(vim, "escape" if key == "\0" else key)
    return vim.now


@pytest.mark.parametrize(
    ("text", "keys", "wanted"),
    [
        ("one two three", "dw", ("two three", 0)),
        ("one two three", "2dw", ("three", 0)),
        ("one two three", "wd$", ("one ", 3)),
        ("one two three", "wD", ("one ", 3)),
        ("one two three", "cwxyz<esc>", ("xyz two three", 2)),
        ("one two three", "$x", ("one two thre", 11)),
        ("one two three", "3lx", ("onetwo three", 3)),
        ("one two three", "ftx", ("one wo three", 4)),
        ("one two three", "dtt", ("two three", 0)),
        ("one two", "wb", ("one two", 0)),
        ("one two", "e", ("one two", 2)),
        ("a\nb\nc", "jdd", ("a\nc", 2)),
        ("a\nb\nc", "Gdd", ("a\nb", 2)),
        ("a\nb\nc", "dG", ("", 0)),
        ("a\nb\nc", "yyGp", ("a\nb\nc\na", 6)),
        ("a\nb", "ddp", ("b\na", 2)),
        ("a\nb", "jccnew<esc>", ("a\nnew", 4)),
        ("a\nb", "onew<esc>", ("a\nnew\nb", 4)),
        ("a\nb", "jOnew<esc>", ("a\nnew\nb", 4)),
        ("  a", "$Ix<esc>", ("  xa", 2)),
        ("ab", "Ac<esc>", ("abc", 2)),
        ("one two", "vey$p", ("one twoone", 9)),
        ("one two", "ved", (" two", 0)),
        ("a\nb\nc", "Vjd", ("c", 0)),
        ("one two three", "cwx<esc>w.", ("x x three", 2)),
        ("abcdef", "xl.", ("bdef", 1)),
        ("one", "xxuu", ("one", 0)),
        ("abcdef", "x3.u", ("bcdef", 0)),
        ("abc", "rz", ("zbc", 0)),
    ],
)  # fmt: skip
def test_what_keys_do(text: str, keys: str, wanted: tuple[str, int]) -> None:
    now = after(text, keys)
    assert (now.text, now.at) == wanted


def test_a_count_makes_no_text_endless() -> None:
    line = "a" * 60_000
    assert after(line, "yyp999.").text == "\n".join([line] * 3)


@example("a", ["u", "i", "h"])
@example("a", [*"xp333."])
@given(st.text("ab \n.", max_size=20), st.lists(st.sampled_from([*KEYS, "escape", "ctrl+r"]), max_size=40))
def test_random_keys_lose_nothing(text: str, keys: list[str]) -> None:
    vim = Vim()
    vim.take(text, len(text))
    press(vim, "escape")
    begun, states = vim.now.text, [vim.now.text]
    for key in keys:
        press(vim, key)
        assert 0 <= vim.now.at <= len(vim.now.text)
        if vim.mode == "normal" and vim.now.text:
            line_end = vim.now.text.find("\n", vim.now.at)
            assert vim.now.at < len(vim.now.text) or vim.now.text.endswith("\n") or line_end < 0
        if vim.mode != "insert":
            states.append(vim.now.text)
    press(vim, "escape")
    press(vim, "escape")
    end, seen = vim.now.text, {vim.now.text}
    for _ in range(300):
        press(vim, "ctrl+r")
        seen.add(vim.now.text)
    for _ in range(300):
        press(vim, "u")
        seen.add(vim.now.text)
    assert end in seen
    # What was undone cannot come back once something else is typed, as in most editors.
    if "u" not in keys:
        assert begun in seen
    if not {"u", "ctrl+r"}.intersection(keys):
        assert set(states) <= seen


async def test_the_composer_has_vims_keys_and_shows_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend()
    monkeypatch.setattr("chatterm.app.Settings", lambda: Settings(composer=ComposerSettings(vim=True)))
    async with driven(backend) as driver:
        assert "INSERT" in driver.text()
        await driver.types("one two")
        await driver.pilot.press("escape")
        await driver.shows("NORMAL")
        await driver.pilot.press("b", "d", "w")
        assert driver.composer.text == "one "
        await driver.pilot.press("u")
        assert driver.composer.text == "one two"
        await driver.pilot.press("ctrl+r")
        assert driver.composer.text == "one "
        await driver.pilot.press("0", "v", "l", "d")
        assert driver.composer.text == "e "
        await driver.pilot.press("A", "x", "enter")
        await driver.idle()
        assert driver.questions == ["e x"]


async def test_g_and_braces_move_in_the_transcript() -> None:
    async with driven(ScriptedBackend([Script("many words " * 200)])) as driver:
        for text in ("one", "two"):
            await driver.send(text)
        await driver.pilot.press("alt+up", "g", "g")
        assert round(driver.transcript.scroll_y) == 0
        await driver.pilot.press("G")
        assert round(driver.transcript.scroll_y) == round(driver.transcript.max_scroll_y)
        selected = driver.transcript.selected
        await driver.pilot.press("left_curly_bracket")
        assert driver.transcript.selected is driver.transcript.entries[-2]
        await driver.pilot.press("right_curly_bracket")
        assert driver.transcript.selected is selected
        assert driver.composer.text == ""
