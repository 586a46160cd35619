"""The choices of a caller: how a model is loaded, how tokens are chosen, and when an answer ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, Literal, Self, get_args

from engine.errors import EngineError

Quantize = Literal["auto", "none", "int8", "int4"]
KVDtype = Literal["auto", "bf16", "fp16", "fp8", "int8"]

UNRECOMMENDED: Mapping[str, float | int] = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""The sampling defaults for a model whose authors recommend none."""
SUPPRESSED = -100.0
"""The bias of tokens that a model's authors never want sampled."""

MOST_BIASED = 1024
"""The maximum number of tokens that one request may bias."""
MOST_ALTERNATIVES = 20
"""The maximum number of alternatives to a token whose log-probabilities are returned."""
MOST_CHARACTERS = 262_144
"""The maximum length of a schema, a regular expression or a grammar."""

Speculation = Literal["auto", "off", "suffix", "draft"]
"""How tokens are guessed ahead: `suffix` from earlier text, `draft` by a draft model, `auto` whichever pays here."""

ConstraintKind = Literal["json_schema", "json_object", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """The format that an answer must match from its first to its last character; thinking before it is free.

    It is compiled where the request is made (`engine.sampling.grammar`), which also reports errors in it.
    """

    kind: ConstraintKind
    text: str = ""
    """A JSON schema as JSON, a regular expression (Rust's syntax) or a Lark grammar; empty for `json_object`."""

    def __post_init__(self) -> None:
        """Raise EngineError for an unknown kind, and for a text that is missing or far too long."""
        if self.kind not in get_args(ConstraintKind):
            known = ", ".join(get_args(ConstraintKind))
            raise EngineError(f"The kind of a constraint is {self.kind!r}; it must be one of {known}.")
        if not self.text.strip() and self.kind != "json_object":
            raise EngineError(f"The {NAMES[self.kind]} is empty; write one, or leave it out.")
        if len(self.text) > MOST_CHARACTERS:
            raise EngineError(
                f"The {NAMES[self.kind]} has {len(self.text):,} characters; it may have at most {MOST_CHARACTERS:,}."
            )


NAMES: Mapping[ConstraintKind, str] = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "lark": "grammar",
}
"""The kinds of constraints as shown to people."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one request; every default except that of `temperature` means "off".

    Raises EngineError when a value is out of range.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p (nucleus sampling)."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the probability of the most likely one."""
    repetition_penalty: float = 1.0
    """Divide (multiply, where negative) the logits of every token seen in prompt or answer, as in CTRL."""
    presence_penalty: float = 0.0
    """Subtract from the logits of every token already generated in this answer."""
    frequency_penalty: float = 0.0
    """Subtract from the logits of a token once for each time that it was generated in this answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """A number to add to the logits of each of these tokens."""
    logprobs: int | None = None
    """Return the log-probability of each token and of this many of the likeliest tokens; None: return none.

    They come from the model's own logits, before any bias, constraint, penalty or temperature.
    """
    constraint: Constraint | None = None
    """The format that the answer must match; None: any text."""
    seed: int | None = None
    """The same seed on the same machine gives the same text; None draws a fresh one."""
    max_tokens: int | None = None
    """The most tokens to generate; None: as many as the context holds."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it and may span tokens."""
    stop_repetition: bool = False
    """Whether an answer ends once it repeats itself without end (`engine/schedule/repetition.py`)."""
    speculation: Speculation = "off"
    """Whether tokens are guessed and several are checked at once. The text is the same to the token."""

    @property
    def penalises(self) -> bool:
        """Whether the probabilities of the next token depend on the text before it through a penalty."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def __post_init__(self) -> None:
        # "or more" alone would allow infinity, and a nan is neither more nor less.
        heat = "0 (greedy) or more" if self.temperature < inf else "a finite number, 0 (greedy) or more"
        rules = {
            "temperature": (0.0 <= self.temperature < inf, heat),
            "top_k": (0 <= self.top_k < 2**31, "0 (off) or more, below 2^31"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            "min_p": (0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            "repetition_penalty": (0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100"),
            "presence_penalty": (-2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            "frequency_penalty": (-2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            "logprobs": (
                self.logprobs is None or 0 <= self.logprobs <= MOST_ALTERNATIVES,
                f"from 0 to {MOST_ALTERNATIVES}",
            ),
            "max_tokens": (self.max_tokens is None or 1 <= self.max_tokens < 2**31, "1 or more, below 2^31"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2^63 - 1"),
            "stop": (all(self.stop), "strings that are not empty"),
            "speculation": (
                self.speculation in get_args(Speculation),
                f"one of {', '.join(get_args(Speculation))}",
            ),
        }
        for name, (valid, allowed) in rules.items():
            if not valid:
                value = getattr(self, name)
                shown = list(value) if isinstance(value, tuple) else value
                raise EngineError(f"{name} is {shown!r}; it must be {allowed}.")
        if len(self.logit_bias) > MOST_BIASED:
            raise EngineError(
                f"logit_bias has {len(self.logit_bias):,} tokens; it may have {MOST_BIASED:,} at most."
            )
        for token_id, bias in self.logit_bias.items():
            if not (isinstance(token_id, int) and token_id >= 0 and -100.0 <= bias <= 100.0):
                raise EngineError(
                    f"logit_bias has {bias!r} for token {token_id!r}; it must be from -100 to 100, "
                    "for a token of 0 or more."
                )


def seeds(first: int | None, count: int) -> list[int | None]:
    """Return the seeds of `count` answers to one prompt: `first` and the numbers after it; all None without `first`."""
    return [None if first is None else (first + number) % 2**63 for number in range(count)]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded. Each default leaves the choice to the model or the machine."""

    device: str = "auto"
    """auto, cpu, cuda, or one GPU of several, as in cuda:1."""
    dtype: str = "auto"
    quantize: Quantize = "auto"
    """How the weights are held (see `models.loading.plan.Target`)."""
    kv_dtype: KVDtype = "auto"
    """The format of the KV cache (see `engine.cache.kv_rows.kv_row`)."""
    context: int | None = None
    """The most tokens of a conversation; None: as many as the model and the memory allow."""
    draft: str | None = None
    """A smaller model with the same tokenizer that guesses the next tokens; "auto" takes the one in the catalogue if it
    is on this machine."""
    threads: int | None = None
    """CPU threads; None: one per physical core, minus one for the screen if there are more than two cores."""
    attention: str = "auto"
    """The name of an attention backend."""
    graphs: bool = True
    """Whether a GPU decodes with CUDA graphs; without them, steps are launched kernel by kernel."""
    tune: bool = True
    """Whether a GPU uses the kernel cuts measured there, if any, else those of the tables. Never with `deterministic`,
    because the text would depend on what was measured when."""
    tensor_parallel: int = 1
    """GPUs (on a CPU: processes) that compute every layer together; 0: as few as have room for the model."""
    deterministic: bool = False
    """Whether a GPU, too, sums in one order however prompts are cut and whatever runs beside them, which costs time."""
    streams: int = 1
    """Simultaneous answers that the KV cache is sized for, memory permitting."""
    offload_gb: float | None = None
    """GB of host memory for blocks evicted from the KV cache of a GPU; None: a share of it."""
    disk_gb: float | None = None
    """GB of disk for the caches of conversations; 0: none, None: a share of the free space."""

    @classmethod
    def of(cls, options: "LoadOptions", **more: Any) -> Self:
        """Return the choices of `options` with `more`, which are fields of this class."""
        return cls(**{part.name: getattr(options, part.name) for part in fields(LoadOptions)} | more)
