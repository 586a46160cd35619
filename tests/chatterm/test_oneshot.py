"""One-shot answers: what goes to which stream, joined prompts, JSON, cancelling, terminal safety."""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from threading import Condition

import pytest

from chatterm.backends.backend import (
    EngineError,
    Exchange,
    Figures,
    FinishReason,
    OnProgress,
    Outcome,
    Progress,
    TokenEvent,
    TurnStats,
)
from chatterm.cli.oneshot import (
    INPUT_LIMIT,
    InputError,
    answer,
    join_prompts,
    read_input,
    stats_line,
    to_json,
)
from chatterm.cli.progress import PlainLines, progress_on
from chatterm.terminal.spinner import Spinner

Script = Iterable[TokenEvent | BaseException]


def said(*texts: str) -> list[TokenEvent]:
    return [TokenEvent(text, number, "answer") for number, text in enumerate(texts)]


def thought(*texts: str) -> list[TokenEvent]:
    return [TokenEvent(text, number, "reasoning") for number, text in enumerate(texts)]


class ScriptedBackend:
    """The part of Backend that `answer` uses; plays one script per turn, an exception in it is raised."""

    model = "scripted"
    info = None

    def __init__(self, *scripts: Script, reason: FinishReason = FinishReason.EOS) -> None:
        self.scripts = iter(scripts)
        self.reason = reason
        self.last: Outcome | None = None
        self.asked: list[str] = []
        self.calls: list[str] = []

    def open(self, on_progress: OnProgress | None = None) -> None:
        self.calls.append("open")
        if on_progress is not None:
            on_progress(Progress("download", "scripted", 5_000_000, 10_000_000))

    def send(self, text: str) -> Iterator[TokenEvent]:
        self.asked.append(text)
        outcome = Outcome("", "", FinishReason.CANCELLED, TurnStats(prompt_tokens=7, prefilled_tokens=7))
        try:
            for item in next(self.scripts):
                if isinstance(item, BaseException):
                    raise item
                if item.kind == "answer":
                    outcome = replace(outcome, text=outcome.text + item.text)
                else:
                    outcome = replace(outcome, reasoning=outcome.reasoning + item.text)
                self.last = outcome
                yield item
            self.last = replace(outcome, finish_reason=self.reason)
        finally:
            self.calls.append("sent")

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
        self.calls.append("load_path")

    def figures(self) -> Figures:
        numbers = (4096, 269_000_000, 378_000_000, 32, 512, 0, 0, 0, 0)
        notes = ("The GPU sleeps.\x1b[2J", *(["A graph failed."] if self.asked else []))
        return Figures("scripted", "cpu", "bfloat16", "sdpa", *numbers, "plain modules", notes)

    def notes(self) -> Sequence[str]:
        return self.figures().notes

    def close(self) -> None:
        self.calls.append("close")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Recorder(io.StringIO):
    """Notes how much had been written at every flush."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


def test_answer_streams_to_out_and_all_else_to_err() -> None:
    out, err = Recorder(), io.StringIO()
    backend = ScriptedBackend([*thought("hm"), *said("One", " two", "")])
    answer(backend, ["count"], stats=True, out=out, err=err)
    assert out.getvalue() == "One two\n"
    assert out.flushed == ["One", "One two", "One two\n"]
    assert "hm" not in err.getvalue()
    assert "Downloading scripted: 5.0 MB of 10 MB" in err.getvalue()
    assert (
        "sdpa attention | decode: plain modules | weights 269 MB | context 4,096 tokens, KV cache 378 MB"
        in err.getvalue()
    )
    assert "prompt 7 tokens" in err.getvalue()
    assert "eos" in err.getvalue()
    assert backend.calls == ["open", "sent", "close"]


def test_turns_are_one_conversation_with_a_blank_line_between_answers() -> None:
    out = io.StringIO()
    backend = ScriptedBackend(said("first\n"), said("second"))
    answer(backend, ["a", "b"], out=out, err=io.StringIO())
    assert backend.asked == ["a", "b"]
    assert out.getvalue() == "first\n\nsecond\n"


def test_notes_are_said_once_as_they_come() -> None:
    err = io.StringIO()
    answer(ScriptedBackend(said("a"), said("b")), ["1", "2"], out=io.StringIO(), err=err)
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("Downloading")]
    assert lines == ["chatterm: The GPU sleeps.", "chatterm: A graph failed."]
    terminal = Terminal()
    answer(ScriptedBackend(said("a")), ["1"], out=io.StringIO(), err=terminal)
    assert "\x1b[2mchatterm: A graph failed.\x1b[22m\n" in terminal.getvalue()


class Waiting(Terminal):
    """A terminal whose content can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = Condition()

    def write(self, text: str) -> int:
        with self._changed:
            self._changed.notify_all()
            return super().write(text)

    def shows(self, text: str) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: text in self.getvalue(), 60)


class Slow(ScriptedBackend):
    """It is loaded, and its first token comes, once the terminal shows that something happens."""

    terminal: Waiting

    def open(self, on_progress: OnProgress | None = None) -> None:
        assert self.terminal.shows("Starting")

    def send(self, text: str) -> Iterator[TokenEvent]:
        assert self.terminal.shows("Reading the prompt")
        return super().send(text)


def left_on_screen(written: str) -> str:
    """What a line of a terminal shows in the end."""
    return written.rsplit("\x1b[K", 1)[-1]


@pytest.fixture
def terminal_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("terminal_codes")
def test_a_terminal_sees_that_something_happens_and_nothing_of_it_is_left() -> None:
    both = Waiting()
    backend = Slow(said("One", " two"))
    backend.terminal = both
    answer(backend, ["count"], out=both, err=both)
    assert "Starting" in both.getvalue()
    assert "Reading the prompt" in both.getvalue()
    assert left_on_screen(both.getvalue().split("One")[0]) in (
        "",
        "\x1b[2mchatterm: The GPU sleeps.\x1b[22m\n",
    )
    assert both.getvalue().split("One")[1] == " two\n" + both.getvalue().split(" two\n")[1]
    assert "Reading" not in both.getvalue().split("One")[1]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), EngineError("No room.")])
@pytest.mark.usefixtures("terminal_codes")
def test_a_spinner_goes_away_with_an_error(failure: BaseException) -> None:
    both = Waiting()
    backend = Slow([failure])
    backend.terminal = both
    with pytest.raises(type(failure)):
        answer(backend, ["count"], out=both, err=both)
    assert left_on_screen(both.getvalue()) == ""


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_nothing_turns_where_codes_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch, terminal_codes: None, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    err = Terminal()
    with Spinner(err, "Waiting", delay=0.0) as spinner:
        assert not spinner.turns
    assert err.getvalue() == ""


@pytest.mark.usefixtures("terminal_codes")
def test_a_spinner_that_was_stopped_at_once_writes_nothing() -> None:
    err = Terminal()
    with Spinner(err, "Waiting", delay=60.0):
        pass
    assert err.getvalue() == ""


def test_an_answer_that_was_cut_off_says_why_and_names_no_command() -> None:
    err = io.StringIO()
    answer(ScriptedBackend(said("cut"), reason=FinishReason.LENGTH), ["a"], out=io.StringIO(), err=err)
    assert "token limit (--max-tokens)" in err.getvalue()
    assert "/continue" not in err.getvalue()


@pytest.mark.usefixtures("terminal_codes")
def test_reasoning_is_dim_on_a_terminal_and_ends_before_the_answer() -> None:
    out, err = io.StringIO(), Terminal()
    backend = ScriptedBackend([*thought("let me", " see"), *said("42")])
    answer(backend, ["?"], out=out, err=err)
    assert out.getvalue() == "42\n"
    assert "\x1b[2mlet me\x1b[22m\x1b[2m see\x1b[22m\n" in err.getvalue()


@pytest.mark.parametrize("evil", [["\x1b[2J"], ["\x1b", "]0;title\x07"], ["\x9b31m"], ["a\rb"], ["\x00\x08"]])
def test_generated_control_characters_never_leave_as_commands(evil: list[str]) -> None:
    out, err = io.StringIO(), Terminal()
    ours = 0

    def script() -> Iterator[TokenEvent]:
        nonlocal ours
        ours = len(err.getvalue())  # until here it is the progress bar, which writes sequences of its own
        yield from [*thought(*evil), *said("x", *evil, "y\tz\n")]

    answer(ScriptedBackend(script()), ["?"], out=out, err=err)
    shown = out.getvalue() + err.getvalue()[ours:].replace("\x1b[2m", "").replace("\x1b[22m", "")
    controls = {char for char in shown if ord(char) < 32 or 0x7F <= ord(char) < 0xA0}
    assert controls <= {"\n", "\t"}
    assert out.getvalue().startswith("x")
    assert out.getvalue().endswith("y\tz\n")
    assert len(err.getvalue()) > ours


def test_json_prints_one_object_per_turn_and_escapes_every_control_character() -> None:
    out, err = io.StringIO(), io.StringIO()
    evil = "\x1b[31m\x9b\x7fé"
    backend = ScriptedBackend([*thought("why"), *said(evil)], said("b"), reason=FinishReason.LENGTH)
    answer(backend, ["1", "2"], as_json=True, out=out, err=err)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert all(32 <= ord(char) < 127 for line in lines for char in line)
    first = json.loads(lines[0])
    assert first["text"] == evil
    assert first["reasoning"] == "why"
    assert first["finish_reason"] == "length"
    assert first["stats"] == TurnStats(prompt_tokens=7, prefilled_tokens=7).to_dict()
    assert set(first) == {"text", "reasoning", "finish_reason", "stats"}
    assert json.loads(lines[1])["text"] == "b"


def test_interrupt_keeps_the_partial_answer_and_closes() -> None:
    out = io.StringIO()
    backend = ScriptedBackend([*said("part"), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        answer(backend, ["?", "never"], out=out, err=io.StringIO())
    assert out.getvalue() == "part\n"
    assert backend.asked == ["?"]
    assert backend.calls[-1] == "close"


def test_interrupt_with_json_prints_the_partial_object() -> None:
    out = io.StringIO()
    backend = ScriptedBackend([*said("part"), KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        answer(backend, ["?"], as_json=True, out=out, err=io.StringIO())
    partial = json.loads(out.getvalue())
    assert (partial["text"], partial["finish_reason"]) == ("part", "cancelled")


def test_interrupt_before_the_first_token_prints_no_object_of_an_earlier_turn() -> None:
    out = io.StringIO()
    backend = ScriptedBackend(said("one"), [KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        answer(backend, ["1", "2"], as_json=True, out=out, err=io.StringIO())
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == ["one"]


def test_an_error_in_a_turn_ends_the_line_closes_and_goes_on() -> None:
    out = io.StringIO()
    backend = ScriptedBackend([*said("one"), EngineError("The engine stopped.")])
    with pytest.raises(EngineError, match="The engine stopped"):
        answer(backend, ["1"], out=out, err=io.StringIO())
    assert out.getvalue() == "one\n"
    assert backend.calls[-1] == "close"


def test_a_full_context_is_said_on_err_and_the_answer_kept() -> None:
    out, err = io.StringIO(), io.StringIO()
    backend = ScriptedBackend(said("so far"), reason=FinishReason.CONTEXT_FULL)
    answer(backend, ["?"], out=out, err=err)
    assert out.getvalue() == "so far\n"
    assert "context is full" in err.getvalue()


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_closed_pipe_stops_the_answer() -> None:
    backend = ScriptedBackend(said("a", "b"))
    with pytest.raises(BrokenPipeError):
        answer(backend, ["?"], out=ClosedPipe(), err=io.StringIO())
    assert backend.calls == ["open", "sent", "close"]


def test_piped_text_stands_before_the_first_prompt() -> None:
    assert join_prompts("file", ["summarise", "shorter"]) == ["file\n\nsummarise", "shorter"]
    assert join_prompts("file", []) == ["file"]
    assert join_prompts(" \n", ["hello"]) == ["hello"]
    assert join_prompts("", []) == []


def test_input_is_read_as_utf8_without_its_mark_and_last_line_end() -> None:
    assert read_input(io.BytesIO(b"\xef\xbb\xbfgr\xc3\xbc\xc3\x9fe\nb\r\n")) == "grüße\nb"
    with pytest.raises(InputError, match=r"not UTF-8 text \(byte 0xff at offset 3\)"):
        read_input(io.BytesIO(b"abc\xff"))


def test_endless_input_is_refused_instead_of_filling_the_memory() -> None:
    class Endless(io.RawIOBase):
        def read(self, count: int = -1) -> bytes:
            assert 0 < count <= INPUT_LIMIT + 1
            return bytes(count)

    with pytest.raises(InputError, match="64 MiB"):
        read_input(Endless())


def test_stats_line_names_the_figures() -> None:
    stats = TurnStats(
        prompt_tokens=30,
        cached_tokens=20,
        prefilled_tokens=10,
        generated_tokens=11,
        reasoning_tokens=4,
        ttft_s=0.25,
        decode_s=0.5,
    )
    line = stats_line(Outcome("x", "y", FinishReason.STOP, stats))
    for part in (
        "30 tokens (20 cached)",
        "0.25 s",
        "11 tokens, 4 of them reasoning",
        "20.0 tok/s",
        "stop",
    ):
        assert part in line
    assert json.loads(to_json(Outcome("x", "y", None, stats)))["finish_reason"] == "cancelled"


def test_stats_line_tells_what_was_drafted() -> None:
    stats = TurnStats(generated_tokens=60, guessed_tokens=50, accepted_tokens=30, saved_s=0.5)
    said = "guessed right 30 of 50 (60%), tokens per step 2.00, saved 0.50 s"
    assert said in stats_line(Outcome("x", "", FinishReason.STOP, stats))
    stats = replace(stats, drafted_tokens=40, accepted_drafts=25)
    said = "guessed right 30 of 50 (60%), 25 of 40 (62%) of them by the draft model, tokens per step 2.00"
    assert said in stats_line(Outcome("x", "", FinishReason.STOP, stats))
    stats = replace(stats, drafted_tokens=50, accepted_drafts=30)
    said = "guessed right 30 of 50 (60%) by the draft model, tokens per step 2.00"
    assert said in stats_line(Outcome("x", "", FinishReason.STOP, stats))


def test_plain_progress_writes_a_line_per_tenth() -> None:
    err = io.StringIO()
    ticks = iter(range(1000))
    report = PlainLines(err, clock=lambda: float(next(ticks)))
    for done in range(101):
        report(Progress("download", "m\x1b[31m", done * 1_000_000, 100_000_000))
    report(Progress("load", "weights", 5, 10))
    lines = err.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[5] == "Downloading m: 50 MB of 100 MB, 1.0 MB/s, 50 s left"
    assert "\x1b" not in err.getvalue()


def test_plain_progress_without_a_known_size_writes_every_ten_seconds() -> None:
    err = io.StringIO()
    ticks = iter(range(1000))
    report = PlainLines(err, clock=lambda: float(next(ticks)))
    for done in range(31):
        report(Progress("download", "m", done * 1000, None))
    assert [line.split(",")[0] for line in err.getvalue().splitlines()] == [
        "Downloading m: 0 B",
        "Downloading m: 10 kB",
        "Downloading m: 20 kB",
        "Downloading m: 30 kB",
    ]


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    err = Terminal()
    with progress_on(err) as report:
        report(Progress("download", "[red]m", 10, 100))
        report(Progress("download", "[red]m", 100, 100))
        report(Progress("load", "weights", 1, None))
    assert "Downloading [red]m" in err.getvalue()
    assert "Loading weights" in err.getvalue()
    assert "\x1b[?25l" not in err.getvalue(), "the cursor stays: a signal would leave it hidden"
