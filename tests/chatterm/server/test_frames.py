"""Frames: whatever arrives, it is whole frames or an error, and never more memory than a frame may have."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatterm.ipc.frames import MOST, FrameError, FrameReader, encode_frame
from chatterm.ipc.messages import (
    Call,
    Cancel,
    Done,
    Failed,
    Feed,
    Item,
    from_client,
    from_server,
    pack,
    to_frame,
    unpack,
)

_BODIES = st.lists(st.binary(min_size=1, max_size=200), max_size=8)


@given(_BODIES, st.lists(st.integers(1, 50), min_size=1))
def test_frames_arrive_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    data, reader, came = b"".join(map(encode_frame, bodies)), FrameReader(), []
    at, turn = 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        came += reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert came == bodies


@given(_BODIES, st.integers(0, 2000))
def test_what_is_cut_off_is_no_frame(bodies: list[bytes], cut: int) -> None:
    data = b"".join(map(encode_frame, bodies))[:cut]
    came = FrameReader().feed(data)
    assert came == bodies[: len(came)]
    assert sum(len(body) + 4 for body in came) <= len(data)


@pytest.mark.parametrize("size", [0, MOST + 1, 2**32 - 1])
def test_a_length_that_is_none_of_ours_is_refused_before_anything_of_it_is_there(size: int) -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(size.to_bytes(4, "big"))


def test_nothing_is_sent_that_the_other_side_would_refuse() -> None:
    assert len(encode_frame(b"x" * 10)) == 14
    with pytest.raises(FrameError):
        encode_frame(bytes(MOST + 1))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, {"a": [2**70]}, "\ud800"])
def test_what_cannot_be_written_is_said_in_a_line(value: object) -> None:
    with pytest.raises(FrameError):
        pack(value)


_MESSAGES = [
    Call(3, "send", pack("hi")),
    Feed(3, pack(None)),
    Cancel(9),
    Item(1, pack([1, 2])),
    Done(1, pack({"a": 1})),
    Failed(2, "engine", "why", {"needed": 3}),
]


@pytest.mark.parametrize("message", _MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_what_they_were(message: Call) -> None:
    (body,) = FrameReader().feed(to_frame(message))
    read = from_client if isinstance(message, Call | Feed | Cancel) else from_server
    assert to_frame(read(body)) == to_frame(message)


@given(st.binary(min_size=1, max_size=300))
@example(b"\x93\xa4call\x01")
@example(b"\x91" * 300)
def test_garbage_is_a_message_or_an_error(body: bytes) -> None:
    reads: list[Callable[[], object]] = [lambda: from_client(body), lambda: from_server(body)]
    reads += [partial(unpack, body, kind) for kind in (list[int], str, dict[str, int])]
    for read in reads:
        with suppress(FrameError):  # nothing else is raised
            read()
