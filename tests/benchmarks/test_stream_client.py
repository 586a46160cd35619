"""The client that reads streams: correct however they are cut in transit, and only for complete ones."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stream_client import Received

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {
    "completion_tokens": 3,
    "prompt_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 1},
}


def chunk(*events: Any) -> bytes:
    """Return events in one chunk of HTTP."""
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    return b"%x\r\n%b\r\n" % (len(body), body)


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


STREAM = (
    HEAD
    + chunk({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    + chunk({"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}]})
    + chunk(said("one"), said(" two\nthree"))
    + chunk({"choices": [], "usage": USAGE})
    + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=20, unique=True))
def test_a_stream_is_read_however_it_is_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(places)]
    answer = Received(0.0, pieces, [float(number) for number in range(1, len(pieces) + 1)]).answer()
    assert answer.text == "one two\nthree"
    assert (answer.tokens, answer.prompt_tokens) == (3, 7)
    assert (answer.cached_tokens, answer.thinking_tokens) == (5, 1)
    assert len(answer.gaps_s) <= 2
    assert 0 < answer.first_s <= answer.first_s + sum(answer.gaps_s) <= len(pieces)


def test_events_count_from_when_their_last_byte_came() -> None:
    first, second = STREAM.index(b"Hm."), STREAM.index(b" two")
    pieces = [STREAM[:first], STREAM[first:second], STREAM[second:]]
    answer = Received(0.0, pieces, [1.0, 2.0, 5.0]).answer()
    assert (answer.first_s, answer.gaps_s) == (2.0, [3.0])


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (STREAM[: STREAM.index(b"[DONE]")], "broke off"),
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", "429"),
        (HEAD + chunk({"error": {"message": "no"}}), "no"),
        (b"", "^ *$"),
    ],
)
def test_what_is_no_whole_stream_is_no_answer(data: bytes, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Received(0.0, [data], [1.0]).answer()
