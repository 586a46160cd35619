"""What a tokenizer is made of, however a model comes: as a folder or as a GGUF file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders

END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Special tokens with these names end a turn in every model that has them."""

META_SPACE = "\u2581"
"""How SentencePiece writes a space."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Everything that a model's files say about text and tokens."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    """bos_token, eos_token, ... with their text, as chat templates use them."""
    stop_ids: frozenset[int]
    """Tokens that the files name as the end of a turn."""
    chat_template: str | None
    unused_ids: frozenset[int] = frozenset()
    """Tokens that fill up the vocabulary and have no text."""
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)


def sentencepiece_decoder(*, prefixed: bool) -> decoders.Decoder:
    """The decoder of a SentencePiece vocabulary with byte tokens; `prefixed`: a text begins with a space."""
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    steps = [decoders.Replace(META_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    return decoders.Sequence(steps)


def merges_of(ranked: Sequence[str], known: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others that are `known`; `ranked` has the best token first."""
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
