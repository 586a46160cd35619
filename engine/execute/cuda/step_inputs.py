"""What a decode step begins with: the embeddings of its tokens and, in some networks, a second input of every layer.

The plain twins are `embed` and `layer_inputs` of `Decoder` in `models/reference/decoder.py`.
"""

import torch
import triton
from torch import Tensor

from engine.execute.cuda.add_norm import AddNorm, add_norm, normed
from engine.execute.cuda.packed import matrix_args
from engine.execute.cuda.prefill import input_gate
from engine.execute.cuda.slots import StepInput
from engine.execute.cuda.step_products import StepProducts
from engine.kernels.triton.embedding import embedding_kernel
from engine.kernels.triton.launch import split_alike
from models.network import LayerInputWeights, Network, Weight
from models.spec import LayerInputs
from models.weights.formats.blocks import COLUMNS


def look_up(
    embedding: Weight, active: Tensor, token: Tensor, rows: int, out: Tensor, scale: float = 1.0
) -> None:
    """Write `scale` times the embedding of token[active[row]] to each row of `out`; zeros where `active` is -1."""
    size = out.shape[1]
    block = 1024 if embedding.planes is None else COLUMNS
    kernel = embedding_kernel[(triton.cdiv(size, block), rows)](
        active,
        token,
        **matrix_args(embedding),
        out=out,
        SIZE=size,
        BLOCK=block,
        SCALE=scale,
    )
    split_alike(kernel)


def rounded_scale(scale: float, dtype: torch.dtype) -> float:
    """Round the scale of an embedding to the dtype of the network, as the reference does."""
    return float(torch.tensor(scale, dtype=dtype))


class StepInputs:
    """Computes the inputs of all layers in a step of few rows, and adds each to its layer's result.

    A row has the bits that it has alone.
    """

    def __init__(
        self,
        network: Network,
        spec: LayerInputs,
        weights: LayerInputWeights,
        rows: int,
        products: StepProducts,
        pdl: bool,
    ) -> None:
        """Allocate buffers for steps of up to `rows` rows. `pdl` turns on programmatic dependent launch."""
        self._network = network
        self._spec, self._weights = spec, weights
        self._products = products
        self._pdl = pdl
        self._scale = rounded_scale(spec.size**0.5, network.dtype)

        def buffer(*shape: int, dtype: torch.dtype = network.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=network.device)

        self._inputs, self._projected = (buffer(rows, len(network.layers) * spec.size) for _ in range(2))
        self._inner = buffer(rows, spec.size)
        self._factor = buffer(1, dtype=torch.float32).fill_(2**-0.5)

    def begin(self, given: StepInput, x: Tensor, rows: int) -> None:
        """Enqueue the inputs of all layers, for the first layer's x [rows, hidden]."""
        spec, weights = self._spec, self._weights
        scale = self._network.spec.hidden_size**-0.5
        look_up(weights.embedding, given.active, given.token, rows, self._inputs, self._scale)
        self._products.run(rows, x, weights.projection, self._projected, scale=scale)
        projected, inputs = (part[:rows].view(-1, spec.size) for part in (self._projected, self._inputs))
        between = AddNorm(normed(spec.norm, weights.norm), 1.0, None, self._factor)
        split_alike(add_norm(projected, inputs, between, inputs, inputs, self._pdl))

    def add(self, rows: int, index: int, x: Tensor) -> None:
        """Enqueue the sum of layer `index`'s result x [rows, hidden] with its input, times the layer's scalar."""
        spec, layer, products = self._spec, self._network.layers[index], self._products
        assert layer.input is not None
        own = self._inputs[:rows, index * spec.size : (index + 1) * spec.size]
        products.run(rows, x, layer.input.gate, self._inner, gate=input_gate(spec), up=own)
        after = AddNorm(normed(spec.post_norm, layer.input.post_norm), 1.0, None, layer.scalar)
        products.add(rows, self._inner, layer.input.out, x, after)
