"""The figures: measured from token times, written for people, fitted to a width."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import (
    DiskFigures,
    DraftCost,
    EngineError,
    Figures,
    FinishReason,
    ModelInfo,
    OffloadFigures,
    Progress,
    TokenEvent,
    TurnStats,
)
from chatterm.conversation.cache_map import PLAIN_MARKS, cache_lines
from chatterm.conversation.figures import (
    Live,
    ProgressRate,
    SessionStats,
    Speedometer,
    Watch,
    bar,
    count_text,
    left_text,
    meter,
    new_notes,
    progress_parts,
    progress_text,
    rate_text,
    seconds_text,
    sparkline,
)
from chatterm.conversation.stats import process_figures, stats_lines
from chatterm.markdown.lines import Line, line_cells, line_text, shortened
from chatterm.widgets.meter import context_bar, note_lines
from chatterm.widgets.side_panel import panel_lines
from chatterm.widgets.status_line import status_line
from chatterm.widgets.welcome import welcome_lines
from engine.cache.block_map import BlockMap, BlockState
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend


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


def test_the_pace_of_a_download_and_the_time_left() -> None:
    pace = ProgressRate(window=4)
    assert (pace.rate(0), pace.left(0, 100)) == (None, None)
    for second in range(11):
        pace.add(second, 10 * second if second < 5 else 40 + 20 * (second - 4))
    assert pace.rate(10) == pytest.approx(20)
    assert pace.left(10, 200) == pytest.approx(2)
    assert pace.left(10, None) is None
    assert pace.rate(12) == pytest.approx(120 / 7, rel=0.2), "a stall slows it down"
    pace.add(13, 0)
    assert pace.rate(13) is None, "something else has begun"


def test_the_watch_tells_rates_of_a_download_and_of_a_prompt() -> None:
    watch = Watch()
    lives = [
        Live("loading", "m", progress=Progress("download", "a.gguf", 10**6 * second, 10**7))
        for second in range(1, 4)
    ]
    seen = [watch.see(live, second) for second, live in enumerate(lives)]
    assert seen[0].left_s is None
    assert progress_parts(seen[-1]) == ["a.gguf 3.0 of 10 MB", "1.0 MB/s", "7 s left"]
    reading = Live("reading", "m", INFO, figures=FIGURES)
    steps = [replace(reading, figures=replace(FIGURES, prefill_done=done)) for done in (0, 1000)]
    first, second = (watch.see(live, now) for now, live in zip((10.0, 12.0), steps, strict=True))
    assert (first.prefill_rate, first.left_s) == (None, None)
    assert (second.prefill_rate, second.left_s) == (500, pytest.approx(4.8))
    after = watch.see(Live("ready", "m", prefill_rate=40.0, computed=1), 13)
    assert after == Live("ready", "m", prefill_rate=500, computed=1), (
        "one token tells nothing of the next thousand"
    )
    assert watch.see(Live("ready", "m", prefill_rate=800.0, computed=100), 14).prefill_rate == 800


def test_the_watch_tells_what_idle_work_has_done() -> None:
    live = Live("ready", "m", INFO, used=100, figures=FIGURES)
    assert Watch().see(live, 1).present == 100
    watch = Watch()
    looks = (
        (1, 40, 100),
        (1.5, 50, 100),
        (2, 60, 60),
        (3, 80, 80),
        (4, 300, 100),
        (5, None, 100),
        (6, 40, 100),
    )
    for now, warmed, present in looks:  # with a draft it warms more than the history
        seen = watch.see(replace(live, figures=replace(FIGURES, warmed=warmed)), now)
        assert seen.present == present, "what is soon done is not told, what takes long is"
        assert seen.is_warming == (present < 100)
        assert seen.left_s == (
            pytest.approx(1.0) if present == 80 else pytest.approx(2.0) if present == 60 else None
        )


def test_the_share_of_the_bandwidth_counts_weights_and_context() -> None:
    live = Live("answering", "m", INFO, speed=100.0, used=16, figures=FIGURES)
    assert live.bandwidth_share is None
    known = replace(live, figures=replace(FIGURES, bandwidth=1e12))
    per_block = FIGURES.kv_bytes / 6
    assert known.bandwidth_share == pytest.approx(100 * (FIGURES.weight_bytes + per_block) / 1e12)
    experts = replace(known, figures=replace(known.figures, read_bytes=10**8))
    assert experts.bandwidth_share == pytest.approx(100 * (10**8 + per_block) / 1e12)
    faster = replace(known, speed=1000.0)
    assert faster.bandwidth_share is None, "more than all of it: something else was read"
    assert not any("bandwidth" in line_text(line) for line in panel_lines(faster, 30))


def test_words() -> None:
    assert [count_text(n) for n in (7, 999, 4096, 131_072)] == ["7", "999", "4.1k", "131k"]
    assert [seconds_text(s) for s in (0.038, 0.42, 12.5, 185)] == ["38 ms", "0.42 s", "12.5 s", "3 min 5 s"]
    assert [seconds_text(s) for s in (0.0, 0.0004, 0.0006)] == ["0 ms", "<1 ms", "1 ms"]
    assert [rate_text(r) for r in (4.25, 99.96, 1234.5)] == ["4.2 tok/s", "100 tok/s", "1,234 tok/s"]
    assert [left_text(s) for s in (0.2, 8, 200, 9000)] == ["1 s left", "8 s left", "3 min left", "2.5 h left"]
    assert progress_text(Progress("load", "weights", 61_000_000, 98_000_000)) == "weights 61 of 98 MB"
    assert progress_text(Progress("load", "weights", 61_000, 98_000_000)) == "weights 61 kB of 98 MB"
    assert progress_text(Progress("download", "a.gguf", 5_000_000, None)) == "a.gguf 5.0 MB"


def test_drawings() -> None:
    assert sparkline((), 10) == ""
    assert sparkline((1, 2, 4), 10) == "▂▄▇"
    assert len(sparkline(tuple(range(1, 100)), 10)) == 10
    assert meter(0, 4) == [("", "primary"), ("────", "rule")]
    assert meter(0.001, 4) == [("━", "primary"), ("───", "rule")]
    assert meter(2, 4) == [("━━━━", "primary"), ("", "rule")]


@given(st.lists(st.floats(0, 0.4), max_size=4), st.integers(5, 60))
def test_a_bar_shows_everything_that_is_not_nothing(shares: list[float], width: int) -> None:
    shares = [share / max(sum(shares), 1) for share in shares]
    line = bar([(share, str(index)) for index, share in enumerate(shares)], width)
    assert line_cells(line) == width
    assert [style for _, style in line if style != "rule"] == [
        str(index) for index, share in enumerate(shares) if share > 0
    ]


INFO = ModelInfo("a-model-with-quite-a-long-name/and-more", "cpu", "bfloat16", 131_072, True)
FIGURES = Figures("m", "cpu", "bfloat16", "sdpa", 131_072, 10**9, 10**9, 16, 1, 2, 3, 1200, 3400)
MEASURED = replace(FIGURES, bandwidth=2e12)
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
        129_000,
        131_072,
        replace(MEASURED, bandwidth=2e15),
        812.0,
    ),
]


@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.phase)
@pytest.mark.parametrize("width", [20, 34, 60, 80, 109])
def test_the_line_fits(live: Live, width: int) -> None:
    assert line_cells(status_line(live, width)) <= width


def _words(line: Line) -> set[str]:
    words = {word.rstrip(":") for text, _ in line for word in text.split()}
    return {word for word in words if re.search(r"\w", word)}


@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.phase)
def test_the_line_cuts_no_word(live: Live) -> None:
    whole = _words(status_line(live, 300)) | {"and-more"}  # the model without its owner
    for width in range(8, 120):
        assert _words(status_line(live, width)) <= whole, width


@given(st.lists(st.sampled_from(["a", "bb", "漢字", "(ccc).", "·"]), max_size=20), st.integers(7, 70))
def test_a_hint_is_cut_after_a_word(words: list[str], width: int) -> None:
    cut = shortened(" ".join(words), width)
    assert line_cells([(cut, "")]) <= width
    assert [word.rstrip(".·…") for word in cut.split()] == [w.rstrip(".·") for w in words[: len(cut.split())]]


@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.phase)
def test_panel_and_welcome_fit(live: Live) -> None:
    assert all(line_cells(line) <= 30 for line in panel_lines(live, 30))
    assert all(line_cells(line) <= 40 for line in welcome_lines(live, 40))


def test_of_a_low_screen_the_panel_leaves_out_whole_sections() -> None:
    everything = panel_lines(LIVES[-1], 30)
    text = "\n".join(map(line_text, everything))
    for part in (
        "1,234.5 tok/s",
        "prefill",
        "812 tok/s",
        "of bandwidth",
        "cached",
        "KV cache",
        "1,072 tokens left",
    ):
        assert part in text
    low = panel_lines(LIVES[-1], 30, 20)
    assert len(low) <= 20
    assert "speed" in map(line_text, low)
    assert low == everything[: len(low)]


def test_the_meter_tells_cached_from_used_and_a_draft_from_free() -> None:
    live = Live("ready", "m", INFO, used=500, present=300, context=1000)
    assert [(len(text), style) for text, style in context_bar(live, 10, 200)] == [
        (3, "primary"),
        (2, "accent"),
        (2, "muted"),
        (3, "rule"),
    ]
    assert context_bar(Live("ready", "m"), 10) == []


def note(used: int, cost: DraftCost | None = None, width: int = 80, **more: float) -> str:
    live = replace(Live("ready", "m", INFO, used=used, context=1000), **more)
    lines = note_lines(live, cost, width)
    assert all(line_cells(line) <= width for line in lines)
    return " ".join(line_text(line) for line in lines)


def test_a_long_draft_says_what_it_costs() -> None:
    assert note(100) == note(100, DraftCost(20, 25, 880)) == ""
    text = note(100, DraftCost(400, 420, 500), prefill_rate=100.0)
    for part in ("400 tokens", "420 to compute (about 4.20 s)", "80 cached", "leaves 500 of 1.0k"):
        assert part in text
    assert "20 tokens" in note(100, DraftCost(20, 120, 880), prefill_rate=50.0), "few tokens, but slow ones"
    text = note(100, DraftCost(1400, 1420, -500))
    assert "does not fit: 500 tokens too many" in text
    assert "Nothing is dropped" in text


@pytest.mark.parametrize("width", [20, 40, 80, 160])
def test_a_full_context_offers_what_can_be_done(width: int) -> None:
    assert note(899, width=width) == ""
    text = note(930, width=width)
    for part in ("93% full", "70 tokens left", "/undo", "/reset", "Nothing is dropped silently."):
        assert part in text
    note(930, DraftCost(400, 400, -300), width)


FREE, CACHED, HELD, SHARED, MASKED = BlockState
MAP = BlockMap(
    16,
    bytes([SHARED] * 6 + [HELD] * 3 + [MASKED] + [CACHED] * 5 + [FREE] * 85),
    tuple(range(10)),
    160,
    150,
    96,
    9,
    2,
)


@pytest.mark.parametrize("size", [(20, 8), (40, 14), (74, 22), (154, 43)])
@pytest.mark.parametrize("plain", [False, True])
def test_the_map_of_the_blocks_fits(size: tuple[int, int], plain: bool) -> None:
    lines = cache_lines(MAP, *size, plain=plain)
    assert all(line_cells(line) <= size[0] for line in lines)
    if size[0] >= 74:
        assert len(lines) <= size[1]
    big = replace(MAP, states=bytes(100_000))
    assert len(cache_lines(big, *size)) <= max(size[1], len(lines))


def test_the_map_tells_the_states_apart_without_colours() -> None:
    text = "\n".join(map(line_text, cache_lines(MAP, 80, plain=True)))
    assert text.isascii()
    row = next(line for line in text.splitlines() if line.startswith("@ @"))
    assert row.split() == ["@"] * 6 + ["#"] * 3 + ["o"]
    assert len(set(PLAIN_MARKS)) == 5
    for part in (
        "160 tokens, 150 of them in the cache",
        "96 shared with 2 other branches",
        "9 tokens of thinking",
    ):
        assert part in text.replace("\n", " ")


def test_a_square_of_several_blocks_shows_the_most_telling_one() -> None:
    found = replace(MAP, states=bytes([FREE, CACHED, HELD, SHARED] + [FREE] * 96), path=())
    lines = [line_text(line) for line in cache_lines(found, 49, 0, plain=True)]
    assert "In the order of memory, 2 blocks per square" in lines
    assert "+ @" + 23 * " ." in lines


class NoWayOn(ScriptedBackend):
    def resume(self) -> Iterator[TokenEvent]:
        raise EngineError("It has cannot continue an answer an answer.")


async def test_going_on_that_is_refused_counts_nothing() -> None:
    async with driven(NoWayOn([Script("one two three", finish_reason=FinishReason.LENGTH)])) as driver:
        await driver.send("hello")
        (exchange,) = driver.app.chat.conversation.path
        before = dict(exchange.stats)
        assert before["generated_tokens"]
        for _ in range(2):
            await driver.send("/continue")
            assert "cannot continue an answer" in driver.errors[-1]
            assert (exchange.text, exchange.stats) == ("one two three", before)


def test_stats_compare_the_turn_the_session_and_the_process() -> None:
    turns = [
        TurnStats(1000, 0, 1000, 50, 0, 1.0, 1.0, 1.0),
        TurnStats(1000, 990, 10, 50, 0, 0.1, 0.01, 1.0, warmed_tokens=40),
    ]
    session, process = SessionStats(), SessionStats()
    process.add(turns[0])
    for stats in (session, process):
        stats.add(turns[0])
        stats.add(turns[1], retry=True)
    lines = stats_lines(100, turns[1], session, INFO, MEASURED, process, process_figures(0.0))
    text = "\n".join(map(line_text, lines))
    for part in (
        "this session   since start",
        "tokens reused",
        "990 of 3,000 prompt tokens came from the cache, 40 of them prewarmed while you read and typed",
        "Retries found 99% of their prompts in the cache",
        "2.0 TB/s",
    ):
        assert " ".join(part.split()) in " ".join(text.split())
    counts = next(line_text(line) for line in lines if line_text(line).startswith("answers"))
    assert counts.split() == ["answers", "–", "2", "3"]
    assert "990" in next(line_text(line) for line in lines if "tokens reused" in line_text(line))
    for width in (30, 60, 160):
        assert all(
            line_cells(line) <= width
            for line in stats_lines(width, turns[1], session, INFO, MEASURED, process)
        )


@pytest.mark.parametrize("width", range(40, 100, 6))
def test_a_narrow_screen_wraps_no_figure_of_the_table(width: int) -> None:
    """80 columns with the panel open leave 41."""
    turn = TurnStats(10_000, 9_000, 1_000, 50, 7, 1.0, 1.0, 1.0)
    session, process = SessionStats(), SessionStats()
    for _ in range(9):
        session.add(turn, retry=True)
        process.add(turn)
    lines = [line_text(line) for line in stats_lines(width, turn, session, INFO, MEASURED, process)]
    end = next(number for number, line in enumerate(lines) if line.startswith("81,000 of"))
    table = [line for line in lines[:end] if line]
    assert max(map(len, table)) <= width
    for line in table[1:]:  # a name, then figures: nothing stands on a line of its own
        assert re.fullmatch(r" *[a-z][a-z ()]*|─+|.*[a-z)] +[\d–].*", line), line
    assert sum(line.startswith("prompt tokens") for line in table) == (
        1 if width > 60 else 2 if width > 50 else 3
    )


DRAFTED = TurnStats(
    *(20, 15, 5, 60, 0, 0.1, 0.2, 0.3),
    guessed_tokens=50,
    accepted_tokens=30,
    drafted_tokens=40,
    accepted_drafts=25,
    saved_s=0.5,
)


def test_stats_and_the_panel_tell_drafts_from_other_guesses() -> None:
    session = SessionStats()
    session.add(DRAFTED)
    session.add(replace(DRAFTED, drafted_tokens=0, accepted_drafts=0))
    lines = [line_text(line).split() for line in stats_lines(100, DRAFTED, session, INFO, FIGURES)]
    assert ["guessed", "right", "30", "of", "50", "(60%)", "60", "of", "100", "(60%)"] in lines
    assert ["from", "the", "text", "5", "of", "10", "(50%)", "35", "of", "60", "(58%)"] in lines
    assert ["draft", "model", "25", "of", "40", "(62%)", "25", "of", "40", "(62%)"] in lines
    live = replace(LIVES[-1], generated=60, guessed=50, accepted=30)
    shown = {line_text(line) for line in panel_lines(live, 30)}
    drafted = [line_text(line) for line in panel_lines(replace(live, drafted=40, accepted_drafts=25), 30)]
    assert [line.split() for line in drafted if line not in shown] == [["of", "drafts", "62%"]]
    live = replace(live, figures=replace(MEASURED, draft_bytes=900_000_000))
    assert ["draft", "model", "900", "MB"] in [line_text(line).split() for line in panel_lines(live, 30)]


def test_stored_turns_add_up_to_the_same_session() -> None:
    session = SessionStats()
    turns = [TurnStats(10, 4, 6, 50, 5, 1.0, 0.5, 2.0), DRAFTED]
    for turn in turns:
        session.add(turn)
    assert SessionStats.of([turns[0].to_dict(), {}, turns[1].to_dict()]) == session


def test_nothing_was_computed_at_no_speed() -> None:
    turn = TurnStats(10, 10, 0, 50, 5, 0.001, 0.001, 2.0)
    prefill = next(
        line_text(line)
        for line in stats_lines(100, turn, SessionStats(), INFO, FIGURES)
        if line_text(line).strip().startswith("prefill")
    )
    assert "tok/s" not in prefill


def test_stats_name_the_kernels() -> None:
    figures = replace(FIGURES, attention="flash", decode="fused kernels, CUDA graph")
    lines = stats_lines(80, None, SessionStats(), INFO, figures)
    assert any("flash attention · fused kernels, CUDA graph" in line_text(line) for line in lines)
    assert all(line_cells(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        (OffloadFigures(0, 0, 0, None, None, True), "0 blocks in 0 B of host memory"),
        (OffloadFigures(12, 25_000_000, 900, None, None, True), "of host memory · 900 tokens restored"),
        (
            OffloadFigures(12, 25_000_000, 0, None, None, True, 3),
            "12 blocks and 3 states in 25 MB of host memory",
        ),
        (
            OffloadFigures(12, 25_000_000, 900, 3.21e-6, 40e-6, True),
            "900 tokens restored, 3.2 µs per token, recomputing 40.0",
        ),
        (
            OffloadFigures(0, 0, 9, 3.2e-6, 3e-6, False),
            "recomputed, not restored: restoring takes 3.2 µs per token, recomputing 3.0",
        ),
    ],
)
def test_stats_say_what_became_of_evicted_blocks(offload: OffloadFigures, said: str) -> None:
    lines = stats_lines(120, None, SessionStats(), INFO, replace(FIGURES, offload=offload))
    assert any(said in line_text(line) for line in lines)


@pytest.mark.parametrize(
    ("brought", "cold", "said"),
    [
        (None, None, "5 blocks · 80 tokens written, 60 tokens restored"),
        (4e-6, None, "60 tokens restored, 4.0 µs per token, recomputing 40.0"),
        (4e-6, 9e-5, "recomputing 40.0; from the disk itself 90.0 µs per token, recomputing 40.0"),
        (None, 9e-5, "60 tokens restored; from the disk itself 90.0 µs per token, recomputing 40.0"),
    ],
)
def test_stats_say_what_the_disk_gave(brought: float | None, cold: float | None, said: str) -> None:
    disk = DiskFigures(5, 80, 60, brought, 40e-6, True, cold_s=cold)
    lines = stats_lines(160, None, SessionStats(), INFO, replace(FIGURES, disk=disk))
    assert any(said in line_text(line) for line in lines)


def test_a_note_is_new_once() -> None:
    said: set[str] = set()
    assert new_notes((), said) == []
    assert new_notes(("a", "b"), said) == ["a", "b"]
    assert new_notes(("a", "b", "c"), said) == ["c"]


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
    text = line_text(status_line(LIVES[-1], 80))
    for part in ("1,234 tok/s", "first 12.5 s", "131k cached, 72 computed", "130k/131k"):
        assert part in text
