"""The choices with which a model is loaded."""

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

Quantize = Literal["auto", "none", "int8", "int4"]
KVDtype = Literal["auto", "bf16", "fp16", "fp8", "int8"]


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
