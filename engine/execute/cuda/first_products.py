"""The products that the mixers of a decode step of few rows begin with.

All of one input run beside each other: the projections of a mixer, its gates, and those of a mixer beside it.
"""

import torch
from torch import Tensor

from engine.execute.cuda.prefill import Projected
from engine.execute.cuda.step_order import StepReader
from engine.execute.cuda.step_products import StepProducts
from models.network import Linear, Network


class FirstProducts:
    """Computes them for steps of up to so many rows; all layers share its buffers."""

    def __init__(self, network: Network, rows: int, products: StepProducts) -> None:
        """Allocate the buffers: a mixer beside another has its own."""
        self._network = network
        self._products = products
        self._buffers: list[tuple[Tensor, Tensor]] = []
        for beside in (False, True):
            layers = zip(network.spec.layers, network.layers, strict=True)
            mixers = [layer for spec, layer in layers if layer.mixer is not None and spec.beside == beside]
            gates = [layer.gates.rows for layer in mixers if layer.gates is not None]
            sizes = max((layer.projections.rows for layer in mixers), default=0), max(gates, default=0)
            first, second = (torch.zeros(rows * n, dtype=network.dtype, device=network.device) for n in sizes)
            self._buffers.append((first, second))

    def run(self, index: int, reads: StepReader, x: Tensor, rows: int, prepared: int) -> None:
        """Enqueue those of x [rows, hidden] that layer `index` begins with. So many programs have prepared x."""
        spec, products = self._network.spec, list[tuple[Linear, Tensor]]()
        following = index + 1
        both = following < len(spec.layers) and spec.layers[following].beside
        for number in (index, following) if both else (index,):
            layer, found = self._network.layers[number], self.found(number, rows)
            products.append((layer.projections, found.first))
            if layer.gates is not None and found.gates is not None:
                products.append((layer.gates, found.gates))
        (first, out), *beside = products
        self._products.run(rows, x, first, out, norm=reads.norm, prepared=prepared, beside=beside)

    def found(self, index: int, rows: int) -> Projected:
        """Return what layer `index` begins with, for so many rows."""
        layer = self._network.layers[index]
        first, second = self._buffers[self._network.spec.layers[index].beside]
        size, gates = layer.projections.rows, layer.gates
        return Projected(
            first[: rows * size].view(rows, size),
            None if gates is None else second[: rows * gates.rows].view(rows, gates.rows),
        )
