"""Bytes to messages, and texts to thinking and answer: however they are cut."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import Outcome, TokenEvent, TurnStats
from chatterm.backends.exchange import NO_TOKEN
from chatterm.backends.remote import stream_parser
from chatterm.backends.remote.answer import RunningAnswer
from chatterm.backends.remote.dialects.chat import ChatCompletions
from chatterm.backends.remote.dialects.responses import Responses
from chatterm.backends.remote.sse import DocumentReader, EventReader, LineReader, TooLongError
from chatterm.backends.remote.thinking import AnswerPiece, Splitter

STREAMS = st.lists(
    st.sampled_from(
        [
            b"\r",
            b"\n",
            b"\r\n",
            b"data",
            b":",
            b" ",
            b"data: {}",
            b": note",
            b"event: x",
            b"\xef\xbb\xbf",
            b"\xe2\x82",
            b"a",
        ]
    ),
    max_size=30,
).map(b"".join)


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def read(reader: EventReader | DocumentReader, parts: Iterable[bytes]) -> list[str]:
    return [text for part in parts for text in reader.feed(part)] + reader.end()


@given(STREAMS, st.lists(st.integers(0, 200), max_size=12))
def test_any_cut_gives_the_same_messages(data: bytes, places: list[int]) -> None:
    parts = cut(data, places)
    for make in (EventReader, DocumentReader):
        assert read(make(), parts) == read(make(), [data])
        assert read(make(), [data[n : n + 1] for n in range(len(data))]) == read(make(), [data])


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), min_size=1), max_size=5
    )
)
def test_what_is_sent_is_read(texts: list[str]) -> None:
    stream = "".join(f": note\ndata: {text}\nid: 3\n\n" for text in texts).encode()
    assert read(EventReader(), [stream]) == texts
    documents = "".join(f"{text}\r\n" for text in texts).encode()
    assert read(DocumentReader(), [documents]) == [text for text in texts if text.encode().strip()]


def test_the_format_of_events() -> None:
    stream = b"\xef\xbb\xbfdata:a\rdata: b\r\n\rretry: 5\ndata\n\nevent: x\n\ndata: \xff\n\ndata: last"
    assert read(EventReader(), [stream]) == ["a\nb", "", "\ufffd", "last"]


def test_what_does_not_end_is_given_up() -> None:
    reader, events = LineReader(longest=64), EventReader(longest=64)
    assert [reader.feed(b"x" * 32) for _ in range(2)] == [[], []]
    with pytest.raises(TooLongError):
        reader.feed(b"x")
    with pytest.raises(TooLongError):
        LineReader(longest=64).feed(b"x" * 65 + b"\n")
    assert [events.feed(b"data: 1234567\n") for _ in range(8)] == [[]] * 8
    with pytest.raises(TooLongError):
        events.feed(b"data: 1\n")


# --- thinking ---

TEXTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<", "<th", "ink>", "\n", " ", "a", "b>", "\ud83d", "\ude00", "</thin", "é"]
    ),
    max_size=12,
).map("".join)


def joined(pieces: Iterable[AnswerPiece]) -> tuple[str, str]:
    found = list(pieces)
    return (
        "".join(piece.text for piece in found if piece.kind == "reasoning"),
        "".join(piece.text for piece in found if piece.kind == "answer"),
    )


def split(parts: Iterable[str], **options: bool) -> tuple[str, str]:
    splitter = Splitter(**options)
    return joined([*(p for part in parts for p in splitter.feed(AnswerPiece(part))), *splitter.end()])


@given(TEXTS, st.booleans())
def test_any_cut_gives_the_same_texts(text: str, is_middle: bool) -> None:
    whole = split([text], is_middle=is_middle)
    assert split(text, is_middle=is_middle) == whole
    for part in whole:
        part.encode()  # no half of a character
    if is_middle or not text.lstrip().startswith("<think>"):
        assert whole == ("", text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "hm\n", "Yes."),
        (" \n<think>a</think>b", "a", "b"),
        ("<think></think>b", "", "b"),
        ("<think>never ends", "never ends", ""),
        ("no <think>tag</think>", "", "no <think>tag</think>"),
        ("<thin", "", "<thin"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ],
)
def test_thinking_in_tags(text: str, thought: str, answer: str) -> None:
    assert split([text]) == (thought, answer)


def test_endless_white_space_is_passed_on_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    splitter = Splitter()
    assert joined(piece for _ in range(1_001) for piece in splitter.feed(AnswerPiece(" "))) == (
        "",
        " " * 1_001,
    )
    late = " " * 1_001 + "<think>a</think>b"
    assert split([late]) == split(late) == ("", late)
    monkeypatch.setattr(stream_parser, "MOST_TEXT", 100)
    for begins in ("", "<think>", "<think>a</think>"):  # what follows a tag is not shown, either
        reader = stream_parser.AnswerReader(ChatCompletions())
        for text in [begins, *[" "] * 101]:
            reader.feed(b'data: {"choices": [{"delta": {"content": "%b"}}]}\n\n' % text.encode())
        assert "an answer that does not end" in reader.problem


def test_a_refusal_is_shown_as_the_answer() -> None:
    """In every form that the two APIs of OpenAI have for it: in parts, whole, streamed or not."""
    no = "I cannot help with that."
    item = {"content": [{"type": "refusal", "refusal": no}]}
    for dialect, message in (
        (ChatCompletions(), {"choices": [{"delta": {"content": None, "refusal": no}}]}),
        (ChatCompletions(), {"choices": [{"message": {"content": None, "refusal": no}}]}),
        (ChatCompletions(), {"choices": [{"message": item}]}),
        (Responses(), {"type": "response.refusal.delta", "delta": no}),
        (Responses(), {"object": "response", "status": "completed", "output": [item]}),
    ):
        assert [(piece.text, piece.kind) for piece in dialect.heard(message).pieces] == [(no, "answer")]


def test_a_piece_of_an_answer_does_not_copy_those_before_it() -> None:
    copied = 0

    class Word(str):
        def __radd__(self, before: str) -> "Word":
            nonlocal copied
            copied += len(before)
            return Word(str(before) + str(self))

    running = RunningAnswer(ChatCompletions(), "m", Outcome("It is ", "Hm. ", None, TurnStats()))
    for number in range(1000):
        for kind in ("answer", "reasoning"):
            running.take(TokenEvent(Word("word "), NO_TOKEN, kind))
        if number == 500:
            assert running.text == "It is " + "word " * 501
    assert running.outcome().text == "It is " + "word " * 1000
    assert running.outcome().reasoning == "Hm. " + "word " * 1000
    assert copied == 0


def test_what_the_server_tells_apart_is_not_looked_at_again() -> None:
    splitter = Splitter()
    pieces = [
        *splitter.feed(AnswerPiece("hm", "reasoning")),
        *splitter.feed(AnswerPiece("<think>x")),
        *splitter.end(),
    ]
    assert joined(pieces) == ("hm", "<think>x")
