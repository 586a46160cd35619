"""How an engine is built."""

from dataclasses import dataclass

from engine.cache.sizing import KVPlan
from engine.execute.group import Group
from engine.kernels.native.library import Pool
from engine.params import LoadOptions
from models.network import Network


@dataclass(frozen=True, slots=True)
class BuildOptions(LoadOptions):
    """How an engine is built around a network: the choices of loading, and what was found or made since. For None, the
    machine decides."""

    fused: bool = True
    """Use our own kernels; without them, steps run through the plain modules."""
    decode_runner: bool = True
    """On a GPU, sequences decode ahead of the host; without it, they decode the way prompts are computed."""
    offload: int | None = None
    """`offload_gb` in bytes; applies on a CPU, too."""
    free: int | None = None
    """Bytes of memory left after the weights; None: what is free now."""
    block_size: int | None = None
    """Rows per block; None: what suits the attention."""
    num_blocks: int | None = None
    """None: as many as the memory allows."""
    max_chunk: int | None = None
    """The most prefill rows in a step."""
    drafter: Network | None = None
    """A draft model; it takes memory in addition to the KV cache."""
    draft_name: str = ""
    plan: KVPlan | None = None
    """The KV cache of a draft model, which was planned with that of the model for which it guesses."""
    drafts_for: int = 0
    """Nonzero if this network is itself a draft model: the vocabulary size that it shares with its target model."""
    pool: Pool | None = None
    """Threads for native kernels, shared with another engine; None: the engine makes its own."""
    notes: tuple[str, ...] = ()
    """Lines for the user that loading had."""
    group: Group | None = None
    """The processes that compute the other parts of a divided network; they build at the same time, in the same way."""
