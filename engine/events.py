"""The events that a stream yields, and the figures of a turn and of the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import Any, Literal

Kind = Literal["reasoning", "answer", "call"]
"""The part of an answer that a token belongs to. The engine never sets "call": only code that knows the tools can."""


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    CONTEXT_FULL = "context_full"
    REPETITION = "repetition"
    """It repeated itself without end (see `SamplingParams.stop_repetition`)."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. `text` may be empty (half a character, a held-back stop string, a special token)."""

    text: str
    token_id: int
    kind: Kind
    logprob: float | None = None
    """The token's log-probability (see `SamplingParams.logprobs`); None unless the request asked for it."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this place and their log-probabilities, likeliest first."""
    guessed: bool = field(default=False, compare=False)
    """Speculation guessed this token correctly; without speculation the token would be the same."""


class Cause(IntEnum):
    """Why a prompt diverged from the cached text. The numbers are stored in sessions."""

    THINKING = 1
    """The cache continues with thinking, which the history leaves out."""
    TRIMMED = 2
    """The cache continues with the end of what was generated, which is not part of the answer in the history."""
    SYSTEM = 3
    """The system prompt was changed."""
    EDITED = 4
    """The message was changed."""
    BRANCH = 5
    """The cache continues with another branch."""
    POLICY = 6
    """The policy for thinking (`think_cache`) was changed after the rows were computed."""
    OPENED = 7
    """The text comes from elsewhere (a saved session, another model) and had not been computed here."""
    EVICTED = 8
    """The rows were cached and made room for others."""
    DRAFT = 9
    """The message was prewarmed while it was typed, and then changed."""
    STATE = 10
    """The rows were cached, but no state of the recurrent layers after them."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The place where a prompt diverged from what the cache held."""

    row: int
    """The number of prompt tokens before it that are the same."""
    message: int
    """The message in which, or after which, they diverge, counted from 1; 0 is the system prompt."""
    in_answer: bool
    """Whether they diverge in the answer to that message."""
    cached: int
    """The next token in the cache; -1: none."""
    wanted: int
    """The next token of the prompt."""
    cause: Cause

    def to_dict(self, prefix: str) -> dict[str, int]:
        """Return the fields as numbers by name, each name with `prefix` in front."""
        return {prefix + item.name: int(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def of(cls, values: Mapping[str, Any], prefix: str) -> "Parting | None":
        """Return the object that `to_dict` wrote; None if it is missing or its cause is unknown."""
        found: dict[str, Any] = {item.name: values.get(prefix + item.name) for item in fields(cls)}
        if not all(isinstance(value, int | float) for value in found.values()) or found["cause"] not in set(
            Cause
        ):
            return None
        row, message, in_answer, cached, wanted, cause = (int(value) for value in found.values())
        return cls(row, message, bool(in_answer), cached, wanted, Cause(cause))


_PARTINGS = ("parting", "draft_parting")
"""The figures whose type is Parting."""


@dataclass(frozen=True, slots=True)
class TurnStats:
    """The figures of one turn; times in seconds.

    `prompt_tokens == cached_tokens + prefilled_tokens`, `cached_tokens == reused_tokens + warmed_tokens`. If a
    server reports the length of the prompt, but not how much of it was cached, both parts are 0.
    `ttft_s` runs from the request to its first token, `decode_s` from the first token to the last.
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
    """The cached tokens that were computed in idle time since the answer before."""
    guessed_tokens: int = 0
    """Tokens that speculation guessed and the model checked."""
    accepted_tokens: int = 0
    """The guessed tokens that were right: each saved a step."""
    drafted_tokens: int = 0
    """The guessed tokens that came from a draft model."""
    accepted_drafts: int = 0
    """The draft model's tokens that were right."""
    saved_s: float = 0.0
    """The decode time that speculation saved, as measured; negative if it took longer."""
    first_tokens: int = 1
    """The number of tokens that arrived first, all at once. `decode_s` does not cover them."""
    parting: Parting | None = None
    """Why no more of the prompt was reused; None if no more could have been."""
    draft_parting: Parting | None = None
    """Why no more of the message was prewarmed; None if it did not change after it was warmed."""

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were cached when the answer before had ended."""
        return self.cached_tokens - self.warmed_tokens

    @property
    def split_tokens(self) -> int:
        """Tokens of the prompt for which it is known whether they were cached: all of them, or 0."""
        return self.cached_tokens + self.prefilled_tokens

    @property
    def decoded_tokens(self) -> int:
        """Tokens that arrived within `decode_s`."""
        return max(self.generated_tokens - self.first_tokens, 0) if self.decode_s > 0.0 else 0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second of decoding; 0.0 if that was not measured."""
        return self.decoded_tokens / self.decode_s if self.decoded_tokens else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of the prompt computed per second; 0.0 if that was not measured, or the prompt was not finished."""
        return self.prefilled_tokens / self.prefill_s if self.prefill_s > 0.0 and self.ttft_s else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """Return every figure by name, for JSON."""
        figures = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _PARTINGS}
        figures["decode_tokens_per_s"] = self.decode_tokens_per_s
        for name in _PARTINGS:
            if (parting := getattr(self, name)) is not None:
                figures |= parting.to_dict(f"{name}_")
        return figures

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "TurnStats":
        """Return the figures that `to_dict` wrote. Missing figures have their defaults."""
        # A count may come from another process, or a file, as a number that is not whole.
        numbers: dict[str, Any] = {
            item.name: (int if isinstance(item.default, int) else float)(values.get(item.name, item.default))
            for item in fields(cls)
            if item.name not in _PARTINGS
        }
        parting, draft_parting = (Parting.of(values, f"{name}_") for name in _PARTINGS)
        return cls(**numbers, parting=parting, draft_parting=draft_parting)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The cost of sending the message being typed, in tokens."""

    tokens: int
    """Tokens of the message itself."""
    new: int
    """Tokens to compute after Enter, as things stand now; at least 1."""
    free: int
    """Tokens left in the context for the answer; negative: the number of tokens too many."""


@dataclass(frozen=True, slots=True)
class OffloadFigures:
    """The host memory tier, which takes evicted blocks; times in seconds per token, None until measured."""

    blocks: int
    """Blocks that can be brought back."""
    bytes: int
    """Host memory in use; it grows on demand."""
    restored_tokens: int
    """Tokens brought back so far instead of being computed."""
    brought_s: float | None
    computed_s: float | None
    is_used: bool
    """False once measurements show that computing is about as fast."""
    states: int = 0
    """States of recurrent layers that can be brought back."""


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """The disk tier, which outlives the process; times in seconds per token, None until measured."""

    blocks: int
    """Blocks that can be brought back, and pieces of states."""
    written_tokens: int
    restored_tokens: int
    """Tokens brought back so far instead of being computed."""
    brought_s: float | None
    computed_s: float | None
    is_used: bool
    """False once measurements show that computing is about as fast."""
    problem: str = ""
    """Why the tier is not used, or no longer used, in one line."""
    cold_s: float | None = None
    """The time to bring back a token from a file that is not in the system's page cache; `brought_s` is for files that
    are."""

    @classmethod
    def none(cls, why: str) -> "DiskFigures":
        """Return the figures of an engine without a disk tier."""
        return cls(0, 0, 0, None, None, False, why)


@dataclass(frozen=True, slots=True)
class CachedChunk:
    """The current state of a chunk: a named prompt prefix that is computed once. Counts are in tokens."""

    name: str
    tokens: int
    pinned: bool
    """Whether it is evicted late."""
    present: int
    """How many of its tokens need not be computed."""
    shared: int
    """How many of its first tokens it shares with a chunk listed before it."""
    branches: int
    """The number of conversations in the cache that begin with it."""
    token_bytes: int
    """Bytes that a token takes in the KV cache."""
    is_read: bool = True
    """False while it is being computed in idle time."""
    disk_bytes: int = 0
    """Bytes of its own file on disk; conversations that begin with the chunk do not store it again."""

    @property
    def bytes(self) -> int:
        """Memory of the tokens that are present and not shared with a chunk listed before it."""
        return max(self.present - self.shared, 0) * self.token_bytes

    @property
    def saved_bytes(self) -> int:
        """Additional memory that the conversations on it would take if each had its own copy."""
        return max(self.branches - 1, 0) * self.present * self.token_bytes


@dataclass(frozen=True, slots=True)
class Figures:
    """The engine's current state and activity: a snapshot, cheap enough to take 30 times a second."""

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
    blocks_free: int = 0
    blocks_cached: int = 0
    """Blocks that no sequence holds but that the prefix index can still find."""
    blocks_held: int = 0
    prefill_done: int = 0
    """Tokens computed so far of the request that is being prefilled."""
    prefill_total: int = 0
    """Tokens to compute in that request; 0 when nothing is being prefilled."""
    decode: str = "plain modules"
    """The program of a decode step: "plain modules", "fused kernels, CUDA graph", ..."""
    notes: tuple[str, ...] = ()
    """Lines to show once: what fell back to something slower, and why."""
    warmed: int | None = None
    """Tokens present of what idle work is warming (the history, then the draft); None while none is running."""
    bandwidth: float | None = None
    """Bytes/s at which the memory of the device, or of all that share the work, is read; None if never measured."""
    read_bytes: int = 0
    """Bytes of the weights that are read for one token, without the experts that are not chosen for it; 0 if they were
    not counted, as when there is no `bandwidth`."""
    offload: OffloadFigures | None = None
    disk: DiskFigures | None = None
    """None if the engine has no such tier."""
    kv_dtype: str = ""
    """The format of the numbers in the KV cache: bfloat16, ..., fp8 or int8."""
    kv_token_bytes: int = 0
    """Bytes that a token takes in the KV cache, scales included, in the layers that keep every row."""
    state_slots: int = 0
    """How many states of recurrent layers there is room for; 0: there are no such layers."""
    state_bytes: int = 0
    """Bytes of one of them, for all layers."""
    marks: int = 0
    """How many of them belong to places of conversations where these can be continued."""
    kv_window_bytes: int = 0
    """Bytes of `kv_bytes` for layers that keep only the rows of their windows."""
    kv_share: float = 0.0
    """The share that the KV cache takes of the memory that the weights left free; 0 if unknown."""
    host_bytes: int = 0
    """Bytes of the weights in host memory: experts for which a GPU had no room."""
    speculation: str = ""
    """How tokens are guessed, or why none are."""
    draft_bytes: int = 0
    """Bytes of the draft model's weights and KV cache."""
    chunks: tuple[CachedChunk, ...] = ()
    """The chunks as of a moment ago."""
