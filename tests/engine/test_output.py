"""Text, kinds and stop strings of a stream."""

import pytest

from engine.events import TokenEvent
from engine.schedule.output import Output
from engine.schedule.reasoning import ThinkTracker
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_parts import THINK_MARKERS
from tests.engine.tiny import tiny_tokenizer


@pytest.fixture(scope="module", params=THINK_MARKERS, ids=lambda markers: markers.open)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tiny_tokenizer(markers=request.param)


def push_all(
    tokenizer: Tokenizer, text: str, *, inside: bool = False, stop: tuple[str, ...] = ()
) -> list[TokenEvent]:
    markers = tokenizer.think_markers
    assert markers is not None
    start, end = tokenizer.think_start, tokenizer.think_end
    output = Output(tokenizer.stream(), ThinkTracker(start, end, inside=inside, label=markers.label), stop)
    text = text.replace("<think>", markers.open).replace("</think>", markers.close)
    events = []
    for id in tokenizer.encode(text):
        events.append(output.push(id))
        if output.stopped:
            break
    events.append(TokenEvent(output.flush(), -1, "answer"))
    return events


def text_of(events: list[TokenEvent], kind: str) -> str:
    return "".join(event.text for event in events if event.kind == kind)


def test_the_markers_and_the_line_breaks_around_them_are_no_text(tokenizer: Tokenizer) -> None:
    events = push_all(tokenizer, "<think>\nfirst\nsecond\n</think>\n\nthe\n\nanswer")
    assert text_of(events, "reasoning") == "first\nsecond\n"
    assert text_of(events, "answer") == "the\n\nanswer"


def test_a_prompt_that_opened_the_span_leaves_the_stream_inside(tokenizer: Tokenizer) -> None:
    events = push_all(tokenizer, "\nhm</think>yes", inside=True)
    assert (text_of(events, "reasoning"), text_of(events, "answer")) == ("hm", "yes")


@pytest.mark.parametrize(
    ("said", "thought"),
    [("thought\nhm", "hm"), ("thought\n\nhm", "hm"), ("thoughts", "thoughts"), ("th", ""), ("hm", "hm")],
)
def test_the_label_of_the_thinking_is_no_text(said: str, thought: str) -> None:
    events = push_all(tiny_tokenizer(markers=THINK_MARKERS[3]), f"<think>{said}</think>thought\nyes")
    assert (text_of(events, "reasoning"), text_of(events, "answer")) == (thought, "thought\nyes")


def test_only_the_first_span_is_thinking(tokenizer: Tokenizer) -> None:
    events = push_all(tokenizer, "<think>a</think>b<think>c</think>")
    special = tokenizer.think_start in tokenizer._special
    markers = tokenizer.think_markers
    assert markers is not None
    opening, closing = markers.open, markers.close
    assert text_of(events, "answer") == ("bc" if special else f"b{opening}c{closing}")


def test_without_markers_in_the_vocabulary_everything_is_answer(tokenizer: Tokenizer) -> None:
    tracker = ThinkTracker(None, None)
    assert tokenizer.think_start is not None
    assert [tracker.push(id) for id in (tokenizer.think_start, 0)] == [("answer", False)] * 2


@pytest.mark.parametrize("stop", [("END",), ("END", "zzz"), ("ND", "END")])
def test_a_stop_string_that_spans_tokens_ends_the_answer(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    events = push_all(tokenizer, "one END two", stop=stop)
    assert text_of(events, "answer") == "one "


def test_what_only_looks_like_a_stop_string_comes_out(tokenizer: Tokenizer) -> None:
    events = push_all(tokenizer, "EEN ENEND", stop=("ENX", "ENDE"))
    assert text_of(events, "answer") == "EEN ENEND"


def test_stop_strings_are_not_looked_for_in_the_reasoning(tokenizer: Tokenizer) -> None:
    events = push_all(tokenizer, "<think>END</think>go END", stop=("END",))
    assert (text_of(events, "reasoning"), text_of(events, "answer")) == ("END", "go ")


def test_half_a_character_waits_for_its_other_half(tokenizer: Tokenizer) -> None:
    texts = [event.text for event in push_all(tokenizer, "né")]
    assert texts == ["n", "", "é", ""]
