"""Products of decode steps of many rows, by kernels that start before the previous kernel has ended."""

import torch
import triton
from torch import Tensor

from engine.execute.cuda.experts import activation
from engine.execute.cuda.prefill import LIBRARY, apply_gate
from engine.execute.cuda.tiles import (
    WarpgroupTile,
    WideTile,
    choose_warpgroup_tile,
    choose_wide_tile,
    rounded,
)
from engine.kernels.triton.gluon import described
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.warpgroup_linear import LINES, warpgroup_linear_kernel
from engine.kernels.triton.wide_linear import wide_linear_kernel
from models.network import Linear
from models.spec import FeedForward


class WideProducts:
    """Implements `Products`, with kernels of our own where those of the library, which start late, are slower."""

    def __init__(self, pdl: bool, warpgroups: bool = False) -> None:
        """`pdl` turns on programmatic dependent launch (sm_90 and later), `warpgroups` `warpgroup_linear_kernel`."""
        self.pdl = pdl
        self._warpgroups = warpgroups

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
        if linear.is_plain:
            outputs, inputs = linear.weight.shape
            cut = outputs // (1 if gate is None else 2), inputs, gate is not None, apart
            aligned = linear.weight.data_ptr() % 16 == 0
            group = choose_warpgroup_tile(x.shape[0], *cut) if self._warpgroups and aligned else None
            if group is not None:
                return warpgroup_product(linear, x, gate, group, self.pdl)
            tile = choose_wide_tile(rounded(x.shape[0]), *cut)
            if tile is not None:
                return wide_product(linear, x, gate, tile, self.pdl)
        product = LIBRARY.product(linear, x)
        return product if gate is None else apply_gate(product, gate, self.pdl)


def wide_product(linear: Linear, x: Tensor, gate: FeedForward | None, tile: WideTile, pdl: bool) -> Tensor:
    """Multiply: [T, columns] -> [T, rows], half as many if gated; fp32 [tile.split, T, rows] if columns are split."""
    pair = 1 if gate is None else 2
    out = _room(linear, x, gate, tile.split)
    outputs = out.shape[-1]
    kernel = wide_linear_kernel[(triton.cdiv(outputs, tile.outputs // pair), tile.split)](
        x,
        linear.weight,
        linear.weight if linear.bias is None else linear.bias,
        out,
        COUNT=x.shape[0],
        ROWS=rounded(x.shape[0]),
        N=outputs,
        K=linear.weight.shape[1],
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


def warpgroup_product(
    linear: Linear, x: Tensor, gate: FeedForward | None, tile: WarpgroupTile, pdl: bool
) -> Tensor:
    """Multiply as `wide_product` does, on sm_90 and with x contiguous."""
    rows = rounded(x.shape[0])
    out = _room(linear, x, gate, tile.split)
    kernel = warpgroup_linear_kernel[(triton.cdiv(out.shape[-1], LINES.value), tile.split)](
        described(x, rows, tile.columns),
        described(linear.weight, LINES.value, tile.columns),
        linear.weight if linear.bias is None else linear.bias,
        out,
        COUNT=x.shape[0],
        ROWS=rows,
        N=out.shape[-1],
        K=linear.weight.shape[1],
        BIAS=linear.bias is not None,
        GATED=gate is not None,
        COLUMNS=tile.columns,
        STAGES=tile.stages,
        SPLIT=tile.split,
        PDL=pdl,
        **(activation(gate) if gate is not None else {}),
        num_warps=4,
        launch_pdl=pdl,
    )
    split_alike(kernel)
    return out


def _room(linear: Linear, x: Tensor, gate: FeedForward | None, split: int) -> Tensor:
    """Return where a product goes: [T, outputs] like x, or fp32 [split, T, outputs] if columns are split."""
    outputs = linear.weight.shape[0] // (1 if gate is None else 2)
    if split > 1:
        return torch.empty(split, x.shape[0], outputs, dtype=torch.float32, device=x.device)
    return torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
