"""What a tokenizer is made of, however a model comes: as a folder or as a GGUF file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders

END_OF_TURN = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>",
    "<|end_of_turn|>", "<|end_of_sentence|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]", "<eos>", "</s>",
    "<｜end▁of▁sentence｜>",
})  # fmt: skip
"""Special tokens with these names end a turn in every model that has them."""

CHANNELS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"})
"""Tokens of the harmony format (gpt-oss). There "<|end|>" ends one message of several that make a turn."""
TO_THE_ANSWER = "<|end|><|start|>assistant<|channel|>final<|message|>"
"""What there stands between thinking and answer."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The tokens of answers in the harmony format."""

    start: int
    channel: int
    message: int
    end: int
    answer: tuple[int, ...]
    """The name of the channel that answers are in."""
    closing: tuple[int, ...]
    """What stands between thinking and answer: TO_THE_ANSWER."""

    @property
    def steering(self) -> tuple[int, int, int, int]:
        """What begins and ends messages and their headers."""
        return self.start, self.channel, self.message, self.end

    @property
    def header(self) -> int:
        """How many of `closing` name the channel: with these begins an answer without thinking."""
        return len(self.answer) + 2


@dataclass(frozen=True, slots=True)
class ThinkMarkers:
    """What a model writes around its thinking: each is one token."""

    open: str
    close: str
    before_close: str
    """Between the thinking and the closing marker."""
    after_close: str
    """Between the closing marker and the answer."""


THINK_MARKERS = (
    ThinkMarkers("<think>", "</think>", "\n", "\n\n"),
    ThinkMarkers("[THINK]", "[/THINK]", "", ""),
)
"""Those of Qwen3, SmolLM3, DeepSeek-R1's distillations and others; those of Magistral."""

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
    text_start: str = ""
    """What the model expects before a text that it is to complete: its bos token, or nothing."""


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
