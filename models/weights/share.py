"""Divide a network among several devices that compute it together: each holds some of the heads of every layer, some
of the width of its feed-forward, and some of the vocabulary (Shoeybi et al. 2019, "Megatron-LM").

All ranks have the same shapes. Parts that do not divide evenly are padded with zeros, which add nothing to any sum: a
head of zeros attends to zeros, and a column of zeros has no effect.
"""

from dataclasses import dataclass, replace

from models.spec import Attention, Experts, FeedForward, Layer, ModelSpec, each_layer

UNIT = 32
"""The least multiple at which a feed-forward is cut: the size of a block of weights in most formats."""


@dataclass(frozen=True, slots=True)
class SharePart:
    """A rank's part of some rows or columns: those from `start` to `stop`, padded with zeros to `size`."""

    start: int
    stop: int
    size: int

    @property
    def count(self) -> int:
        """How many are not padding."""
        return self.stop - self.start

    def times(self, width: int) -> "SharePart":
        """Return the same part, where each unit stands for `width` rows or columns."""
        return SharePart(self.start * width, self.stop * width, self.size * width)


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a network that rank `rank` of `ranks` holds."""

    rank: int
    ranks: int
    whole: ModelSpec
    unit: int = UNIT

    @property
    def is_first(self) -> bool:
        """Whether this rank adds the terms to be added only once: biases of results summed over the ranks."""
        return self.rank == 0

    @property
    def vocab(self) -> SharePart:
        """The rank's part of the vocabulary: rows of the embedding and of the head."""
        return self._even(self.whole.vocab_size, 1)

    def width(self, size: int) -> SharePart:
        """Return the rank's part of the inner width `size` of a feed-forward."""
        return self._even(size, self.unit)

    def kv_heads(self, spec: Attention) -> SharePart:
        """Return the rank's KV heads. Where there are more ranks than KV heads, several ranks hold the same head."""
        heads = spec.kv_heads
        if heads >= self.ranks:
            return self._even(heads, 1)
        head = self.rank // self.copies(spec)
        return SharePart(head, head + 1, 1) if head < heads else SharePart(0, 0, 1)

    def q_heads(self, spec: Attention) -> SharePart:
        """Return the rank's query heads: they read its KV heads."""
        heads = spec.kv_heads
        if heads >= self.ranks:
            return self.kv_heads(spec).times(spec.groups)
        sharing = self.copies(spec)
        head, place = divmod(self.rank, sharing)
        size = -(-spec.groups // sharing)
        if head >= heads:
            return SharePart(0, 0, size)
        start, stop = (head * spec.groups + min(at * size, spec.groups) for at in (place, place + 1))
        return SharePart(start, stop, size)

    def copies(self, spec: Attention) -> int:
        """Return how many ranks hold the same KV head."""
        return max(self.ranks // spec.kv_heads, 1)

    @property
    def spec(self) -> ModelSpec:
        """The spec of the network that each rank computes: the same for all ranks."""
        return replace(
            each_layer(self.whole, lambda _, layer: self._layer(layer)), vocab_size=self.vocab.size
        )

    def _layer(self, layer: Layer) -> Layer:
        attention, feed = layer.attention, layer.feed_forward
        assert feed is not None
        return replace(
            layer,
            mixer=replace(
                attention, heads=self.q_heads(attention).size, kv_heads=self.kv_heads(attention).size
            ),
            feed_forward=self._experts(feed) if isinstance(feed, Experts) else self._feed(feed),
        )

    def _experts(self, experts: Experts) -> Experts:
        shared = None if experts.shared is None else self._feed(experts.shared)
        return replace(experts, expert=self._feed(experts.expert), shared=shared)

    def _feed(self, feed: FeedForward) -> FeedForward:
        return replace(feed, size=self.width(feed.size).size)

    def _even(self, count: int, unit: int) -> SharePart:
        size = -(-count // (self.ranks * unit)) * unit
        return SharePart(min(self.rank * size, count), min((self.rank + 1) * size, count), size)
