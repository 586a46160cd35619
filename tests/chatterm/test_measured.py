"""No figure on the screen says more than was measured: answers come in packets at random times."""

import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatterm.backends.backend import FinishReason, Outcome, TurnStats
from chatterm.backends.remote import answer
from chatterm.backends.remote.dialects.chat import ChatCompletions
from chatterm.backends.remote.dialects.ollama import Ollama
from chatterm.cli.oneshot import stats_line
from chatterm.conversation.figures import Live, SessionStats, Speedometer
from chatterm.conversation.stats import stats_lines
from chatterm.conversation.turn import footer_line
from chatterm.markdown.lines import line_text
from chatterm.widgets.side_panel import panel_lines
from chatterm.widgets.status_line import status_line

Packets = list[tuple[float, int]]
"""A gap in seconds, and the tokens that came after it."""

packets = st.lists(
    st.tuples(st.sampled_from((0.0, 1e-6, 0.001, 0.02, 0.1, 1.0, 20.0)), st.integers(1, 40)),
    min_size=1,
    max_size=40,
)


def arrived(given: Packets) -> tuple[list[tuple[float, int]], int]:
    """When tokens came, and how many of them not together with the first."""
    time, times, later = 100.0, [], 0
    for gap, count in given:
        time += gap
        times.append((time, count))
        later += count if time - times[0][0] > 0.05 else 0
    return times, later


@given(packets)
@example([(0.0, 400), (0.001, 96)])
@example([(1.4, 1)] * 5)
def test_no_speed_is_told_that_the_arrivals_do_not_show(given: Packets) -> None:
    times, later = arrived(given)
    speed = Speedometer()
    for number, (time, count) in enumerate(times, 1):
        speed.add(time, count)
        come = sum(count for at, count in times[:number] if at - times[0][0] > 0.05)
        for look in (time, time + 0.15, time + 3.0):
            assert 0 <= speed.now(look) <= come / 0.1
        assert 0 <= speed.average <= come / 0.1
    took = times[-1][0] - times[0][0]
    assert speed.average == 0 or speed.average >= later / took * 0.999
    assert bool(speed.average) >= (later > 0 and took > 0.2)


def remote(given: Packets, usage: int | None, monkeypatch: pytest.MonkeyPatch) -> TurnStats:
    """The figures of an answer whose packets came like that."""
    clock = [99.0]
    monkeypatch.setattr(answer.time, "monotonic", lambda: clock[0])
    running = answer.RunningAnswer(ChatCompletions(), "m")
    for time, count in arrived(given)[0]:
        clock[0] = time
        said = "data: " + json.dumps({"choices": [{"delta": {"content": "a "}}]}) + "\n\n"
        for event in running.feed(said.encode() * count):
            running.take(event)
    told = {"choices": [], "usage": {"completion_tokens": usage}} if usage is not None else {"choices": []}
    running.feed(f"data: {json.dumps(told)}\n\n".encode())
    return running.stats


@given(packets, st.integers(1, 5) | st.none())
@example([(0.0, 40)], None)
@example([(0.0, 30), (0.0001, 9)], 3)
def test_a_server_that_sends_it_all_at_once_is_not_fast(given: Packets, a_piece: int | None) -> None:
    times, later = arrived(given)
    pieces = sum(count for _, count in times)
    with pytest.MonkeyPatch.context() as patch:
        stats = remote(given, None if a_piece is None else pieces * a_piece, patch)
    assert stats.generated_tokens == pieces * (a_piece or 1)
    assert stats.ttft_s == pytest.approx(times[0][0] - 99.0)
    assert stats.decoded_tokens <= later * (a_piece or 1)
    assert stats.decode_tokens_per_s <= later * (a_piece or 1) / 0.1
    assert TurnStats.of(stats.to_dict()) == stats
    fast = replace(stats, decode_s=min(stats.decode_s, 0.09), first_tokens=1)
    assert "tok/s" not in line_text(footer_line(fast)), "so short a time tells nothing here, either"
    line, footer = stats_line(Outcome("a", "", FinishReason.EOS, stats)), line_text(footer_line(stats))
    assert ("tok/s" in line) == ("tok/s" in footer) == (stats.decode_tokens_per_s > 0)


def test_reasoning_that_nobody_saw_come_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(answer.time, "monotonic", lambda: clock[0])
    running = answer.RunningAnswer(ChatCompletions(), "m")
    for clock[0] in (10.0, 10.5, 11.0):
        for event in running.feed(b'data: {"choices": [{"delta": {"content": "a "}}]}\n\n'):
            running.take(event)
    usage = {"completion_tokens": 2003, "completion_tokens_details": {"reasoning_tokens": 2000}}
    running.feed(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
    assert running.stats.generated_tokens == 2003
    assert running.stats.decode_tokens_per_s == pytest.approx(2.0)


def test_what_a_server_does_not_tell_of_the_cache_is_not_told() -> None:
    silent = TurnStats(prompt_tokens=300, generated_tokens=20, decode_s=1.0)
    known = TurnStats(100, 60, 40, 20, decode_s=1.0)
    assert "300 tokens |" in stats_line(Outcome("a", "", FinishReason.EOS, silent))
    session = SessionStats.of([known.to_dict(), silent.to_dict()])
    rows = [line_text(line).split() for line in stats_lines(100, silent, session, None, None)]
    for name, value in (("from cache", "60"), ("computed", "40"), ("cache hit rate", "60%")):
        assert [*name.split(), "–", value] in rows
    assert ["prompt", "tokens", "300", "400"] in rows
    message = {"done": True, "prompt_eval_count": 247, "prompt_eval_duration": 6_809_551, "eval_count": 3}
    running = answer.RunningAnswer(Ollama(), "m")
    running.feed(f"{json.dumps(message)}\n".encode())
    assert (running.stats.prompt_tokens, running.stats.split_tokens) == (247, 0)
    assert running.stats.prefill_tokens_per_s == 0.0, "cached or not, nobody knows"


turns = st.builds(
    TurnStats,
    generated_tokens=st.integers(0, 500),
    prefilled_tokens=st.integers(0, 5000),
    prompt_tokens=st.just(5000),
    decode_s=st.sampled_from((0.0, 0.2, 3.0)),
    prefill_s=st.sampled_from((0.0, 0.1, 2.0)),
    ttft_s=st.sampled_from((0.0, 0.5)),
    first_tokens=st.sampled_from((1, 400)),
)


@given(st.lists(turns, min_size=1, max_size=8))
@example([TurnStats(generated_tokens=500), TurnStats(generated_tokens=11, decode_s=1.0)])
@example([TurnStats(), TurnStats(generated_tokens=11, decode_s=1.0)])
def test_the_rates_of_a_session_lie_between_those_of_its_answers(given: list[TurnStats]) -> None:
    session = SessionStats()
    for turn in given:
        session.add(turn)
    for part, tokens, seconds in (
        ("decode_tokens_per_s", session.decoded_tokens, session.decode_s),
        ("prefill_tokens_per_s", session.timed_tokens, session.prefill_s),
    ):
        rates = [rate for turn in given if (rate := getattr(turn, part))]
        assert bool(rates) == (seconds > 0)
        if rates:
            assert min(rates) * 0.999 <= tokens / seconds <= max(rates) * 1.001


def test_an_answer_that_was_continued_is_one_answer() -> None:
    live, stored = SessionStats(), SessionStats()
    first = TurnStats(90, 80, 10, 50, ttft_s=0.5, decode_s=5.0)
    live.add(first)
    live.add(TurnStats(140, 139, 1, 20, ttft_s=0.01, decode_s=2.0), resumed=True)
    stored.add(replace(first, generated_tokens=70, decode_s=7.0, first_tokens=2))
    assert live == stored


def test_what_is_not_known_yet_is_not_zero() -> None:
    live = Live("answering", "m", generated=1, ttft_s=0.0004)
    panel = [line_text(line).split() for line in panel_lines(live, 30)]
    assert ["–", "tok/s"] in panel
    assert ["average", "–", "tok/s"] in panel
    assert ["first", "token", "<1", "ms"] in panel
    assert "tok/s" not in line_text(status_line(live, 120))
    turn = TurnStats(generated_tokens=40)
    session = SessionStats.of([turn.to_dict()])
    rows = [line_text(line).split() for line in stats_lines(100, turn, session, None, None)]
    for name in ("prompt tokens", "prefill", "decode", "decode time", "first token (mean)"):
        assert [*name.split(), "–", "–"] in rows


def test_guesses_that_gained_nothing_are_not_told() -> None:
    lost = TurnStats(generated_tokens=20, decode_s=1.0, guessed_tokens=1, saved_s=-0.001)
    gained = replace(lost, guessed_tokens=8, accepted_tokens=5, saved_s=0.2)
    for stats, is_told in ((lost, False), (replace(lost, accepted_tokens=1), False), (gained, True)):
        session = SessionStats.of([stats.to_dict()])
        table = [line_text(line) for line in stats_lines(100, stats, session, None, None)]
        assert ("guessed" in stats_line(Outcome("a", "", FinishReason.EOS, stats))) == is_told
        assert any("guessed" in line for line in table) == is_told
