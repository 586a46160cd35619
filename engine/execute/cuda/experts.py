"""Feed-forwards with experts on a GPU, for decode steps of few rows and for many tokens at once.

The host knows neither which experts are chosen nor how often, and never waits to find out.

    few rows, three launches a layer, and two for a shared expert, each of which runs beside the one below it:
        (norm, shared gate and up)    linear_kernel   x -> inner
        norm, router, choice          router_kernel   x -> ids, shares
        (shared down, residual)       linear_kernel   inner, x -> sums
        norm, gate and up, activation gate_up_kernel  ids, x -> inner
        down, shares, sum, residual   down_kernel     ids, shares, inner, sums or x -> x
        (norms of the sums, residual) join_kernel     in place of the residuals, where the layer asks for them
    many tokens: see `engine/kernels/triton/grouped_gemm.py`

The plain twin is `Decoder._mix` in `models/reference/decoder.py`. All experts of a layer are views of one tensor
(`ExpertWeights`), so the address of the first is the address of all. The same holds for the planes of packed experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.execute.cuda.add_norm import AddNorm, Normed, add_norm, normed
from engine.execute.cuda.kernel_configs import table_cuts
from engine.execute.cuda.packed import matrix_args, plane_args
from engine.execute.cuda.tiles import FUSED
from engine.kernels.triton.expert_norms import join_kernel
from engine.kernels.triton.experts import down_kernel, gate_up_kernel, packed_down_kernel
from engine.kernels.triton.grouped_gemm import count_kernel, group_kernel, place_kernel, sum_kernel
from engine.kernels.triton.launch import shared_bytes, split_alike
from engine.kernels.triton.pointwise import Gate
from engine.kernels.triton.routing import choose_kernel, router_kernel
from models.network import ExpertWeights, Linear, Network
from models.spec import Experts, FeedForward

PER = 2
"""Logits that a program of the router computes."""
SCANNED = 4096
"""Pairs of tokens and choices that are read together."""
SUMMED = 1024
"""Numbers of a token that one program sums."""
MOST_TOKENS = 4096
"""Tokens multiplied together: enough to keep the experts busy, and a bound on the memory of their outputs."""


def apart(network: Network) -> bool:
    """Return whether the experts of any layer do not lie one after another in one tensor, as the kernels expect."""
    feeds = (layer.feed_forward for layer in network.layers)
    return any(
        tensor.data_ptr() != tensors[0].data_ptr() + number * tensors[0].nbytes or not tensor.is_contiguous()
        for feed in feeds
        if isinstance(feed, ExpertWeights) and not feed.on_host
        for layers in (
            [expert.gate_up for expert in feed.experts],
            [expert.down for expert in feed.experts],
        )
        for tensors in (
            *zip(*(_tensors(layer) for layer in layers), strict=True),
            [layer.bias for layer in layers if layer.bias is not None],
        )
        for number, tensor in enumerate(tensors)
    )


def _tensors(layer: Linear) -> list[Tensor]:
    """Return the numbers, or the planes, of all parts."""
    return [
        tensor
        for part in layer.parts
        for tensor in ([part.data] if part.planes is None else part.planes.tensors)
    ]


def activation(spec: FeedForward | None) -> Gate | None:
    """Return the constant that describes the activation to kernels; None for plain SiLU, or if there is none."""
    if spec is None:
        return None
    gate = Gate(spec.activation, spec.gain, spec.limit or 0.0, spec.up_offset, not spec.gated)
    return None if gate == Gate() else gate


def inner_norm(
    spec: Experts, weights: ExpertWeights, name: str, other: Normed | None = None
) -> Normed | None:
    """Return the norm inside the mixture that the field `name` of its spec describes; `other` if it has none."""
    return normed(spec.norms.get(name), weights.norms.get(name)) or other


def has_post_norms(spec: Experts) -> bool:
    """Return whether the sum of the chosen experts, or the output of the shared one, is normed."""
    return (spec.expert_post_norm, spec.shared_post_norm) != (None, None)


def norm_rows(x: Tensor, norm: Normed | None) -> Tensor:
    """Return x [T, hidden] normed; x itself if there is no norm."""
    if norm is None:
        return x
    out = torch.empty_like(x)
    add_norm(x, None, AddNorm(None, 1.0, norm), out, x)
    return out


def join(
    spec: Experts,
    weights: ExpertWeights,
    found: Tensor,
    beside: Tensor | None,
    out: Tensor,
    between: AddNorm | None = None,
    pdl: bool = False,
) -> None:
    """Write to `out` the experts' sum `found` and the output `beside` of the shared expert, both normed: [T, hidden].

    With `between`, out is what this is added to, in the way that it says.
    """
    rows, size = out.shape
    block = triton.next_power_of_2(size)
    norms = [inner_norm(spec, weights, name) for name in ("expert_post_norm", "shared_post_norm")]
    norms.append(None if between is None else between.post)
    scales = [out if norm is None else norm[1].weight for norm in norms]
    how = [None if norm is None else (norm[0].eps, norm[0].offset, norm[0].rounds_last) for norm in norms]
    kernel = join_kernel[(rows,)](
        found,
        beside,
        None if between is None else out,
        out,
        *scales,
        SIZE=size,
        BLOCK=block,
        FOUND=how[0],
        BESIDE=how[1],
        NORM=how[2],
        SCALE=1.0 if between is None else between.scale,
        PDL=pdl,
        factor=None if between is None else between.factor,
        num_warps=max(1, min(8, block // 512)),
        launch_pdl=pdl,
    )
    if pdl:
        split_alike(kernel)


class ExpertStep:
    """The experts of a decode step of few rows. All layers share its buffers."""

    def __init__(self, network: Network, rows: int, pdl: bool) -> None:
        """Allocate buffers for steps of up to `rows` rows of a network in which some layers have experts."""
        found = [
            layer.feed_forward for layer in network.spec.layers if isinstance(layer.feed_forward, Experts)
        ]
        self._pdl = pdl
        self._cuts = table_cuts(network.device)

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=network.device)

        chosen = max(experts.chosen for experts in found)
        inner = max(experts.chosen * experts.expert.size for experts in found)
        self._logits = buffer(rows, max(experts.count for experts in found), dtype=torch.float32)
        self._arrived = buffer(rows, dtype=torch.int32)
        self._ids = buffer(rows, chosen, dtype=torch.int32)
        self._shares = buffer(rows, chosen, dtype=torch.float32)
        self._inner = buffer(rows, inner, dtype=network.dtype)
        hidden = network.spec.hidden_size
        self.shared_gates = buffer(rows, 1, dtype=network.dtype)
        """The projections whose sigmoid weights the output of the shared expert."""
        self.sums, self.beside, self.nothing = (buffer(rows, hidden, dtype=network.dtype) for _ in range(3))
        """x and the output of the shared expert. Where their norms keep them apart: the sum of the experts, the output
        of the shared one, and zeros."""

    def route(
        self,
        spec: Experts,
        weights: ExpertWeights,
        norm: Normed,
        active: Tensor,
        x: Tensor,
        rows: int,
        follows: bool = False,
    ) -> None:
        """Choose the experts of x [rows, hidden], which the kernel norms first. Rows that are not `active` get none.

        If it `follows` a product that leads (`linear_kernel`), it runs beside that.
        """
        router, bias = weights.router.weight, weights.router.bias
        hidden = x.shape[1]
        kernel = router_kernel[(triton.cdiv(spec.count, PER), rows)](
            x,
            router,
            bias if bias is not None else router,
            norm[1].weight,
            weights.selection_bias if weights.selection_bias is not None else self._logits,
            active,
            self._logits,
            self._arrived,
            self._ids,
            self._shares,
            COUNT=spec.count,
            CHOSEN=spec.chosen,
            K=hidden,
            EPS=norm[0].eps,
            BIAS=bias is not None,
            SELECTION_BIAS=weights.selection_bias is not None,
            SIGMOID=spec.scoring == "sigmoid",
            RENORMALISE=spec.renormalise,
            PER=PER,
            PDL=self._pdl,
            SCALE=spec.router_scale,
            expert_scales=weights.expert_scales,
            OFFSET=norm[0].offset,
            FACTOR=spec.scale,
            FOLLOWS=follows,
            num_warps=4 if hidden <= 4096 and spec.count <= 128 else 8,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)

    def chosen(self, rows: int, chosen: int) -> tuple[Tensor, Tensor]:
        """Return what `route` wrote: ids int32 [rows, chosen], -1 for rows that are not active, and shares fp32."""
        ids, shares = (words.view(-1)[: rows * chosen] for words in (self._ids, self._shares))
        return ids.view(rows, chosen), shares.view(rows, chosen)

    def begin(self, spec: Experts, weights: ExpertWeights, norm: Normed, x: Tensor, rows: int) -> None:
        """Compute gate and up, and the activation, of the experts that `route` chose for x [rows, hidden]. The next
        launch may run beside it."""
        first, size, hidden = weights.experts[0], spec.expert.size, x.shape[1]
        gated = spec.expert.gated
        (weight,) = first.gate_up.parts
        if weight.planes is None:
            tile = self._cuts.product(FUSED, size, hidden, gated, None)
        else:
            tile = self._cuts.experts(size, hidden, 1, gated, weight.format)
        kernel = gate_up_kernel[(triton.cdiv(size, tile.outputs(gated)), spec.chosen, rows)](
            x,
            self._ids,
            norm_weight=norm[1].weight,
            out=self._inner,
            CHOSEN=spec.chosen,
            N=size,
            K=hidden,
            EPS=norm[0].eps,
            FOLDS=tile.folds,
            **matrix_args(weight),
            WARPS=tile.warps,
            TILES=tile.tiles,
            AHEAD=tile.ahead,
            PDL=self._pdl,
            bias=first.gate_up.bias,
            LANES=tile.lanes,
            GATED=gated,
            GATE=activation(spec.expert),
            OFFSET=norm[0].offset,
            num_warps=tile.warps,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)

    def add(
        self, spec: Experts, weights: ExpertWeights, start: Tensor, out: Tensor, rows: int, scale: float = 1.0
    ) -> None:
        """Write to `out` [rows, hidden] the sum of `start`, which may be the same, and `scale` times the output of the
        experts that have begun."""
        first, size, hidden = weights.experts[0], spec.expert.size, out.shape[1]
        (weight,) = first.down.parts
        matrices: dict[str, Any]
        if weight.planes is None:
            tile = self._cuts.product(FUSED, hidden, spec.chosen * size, False, None)
            launch, matrices = down_kernel, {"weight": weight.data, "FOLDS": tile.folds}
            outputs = 16 // tile.folds
        else:
            tile = self._cuts.experts(hidden, size, spec.chosen, False, weight.format)
            launch, matrices = (
                packed_down_kernel,
                {**plane_args(weight), "TILES": tile.tiles, "LANES": tile.lanes},
            )
            outputs = tile.outputs(False)
        kernel = launch[(triton.cdiv(hidden, outputs), rows)](
            self._inner,
            self._ids,
            self._shares,
            residual=start,
            out=out,
            CHOSEN=spec.chosen,
            N=hidden,
            K=size,
            **matrices,
            WARPS=tile.warps,
            AHEAD=tile.ahead,
            PDL=self._pdl,
            bias=first.down.bias,
            SCALE=scale,
            num_warps=tile.warps,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)


@dataclass(frozen=True, slots=True)
class GroupTile:
    """How the product of a group is cut (see `group_kernel`)."""

    height: int
    width: int
    depth: int
    warps: int

    def stages(self, gated: bool, shared_bytes: int) -> int:
        """Return how many steps along the columns are loaded ahead, in bf16, in `shared_bytes` of shared memory."""
        return max(1, min(4, shared_bytes // (2 * self.depth * (self.height + self.width * (1 + gated)))))


def choose_group_tile(pairs: int, experts: int) -> GroupTile:
    """Return a tile about as high as an expert has tokens, given the pairs of tokens and choices. Not yet measured."""
    if pairs <= 16 * experts:
        return GroupTile(16, 64, 128, 4)
    if pairs <= 64 * experts:
        return GroupTile(64, 128, 64, 4)
    return GroupTile(128, 128, 64, 8)


def choose(spec: Experts, weights: ExpertWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the experts of x [T, hidden], normed unless the router has its own norm; return ids int32 [T, chosen] and
    shares fp32 [T, chosen]."""
    tokens = len(x)
    ids = torch.empty(tokens, spec.chosen, dtype=torch.int32, device=x.device)
    shares = torch.empty(tokens, spec.chosen, dtype=torch.float32, device=x.device)
    if (norm := inner_norm(spec, weights, "router_norm")) is not None:
        x = F.rms_norm(x.float(), x.shape[-1:], norm[1].weight.float() + norm[0].offset, norm[0].eps)
    logits = _logits(weights.router, x)
    if spec.router_scale != 1.0:
        logits *= spec.router_scale
    choose_kernel[(tokens,)](
        logits,
        weights.selection_bias if weights.selection_bias is not None else logits,
        ids,
        shares,
        COUNT=spec.count,
        CHOSEN=spec.chosen,
        SELECTION_BIAS=weights.selection_bias is not None,
        SIGMOID=spec.scoring == "sigmoid",
        RENORMALISE=spec.renormalise,
        expert_scales=weights.expert_scales,
        FACTOR=spec.scale,
        num_warps=4 if spec.count <= 128 else 8,
    )
    return ids, shares


def mix(spec: Experts, weights: ExpertWeights, x: Tensor, beside: Tensor | None) -> Tensor:
    """Return the output of the experts of x [T, hidden], plus `beside`: [T, hidden].

    x is normed, unless the mixture has norms of its own.
    """
    out, at_once = torch.empty_like(x), None if has_post_norms(spec) else beside
    for start in range(0, len(x), MOST_TOKENS):
        part = slice(start, start + MOST_TOKENS)
        _mix(spec, weights, x[part], at_once[part] if at_once is not None else None, out[part])
    if has_post_norms(spec):
        join(spec, weights, out, beside, out)
    return out


def _mix(spec: Experts, weights: ExpertWeights, x: Tensor, beside: Tensor | None, out: Tensor) -> None:
    tokens, hidden = x.shape
    pairs = tokens * spec.chosen
    ids, shares = choose(spec, weights, x)
    tile = choose_group_tile(pairs, spec.count)
    order, tiles = _sorted(ids, spec.count, tile.height)
    first, x = weights.experts[0], norm_rows(x, inner_norm(spec, weights, "expert_norm"))
    inner = torch.empty(pairs, spec.expert.size, dtype=x.dtype, device=x.device)
    _multiply(x, first.gate_up, order, tiles, inner, spec.chosen, tile, spec.expert)
    found = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    _multiply(inner, first.down, order, tiles, found, spec.chosen, tile, None)
    block = min(SUMMED, triton.next_power_of_2(hidden))
    sum_kernel[(tokens, triton.cdiv(hidden, block))](
        found,
        shares,
        beside if beside is not None else x,
        out,
        CHOSEN=spec.chosen,
        N=hidden,
        BESIDE=beside is not None,
        BLOCK=block,
        num_warps=4,
    )


def _logits(router: Linear, x: Tensor) -> Tensor:
    """Return fp32 [T, experts], computed in fp32: rounded logits would be equal too often."""
    bias = router.bias.float() if router.bias is not None else None
    return F.linear(x.float(), router.weight.float(), bias)


def _sorted(ids: Tensor, experts: int, height: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of ids [T, chosen] by expert and cut them into tiles; see `place_kernel`."""
    pairs = ids.numel()
    most = min(pairs, pairs // height + experts)
    words = torch.empty(experts + pairs + 3 * most, dtype=torch.int32, device=ids.device)
    counts, order, tiles = torch.split(words, [experts, pairs, 3 * most])
    block = min(SCANNED, triton.next_power_of_2(pairs))
    count_kernel[(experts,)](ids, counts, pairs, BLOCK=block, num_warps=8)
    place_kernel[(experts,)](
        ids, counts, order, tiles, pairs, most, COUNT=experts, HEIGHT=height, BLOCK=block, num_warps=8
    )
    return order, tiles.view(most, 3)


def _multiply(
    x: Tensor,
    linear: Linear,
    order: Tensor,
    tiles: Tensor,
    out: Tensor,
    chosen: int,
    tile: GroupTile,
    gate: FeedForward | None,
) -> None:
    """Multiply by the layer of which `linear` is the first expert's: by down, or with `gate` by what is before it."""
    outputs, gated = out.shape[1], gate is not None and gate.gated
    (weight,) = linear.parts
    group_kernel[(triton.cdiv(outputs, tile.width), len(tiles))](
        x,
        order=order,
        tiles=tiles,
        out=out,
        **matrix_args(weight),
        CHOSEN=chosen,
        N=outputs,
        K=x.shape[1],
        GATED=gated,
        GATHERS=gate is not None,
        HEIGHT=tile.height,
        WIDTH=tile.width,
        DEPTH=tile.depth,
        bias=linear.bias,
        GATE=activation(gate),
        num_warps=tile.warps,
        num_stages=tile.stages(gated, shared_bytes(x.device)),
    )
