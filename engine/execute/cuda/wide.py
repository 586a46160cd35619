"""Products of decode steps of many rows, by kernels that start before the previous kernel has ended."""

import torch
import triton
from torch import Tensor

from engine.execute.cuda.experts import activation
from engine.execute.cuda.prefill import LIBRARY, apply_gate
from engine.execute.cuda.tiles import WideTile, choose_wide_tile
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.wide_linear import wide_linear_kernel
from models.network import Linear
from models.spec import FeedForward


class WideProducts:
    """Implements `Products`, with `wide_linear_kernel` for small ones: those of the library start late."""

    def __init__(self, pdl: bool) -> None:
        """`pdl` turns on programmatic dependent launch (sm_90 and later)."""
        self.pdl = pdl

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """See `Products`."""
        return self._product(linear, x, None, False)

    def gated(self, linear: Linear, x: Tensor, spec: FeedForward) -> Tensor:
        """See `Products`."""
        return self._product(linear, x, spec, False)

    def parts(self, linear: Linear, x: Tensor, place: Tensor | None = None) -> Tensor:
        """See `Products`."""
        return self._product(linear, x, None, linear.bias is None)

    def _product(self, linear: Linear, x: Tensor, gate: FeedForward | None, apart: bool) -> Tensor:
        tile = None
        if linear.is_plain:
            rows = max(triton.next_power_of_2(x.shape[0]), 16)
            outputs, inputs = linear.weight.shape
            tile = choose_wide_tile(
                rows, outputs // (1 if gate is None else 2), inputs, gate is not None, apart
            )
        if tile is None:
            product = LIBRARY.product(linear, x)
            return product if gate is None else apply_gate(product, gate, self.pdl)
        return wide_product(linear, x, gate, tile, self.pdl)


def wide_product(linear: Linear, x: Tensor, gate: FeedForward | None, tile: WideTile, pdl: bool) -> Tensor:
    """Multiply: [T, columns] -> [T, rows], half as many if gated; fp32 [tile.split, T, rows] if columns are split."""
    lines, inputs = linear.weight.shape
    outputs, pair = (lines, 1) if gate is None else (lines // 2, 2)
    count = x.shape[0]
    if tile.split > 1:
        out = torch.empty(tile.split, count, outputs, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    kernel = wide_linear_kernel[(triton.cdiv(outputs, tile.outputs // pair), tile.split)](
        x,
        linear.weight,
        linear.weight if linear.bias is None else linear.bias,
        out,
        COUNT=count,
        ROWS=max(triton.next_power_of_2(count), 16),
        N=outputs,
        K=inputs,
        BIAS=linear.bias is not None,
        GATED=gate is not None,
        OUTPUTS=tile.outputs,
        COLUMNS=tile.columns,
        STAGES=tile.stages,
        SPLIT=tile.split,
        DOWN=tile.down,
        WARPS=tile.warps,
        PDL=pdl,
        **(activation(gate) if gate is not None else {}),
        num_warps=tile.warps,
        launch_pdl=pdl,
    )
    split_alike(kernel)
    return out
