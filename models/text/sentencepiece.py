"""SentencePiece vocabularies from any file: BPE by scores, or unigram, with bytes for missing characters."""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from models.text.tokenizer_parts import META_SPACE, derive_merges, sentencepiece_decoder

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types, as SentencePiece and GGUF number them."""


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """A vocabulary: the text, score and type of each id, and the rules for spaces."""

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unigram: bool
    unknown: int
    prefixed: bool
    """Whether a space is put before a text."""
    squeezed: bool = False
    """Whether spaces around a text are dropped, and runs of spaces become one."""
    charsmap: bytes = b""
    """SentencePiece's own table for normalising characters; empty if there is none."""


def sentencepiece_backend(
    vocabulary: SentencePiece, always_control: Container[str] = ()
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a vocabulary of distinct tokens. `always_control` has names that are control tokens."""
    model = _unigram(vocabulary) if vocabulary.unigram else _bpe(vocabulary)
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.squeezed:
        steps.append(normalizers.Replace(Regex(r"\A +| +(?= )"), ""))
    if vocabulary.prefixed:
        steps.append(normalizers.Prepend(META_SPACE))
    steps.append(normalizers.Replace(" ", META_SPACE))
    if vocabulary.squeezed:
        steps.append(normalizers.Replace(Regex(rf"{META_SPACE}+\z"), ""))
    backend.normalizer = normalizers.Sequence(steps)
    if vocabulary.unigram:  # in a BPE, no merge makes them
        backend.pre_tokenizer = _apart(vocabulary)
    backend.decoder = sentencepiece_decoder(prefixed=vocabulary.prefixed)
    # User-defined tokens may be spaces (Gemma's are). A prefix would be put before those, too.
    add_typed_tokens(
        backend, vocabulary.tokens, vocabulary.types, always_control, normalized=not vocabulary.prefixed
    )
    return backend


def add_typed_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    always_control: Container[str] = (),
    *,
    normalized: bool = False,
) -> None:
    """Make control tokens special, and keep user-defined ones whole wherever they occur in a text.

    `always_control` has names that are control tokens whatever their type. With `normalized`, user-defined tokens are
    searched in the normalised text, where a space has become U+2581.
    """
    special = [
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL) or token in always_control
    ]
    whole = [
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind == USER_DEFINED and token not in always_control
    ]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=normalized) for token in whole])


def _bpe(vocabulary: SentencePiece) -> BPE:
    tokens, scores, types = vocabulary.tokens, vocabulary.scores, vocabulary.types
    known = {token: index for index, token in enumerate(tokens)}
    # Control and byte tokens are never made from the text that spells them.
    mergeable = [i for i in range(len(tokens)) if types[i] not in (UNKNOWN, CONTROL, BYTE)]
    mergeable.sort(key=lambda i: -scores[i])
    merges = derive_merges([tokens[i] for i in mergeable], known)
    unknown = tokens[vocabulary.unknown]
    return BPE(vocab=known, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _unigram(vocabulary: SentencePiece) -> Unigram:
    scored = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    return Unigram(scored, unk_id=vocabulary.unknown, byte_fallback=True)


def _apart(vocabulary: SentencePiece) -> pre_tokenizers.PreTokenizer:
    """Split names of control and byte tokens where no word spans the cut, so that they are text when typed."""
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    words = "\n".join(token for token, kind in typed if kind not in (UNKNOWN, CONTROL, BYTE))
    cuts = []
    for name, kind in typed:
        if kind in (UNKNOWN, CONTROL, BYTE) and len(name) > 1:
            cut = next((at for at in range(1, len(name)) if name[at - 1 : at + 1] not in words), 1)
            cuts.append(f"{re.escape(name[:cut])}(?={re.escape(name[cut:])})")
    return pre_tokenizers.Split(Regex("|".join(cuts) or r"(?!)"), behavior="merged_with_previous")
