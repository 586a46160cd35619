"""The figures: measured from token times, written for people, fitted to a width."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backend import Figures, ModelInfo, Progress
from chatterm.figures import (
    Live,
    SessionStats,
    Speedometer,
    count_text,
    meter,
    new_notes,
    progress_text,
    rate_text,
    seconds_text,
    sparkline,
)
from chatterm.markdown.lines import line_cells, text_of
from chatterm.reports import stats_lines
from chatterm.widgets.side_panel import panel_lines
from chatterm.widgets.status_line import status_line
from chatterm.widgets.welcome import welcome_lines
from tests.chatterm.driving import driven
from tests.chatterm.scripted import ScriptedBackend


def measured(times: list[float]) -> Speedometer:
    speed = Speedometer()
    for time in times:
        speed.add(time)
    return speed


def test_speed_of_a_steady_stream() -> None:
    speed = measured([100 + n / 50 for n in range(501)])
    assert speed.average == pytest.approx(50)
    assert speed.now(110) == pytest.approx(50, rel=0.05)
    assert speed.now(200) == 0.0
    assert all(rate == pytest.approx(50, rel=0.25) for rate in speed.history())


def test_speed_now_forgets_a_slow_start() -> None:
    speed = measured([0, 1, 2, 3, 4, 5] + [5 + n / 100 for n in range(1, 201)])
    assert speed.now(7) == pytest.approx(100, rel=0.05)
    assert speed.average == pytest.approx(205 / 7)
    assert measured([]).average == measured([1]).average == measured([1]).now(1) == 0.0


@given(st.lists(st.floats(0, 5), min_size=1, max_size=300))
def test_the_history_stays_short_and_counts_every_token(gaps: list[float]) -> None:
    times = [sum(gaps[:n]) for n in range(len(gaps))]
    speed = measured(times)
    assert len(speed.history()) < 64
    assert sum(speed._counts) == len(times)


def test_words() -> None:
    assert [count_text(n) for n in (7, 999, 4096, 131_072)] == ["7", "999", "4.1k", "131k"]
    assert [seconds_text(s) for s in (0.038, 0.42, 12.5, 185)] == ["38 ms", "0.42 s", "12.5 s", "3 min 5 s"]
    assert [rate_text(r) for r in (4.25, 99.96, 1234.5)] == ["4.2 tok/s", "100 tok/s", "1,234 tok/s"]
    assert progress_text(Progress("load", "weights", 61_000_000, 98_000_000)) == "weights 61 of 98 MB"
    assert progress_text(Progress("load", "weights", 61_000, 98_000_000)) == "weights 61 kB of 98 MB"
    assert progress_text(Progress("download", "a.gguf", 5_000_000, None)) == "a.gguf 5.0 MB"


def test_drawings() -> None:
    assert sparkline((), 10) == ""
    assert sparkline((1, 2, 4), 10) == "▂▄▇"
    assert len(sparkline(tuple(range(1, 100)), 10)) == 10
    assert meter(0, 4) == ("", "────")
    assert meter(0.001, 4) == ("━", "───")
    assert meter(2, 4) == ("━━━━", "")


INFO = ModelInfo("a-model-with-quite-a-long-name/and-more", "cpu", "bfloat16", 131_072, True)
FIGURES = Figures("m", "cpu", "bfloat16", "sdpa", 131_072, 10**9, 10**9, 16, 1, 2, 3, 1200, 3400)
LIVES = [
    Live("loading", "m"),
    Live("loading", "m", progress=Progress("download", "a-rather-long-file-name.safetensors", 1, 10**9)),
    Live("absent", "m"),
    Live("ready", "m", INFO, context=131_072),
    Live("reading", "m", INFO, waited_s=1.2, figures=FIGURES, context=131_072),
    Live(
        "answering",
        "m",
        INFO,
        None,
        1234.5,
        1200.5,
        (1.0, 2.0) * 30,
        12.5,
        0.0,
        131_000,
        72,
        9_999,
        130_000,
        131_072,
    ),
]


@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.phase)
@pytest.mark.parametrize("width", [34, 60, 80, 109])
def test_the_line_fits(live: Live, width: int) -> None:
    assert line_cells(status_line(live, width)) <= width


@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.phase)
def test_panel_and_welcome_fit(live: Live) -> None:
    assert all(line_cells(line) <= 30 for line in panel_lines(live, 30))
    assert all(line_cells(line) <= 40 for line in welcome_lines(live, 40))


def test_stats_name_the_kernels() -> None:
    figures = replace(FIGURES, attention="flash", decode="fused kernels, CUDA graph")
    lines = stats_lines(80, None, SessionStats(), INFO, figures)
    assert "flash attention · fused kernels, CUDA graph · weights" in " ".join(map(text_of, lines))
    assert all(line_cells(line) <= 80 for line in lines)


def test_a_note_is_new_once() -> None:
    said: set[str] = set()
    assert new_notes(None, said) == []
    assert new_notes(replace(FIGURES, notes=("a", "b")), said) == ["a", "b"]
    assert new_notes(replace(FIGURES, notes=("a", "b", "c")), said) == ["c"]


class WithNotes(ScriptedBackend):
    """Has something to tell once loaded, and more after the first answer."""

    def figures(self) -> Figures | None:
        figures = super().figures()
        notes = ("The GPU sleeps.", *(["A graph failed."] if self.history else []))
        return replace(figures, notes=notes) if figures is not None else None


async def test_the_engine_s_notes_stand_in_the_chat_once() -> None:
    async with driven(WithNotes()) as driver:
        assert driver.notices == ["The GPU sleeps."]
        await driver.send("1")
        await driver.send("2")
        assert driver.notices == ["The GPU sleeps.", "A graph failed."]


def test_at_80_columns_the_line_tells_what_matters() -> None:
    text = text_of(status_line(LIVES[-1], 80))
    for part in ("1,234 tok/s", "first 12.5 s", "131k cached + 72 new", "130k/131k"):
        assert part in text
