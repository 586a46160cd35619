"""Turn token ids into text: all at once, or token by token without ever showing part of a character."""

import codecs
import json
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from models.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the characters with which byte-level vocabularies spell bytes, and the byte of each.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


@dataclass(slots=True)
class TokenBytes:
    """The bytes that each token stands for, looked up once per token.

    `strip_left` is the number of spaces to drop from the very start of a text: SentencePiece puts a space before the
    first word.
    """

    lookup: Callable[[int], str | None]
    spell: Callable[[str], bytes]
    strip_left: int = 0
    _known: dict[int, bytes] = field(default_factory=dict)

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of `token_id`; empty for an id that the vocabulary does not have."""
        found = self._known.get(token_id)
        if found is None:
            token = self.lookup(token_id) if token_id >= 0 else None
            found = self._known[token_id] = b"" if token is None else self.spell(token)
        return found


class TextStream:
    """Decodes tokens as they come. The results of `push` and `flush`, joined, equal `decode` of all ids."""

    __slots__ = ("_decoder", "_hidden", "_strip", "_strip_left", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, hidden: Container[int], *, strip: bool = True) -> None:
        """Begin a stream; `hidden` has the ids of tokens without text (special tokens). `strip`: it begins a text."""
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._strip = self._strip_left = token_bytes.strip_left if strip else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def again(self) -> "TextStream":
        """Return a new stream with the same settings."""
        return TextStream(self._token_bytes, self._hidden, strip=bool(self._strip))

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes; empty while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        return self._trim(self._decoder.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        """End the text: an incomplete character becomes U+FFFD. The stream can then be used again."""
        text = self._trim(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._strip_left = self._strip
        return text

    def _trim(self, text: str) -> str:
        if not self._strip_left or not text:
            return text
        kept = _strip(text, self._strip_left)
        self._strip_left = 0 if kept else self._strip_left - len(text)
        return kept


def _strip(text: str, count: int) -> str:
    spaces = len(text) - len(text.lstrip(" "))
    return text[min(count, spaces) :]


def decode(
    token_bytes: TokenBytes, token_ids: Iterable[int], hidden: Container[int], *, strip: bool = True
) -> str:
    """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD. `strip`: the ids begin at the start of a text."""
    joined = b"".join(token_bytes(token_id) for token_id in token_ids if token_id not in hidden)
    return _strip(joined.decode("utf-8", "replace"), token_bytes.strip_left if strip else 0)


def find_token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes:
    """Return how a tokenizer's decoder spells its tokens: byte-level, or SentencePiece with byte tokens.

    Raises ModelError for any other decoder.
    """
    steps = _decoder_steps(backend)
    kinds = {step["type"] for step in steps}
    if kinds - {"Fuse"} == {"ByteLevel"}:
        return TokenBytes(backend.id_to_token, _byte_level_speller())
    if not kinds or kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise ModelError(
            f"The tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported; "
            "use a model with a byte-level or a SentencePiece tokenizer."
        )
    return TokenBytes(backend.id_to_token, _sentencepiece_speller(steps), _spaces_to_strip(steps))


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    # The only public way to read a decoder's settings is its pickled form, which is JSON.
    decoder = json.loads(backend.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_level_speller() -> Callable[[str], bytes]:
    alphabet = byte_alphabet()

    def spell(token: str) -> bytes:
        try:
            return bytes(map(alphabet.__getitem__, token))
        except KeyError:  # an added token, written as plain text
            return token.encode("utf-8")

    return spell


def _sentencepiece_speller(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    replaced = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)

    def spell(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        if match:
            return bytes.fromhex(match[1])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode("utf-8")

    return spell


def _spaces_to_strip(steps: list[dict[str, Any]]) -> int:
    strips = [int(step["start"]) for step in steps if step["type"] == "Strip" and step["content"] == " "]
    prepends = any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in steps)
    return sum(strips) + prepends
