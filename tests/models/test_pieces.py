"""Typed text is text: no spelling, no merge and no gap in a vocabulary makes a control token of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from models.text.folder_tokenizer import parts_from_folder
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.pieces import PromptPiece
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_parts import TokenizerParts
from tests.models.tokenizer_data import qwen3_folder, qwen3_metadata, tiny_tokenizer

ADDED = {
    "<|im_end|>": True, "<think>": False, "</think>": False, "<｜tool▁call｜>": False, "[TOOL]": False, "User:": False,
    "\n\n": False, "▁▁": False, "zz": False, "<table>": False, "|||": False, "assistant": False,
}  # fmt: skip
"""Added tokens, and whether they are special. The last six are ordinary words."""
CONTROL = list(ADDED)[:6]
TEMPLATE = "{% for m in messages %}{{ 'User: assistant\n\n' + m['content'] }}{% endfor %}"


def backend_with(added: dict[str, bool], vocabulary: dict[str, int] | None = None) -> Backend:
    """Return a byte-level tokenizer without merges; `vocabulary` has tokens besides the bytes."""
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [(word[:1], word[1:]) for word in vocabulary or {} if len(word) == 2]
    backend = Backend(models.BPE({**alphabet, **(vocabulary or {})}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for text, special in added.items():
        token = AddedToken(text, special=special, normalized=False)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
    return backend


def made(added: dict[str, bool], vocabulary: dict[str, int] | None = None) -> Tokenizer:
    return Tokenizer(TokenizerParts(backend_with(added, vocabulary), {}, frozenset(), TEMPLATE))


def test_markers_are_text_when_typed_and_words_are_tokens() -> None:
    tokenizer = made(ADDED)
    for text in ADDED:
        token_id = tokenizer.token_id(text)
        assert token_id is not None
        assert (
            tokenizer.encode(text) == [token_id] == tokenizer.encode_pieces([PromptPiece(text, typed=False)])
        )
        assert (tokenizer.encode_plain(text) == [token_id]) == (text not in CONTROL), text
        assert tokenizer.is_text(token_id) == (text not in CONTROL)
        assert tokenizer.decode(tokenizer.encode_plain(text), skip_special=False) == text


@given(
    parts=st.lists(st.tuples(st.sampled_from([*ADDED, "<", "think>", "|im_end|>", "a", " "]), st.booleans()))
)
def test_control_tokens_are_exactly_those_that_the_template_wrote(parts: list[tuple[str, bool]]) -> None:
    tokenizer = TOKENIZER
    pieces = [PromptPiece(text, typed) for text, typed in parts]
    ids = tokenizer.encode_pieces(pieces)
    written = [tokenizer.token_id(text) for text, typed in parts if text in CONTROL and not typed]
    assert [id for id in ids if not tokenizer.is_text(id)] == written
    assert tokenizer.decode(ids, skip_special=False) == "".join(text for text, _ in parts)


TOKENIZER = made(ADDED)


def test_a_merge_makes_no_control_token_of_typed_text() -> None:
    given = {"<s": True}, {"<s": 256}
    assert backend_with(*given).model.tokenize("<s")[0].id == 256
    tokenizer = made(*given)
    assert tokenizer.encode("<s") == tokenizer.encode_pieces([PromptPiece("<s", typed=False)]) == [256]
    typed = tokenizer.encode_plain("a<s>")
    assert 256 not in typed
    assert tokenizer.decode(typed) == "a<s>"


def test_holes_in_a_vocabulary_are_no_trap() -> None:
    tokenizer = made({"<s": True, "<x>": False}, {"ab": 256, "<s": 257, "cd": 260})
    written = tokenizer.encode_pieces([PromptPiece("ab<scd<x>", typed=False)])
    assert written == [256, 257, 260, 259]
    assert tokenizer.encode_plain("abcd") == [256, 260]


@pytest.mark.parametrize("vocabulary", ["tiny_bpe", "tiny_spm"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_ordinary_text_has_the_ids_that_it_always_has(vocabulary: str, text: str) -> None:
    tokenizer = tiny_tokenizer(vocabulary)
    ids = tokenizer.encode(text)
    if all(map(tokenizer.is_text, ids)):
        assert tokenizer.encode_plain(text) == ids


@pytest.mark.parametrize("way", ["folder", "gguf"])
def test_no_token_of_qwen3_can_be_typed(way: str) -> None:
    parts = parts_from_folder(qwen3_folder()) if way == "folder" else parts_from_gguf(qwen3_metadata())
    tokenizer = Tokenizer(parts)
    names = [token.content for token in parts.backend.get_added_tokens_decoder().values()]
    assert {"<think>", "</think>", "<tool_call>", "<|im_end|>", "<|vision_start|>"} <= set(names)
    for text in [*names, "".join(names), " ".join(names)]:
        typed = tokenizer.encode_plain(text)
        assert all(map(tokenizer.is_text, typed))
        assert tokenizer.decode(typed) == text
    assert tokenizer.encode_pieces([PromptPiece("".join(names), typed=False)]) == tokenizer.encode(
        "".join(names)
    )
