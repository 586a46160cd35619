"""The GPU memory that computing takes beside the weights and the KV cache, and the chunk size that fits in it.

Once a model is loaded, its activations are measured (`engine.execute.profile_run`). Before that they are estimated from
its description, so that a model which cannot fit is refused before it is read.
"""

import torch

from engine.cache.kv_rows import QUANTIZED
from models.recurrences import Recurrence
from models.spec import Experts, FeedForward, LatentAttention, Layer, ModelSpec, ShortConvolution

GRAPH_BYTES = 256 * 1024**2
"""Bytes that graphs, compiled kernels and the workspaces of libraries take on a GPU beside the activations."""
EXPANDED_BYTES = 256 * 1024**2
"""The most bytes for the decoded numbers of quantised KV rows while a layer attends to them."""
EXPANDING_BYTES = 256 * 1024**2
"""Bytes for expanding experts that are fetched from host memory, about 32 for each number expanded at once."""
SCRATCH_BYTES = 128 * 1024**2
"""Bytes for expanding a packed matrix before a product."""
MOST_ROWS = 4096
"""The most prefill rows of a step on a GPU, which computes them within milliseconds."""
LEAST_ROWS = 512
"""The chunk size on a GPU without memory for more. The products of a prompt are about as fast with so few rows."""
CPU_ROWS = 512
CHUNK_PART = 16
"""The activations of a chunk take at most 1 / CHUNK_PART of a GPU's memory."""


def chunk_bytes(spec: ModelSpec, rows: int, itemsize: int) -> int:
    """Estimate the bytes of the activations of `rows` rows, experts included.

    At the peak of a layer, memory holds for each row its input and four vectors as wide as the feed-forward's inner
    layer (gate and up, which are one matrix, and their product), or four as wide as q, k and v together.
    """
    widths = [max(4 * _inner(layer), 4 * _heads(layer)) + spec.hidden_size for layer in spec.layers]
    return max(widths) * rows * itemsize + expert_bytes(spec, rows, itemsize)


def expert_bytes(spec: ModelSpec, rows: int, itemsize: int) -> int:
    """Return the bytes on a GPU for the chosen experts of `rows` rows: their inner activations and their outputs."""
    found = [
        layer.feed_forward.chosen * (layer.feed_forward.expert.size + spec.hidden_size)
        for layer in spec.layers
        if isinstance(layer.feed_forward, Experts)
    ]
    return max(found, default=0) * rows * itemsize


def prefill_rows(spec: ModelSpec, dtype: torch.dtype, device: torch.device, memory: int | None) -> int:
    """Return the prefill rows of one step: enough to use the machine well, few enough that a cancel takes effect soon.

    On a GPU with `memory` bytes for the model and everything around it (None: unknown), there are no more than
    CHUNK_PART allows, but at least LEAST_ROWS.
    """
    if device.type != "cuda":
        return CPU_ROWS
    rows = MOST_ROWS
    while (
        rows > LEAST_ROWS
        and memory is not None
        and CHUNK_PART * chunk_bytes(spec, rows, dtype.itemsize) > memory
    ):
        rows //= 2
    return rows


def computing_bytes(
    spec: ModelSpec,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: str = "auto",
    on_host: bool = False,
) -> int:
    """Estimate the GPU memory, in bytes, that steps of up to `rows` rows take beside the weights and the KV cache.

    `kv_dtype` is as in `kv_row`. `on_host` says whether there may be experts in host memory. Return 0 for a CPU:
    there the KV cache is limited to a share of the memory that leaves enough for everything else.
    """
    if device.type != "cuda":
        return 0
    activations = chunk_bytes(spec, rows, dtype.itemsize)
    more = EXPANDED_BYTES * (kv_dtype in QUANTIZED) + EXPANDING_BYTES * on_host
    return max(activations, SCRATCH_BYTES + activations // 2) + GRAPH_BYTES + more


def _inner(layer: Layer) -> int:
    """Return the inner width of a layer's feed-forward; with experts, that of the shared expert (0 without one)."""
    feed = layer.feed_forward
    if feed is None:
        return 0
    if isinstance(feed, FeedForward):
        return feed.size
    return feed.shared.size if feed.shared is not None else 0


def _heads(layer: Layer) -> int:
    """Return the width of q, k and v together, or that of the inputs of a convolution or a recurrence and the rows
    before."""
    mixer = layer.mixer
    if mixer is None:
        return 0
    if isinstance(mixer, ShortConvolution):
        return (2 + mixer.width) * mixer.size
    if isinstance(mixer, Recurrence):
        return 3 * mixer.log_size + 2 * mixer.output_size
    if isinstance(mixer, LatentAttention):
        return mixer.heads * (2 * mixer.head_dim + mixer.v_dim)
    return (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
