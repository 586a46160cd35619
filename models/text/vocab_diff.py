"""Whether two tokenizers are equivalent: ids stand for the same tokens, and texts become the same ids."""

import json
from collections.abc import Container, Mapping
from itertools import zip_longest
from typing import Any

import tokenizers


def difference(
    one: tokenizers.Tokenizer,
    other: tokenizers.Tokenizer,
    unused_by_one: Container[int] = (),
    unused_by_other: Container[int] = (),
) -> str | None:
    """Return how `other` differs, as the middle of a sentence; None if it does not.

    Ids that only fill up a vocabulary count as missing.
    """
    here, there = _by_id(one, unused_by_one), _by_id(other, unused_by_other)
    for id in sorted(here.keys() | there.keys()):
        if (first := here.get(id)) != (second := there.get(id)):
            special = any(id in backend.get_added_tokens_decoder() for backend in (one, other))
            return f"{'special token' if special else 'token'} {id} is {_quoted(second)} and not {_quoted(first)}"
    rules, others = _merges(one), _merges(other)
    if rules is not None and others is not None and rules != others:
        pairs = enumerate(zip_longest(rules, others), 1)
        at, (rule, another) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        return f"merge {at:,} is {_quoted(another)} and not {_quoted(rule)}"
    return None


def _by_id(backend: tokenizers.Tokenizer, unused: Container[int]) -> Mapping[int, str]:
    known = backend.get_vocab(with_added_tokens=True)
    return {id: token for token, id in known.items() if id not in unused}


def _merges(backend: tokenizers.Tokenizer) -> list[str] | None:
    """Return the merges in order; None for SentencePiece vocabularies, which have scores instead."""
    said: dict[str, Any] = json.loads(backend.to_str())
    merges, decoder = said["model"].get("merges"), json.dumps(said["decoder"])
    if merges is None or '"ByteLevel"' not in decoder:
        return None
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]


def _quoted(text: str | None) -> str:
    return "missing" if text is None else f"{text[:40]!a}"
