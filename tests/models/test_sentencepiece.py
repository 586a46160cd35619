"""SentencePiece vocabularies from `tokenizer.model` and GGUF: the same ids and text as the sentencepiece library."""

import functools
import inspect
import io
import json
import struct
import textwrap
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import ModelError
from models.files import ModelFiles
from models.text.folder_tokenizer import parts_from_folder
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.sentencepiece_file import read_sentencepiece
from models.text.tokenizer import Tokenizer, load_tokenizer
from tests.fresh import examples
from tests.models import nasty
from tests.models.nasty import nasty_texts
from tests.models.tokenizer_data import golden, tiny

EXACT = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SPACES = ["\u2581" * count for count in range(2, 17)]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "split_digits": True, "allow_whitespace_only_pieces": True, **EXACT},
    "gemma": {"model_type": "bpe", "add_dummy_prefix": False, "split_digits": True, **EXACT,
              "user_defined_symbols": [*SPACES, "\n\n", "\n\n\n", "\t\t", "<table>"]},
    "phrases": {"model_type": "bpe", "split_by_whitespace": False, "split_by_unicode_script": False, **EXACT},
    "no bytes": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "no bytes nfkc": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram", "split_digits": True, **EXACT},
    "unigram phrases": {"model_type": "unigram", "split_by_whitespace": False, **EXACT},
    "unigram no bytes": {"model_type": "unigram", "normalization_rule_name": "identity"},
}  # fmt: skip


@functools.cache
def trained(kind: str) -> bytes:
    """Train a small model; skip the test if the sentencepiece library is not installed."""
    library = pytest.importorskip("sentencepiece")
    lines = [
        *golden()["texts"],
        *inspect.getsource(textwrap).split("\n"),
        *inspect.getsource(nasty).split("\n"),
    ]
    lines = [line for text in lines for line in text.replace("\x00", "").split("\n") if line]
    written = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *["".join(map(chr, range(33, 127)))] * 3]),
        model_writer=written, vocab_size=1000, character_coverage=0.99, minloglevel=2, hard_vocab_limit=False,
        num_threads=1, **KINDS[kind],
    )  # fmt: skip
    return written.getvalue()


def folder_of(path: Path, model: bytes, **config: Any) -> Path:
    (path / "tokenizer.model").write_bytes(model)
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def as_gguf(model: Path) -> dict[str, Any]:
    """Return GGUF metadata as llama.cpp's converter writes it."""
    vocabulary, _ = read_sentencepiece(model)
    return {
        "tokenizer.ggml.model": "t5" if vocabulary.unigram else "llama",
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.scores": vocabulary.scores,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.add_space_prefix": vocabulary.prefixed,
        "tokenizer.ggml.remove_extra_whitespaces": vocabulary.squeezed,
        "tokenizer.ggml.precompiled_charsmap": list(vocabulary.charsmap),
        "tokenizer.ggml.unknown_token_id": vocabulary.unknown,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_ids_and_text_are_those_of_sentencepiece(tmp_path: Path, kind: str, source: str) -> None:
    model = trained(kind)
    theirs = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=model)
    folder = folder_of(tmp_path, model)
    ours = Tokenizer(
        parts_from_folder(folder)
        if source == "folder"
        else parts_from_gguf(as_gguf(folder / "tokenizer.model"))
    )
    texts = nasty_texts()
    if "nfkc" in kind:  # the tokenizers library normalises letters with marks and joiners in its own way
        texts = [
            text
            for text in texts
            if not any(unicodedata.category(letter) in ("Mn", "Mc", "Me", "Cf") for letter in text)
        ]
    for text in texts:
        expected, ids = theirs.encode(text), ours.encode_plain(text)
        if ids != expected and "unigram" in kind:
            # Two segmentations with the same sum of scores, which the library adds up in float32.
            sums = [sum(map(theirs.get_score, found)) for found in (ids, expected)]
            assert sums[0] == pytest.approx(sums[1], rel=1e-6), text
            assert theirs.decode(ids) == theirs.decode(expected), text
        else:
            assert ids == expected, text
        squeezed = "no bytes" in kind and "\u2581" in text  # a literal one means a space to the vocabulary
        if theirs.unk_id() not in ids and not squeezed:  # the library shows unknown tokens as U+2047
            assert ours.decode(ids) == theirs.decode(ids), text
            stream = ours.stream()
            assert "".join([*map(stream.push, ids), stream.flush()]) == theirs.decode(ids), text


@pytest.mark.parametrize("kind", ["llama", "gemma", "unigram"])
def test_no_special_token_can_be_typed(tmp_path: Path, kind: str) -> None:
    ours = Tokenizer(parts_from_folder(folder_of(tmp_path, trained(kind))))
    text = "<s> x</s><unk> <0x0A> <0xE2><0x96><0x81>"
    assert ours.decode(ours.encode_plain(text)) == text
    assert all(map(ours.is_text, ours.encode_plain(text)))
    assert [ours.token_id("<s>"), ours.token_id("</s>")] == [1, 2]
    assert [ours.encode(text).count(token_id) for token_id in range(3)] == [1, 1, 1]


def varint(value: int) -> bytes:
    more = value >> 7
    return bytes([value & 0x7F | 0x80]) + varint(more) if more else bytes([value])


def field(number: int, value: int | float | bytes | str) -> bytes:
    """Encode one field of a protobuf message."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value % 2**64)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def model_file(metadata: dict[str, Any], trainer: bytes = b"", normalizer: bytes = b"") -> bytes:
    """Return a `tokenizer.model` with the vocabulary of GGUF metadata, laid out like Llama 2's."""
    rows = zip(
        *(metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")), strict=True
    )
    pieces = [
        field(1, field(1, token) + field(2, float(score)) + field(3, kind)) for token, score, kind in rows
    ]
    trainer = field(1, "corpus") + field(3, 2) + field(10, 0.5) + field(35, 1) + field(43, -1) + trainer
    normalizer = field(1, "identity") + field(3, 1) + field(4, 0) + normalizer
    return b"".join(pieces) + field(2, trainer) + field(3, normalizer) + field(4, b"") + field(5, b"")


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_model_file_gives_the_ids_of_llama_cpp(tmp_path: Path, prefixed: bool) -> None:
    model = model_file(tiny("tiny_spm"), normalizer=field(3, int(prefixed)))
    ours = load_tokenizer(ModelFiles("spm", folder=folder_of(tmp_path, model)))
    metadata = tiny("tiny_spm") | {"tokenizer.ggml.add_space_prefix": prefixed}
    reference = Tokenizer(parts_from_gguf(metadata))
    for text in nasty_texts():
        assert ours.encode(text) == reference.encode(text), text
        assert ours.encode_plain(text) == reference.encode_plain(text), text
    assert ours.stop_ids == reference.stop_ids
    assert ours.special_strings == reference.special_strings


def test_the_files_beside_a_model_file_are_heeded(tmp_path: Path) -> None:
    metadata = tiny("tiny_spm")
    size = len(metadata["tokenizer.ggml.tokens"])
    config = {"add_prefix_space": False, "tokenizer_class": "LlamaTokenizer", "eos_token": "<|end|>"}
    folder = folder_of(tmp_path, model_file(metadata), **config)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    (folder / "added_tokens.json").write_text(
        json.dumps({"<|end|>": size + 1, "<b>": size}), encoding="utf-8"
    )
    ours = Tokenizer(parts_from_folder(folder))
    assert ours.encode("<b>Hi<|end|>") == [size, *ours.encode("Hi"), size + 1]
    assert ours.decode(ours.encode("Hi")) == "Hi"
    assert ours.encode("Hi") == Tokenizer(
        parts_from_gguf(metadata | {"tokenizer.ggml.add_space_prefix": False})
    ).encode("Hi")
    assert size + 1 in ours.stop_ids
    assert 2 in ours.stop_ids  # </s>


GOOD = model_file(tiny("tiny_spm"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no model at all",
        GOOD[: len(GOOD) // 2],
        GOOD[:-1] + b"\xff",
        field(1, 5),
        field(1, field(1, 5)),
        field(1, field(1, b"\xff")),
        field(1, field(1, "a")) * 2,
        model_file(tiny("tiny_spm"), trainer=field(3, 4)),
        model_file(tiny("tiny_spm"), trainer=field(24, 1)),
        model_file(tiny("tiny_spm"), normalizer=field(2, b"\xff\xff\xff")),
        b"\xff" * 40,
    ],
)
def test_damaged_model_files_get_one_line(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.model") as caught:
        Tokenizer(parts_from_folder(folder_of(tmp_path, data)))
    assert "\n" not in str(caught.value)


@examples(30)
@given(changes=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 255)), min_size=1), cut=st.booleans())
def test_any_damage_gets_one_line(changes: list[tuple[int, int]], cut: bool) -> None:
    data = bytearray(GOOD)
    for back, byte in changes:
        data[-back] = byte
    with TemporaryDirectory() as folder:
        path = folder_of(Path(folder), bytes(data[: -changes[0][0]] if cut else data))
        try:
            said = str(Tokenizer(parts_from_folder(path)).encode_plain("Hi"))
        except ModelError as error:
            said = str(error)
    assert said != "[]"
    assert "\n" not in said


def test_ids_that_a_gguf_file_does_not_name() -> None:
    metadata = {key: value for key, value in tiny("tiny_spm").items() if not key.endswith("_token_id")}
    assert parts_from_gguf(metadata).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert 2 in parts_from_gguf(metadata).stop_ids
