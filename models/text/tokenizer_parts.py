"""The parts of a tokenizer, whether a model comes as a folder or as a GGUF file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders

END_OF_TURN = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>",
    "<|end_of_turn|>", "<|end_of_sentence|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]", "<eos>", "</s>",
    "<｜end▁of▁sentence｜>", "<turn|>", "<|tool_response>", "<|observation|>", "[|endofturn|]", "<seed:eos>",
    "<|eot|>",
})  # fmt: skip
"""Special tokens with these names end a turn in every model that has them."""

CHANNELS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"})
"""Tokens of the harmony format (gpt-oss), in which "<|end|>" ends one of the several messages of a turn."""
TO_THE_ANSWER = "<|end|><|start|>assistant<|channel|>final<|message|>"
"""The text between thinking and answer in the harmony format."""
ADDRESSED = frozenset({"<|start|>", "<|message|>", "<|eom|>", "<|eot|>"})
"""Tokens of a format (Muse Glimmer's) whose messages have a recipient instead: "self" for thinking, "user"."""
TO_THE_USER = " to=user<|message|>"
"""The header of an answer in that format, after the author."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The tokens of answers that come as several messages, in channels (the harmony format) or with recipients."""

    start: int
    channel: int | None
    """None where messages have recipients."""
    message: int
    end: int
    answer: tuple[int, ...]
    """The name of the channel that contains answers, or of their recipient."""
    closing: tuple[int, ...]
    """The tokens between thinking and answer."""

    @property
    def steering(self) -> tuple[int, ...]:
        """The tokens that begin and end messages and their headers."""
        channel = () if self.channel is None else (self.channel,)
        return self.start, *channel, self.message, self.end

    @property
    def header(self) -> int:
        """How many tokens at the end of `closing` are the header: an answer without thinking begins with these."""
        return len(self.answer) + (1 if self.channel is None else 2)


@dataclass(frozen=True, slots=True)
class ThinkMarkers:
    """The marks around a model's thinking; each is a single token."""

    open: str
    close: str
    before_close: str
    """The text between the thinking and the closing mark."""
    after_close: str
    """The text between the closing mark and the answer."""
    label: str = ""
    """The text between the opening mark and the thinking, which says that thinking follows."""


THINK_MARKERS = (
    ThinkMarkers("<think>", "</think>", "\n", "\n\n"),
    ThinkMarkers("[THINK]", "[/THINK]", "", ""),
    ThinkMarkers("<seed:think>", "</seed:think>", "", "\n"),
    ThinkMarkers("<|channel>", "<channel|>", "\n", "", "thought\n"),
)
"""The marks of Qwen3, SmolLM3, DeepSeek-R1's distillations and others; of Magistral and Ministral 3; of Seed-OSS; of
Gemma 4."""

META_SPACE = "\u2581"
"""The character by which SentencePiece writes a space."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Everything that a model's files say about text and tokens."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    """The texts of bos_token, eos_token, ..., as chat templates use them."""
    stop_ids: frozenset[int]
    """Tokens that end a turn according to the files."""
    chat_template: str | None
    unused_ids: frozenset[int] = frozenset()
    """Tokens that only fill up the vocabulary and have no text."""
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    suppressed_ids: frozenset[int] = frozenset()
    """Tokens that are never sampled."""
    notes: tuple[str, ...] = ()
    """Lines for the user about unsupported settings in the files, and about what the files lack."""
    text_start: str = ""
    """The text that the model expects before a text to complete: its bos token, or ""."""


def sentencepiece_decoder(*, prefixed: bool) -> decoders.Decoder:
    """Return the decoder of a SentencePiece vocabulary with byte tokens. `prefixed`: a space was put before texts."""
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    steps = [decoders.Replace(META_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    return decoders.Sequence(steps)


def derive_merges(ranked: Sequence[str], known: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every way to make a token of two other `known` tokens; `ranked` has the best token first."""
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
