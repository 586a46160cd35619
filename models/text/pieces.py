"""Tokenise text that a user typed in part: typed text stays text, whatever it spells.

A chat template writes control tokens (`<|im_start|>`, `<think>`) as text between the texts that users typed. To
prevent typed text from becoming a control token, prompts are tokenised by a second backend. It shares the vocabulary
of the first one, but knows the control tokens only by secret names, which replace them in the template's own text.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import tokenizers
from tokenizers import AddedToken

_LONG = 20_000
"""The length in characters from which a text is tokenised without blocking other Python threads."""

_BEFORE = "\ue0ff"
"""Stands for preceding text: a character that no token joins with the characters after it."""

_HTML = frozenset({
    "a", "b", "blockquote", "body", "br", "caption", "code", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "head",
    "hr", "html", "i", "img", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td",
    "tfoot", "th", "thead", "tr", "u", "ul",
})  # fmt: skip
"""Tags that are ordinary words of a vocabulary (Gemma's)."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A stretch of a prompt. Control tokens are recognised in the template's text, not in typed text."""

    text: str
    typed: bool


def control_tokens(backend: tokenizers.Tokenizer, template: str | None) -> dict[int, str]:
    """Return the tokens that control a model, with their text, by id; other added tokens are words that users may type.

    They are the special tokens, and those others that look like a tag or are a mark that the chat template names.
    """
    added = backend.get_added_tokens_decoder()
    return {
        token_id: token.content
        for token_id, token in added.items()
        if token.special or _is_mark(token.content, template or "")
    }


def _is_mark(text: str, template: str) -> bool:
    if not any(map(str.isalpha, text)):
        return False  # a run of spaces or line breaks
    named = text in template
    if (text[0], text[-1]) in {("<", ">"), ("[", "]")}:
        return named or text.strip("</>").lower() not in _HTML
    return named and not text.isalnum()


class PieceEncoder:
    """Tokenises pieces. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, control: Mapping[int, str]) -> None:
        """Build the second backend; `control` is the result of `control_tokens`."""
        self._backend = backend
        self._control = dict(control)
        plain = self._plain = tokenizers.Tokenizer(backend.model)  # shared, not copied
        plain.normalizer, plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        secret = secrets.token_hex(8)
        self._names = {token_id: f"\ue000{secret}.{token_id}\ue001" for token_id in control}
        tokens = {
            token_id: token if token_id not in control else _named(token, self._names[token_id])
            for token_id, token in added.items()
        }
        self._break = f"\ue000{secret}\ue001"
        gaps = [f"\ue000{secret}-{gap}\ue001" for gap in range(_gap(plain, len(added) + 1))]
        marks = [AddedToken(text, normalized=False) for text in (*gaps, self._break)]
        plain.add_tokens([*marks, *tokens.values()])
        self._added = frozenset(added)
        ids = ((plain.token_to_id(token.content), token_id) for token_id, token in tokens.items())
        self._real = {theirs: ours for theirs, ours in ids if theirs is not None and theirs != ours}
        self._spelled = {token_id for token_id in control if backend.model.id_to_token(token_id) is not None}
        """Control tokens in the vocabulary itself, which a merge could make of typed text."""
        self._with_names = lru_cache(256)(self._name)  # a template writes the same text over and over
        before, both = self._ids(_BEFORE), self._ids(f"{_BEFORE}a")
        self._before = len(before)
        self._spelled.difference_update(before)  # the tokens of an unknown character
        self._prefixed = both[: self._before] == before and both[self._before :] != self._ids("a")
        """Whether a text's beginning is tokenised differently from a continuation: SentencePiece prepends a space."""

    def encode(self, pieces: Iterable[PromptPiece], after: int | None = None) -> list[int]:
        """Return the token ids of the pieces as one text. `after` is the preceding token; None at the beginning."""
        text = "".join(piece.text if piece.typed else self._with_names(piece.text) for piece in pieces)
        if after is None or not self._prefixed:
            return self._as_ours(self._ids(text))
        if after in self._added:  # text after an added token is tokenised separately anyway
            return self._as_ours(self._ids(self._break + text)[1:])
        return self._as_ours(self._after_text(text))

    def spells_control(self, text: str) -> bool:
        """Return whether this text, written by a template, has control tokens."""
        return self._with_names(text) != text

    def _after_text(self, text: str) -> list[int]:
        return self._ids(_BEFORE + text)[self._before :]

    def _name(self, text: str) -> str:
        """Return a template's text with the secret names of its control tokens."""
        found = self._backend.encode(text, add_special_tokens=False)
        if self._names.keys().isdisjoint(found.ids):
            return text
        named, done = "", 0
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            if token_id in self._names:
                named += text[done:start] + self._names[token_id]
                done = end
        return named + text[done:]

    def _ids(self, text: str) -> list[int]:
        if len(text) < _LONG:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        else:  # a batch lets other threads run: 1 MB takes most of a second
            ids = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _as_ours(self, ids: list[int]) -> list[int]:
        """Convert ids of the second backend to ids of the model."""
        if not self._spelled.isdisjoint(ids):
            ids = [part for token_id in ids for part in self._spelling(token_id)]
        if not self._real.keys().isdisjoint(ids):
            ids = [self._real.get(token_id, token_id) for token_id in ids]
        return ids

    def _spelling(self, token_id: int) -> list[int]:
        """Replace a control token that a merge made by the tokens of its letters."""
        if token_id not in self._spelled:
            return [token_id]
        letters = map(self._after_text, self._control[token_id])
        return [part for letter in letters for part in letter if part not in self._spelled]


def _gap(plain: tokenizers.Tokenizer, count: int) -> int:
    """Return how many ids to skip so that `count` new tokens get ids outside the vocabulary, which may have gaps."""
    begin = end = plain.get_vocab_size()
    while taken := [id for id in range(end, end + count) if plain.model.id_to_token(id) is not None]:
        end = taken[-1] + 1
    return end - begin


def _named(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)
