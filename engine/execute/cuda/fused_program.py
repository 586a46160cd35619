"""The decode step in fused GPU kernels, for one token of each of several sequences.

Up to eight rows, a layer takes six launches, weights are read once, and every row has the bits that it has alone:

    norm, q, k and v        linear_kernel     x -> heads
    position, cache, attend attention_kernel  heads -> partial, lse
    combine the chunks      combine_kernel    partial, lse -> mixed
    o, residual             linear_kernel     mixed, x -> x
    norm, gate and up, SiLU linear_kernel     x -> inner
    down, residual          linear_kernel     inner, x -> x

Before products with few bits per weight, o and down do most of the norm: they multiply x by the norm's weights and sum
its squares. In small networks o also combines the chunks of a single short sequence.

Where a product's output is normed before it is added to x, the product prepares that norm, and the next one adds it;
with more than four rows, a launch of its own adds it.

In layers with experts, other kernels replace the last two (`experts.py`). A row without a sequence chooses no experts.
A short convolution is one launch in place of the attention and its combination (`convolution.py`), as is a recurrence
(`recurrence.py`). Latent attention takes up to three products more (`latent_step.py`). Gates of any, kv_a, and the
first product of a mixer beside another (`first_products.py`) are products beside the first, which run at the same time.
A layer may be a mixer or a feed-forward alone (`step_order.py`).
A second input of every layer is computed first, and added to each layer's result in two launches (`step_inputs.py`).

With many query heads per KV head, and for many short sequences, tensor cores compute the attention
(`attention_mma.py`). With more rows, rows that several sequences share are attended to once, besides those that each
has alone. From 17 rows on (nine with experts or large products) the layers run like those of a prompt, with its kernels
between products; small products use `many_row_linear.py`.

In a divided network, o and down compute partial sums. `AllReduce` adds those of all ranks before the residual is added,
in a launch of its own; the embedding and the logits are exchanged the same way.

The plain twin is `engine/execute/cuda/plain_program.py`, which runs `models/reference/decoder.py`. It writes the same
KV cache.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.execute.compatibility import has_experts, not_divided, not_fused
from engine.execute.cuda.add_norm import AddNorm, Normed, add_norm, normed
from engine.execute.cuda.all_reduce import AllReduce
from engine.execute.cuda.decode_attention import Partials
from engine.execute.cuda.experts import ExpertStep, apart, has_post_norms, inner_norm, join, norm_rows
from engine.execute.cuda.first_products import FirstProducts
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.kernel_configs import KernelConfigs, table_cuts
from engine.execute.cuda.many_row_linear import WideProducts
from engine.execute.cuda.packed import packed_embedding, packed_product
from engine.execute.cuda.prefill import OnHost, Projected, run_layers
from engine.execute.cuda.prefix_groups import KVShape
from engine.execute.cuda.recurrence import norm_after
from engine.execute.cuda.slots import StepInput
from engine.execute.cuda.step_attention import StepAttention
from engine.execute.cuda.step_inputs import StepInputs, look_up, rounded_scale
from engine.execute.cuda.step_order import Part, step_parts
from engine.execute.cuda.step_products import StepProducts
from engine.execute.cuda.tiles import FEW, FUSED, FUSED_MOST
from engine.kernels.triton.launch import has_warpgroups, split_alike
from models.network import ExpertWeights, FeedForwardWeights, Linear, Network, Weight
from models.reference.decoder import Decoder
from models.spec import Experts, FeedForward, ModelSpec


def unsupported(network: Network) -> str | None:
    """Return why the fused kernels cannot run this network, as the middle of a sentence; None if they can."""
    if any(weight.format.block > 1 and weight.planes is None for weight in _on_device(network)):
        return "the fused kernels do not support quantised weights that are not packed for them"
    if network.dtype != torch.bfloat16 and network.device.type == "cuda":
        return f"there are no fused kernels for {str(network.dtype).removeprefix('torch.')} weights"
    reason = not_fused(network.spec)
    if reason is None and network.share is not None:
        reason = not_divided(network.whole, network.share.ranks)
    if reason is None and apart(network):
        return "the fused kernels do not support experts that are not in one tensor"
    return reason


def _on_device(network: Network) -> list[Weight]:
    """Return all weights except experts in host memory."""
    host = [feed.experts for feed in network.on_host.values()]
    apart = {
        id(part) for experts in host for each in experts for part in (*each.gate_up.parts, *each.down.parts)
    }
    return [weight for weight in network.parts(Weight) if id(weight) not in apart]


class FusedDecoder:
    """Runs one token of each sequence through the model, from a `StepInput` to logits on the device."""

    name = "fused kernels"

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        given: StepInput,
        pdl: bool,
        deterministic: bool = False,
        on_host: HostExperts | None = None,
        cuts: KernelConfigs | None = None,
        exchange: AllReduce | None = None,
    ) -> None:
        """`pdl` turns on programmatic dependent launch (sm_90 and later). With `deterministic`, many rows run as steps
        of FEW, so each row has the bits that it has alone. `on_host` computes the experts in host memory; `cuts` says
        how kernels are cut (None: by the tables); `exchange` connects the other ranks of a divided network."""
        spec = network.spec
        self._network = network
        self._reference = Decoder(network, packed_product, embedding=packed_embedding)
        self._embedding_scale = rounded_scale(spec.embedding_scale, network.dtype)
        self._given = given
        self._pdl = pdl
        self._deterministic = deterministic
        self._on_host = on_host
        self._exchange = exchange
        cuts = cuts or table_cuts(network.device)
        self._wide = WideProducts(pdl, cuts, has_warpgroups(network.device))
        vocab, size = spec.vocab_size, spec.hidden_size
        most = max(given.active.shape[0], FEW)  # a single sequence has several rows when guesses are checked
        # Each of a few rows computes its own experts; with many rows the experts are shared, and products are grouped
        # by expert.
        packed = any(weight.planes is not None for weight in network.parts(Weight))
        small = _largest(spec) * 2 * size <= FUSED_MOST
        alike = packed or small
        self._fused = FUSED if alike and not has_experts(spec) else FEW
        few = min(most, self._fused)

        def buffer(*shape: int, dtype: torch.dtype = network.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=network.device)

        self._x = buffer(most, size)
        self._parts = step_parts(network)
        self._inner = buffer(few * _largest(spec))
        self._experts = ExpertStep(network, few, pdl) if has_experts(spec) else None
        self._logits = buffer(most if deterministic else few, vocab)
        self._products = StepProducts(network, few, pdl, cuts, exchange)
        self._first = FirstProducts(network, few, self._products)
        self._attention = StepAttention(
            network, cache, (few, most), pdl, self._products, small, not deterministic
        )
        self._inputs: StepInputs | None = None
        if spec.layer_inputs is not None and network.layer_inputs is not None:
            parts = spec.layer_inputs, network.layer_inputs
            self._inputs = StepInputs(network, *parts, few, self._products, pdl)

    @property
    def cuts(self) -> KernelConfigs:
        """How the kernels are cut."""
        return self._products.cuts

    @cuts.setter
    def cuts(self, cuts: KernelConfigs) -> None:
        self._products.cuts = cuts

    @property
    def kv(self) -> KVShape | None:
        """See `DecodeProgram`."""
        return self._attention.kv

    def run(self, rows: int, limit: int, own: int = 0) -> Tensor:
        """Enqueue a step of `rows` rows, the size of a graph, not the number of sequences; return logits [rows, vocab].

        The logits have the model's dtype. They are meaningless for rows without a slot, and on every rank after the
        first. Every token lies in a row of its sequence below `limit`. With `own`, sequences read the rows together
        that `StepInput` says they share, and have less than `own` other rows before that of their newest token.
        """
        given = self._given
        self._embed(given, rows)
        if rows > self._fused and not self._deterministic:
            return self._whole(self._many(rows, limit, own))
        if rows <= FEW or not self._deterministic:
            self._few(given, self._x, self._logits, rows, limit, own)
        else:  # run every eight rows as a step of their own: results then do not depend on the other rows
            for first in range(0, rows, FEW):
                group = replace(given, active=given.active[first:])
                self._few(group, self._x[first:], self._logits[first:], FEW, limit)
        return self._whole(self._logits[:rows])

    def check(self, given: StepInput, alone: StepInput, rows: int, limit: int) -> Tensor:
        """See `ChecksGuesses`; for at most FEW rows."""
        self._embed(given, rows)
        self._few(given, self._x, self._logits, rows, limit, alone=alone)
        return self._whole(self._logits[:rows])

    def _whole(self, logits: Tensor) -> Tensor:
        """Return all logits [rows, vocab], joined from the columns of every rank."""
        return logits if self._exchange is None else self._exchange.join_columns(logits)

    def _embed(self, given: StepInput, rows: int) -> None:
        exchange, share = self._exchange, self._network.share
        if exchange is None or share is None:
            self._look_up(given.active, given.token, rows)
            return
        # Each rank has some rows of the embedding. Tokens of other ranks become zeros, and the ranks are summed.
        active, token = exchange.begin(given, rows, share.vocab.start, share.vocab.stop)
        self._look_up(active, token, rows)
        exchange.sum(self._x[:rows])

    def _look_up(self, active: Tensor, token: Tensor, rows: int) -> None:
        look_up(self._network.embedding, active, token, rows, self._x, self._embedding_scale)

    def _few(
        self,
        given: StepInput,
        x: Tensor,
        logits: Tensor,
        rows: int,
        limit: int,
        own: int = 0,
        alone: StepInput | None = None,
    ) -> None:
        network, spec, inputs = self._network, self._network.spec, self._inputs
        prepared = 0  # by so many programs, x is prepared for the next norm
        self._attention.begin(given, rows)
        if inputs is not None:
            inputs.begin(given, x, rows)
        for part in self._parts:
            layer = network.layers[part.layer]
            if part.is_mixer:
                if part.reads is not None:
                    self._first.run(part.layer, part.reads, x, rows, prepared)
                projected = self._first.found(part.layer, rows)
                left = self._attention.run(given, part.layer, projected, limit, own, alone)
                prepared = self._add_mixed(part, x, rows, left)
            elif isinstance(layer.feed_forward, ExpertWeights):
                factor = layer.scalar if inputs is None else None
                self._mix(given, x, rows, part.layer, _norm(part), factor)
                prepared = 0
            else:
                prepared = self._feed(part, x, rows, prepared)
            if inputs is not None and part.is_last:
                inputs.add(rows, part.layer, x)
        scale, cap = spec.logit_scale, spec.logit_cap or 0.0
        norm = spec.final_norm, network.final_norm
        self._products.run(rows, x, network.head, logits, norm=norm, scale=scale, cap=cap, prepared=prepared)

    def _add_mixed(self, part: Part, x: Tensor, rows: int, left: Partials | None) -> int:
        """Add the output of a mixer to x, and return by how many programs x is prepared for what reads it next."""
        spec, layer = self._network.spec.layers[part.layer], self._network.layers[part.layer]
        after = normed(spec.attention_post_norm, layer.attention_post_norm)
        between, reader = self._between(part, after)
        norm = norm_after(spec.mixer, layer.mixer)
        return self._products.add(rows, self._attention.mixed, layer.out, x, between, left, reader, norm)

    def _feed(self, part: Part, x: Tensor, rows: int, prepared: int) -> int:
        """Add a feed-forward without experts to x, which so many programs have prepared; return as `_add_mixed`."""
        layer, spec = self._network.layers[part.layer], self._network.spec.layers[part.layer]
        feed, weights = spec.feed_forward, layer.feed_forward
        assert isinstance(feed, FeedForward)
        assert isinstance(weights, FeedForwardWeights)
        inner = self._inner[: rows * feed.size].view(rows, feed.size)
        norm = _norm(part)
        self._products.run(rows, x, weights.gate_up, inner, norm=norm, gate=feed, prepared=prepared)
        between, reader = self._between(
            part, normed(spec.feed_forward_post_norm, layer.feed_forward_post_norm)
        )
        return self._products.add(rows, inner, weights.down, x, between, reader=reader)

    def _between(self, part: Part, after: Normed | None) -> tuple[AddNorm, Linear | None]:
        """Return how the output of a part, normed by `after`, is added to x, and what may have x prepared for it."""
        scale, then = self._network.spec.layers[part.layer].residual_scale, part.then
        factor = self._network.layers[part.layer].scalar if part.is_last and self._inputs is None else None
        if then is None or (part.is_last and self._inputs is not None):  # something else is added first
            return AddNorm(after, scale, None, factor), None
        return AddNorm(after, scale, then.norm, factor), then.product

    def _mix(
        self,
        given: StepInput,
        x: Tensor,
        rows: int,
        index: int,
        norm: Normed | None,
        factor: Tensor | None,
    ) -> None:
        """Compute the feed-forward of a layer with experts, and beside them that of the shared one, whose output is
        added first.

        `norm` is that of the layer; norms inside the mixture take its place. In the end, `factor` [1] multiplies x.
        """
        layer, weights = self._network.spec.layers[index], self._network.layers[index].feed_forward
        spec, scale = layer.feed_forward, layer.residual_scale
        experts, products, exchange = self._experts, self._products, self._exchange
        assert isinstance(spec, Experts)
        assert isinstance(weights, ExpertWeights)
        assert experts is not None
        routed, own, beside = (
            inner_norm(spec, weights, name, norm) for name in ("router_norm", "expert_norm", "shared_norm")
        )
        assert routed is not None
        assert own is not None
        after = normed(layer.feed_forward_post_norm, self._network.layers[index].feed_forward_post_norm)
        is_apart = after is not None or factor is not None or has_post_norms(spec)
        shared, inner, here = weights.shared, self._inner, x[:rows]
        gates = None if weights.shared_gate is None else experts.shared_gates[:rows]
        if shared is not None and spec.shared is not None:
            inner = inner[: rows * spec.shared.size].view(rows, spec.shared.size)
            gate = [] if gates is None or weights.shared_gate is None else [(weights.shared_gate, gates)]
            how = spec.shared
            products.run(rows, x, shared.gate_up, inner, norm=beside, gate=how, beside=gate, leads=True)
        experts.route(spec, weights, routed, given.active, x, rows, follows=shared is not None)
        # The experts are added to what the shared one leaves in `start`: the sum so far, if nothing comes in between.
        start, out, added = (x, x, x) if exchange is None else (products.part, products.part, None)
        if is_apart:
            start, out, added = experts.nothing, experts.sums, None
        elif shared is not None and exchange is None:
            start = experts.sums
        elif shared is None and exchange is not None:
            start.zero_()
        if not weights.on_host:
            experts.begin(spec, weights, own, x, rows)
        if shared is not None:
            into = experts.beside if is_apart else start
            amount, follows = 1.0 if is_apart else scale, not weights.on_host
            products.run(
                rows, inner, shared.down, into, residual=added, scale=amount, row_gates=gates, follows=follows
            )
        if weights.on_host:
            assert self._on_host is not None
            seen = torch.empty_like(here)
            split_alike(add_norm(here, None, AddNorm(None, 1.0, own), seen, here))
            found = self._on_host.mix(index, seen, *experts.chosen(rows, spec.chosen))
            torch.add(start[:rows], found, alpha=1.0 if is_apart else scale, out=out[:rows])
        else:
            experts.add(spec, weights, start, out, rows, 1.0 if is_apart else scale)
        if is_apart:
            between = AddNorm(after, scale, None, factor)
            other = None if shared is None else experts.beside[:rows]
            join(spec, weights, out[:rows], other, here, between, self._pdl)
        elif exchange is not None:
            exchange.add(out[:rows], here, here)

    def _many(self, rows: int, limit: int, own: int) -> Tensor:
        attention = self._attention

        def attend(index: int, projected: Projected) -> Tensor:
            attention.run(self._given, index, projected, limit, own)
            layer = self._network.layers[index]
            size = layer.out.columns
            mixed = attention.mixed[: rows * size].view(rows, size)
            return norm_rows(mixed, norm_after(self._network.spec.layers[index].mixer, layer.mixer))

        attention.begin(self._given, rows)
        # A decode step never fetches experts, however many rows it has.
        on_host = None if self._on_host is None else OnHost(self._on_host, False, self._given.active)
        x, inputs = self._x[:rows], None
        if self._network.layer_inputs is not None:
            slots = self._given.active[:rows].clamp(min=0)
            token = self._given.token.index_select(0, slots).clamp(min=0)
            inputs = self._reference.layer_inputs(token, x)
        hidden = run_layers(self._network, x, attend, on_host, self._wide, self._exchange, inputs)
        return self._reference.logits(hidden)


def _norm(part: Part) -> Normed | None:
    """Return the norm of x that a part which reads it begins with; None if there is none."""
    assert part.reads is not None
    return part.reads.norm


def _largest(spec: ModelSpec) -> int:
    """Return the size of the largest dense feed-forward, including shared experts; 0 if there is none."""
    feeds = (layer.feed_forward for layer in spec.layers)
    dense = (feed.shared if isinstance(feed, Experts) else feed for feed in feeds)
    return max((feed.size for feed in dense if feed is not None), default=0)
