"""Read a `tokenizer.model`: a SentencePiece model in the protobuf format."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.errors import ModelError
from models.text.sentencepiece import NORMAL, SentencePiece

_UNIGRAM, _BPE = 1, 2
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3


def read_sentencepiece(path: Path) -> tuple[SentencePiece, dict[str, str]]:
    """Return the vocabulary, and the text of its bos_token, eos_token, unk_token and pad_token if it has them.

    Raises ModelError if the file is not a SentencePiece model or is of an unsupported kind.
    """
    try:
        return _read(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again.") from error
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        reason = str(error) if type(error) is ValueError else "it is damaged"
        raise ModelError(
            f"{path} cannot be used as a SentencePiece model ({reason}); use a model with a tokenizer.json."
        ) from error


def _read(data: bytes) -> tuple[SentencePiece, dict[str, str]]:
    pieces: list[dict[int, Any]] = []
    parts: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
    for number, value in _fields(data):
        if number == _PIECES:
            pieces.append(dict(_fields(value)))
        elif number in parts:
            parts[number] |= dict(_fields(value))
    trainer, normalizer = parts[_TRAINER], parts[_NORMALIZER]
    if not pieces:
        raise ValueError("it has no tokens")
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE) or trainer.get(24, 0) or not normalizer.get(5, 1):
        raise ValueError("it is neither unigram nor BPE with spaces before words")
    tokens = [piece.get(1, b"").decode("utf-8") for piece in pieces]
    if len(set(tokens)) != len(tokens):
        raise ValueError("it lists a token twice")
    # Protobuf numbers are unsigned here: 2 ** 64 - 1 is -1, which means none.
    ids = {"unk_token": trainer.get(40, 0), "bos_token": trainer.get(41, 1), "eos_token": trainer.get(42, 2)}
    ids["pad_token"] = trainer.get(43, len(tokens))
    vocabulary = SentencePiece(
        tokens,
        scores=[float(piece.get(2, 0.0)) for piece in pieces],
        types=[int(piece.get(3, NORMAL)) for piece in pieces],
        unigram=kind == _UNIGRAM,
        unknown=min(int(ids["unk_token"]), len(tokens) - 1),
        prefixed=bool(normalizer.get(3, 1)),
        squeezed=bool(normalizer.get(4, 1)),
        charsmap=normalizer.get(2, b""),
    )
    return vocabulary, {name: tokens[int(i)] for name, i in ids.items() if int(i) < len(tokens)}


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message. Raises ValueError for other data."""
    if not isinstance(data, bytes):
        raise ValueError("it is damaged")
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 5:
            yield number, struct.unpack_from("<f", data, at)[0]
            at += 4
        elif wire == 1:
            yield number, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif wire == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("it is cut off")
            yield number, data[at : at + size]
            at += size
        else:
            raise ValueError("it is damaged")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("it is damaged")
