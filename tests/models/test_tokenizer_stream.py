"""Decoding token by token: never part of a character, and joined the same text as decoding at once."""

import sys
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from models.text.text_stream import TextStream, TokenBytes, byte_alphabet, decode, find_token_bytes
from models.text.tokenizer import Tokenizer
from tests.counting import calls_in
from tests.models.tokenizer_data import tiny_backend, tiny_tokenizer

VOCABULARIES = ["tiny_bpe", "tiny_spm"]
IDS = st.lists(st.integers(0, 1200), max_size=40)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(
    "aé漢😀👩🏽\u200d\u0301 \n", max_size=60
)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@given(ids=IDS)
def test_any_ids(vocabulary: str, ids: list[int]) -> None:
    tokenizer = tiny_tokenizer(vocabulary)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@given(text=TEXT)
def test_any_text(vocabulary: str, text: str) -> None:
    tokenizer = tiny_tokenizer(vocabulary)
    ids = tokenizer.encode_plain(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces).replace("\ufffd", "", text.count("\ufffd"))
    if vocabulary == "tiny_bpe":
        assert "".join(pieces) == text


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@given(text=TEXT, cut=st.integers(0, 60))
def test_what_was_shown_is_never_taken_back(vocabulary: str, text: str, cut: int) -> None:
    tokenizer = tiny_tokenizer(vocabulary)
    ids = tokenizer.encode_plain(text)
    shown = "".join(pieces_of(tokenizer, ids)[:cut])
    assert tokenizer.decode(ids).startswith(shown)


def byte_ids(vocabulary: str, data: bytes) -> list[int]:
    """Return one token for each byte."""
    spelling = {byte: letter for letter, byte in byte_alphabet().items()}
    backend = tiny_backend(vocabulary)
    names = [(spelling[byte], f"<0x{byte:02X}>") for byte in data]
    is_byte_level = backend.token_to_id("<0x00>") is None
    found = [backend.token_to_id(letter if is_byte_level else token) for letter, token in names]
    return [token_id for token_id in found if token_id is not None]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_character_appears_with_its_last_byte(vocabulary: str) -> None:
    tokenizer = tiny_tokenizer(vocabulary)
    stream = tokenizer.stream()
    ids = byte_ids(vocabulary, "é😀".encode())
    assert [stream.push(token_id) for token_id in ids] == ["", "é", "", "", "", "😀"]
    assert stream.flush() == ""


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    ("data", "pieces", "rest"),
    [
        (b"\xf0\x9f\x98", ["", "", ""], "\ufffd"),
        (b"\xff!", ["\ufffd", "!"], ""),
        (b"\xe6\xbca", ["", "", "\ufffda"], ""),
        (b"\x80", ["\ufffd"], ""),
        (b"\xed\xa0\x80", ["", "", "\ufffd" * 3], ""),
    ],
)
def test_bytes_that_are_no_utf8(vocabulary: str, data: bytes, pieces: list[str], rest: str) -> None:
    tokenizer = tiny_tokenizer(vocabulary)
    ids = byte_ids(vocabulary, data)
    stream = tokenizer.stream()
    assert [stream.push(token_id) for token_id in ids] == pieces
    assert stream.flush() == rest
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@given(
    data=st.binary(max_size=20) | st.lists(st.sampled_from([0xED, 0xA0, 0xF0, 0x9F, 0xE6, 0xBC, 0x61, 0xFF]))
)
def test_any_bytes(vocabulary: str, data: bytes | list[int]) -> None:
    tokenizer = tiny_tokenizer(vocabulary)
    ids = byte_ids(vocabulary, bytes(data))
    expected = bytes(data).decode("utf-8", "replace")
    if vocabulary == "tiny_spm" and expected.startswith(" "):
        expected = expected[1:]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == expected


def test_special_tokens_are_silent_and_do_not_break_a_character() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    first, second = byte_ids("tiny_bpe", "é".encode())
    ids = [first, end, second, end]
    assert pieces_of(tokenizer, ids) == ["", "", "é", "", ""]
    assert tokenizer.decode(ids) == "é"


def test_added_tokens_that_are_not_special_are_text() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    assert pieces_of(tokenizer, tokenizer.encode("<think>x<tool  call>")) == [
        "<think>",
        "x",
        "<tool  call>",
        "",
    ]


def test_only_the_first_space_is_dropped() -> None:
    tokenizer = tiny_tokenizer("tiny_spm")
    ids = tokenizer.encode_plain("  two  spaces ")
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "  two  spaces "
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert "".join(pieces_of(tokenizer, [end, *tokenizer.encode_plain("word")])) == "word"


def test_a_flushed_stream_starts_anew() -> None:
    tokenizer = tiny_tokenizer("tiny_spm")
    stream = tokenizer.stream()
    for _ in range(2):
        shown = "".join(stream.push(token_id) for token_id in tokenizer.encode_plain("hi there"))
        assert shown + stream.flush() == "hi there"


def test_two_streams_do_not_share_their_state() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    first, second = tokenizer.stream(), tokenizer.stream()
    start, end = byte_ids("tiny_bpe", "é".encode())
    assert (first.push(start), second.push(start), first.push(end), second.push(end)) == ("", "", "é", "é")


def test_several_spaces_may_be_stripped() -> None:
    token_bytes = TokenBytes({0: " ", 1: "   ", 2: "a"}.get, str.encode, strip_left=2)
    for ids, text in (([0, 0, 0, 2], " a"), ([1, 2], " a"), ([0, 2, 0], "a "), ([0], ""), ([2, 1], "a   ")):
        stream = TextStream(token_bytes, frozenset())
        assert "".join([*(stream.push(token_id) for token_id in ids), stream.flush()]) == text
        assert decode(token_bytes, ids, frozenset()) == text


@pytest.mark.parametrize(
    ("decoder", "token", "text"),
    [
        (decoders.ByteLevel(), "Ġa", b" a"),
        (decoders.ByteLevel(), "a b", b"a b"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "Ċ", b"\n"),
        (decoders.Metaspace(), "▁a", b" a"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]), "<0xe6>", b"\xe6"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]), "<0xE6>", b"<0xE6>"),
    ],
)
def test_spelling_by_decoder(decoder: decoders.Decoder, token: str, text: bytes) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = decoder
    assert find_token_bytes(backend).spell(token) == text


def test_work_per_token_does_not_grow() -> None:
    tokenizer = tiny_tokenizer("tiny_bpe")
    ids = tokenizer.encode_plain("Some words, é and 漢. ")
    stream = tokenizer.stream()
    calls = [calls_in(lambda: [stream.push(token_id) for token_id in ids]) for _ in range(1000)]
    assert set(calls[1:]) == {calls[1]}
    assert calls[1] < 8 * len(ids)
    kept = [getattr(stream, name) for name in stream.__slots__]
    assert all(value is tokenizer._token_bytes or sys.getsizeof(value) < 1000 for value in kept), "no history"
