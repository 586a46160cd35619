"""How a network is divided among several devices that compute it together: each has some of the heads of every layer,
some of the width of its feed-forward, and some of the vocabulary (Shoeybi et al. 2019, "Megatron-LM").

All ranks have the same shapes. What does not divide evenly is filled up with zeros, which add nothing to any sum: a
head of zeros attends to zeros, and a column of zeros has no effect.
"""

from dataclasses import dataclass, replace

from models.spec import Attention, Experts, FeedForward, Layer, ModelSpec, each_layer

UNIT = 32
"""A feed-forward is cut at multiples of so many at least: that is what a block of weights has in most formats."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of some rows or columns: those from `start` to `stop`, and zeros up to `size` of them."""

    start: int
    stop: int
    size: int

    @property
    def count(self) -> int:
        """How many of them are not filled up."""
        return self.stop - self.start

    def times(self, width: int) -> "Part":
        """The same of rows that are `width` for each one."""
        return Part(self.start * width, self.stop * width, self.size * width)


@dataclass(frozen=True, slots=True)
class Share:
    """What rank `rank` of `ranks` has of a network."""

    rank: int
    ranks: int
    whole: ModelSpec
    unit: int = UNIT

    @property
    def is_first(self) -> bool:
        """Whether it adds what is to be added once: biases of results that are summed up over the ranks."""
        return self.rank == 0

    @property
    def vocab(self) -> Part:
        """Of the vocabulary: rows of the embedding and of the head."""
        return self._even(self.whole.vocab_size, 1)

    def width(self, size: int) -> Part:
        """Of the inner numbers of a feed-forward."""
        return self._even(size, self.unit)

    def kv_heads(self, spec: Attention) -> Part:
        """Of the KV heads. Where there are more ranks than heads, several ranks have the same one."""
        heads = spec.kv_heads
        if heads >= self.ranks:
            return self._even(heads, 1)
        head = self.rank // self.copies(spec)
        return Part(head, head + 1, 1) if head < heads else Part(0, 0, 1)

    def q_heads(self, spec: Attention) -> Part:
        """Of the query heads: those that read its KV heads."""
        heads = spec.kv_heads
        if heads >= self.ranks:
            return self.kv_heads(spec).times(spec.groups)
        sharing = self.copies(spec)
        head, place = divmod(self.rank, sharing)
        size = -(-spec.groups // sharing)
        if head >= heads:
            return Part(0, 0, size)
        start, stop = (head * spec.groups + min(at * size, spec.groups) for at in (place, place + 1))
        return Part(start, stop, size)

    def copies(self, spec: Attention) -> int:
        """How many ranks have the same KV head."""
        return max(self.ranks // spec.kv_heads, 1)

    @property
    def spec(self) -> ModelSpec:
        """What the rank computes: the same for all of them."""
        return replace(
            each_layer(self.whole, lambda _, layer: self._layer(layer)), vocab_size=self.vocab.size
        )

    def _layer(self, layer: Layer) -> Layer:
        attention, feed = layer.attention, layer.feed_forward
        return replace(
            layer,
            attention=replace(
                attention, heads=self.q_heads(attention).size, kv_heads=self.kv_heads(attention).size
            ),
            feed_forward=self._experts(feed) if isinstance(feed, Experts) else self._feed(feed),
        )

    def _experts(self, experts: Experts) -> Experts:
        shared = None if experts.shared is None else self._feed(experts.shared)
        return replace(experts, expert=self._feed(experts.expert), shared=shared)

    def _feed(self, feed: FeedForward) -> FeedForward:
        return replace(feed, size=self.width(feed.size).size)

    def _even(self, count: int, unit: int) -> Part:
        size = -(-count // (self.ranks * unit)) * unit
        return Part(min(self.rank * size, count), min((self.rank + 1) * size, count), size)
