"""The products of a decode step of few rows, each fused with the operations before and after it.

The plain twin is `Decoder` in `models/reference/decoder.py`. `fused_program.py` calls them.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
from torch import Tensor

from engine.execute.cuda.add_norm import AddNorm, Normed, add_norm, wants_norm
from engine.execute.cuda.all_reduce import AllReduce
from engine.execute.cuda.decode_attention import Partials
from engine.execute.cuda.experts import activation
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.packed import ordered_plane_args
from engine.execute.cuda.tiles import FEW, SMALLEST_OUTPUTS, by_head
from engine.kernels.triton.columns import SPAN
from engine.kernels.triton.fused_norm import add_prepared_kernel
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.linear import HeadInputs, linear_kernel
from engine.kernels.triton.packed_linear import packed_linear_kernel
from models.network import Linear, Network, Weight
from models.spec import FeedForward


class StepProducts:
    """Launches the products of steps of up to so many rows; all layers share its buffers."""

    def __init__(
        self, network: Network, rows: int, pdl: bool, cuts: KernelConfigs, exchange: AllReduce | None
    ) -> None:
        """`pdl` turns on programmatic dependent launch. `exchange` connects the other ranks of a divided network."""
        size = network.spec.hidden_size

        def buffer(*shape: int, dtype: torch.dtype = network.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=network.device)

        self.cuts = cuts
        self.rows = rows
        self._pdl = pdl
        self._exchange = exchange
        # So that 12B's gate and up keep what they hold in registers; other networks keep their order of sums.
        self._by_span = any(layer.attention_post_norm is not None for layer in network.spec.layers)
        # With inputs of layers (Gemma 4 E2B), norms of whole rows are faster, on an H200.
        self._adds_prepared = network.layer_inputs is None
        self._out = buffer(rows, size)
        self._prepared = buffer(rows, size)
        self._square_sums = buffer(rows * triton.cdiv(size, SMALLEST_OUTPUTS), dtype=torch.float32)
        self.part = buffer(rows if exchange is not None else 0, size, dtype=torch.float32)
        """The summands of a divided network, before the ranks are summed."""

    def add(
        self,
        rows: int,
        given: Tensor,
        layer: Linear,
        x: Tensor,
        between: AddNorm,
        parts: Partials | None = None,
        reader: Linear | None = None,
        norm: Normed | None = None,
    ) -> int:
        """Add the product to x, as `between` says. It norms its input if there is a `norm`; with `parts`, it combines
        that.

        The `reader` is the product that reads x next, and norms it by the norm of `between`. Return the number of
        programs that have prepared x for that; 0 if it is not prepared, as it never is without a reader.
        """
        exchange, here = self._exchange, x[:rows]
        after, scale, following, factor = between.post, between.scale, between.norm, between.factor
        whole = exchange is None and len(layer.parts) == 1
        if after is None and factor is None and exchange is None:
            prepares = reader is not None and wants_norm(reader) and whole and norm is None
            following = following if prepares else None
            programs = self.run(
                rows, given, layer, x, norm=norm, residual=x, scale=scale, following=following, parts=parts
            )
            return 0 if following is None else programs
        if self._adds_prepared and after is not None and whole and norm is None:
            programs = self.run(rows, given, layer, self._out, following=after, parts=parts)
            self._add_prepared(rows, x, programs, between)
            return 0
        if exchange is None:
            self.run(rows, given, layer, self._out, norm=norm, parts=parts)
        else:
            part_scale = scale if after is None else 1.0
            self.run(rows, given, layer, self.part, norm=norm, scale=part_scale, parts=parts)
            if after is None:
                exchange.add(self.part[:rows], here, here)
                return 0
            exchange.add(self.part[:rows], None, self._out[:rows])
        kernel = add_norm(self._out, x, AddNorm(after, scale, None, factor), here, x, self._pdl)
        split_alike(kernel)
        return 0

    def _add_prepared(self, rows: int, x: Tensor, programs: int, between: AddNorm) -> None:
        """Add what so many programs of a product have prepared to x, as `between` says."""
        size, warps = x.shape[1], 4
        kernel = add_prepared_kernel[(triton.cdiv(size, SPAN.value * warps),)](
            x,
            self._prepared,
            self._square_sums,
            COUNT=rows,
            K=size,
            PREPARED=programs,
            WARPS=warps,
            PDL=self._pdl,
            **between.after_prepared(),
            num_warps=warps,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)

    def run(
        self,
        rows: int,
        x: Tensor,
        layer: Linear,
        out: Tensor,
        *,
        norm: Normed | None = None,
        residual: Tensor | None = None,
        gate: FeedForward | None = None,
        up: Tensor | None = None,
        scale: float = 1.0,
        cap: float = 0.0,
        prepared: int = 0,
        following: Normed | None = None,
        parts: Partials | None = None,
        beside: Sequence[tuple[Linear, Tensor]] = (),
        row_gates: Tensor | None = None,
        leads: bool = False,
        follows: bool = False,
        heads: HeadInputs | None = None,
    ) -> int:
        """Run `linear_kernel` for each part of the layer, gated or activated as `gate` says; return its number of
        programs.

        With `prepared`, that many programs have prepared x for the norm. With `up` [rows, outputs], its rows any
        distance apart, the product is not halved but gates that. A layer of one part prepares its output for the norm
        `following`. With `parts`, x is not read but combined from them. `beside` are other layers that read the
        same x, and their outputs, which are not gated. The sigmoid of row_gates [rows] multiplies each row. If it
        `leads`, the next launch may run beside it; if it `follows`, it runs beside the one before, which lets it.
        `heads` says that outputs are products of other columns of x for each head.
        """
        programs, weighs = 0, norm or following
        added = residual if up is None else up
        jobs = [(layer, *each, out, gate) for each in _places(layer)]
        for other, into in beside:
            jobs += [(other, *each, into, None) for each in _places(other)]
        for number, (own, weight, place, into, how) in enumerate(jobs):
            gated = how is not None and how.gated and up is None
            outputs = weight.rows // (2 if gated else 1)
            first = place // (2 if gated else 1)
            kind = weight.format if weight.planes is not None else None
            tile = self.cuts.product(rows, outputs, weight.columns, gated, kind)
            if heads is not None:
                tile = by_head(tile, heads.outputs, weight.columns, kind)
            limit = {}
            if kind is None:
                launch, matrix = linear_kernel, {"weight": weight.data, "FOLDS": tile.folds}
                matrix["BY_SPAN"] = self._by_span and norm is not None
                if norm is None and rows <= FEW and (tile.folds, tile.warps, tile.tiles) == (2, 8, 1):
                    limit = {"maxnreg": 128}  # so that two programs fit
            else:
                launch = packed_linear_kernel
                matrix = {**ordered_plane_args(weight), "STRIDE": into.shape[1], "LANES": tile.lanes}
                if rows > FEW // 2 and tile.lanes > 1 and tile.warps >= 8:  # as above
                    limit = {"maxnreg": 128}
            programs = triton.cdiv(outputs, tile.outputs(gated))
            kernel = launch[(programs,)](
                self._prepared if prepared else x,
                bias=weight.data if own.bias is None else own.bias[first:],
                norm_weight=weighs[1].weight if weighs is not None else x,
                residual=x if added is None else added[:, first:],
                out=into.view(-1)[first:],
                COUNT=rows,
                N=outputs,
                K=weight.columns,
                EPS=norm[0].eps if norm is not None else 0.0,
                NORM=norm is not None,
                BIAS=own.bias is not None,
                GATED=gated,
                RESIDUAL=added is not None,
                BESIDE=0 if up is None else up.stride(0),
                WARPS=tile.warps,
                TILES=tile.tiles,
                AHEAD=tile.ahead,
                PDL=self._pdl,
                OFFSET=weighs[0].offset if weighs is not None else 0.0,
                **matrix,
                GATE=activation(how),
                **(parts.arguments() if parts is not None else {}),
                SCALE=scale,
                CAP=cap,
                prepared=self._prepared,
                square_sums=self._square_sums,
                PREPARED=prepared,
                PREPARES=programs if following is not None else 0,
                LEADS=number == 0 and not follows and (leads or len(jobs) > 1),
                FOLLOWS=number > 0 or follows,
                row_gates=row_gates,
                HEADS=heads,
                num_warps=tile.warps,
                launch_pdl=self._pdl,
                **limit,
            )
            split_alike(kernel)
        return programs


def _places(layer: Linear) -> Iterator[tuple[Weight, int]]:
    """Yield each part of a layer and the number of its first row."""
    first = 0
    for weight in layer.parts:
        yield weight, first
        first += weight.rows
