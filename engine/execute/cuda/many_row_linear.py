"""Products of decode steps of many rows, by kernels that start before the previous kernel has ended."""

from typing import Any

import torch
import triton
from torch import Tensor

from engine.execute.cuda.experts import activation
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.prefill import LIBRARY, apply_halves
from engine.execute.cuda.tiles import WarpgroupTile, WideTile, rounded
from engine.kernels.triton.gluon import described
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.warpgroup_linear import LINES, warpgroup_linear_kernel
from engine.kernels.triton.wide_linear import wide_linear_kernel
from models.network import Linear
from models.spec import FeedForward


class WideProducts:
    """Implements `Products`, with kernels of our own where those of the library, which start late, are slower."""

    def __init__(self, pdl: bool, cuts: KernelConfigs, warpgroups: bool = False) -> None:
        """`pdl` turns on programmatic dependent launch (sm_90 and later), `warpgroups` `warpgroup_linear_kernel`."""
        self.pdl = pdl
        self._cuts = cuts
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
            gated = gate is not None and gate.gated
            cut = outputs // (2 if gated else 1), inputs, gated, apart
            aligned = linear.weight.data_ptr() % 16 == 0
            group = self._cuts.warpgroups(x.shape[0], *cut) if self._warpgroups and aligned else None
            if group is not None:
                return warpgroup_product(linear, x, gate, group, self.pdl)
            tile = self._cuts.wide(rounded(x.shape[0]), *cut)
            if tile is not None:
                return wide_product(linear, x, gate, tile, self.pdl)
        product = LIBRARY.product(linear, x)
        return product if gate is None else apply_halves(product, gate, self.pdl)


def wide_product(linear: Linear, x: Tensor, gate: FeedForward | None, tile: WideTile, pdl: bool) -> Tensor:
    """Multiply: [T, columns] -> [T, rows], half as many if gated; fp32 [tile.split, T, rows] if columns are split."""
    given = _arguments(linear, x, gate, tile, pdl)
    programs = triton.cdiv(given["N"], tile.outputs // (2 if given["GATED"] else 1))
    kernel = wide_linear_kernel[(programs, tile.split)](
        x,
        linear.weight,
        OUTPUTS=tile.outputs,
        DOWN=tile.down,
        WARPS=tile.warps,
        num_warps=tile.warps,
        **given,
    )
    split_alike(kernel)
    out: Tensor = given["out"]
    return out


def warpgroup_product(
    linear: Linear, x: Tensor, gate: FeedForward | None, tile: WarpgroupTile, pdl: bool
) -> Tensor:
    """Multiply as `wide_product` does, on sm_90."""
    given = _arguments(linear, x, gate, tile, pdl)
    kernel = warpgroup_linear_kernel[(triton.cdiv(given["N"], LINES.value), tile.split)](
        described(x, given["ROWS"], tile.columns),
        described(linear.weight, LINES.value, tile.columns),
        num_warps=4,
        **given,
    )
    split_alike(kernel)
    out: Tensor = given["out"]
    return out


def _arguments(
    linear: Linear, x: Tensor, gate: FeedForward | None, tile: WideTile | WarpgroupTile, pdl: bool
) -> dict[str, Any]:
    """Return the named arguments that both kernels take, with room for the product in `out`."""
    lines, inputs = linear.weight.shape
    gated = gate is not None and gate.gated
    count, outputs = x.shape[0], lines // 2 if gated else lines
    whole = tile.split == 1
    shape = (count, outputs) if whole else (tile.split, count, outputs)
    return {
        "bias": linear.weight if linear.bias is None else linear.bias,
        "out": torch.empty(shape, dtype=x.dtype if whole else torch.float32, device=x.device),
        "COUNT": count,
        "ROWS": rounded(count),
        "N": outputs,
        "K": inputs,
        "BIAS": linear.bias is not None,
        "GATED": gated,
        "COLUMNS": tile.columns,
        "STAGES": tile.stages,
        "SPLIT": tile.split,
        "PDL": pdl,
        "GATE": activation(gate),
        "launch_pdl": pdl,
    }
