"""What a stream yields, and the figures of a turn."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Kind = Literal["reasoning", "answer"]


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    CONTEXT_FULL = "context_full"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. `text` may be empty (half a character, a held-back stop string, a marker)."""

    text: str
    token_id: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class TurnStats:
    """The figures of one turn; times in seconds.

    `prompt_tokens == cached_tokens + prefilled_tokens`. `ttft_s` runs from the request to its first token,
    `decode_s` from the first token to the last. `decode_tokens_per_s` counts the tokens after the first.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, per second of decoding; 0.0 for fewer than two tokens."""
        if self.generated_tokens < 2 or self.decode_s <= 0.0:
            return 0.0
        return (self.generated_tokens - 1) / self.decode_s

    def to_dict(self) -> dict[str, int | float]:
        """Every figure by name, for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "generated_tokens": self.generated_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "ttft_s": self.ttft_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What sending a draft would take, in tokens."""

    tokens: int
    """Of the message itself."""
    new: int
    """Computed after Enter, as things stand now; at least 1."""
    free: int
    """Left in the context for the answer; below 0: so many too many."""


@dataclass(frozen=True, slots=True)
class SpillFigures:
    """The tier in host memory that takes evicted blocks; times in seconds a token, None before they are measured."""

    blocks: int
    """Blocks that can be brought back."""
    bytes: int
    """Host memory that is taken; it grows when it is needed."""
    restored_tokens: int
    """Tokens that were brought back so far instead of being computed."""
    brought_s: float | None
    computed_s: float | None
    is_used: bool
    """False once it is known that computing is about as fast."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the engine holds and does right now; a snapshot, cheap enough to take 30 times a second."""

    model_name: str
    device: str
    dtype: str
    attention: str
    """The attention backend in use."""
    context_length: int
    """Tokens that one sequence may hold."""
    weight_bytes: int
    kv_bytes: int
    """Bytes of the whole KV cache; it never grows."""
    block_size: int
    blocks_free: int
    blocks_cached: int
    """Blocks that nobody holds but the prefix index can still find."""
    blocks_held: int
    prefill_done: int
    """Tokens computed so far of the request being prefilled."""
    prefill_total: int
    """Tokens to compute in that request; 0 when nothing is being prefilled."""
    decode: str = "plain modules"
    """The program of a decode step: "plain modules", "fused kernels, CUDA graph", ..."""
    notes: tuple[str, ...] = ()
    """What the person should be told once: fallbacks, and why."""
    warmed: int | None = None
    """Tokens that are present of what idle work warms (the history, then the draft); None when it does not run."""
    bandwidth: float | None = None
    """Bytes/s that the device's memory reads; None where it has never been measured."""
    spill: SpillFigures | None = None
    """None where there is no such tier."""
