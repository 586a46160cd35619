"""Mistral's `tekken.json`: the ids of a byte pair encoding by rank, as in tiktoken."""

import base64
import functools
import inspect
import json
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from models.errors import ModelError
from models.text.folder_tokenizer import parts_from_folder
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.text_stream import byte_alphabet
from models.text.tokenizer import Tokenizer as OurTokenizer
from tests.models import nasty
from tests.models.nasty import nasty_texts
from tests.models.test_splits import TEKKEN, split
from tests.models.tokenizer_data import golden

SPECIAL = 30
SPLIT = pre_tokenizers.Split(Regex(TEKKEN), behavior="isolated")


@functools.cache
def ranked() -> tuple[bytes, ...]:
    """Return words of bytes, best first: the 256 bytes, then a trainer's merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(split(TEKKEN))
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [*golden()["texts"], inspect.getsource(textwrap), inspect.getsource(nasty)]
    backend.train_from_iterator(texts, trainer)
    letters = byte_alphabet()
    vocab = backend.get_vocab()
    words = [bytes(map(letters.__getitem__, token)) for token in sorted(vocab, key=vocab.__getitem__)]
    return (*(bytes([byte]) for byte in range(256)), *(word for word in words if len(word) > 1))


def by_rank(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Split a word: a known word is whole; otherwise neighbours are joined, always the pair of the best rank."""
    parts = [word] if word in ranks else [bytes([byte]) for byte in word]
    while True:
        joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        best = min(joined, default=len(ranks))
        if best == len(ranks):
            return [ranks[part] for part in parts]
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def tekken_file(folder: Path, words: tuple[bytes, ...], **changes: Any) -> Path:
    """Write a tekken.json that lists twenty more words than it uses; return its folder."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate([*words, *(b"more%d" % i for i in range(20))])
    ]
    size = {"default_num_special_tokens": SPECIAL, "default_vocab_size": SPECIAL + len(words)}
    content = {"config": {"pattern": TEKKEN, **size, "version": "v3"}, "vocab": vocab, **changes}
    (folder / "tekken.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_ids_are_those_of_the_ranks(tmp_path: Path) -> None:
    parts = parts_from_folder(tekken_file(tmp_path, ranked()))
    ours, backend = OurTokenizer(parts), parts.backend
    ranks = {word: rank for rank, word in enumerate(ranked())}
    # The same vocabulary as a GGUF file.
    tokens = [backend.id_to_token(token_id) for token_id in range(ours.vocab_size)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * SPECIAL + [1] * len(ranks),
        "tokenizer.ggml.merges": [
            " ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]
        ],
        "tokenizer.ggml.eos_token_id": 2,
    }
    gguf = OurTokenizer(parts_from_gguf(metadata))
    for text in nasty_texts():
        words = [word.encode() for word, _ in SPLIT.pre_tokenize_str(text)]
        expected = [SPECIAL + rank for word in words for rank in by_rank(word, ranks)]
        assert ours.encode_plain(text) == expected, text
        assert gguf.encode_plain(text) == expected, text
        stream = ours.stream()
        assert "".join([*map(stream.push, expected), stream.flush()]) == ours.decode(expected) == text
    assert ours.vocab_size == SPECIAL + len(ranks)
    assert ours.stop_ids == gguf.stop_ids == {2}


def test_special_tokens_come_first_and_cannot_be_typed(tmp_path: Path) -> None:
    parts = parts_from_folder(tekken_file(tmp_path, ranked()))
    ours = OurTokenizer(parts)
    assert ours.encode("<s>[INST]Hi[/INST]")[:2] == [1, 3]
    assert ours.encode("<SPECIAL_29>") == [29]
    assert dict(parts.special_tokens) == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
    }  # fmt: skip
    text = "<s>[INST]Hi[/INST]</s><SPECIAL_29>"
    assert min(ours.encode_plain(text)) >= SPECIAL
    assert ours.decode(ours.encode_plain(text)) == text


def test_a_file_may_list_its_special_tokens(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "[THINK]", "[/THINK]", "<word>"]
    listed = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    words = (*ranked(), b"<word>")  # a word with the text of a special token
    ours = OurTokenizer(parts_from_folder(tekken_file(tmp_path, words, special_tokens=listed)))
    assert ours.encode("".join(names)) == [0, 1, 2, 3, 4, 5]
    assert ours.encode("[INST]") == ours.encode_plain("[INST]")
    assert min(ours.encode_plain("".join(names))) >= SPECIAL
    assert ours.encode("the") == ours.encode_plain("the")


@pytest.mark.parametrize(
    "changes",
    [
        {"config": None},
        {"config": {}},
        {"config": {"default_num_special_tokens": 3, "default_vocab_size": 300, "pattern": "("}},
        {"config": {"default_num_special_tokens": 10**12, "default_vocab_size": 10**12}},
        {"config": {"default_num_special_tokens": 3, "default_vocab_size": 10**6}},
        {"vocab": None},
        {"vocab": [{"rank": 0}]},
        {"vocab": [{"rank": 0, "token_bytes": "?"}]},
        {"vocab": [{"rank": "x", "token_bytes": "AA=="}]},
        {"special_tokens": [{"rank": None}]},
        {"special_tokens": 7},
    ],
)
def test_damaged_files_get_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"tekken\.json") as caught:
        OurTokenizer(parts_from_folder(tekken_file(tmp_path, ranked(), **changes)))
    assert "\n" not in str(caught.value)
