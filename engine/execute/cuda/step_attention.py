"""The attention, convolutions and recurrences of a decode step, between the two products around them.

The plain twins are in `models/reference/decoder.py` and `engine/attention/sdpa.py`. `fused_program.py` calls them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.cuda.attend_mma import (
    attend_mma,
    by_tensor_cores,
    can_use_tensor_cores,
    choose_own_cut,
    choose_shared_cut,
)
from engine.execute.cuda.convolution import convolution_groups, convolve, most_seen, seen_in_step
from engine.execute.cuda.decode_attention import AttentionInput, AttentionShape, Partials, attend, parts_left
from engine.execute.cuda.latent_step import StepLatents
from engine.execute.cuda.prefill import Projected
from engine.execute.cuda.prefix_groups import KVShape, choose_sharing
from engine.execute.cuda.recurrence import recur
from engine.execute.cuda.slots import StepInput
from engine.execute.cuda.step_products import StepProducts
from engine.execute.cuda.tiles import (
    FEW,
    MOST_CHUNKS,
    SMALLEST,
    choose_chunking,
    choose_chunkings,
    most_chunks,
)
from models.network import ConvolutionWeights, DeltaNetWeights, LatentWeights, Mamba2Weights, Network
from models.recurrences import Recurrence
from models.spec import LatentAttention, same_heads


class StepAttention:
    """Attends, convolves and recurs in all layers, which share its buffers."""

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        sizes: tuple[int, int],
        pdl: bool,
        products: StepProducts,
        small: bool,
        shares: bool,
    ) -> None:
        """Allocate for steps of at most `sizes` rows: of those that keep each row's bits, and of all others.

        `small` is as in `AttentionShape`; `shares` says whether sequences may read a common prefix together.
        """
        spec, (few, most) = network.spec, sizes

        def buffer(*shape: int, dtype: torch.dtype = network.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=network.device)

        self._products = products
        self._network = network
        self._cache = cache
        self._pdl = pdl
        self._small = small
        self._machine = (1, 0)
        if network.device.type == "cuda":
            device = torch.cuda.get_device_properties(network.device)
            self._machine = device.multi_processor_count, device.shared_memory_per_multiprocessor
        self.kv: KVShape | None = None
        """See `DecodeProgram`."""
        if shares and spec.attentions and same_heads(spec):
            self.kv = KVShape(spec.attention.groups, cache.block_size, 2 * cache.row.nbytes)
        self._latents: StepLatents | None = None
        if any(isinstance(layer.mixer, LatentAttention) for layer in spec.layers):
            self._latents = StepLatents(network, cache, most, products, pdl)
        self.mixed = buffer(
            most * max(layer.out.columns for layer in network.layers if layer.mixer is not None)
        )
        """The result of the last layer computed: [rows, inputs of its output projection], side by side."""
        width = most_seen(spec)
        self._seen = {
            group: buffer(most, width, dtype=torch.int32) for group in convolution_groups(spec, cache)
        }
        parts = max(
            rows * (most_chunks(rows) if rows > FEW else MOST_CHUNKS)
            for rows in {few, min(most, 31), min(most, 127), most}
        )
        attentions = spec.attentions.values()
        width = max((each.heads * each.head_dim for each in attentions), default=0)
        self._partial = buffer(parts * width, dtype=torch.float32)
        heads = max((each.heads for each in attentions), default=0)
        self._lse = buffer(parts * heads, dtype=torch.float32)
        self._alone = buffer(most, dtype=torch.int32), buffer(16, dtype=torch.int32).fill_(-1)

    def begin(self, given: StepInput, rows: int) -> None:
        """Look up for all convolutions, if there are any, where the rows of the step find those before them."""
        for group, seen in self._seen.items():
            seen_in_step(given, group, seen[:rows], self._cache.block_size)

    def run(
        self,
        given: StepInput,
        index: int,
        projections: Projected,
        limit: int,
        own: int = 0,
        alone: StepInput | None = None,
    ) -> Partials | None:
        """Attend, convolve or recur, into `mixed`. What is kept of the new tokens goes into the cache.

        With `alone`, which presents each row as the only one in its block, the layer's own K and V are written first,
        because rows of the same step read them. Parts are returned if they are to be combined by the next product.
        """
        mixer, group = self._network.layers[index].mixer, self._cache.groups[index]
        projected, gates, rows = projections.first, projections.gates, len(projections.first)
        if isinstance(mixer, ConvolutionWeights):
            convolve(mixer, projected, self._cache.k[index], self._seen[group], self.mixed, self._pdl)
            return None
        if isinstance(mixer, LatentWeights):
            assert self._latents is not None
            self._latents.run(given, index, projections, limit, self.mixed, alone)
            return None
        if isinstance(mixer, DeltaNetWeights | Mamba2Weights):
            net = self._network.spec.layers[index].mixer
            assert isinstance(net, Recurrence)
            recur(net, mixer, given, self._cache, index, projections, self.mixed, self._pdl)
            return None
        spec, layer = self._network.spec.layers[index].attention, self._network.layers[index].attention
        shape = AttentionShape(spec, self._cache.block_size, self._pdl, *self._machine, self._small)
        step = AttentionInput(
            projected,
            layer.head_norm,
            layer.rotary,
            self._cache.k[index],
            self._cache.v[index],
            given.active,
            given.tables[group],
            given.counters,
            self._partial,
            self._lse,
            layer.sinks,
            self._cache.told(index),
            gates,
        )
        itemsize = self._cache.k[index].element_size()
        sharing = None
        possible = can_use_tensor_cores(shape, step)
        if own and self.kv is not None and possible:
            sharing = choose_sharing(rows, self.kv.group)
        if sharing is not None:
            cut = choose_shared_cut(shape, rows, sharing, own, itemsize)
            attend_mma(shape, step, self.mixed, rows, sharing, cut, given.shared, given.members)
            return None
        usual = by_tensor_cores(shape, step, rows, limit)
        cuts = self._products.cuts
        split = cuts.split(rows, spec, shape.dim, usual, possible)
        by_tensor = usual if split is None else split.tensor_cores

        def launch(step: AttentionInput, out: Tensor | None, limit: int, overlaps: bool) -> None:
            if by_tensor:
                cut = choose_own_cut(shape, rows, limit, itemsize, split)
                attend_mma(shape, step, out, rows, None, cut, *self._alone, overlaps=overlaps)
            else:
                chunkings = choose_chunkings(rows, limit, shape.programs, spec.window, split)
                attend(shape, step, out, rows, chunkings, overlaps)

        if alone is not None and spec.kv_from is None:
            written = replace(step, tables=alone.tables[group], counters=alone.counters)
            launch(written, None, SMALLEST, True)
        parts = None
        if rows == 1 and not by_tensor and cuts.combines(layer.out):
            parts = parts_left(step, spec, choose_chunking(limit, shape.programs, split))
        launch(step, self.mixed if parts is None else None, limit, alone is None)
        return parts
