"""What a stream yields, and the figures of a turn."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import Any, Literal

Kind = Literal["reasoning", "answer", "call"]
"""What a token is part of. The engine itself does not tell calls of tools from the answer: who knows the tools does."""


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
    logprob: float | None = None
    """Of the token, as `SamplingParams.logprobs` says; None where nobody asked."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens there and their log-probabilities, the likeliest first."""
    guessed: bool = field(default=False, compare=False)
    """Speculation had it right: the token is the one that it would have been."""


class Cause(IntEnum):
    """Why a prompt did not go on as the cache did. The numbers are stored in sessions."""

    THINKING = 1
    """What was generated there first is thinking, which the history leaves out."""
    TRIMMED = 2
    """What was generated there last is no part of the answer in the history."""
    SYSTEM = 3
    """The system prompt was changed."""
    EDITED = 4
    """The message was another one."""
    BRANCH = 5
    """Another branch was gone through before."""
    POLICY = 6
    """Thinking is kept in another way (`think_cache`) than when it was computed."""
    OPENED = 7
    """It was said elsewhere (a saved session, another model) and had not been computed here."""
    EVICTED = 8
    """It was there and made room for something else."""
    DRAFT = 9
    """The message was warmed while it was typed, and then changed."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a prompt went on otherwise than what the cache held."""

    row: int
    """So many tokens of the prompt were the same."""
    message: int
    """The message in or behind which they part, from 1; 0 the system prompt."""
    in_answer: bool
    """They part in the answer to that message."""
    cached: int
    """The token that the cache held next; -1: nothing."""
    wanted: int
    """The token of the prompt."""
    cause: Cause

    def to_dict(self, prefix: str) -> dict[str, int]:
        """Numbers by name, every name beginning with `prefix`."""
        return {prefix + item.name: int(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def of(cls, values: Mapping[str, Any], prefix: str) -> "Parting | None":
        """What `to_dict` wrote; None where there is nothing of it, or of a kind that is not known."""
        found: dict[str, Any] = {item.name: values.get(prefix + item.name) for item in fields(cls)}
        if not all(isinstance(value, int | float) for value in found.values()) or found["cause"] not in set(
            Cause
        ):
            return None
        row, message, in_answer, cached, wanted, cause = (int(value) for value in found.values())
        return cls(row, message, bool(in_answer), cached, wanted, Cause(cause))


_PARTINGS = ("parting", "draft_parting")
"""Figures that are partings."""


@dataclass(frozen=True, slots=True)
class TurnStats:
    """The figures of one turn; times in seconds.

    `prompt_tokens == cached_tokens + prefilled_tokens`, `cached_tokens == reused_tokens + warmed_tokens`.
    `ttft_s` runs from the request to its first token, `decode_s` from the first token to the last.
    `decode_tokens_per_s` counts the tokens after the first.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    warmed_tokens: int = 0
    """Of the cached ones those that were computed in idle time since the answer before."""
    guessed_tokens: int = 0
    """Tokens that speculation guessed and had checked,"""
    accepted_tokens: int = 0
    """those of them that were right: each saved a step,"""
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    """the same of those among them that a draft model guessed,"""
    saved_s: float = 0.0
    """and the decode time saved, as measured; below 0 it took longer."""
    parting: Parting | None = None
    """Why no more was reused than that; None where nothing more could have been."""
    draft_parting: Parting | None = None
    """Why no more was warmed of the message itself; None where it was not changed while it was typed."""

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were there when the answer before had ended."""
        return self.cached_tokens - self.warmed_tokens

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, per second of decoding; 0.0 for fewer than two tokens."""
        if self.generated_tokens < 2 or self.decode_s <= 0.0:
            return 0.0
        return (self.generated_tokens - 1) / self.decode_s

    def to_dict(self) -> dict[str, int | float]:
        """Every figure by name, for JSON."""
        figures = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _PARTINGS}
        figures["decode_tokens_per_s"] = self.decode_tokens_per_s
        for name in _PARTINGS:
            if (parting := getattr(self, name)) is not None:
                figures |= parting.to_dict(f"{name}_")
        return figures

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "TurnStats":
        """What `to_dict` gave. Figures that are missing are 0."""
        numbers = {item.name: values.get(item.name, 0) for item in fields(cls) if item.name not in _PARTINGS}
        parting, draft_parting = (Parting.of(values, f"{name}_") for name in _PARTINGS)
        return cls(**numbers, parting=parting, draft_parting=draft_parting)


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
class OffloadFigures:
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
class DiskFigures:
    """The tier on disk that outlives the process; times in seconds a token, None before they are measured."""

    blocks: int
    """Blocks that can be brought back."""
    written_tokens: int
    restored_tokens: int
    """Tokens that were brought back so far instead of being computed."""
    brought_s: float | None
    computed_s: float | None
    is_used: bool
    """False once it is known that computing is about as fast."""
    problem: str = ""
    """Why it is not used, or not any more, in a line."""

    @classmethod
    def none(cls, why: str) -> "DiskFigures":
        """Of an engine that has no such tier."""
        return cls(0, 0, 0, None, None, False, why)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What many prompts begin with, computed once and kept by a name, as it stands now. Counts are of tokens."""

    name: str
    tokens: int
    pinned: bool
    """Whether it is evicted late."""
    present: int
    """How many of its tokens need not be computed."""
    shared: int
    """How many it has in common with the beginning of one that is listed before it."""
    branches: int
    """Ends of conversations in the cache that stand on it."""
    token_bytes: int
    """What a token takes in the KV cache."""
    is_read: bool = True
    """False while it is computed in idle time."""
    disk_bytes: int = 0
    """What it takes on disk, in a file of its own; conversations that begin with it do not have it in theirs."""

    @property
    def bytes(self) -> int:
        """Memory that its own tokens take: those present and not shared."""
        return max(self.present - self.shared, 0) * self.token_bytes

    @property
    def saved_bytes(self) -> int:
        """Memory that the conversations on it would take more if each had its own."""
        return max(self.branches - 1, 0) * self.present * self.token_bytes


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
    offload: OffloadFigures | None = None
    disk: DiskFigures | None = None
    """None where there is no such tier."""
    kv_dtype: str = ""
    """Of the numbers in the KV cache: bfloat16, ..., fp8 or int8."""
    kv_token_bytes: int = 0
    """What a token takes there, with the scales."""
    host_bytes: int = 0
    """Those of the weights that a GPU had no room for: experts in host memory."""
    speculation: str = ""
    """How tokens are guessed, or why none are."""
    draft_bytes: int = 0
    """Of the weights and the KV cache of a draft model."""
    chunks: tuple[Chunk, ...] = ()
    """As they were a moment ago."""
