"""The attention seam: a network computes q, k and v; the implementation of this protocol keeps the KV and attends."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from models.network import DeltaNetWeights, Mamba2Weights
from models.recurrences import Recurrence


class Attention(Protocol):
    """The attention of one step over a flat batch of T tokens; causal within each sequence."""

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v into the cache of this layer and attend with q.

        If the layer reads the rows of another layer (`kv_from` of its spec), k and v have no heads: [T, 0, head_dim].

        q is [T, num_attention_heads, head_dim]; k and v are [T, num_key_value_heads, head_dim]; all are in the model's
        dtype, and q and k are already normed and rotated. They may be views of one tensor that the next layer does not
        reuse. Scale, window and other parameters are those of the layer's spec. Returns
        [T, num_attention_heads, head_dim].
        """


@runtime_checkable
class ConvolutionRows(Protocol):
    """What the attention of a step also does for a network with short convolutions."""

    def last_rows(self, layer_index: int, x: Tensor, width: int) -> list[Tensor]:
        """Write the inputs x [T, size] of a convolution into the cache of this layer, and return what its rows see.

        Returns `width` tensors [T, size] in the dtype of x: for each row the input `width` - 1 rows before it in its
        sequence, and so on to its own. Before the first row of a sequence there are zeros.
        """


@runtime_checkable
class LatentRows(Protocol):
    """What the attention of a step also does for a network with latent attention."""

    def latent_rows(self, layer_index: int, rows: Tensor) -> Iterable[tuple[int, Tensor]]:
        """Write the rows [T, numbers] of a step into the cache of this layer, and return what its sequences see.

        For each sequence, in the order of the step: how many of the rows are its own, and all of its rows up to its
        last one in the dtype of `rows`, [those before and its own, numbers].
        """


@dataclass(frozen=True, slots=True)
class Walk:
    """The recurrence of a layer: (log rows [conv_width - 1 + n, log_size], the fp32 state before the last n of them) ->
    their outputs [n, output_size] and the state after them (see `models.reference.delta_net.walk`)."""

    compute: Callable[[Any, Any, Tensor, Tensor], tuple[Tensor, Tensor]]
    """The same function of the spec and the weights too."""
    spec: Recurrence
    weights: DeltaNetWeights | Mamba2Weights

    def __call__(self, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute it in plain torch."""
        return self.compute(self.spec, self.weights, rows, state)


@runtime_checkable
class RecurrentRows(Protocol):
    """What the attention of a step also does for a network with recurrent layers."""

    def recur(self, layer_index: int, rows: Tensor, walk: Walk) -> Tensor:
        """Write the log rows [T, log_size] of a step, and return what `walk` makes of them [T, output_size].

        It walks over the rows of each sequence alone, after the conv_width - 1 rows before them and from the state
        after those; before the first row of a sequence rows and state are zeros. `walk` changes none of its arguments.
        What it returns has the device of `rows`, and a dtype that the layer chooses.
        """
