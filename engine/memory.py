"""How much KV cache there is, and so how long a context can be."""

from dataclasses import dataclass

from engine.device import gib
from engine.errors import EngineError

DEFAULT_SHARE = 0.5
"""Of the memory that is free once the weights are loaded; the rest is for activations and other programs."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """`context_length` in tokens, and the blocks of the cache."""

    context_length: int
    num_blocks: int


def plan_kv(
    bytes_per_token: int,
    block_size: int,
    available: int,
    model_limit: int,
    requested: int | None,
    share: float = DEFAULT_SHARE,
) -> KVPlan:
    """Size the cache for one context of `requested` tokens (default: what the model was made for, or what fits).

    Up to twice the context is taken, so that a conversation and its branches fit side by side. Raises
    EngineError when the request is longer than the model allows or than the memory holds.
    """
    if requested is not None and requested < 16:
        raise EngineError(f"--context is {requested}; it must be 16 tokens or more.")
    if requested is not None and requested > model_limit:
        raise EngineError(
            f"--context is {requested:,}, but this model was made for {model_limit:,} tokens. Ask for at most that."
        )
    fits = int(available * share) // bytes_per_token // block_size * block_size - block_size
    if fits < min(requested or 16, model_limit):
        wanted = requested or 16
        raise EngineError(
            f"Too little memory: a context of {wanted:,} tokens needs {gib(wanted * bytes_per_token)} for its "
            f"KV cache, {gib(available * share)} can be used. "
            + (f"Use --context {fits} or less, or close" if fits >= 16 else "Close")
            + " other programs."
        )
    context = min(requested or model_limit, fits)
    # One block more than the context fills: room for a copy-on-write while a full context is held.
    blocks = -(-min(2 * context, fits) // block_size) + 1
    return KVPlan(context, blocks)
