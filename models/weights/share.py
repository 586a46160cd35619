"""Divide a network among several devices that compute it together: each holds some of the heads of every layer, some
of the width of its feed-forward, and some of the vocabulary (Shoeybi et al. 2019, "Megatron-LM").

All ranks have the same shapes. Parts that do not divide evenly are padded with zeros, which add nothing to any sum: a
head of zeros attends to zeros or has a state of zeros, and a column of zeros has no effect.
"""

from dataclasses import dataclass, replace

from models.recurrences import DeltaNet, Mamba2
from models.spec import Attention, Experts, FeedForward, Layer, Mixer, ModelSpec, each_layer

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

    def after(self, offset: int) -> "SharePart":
        """Return the same part of rows or columns that begin at `offset`."""
        return SharePart(self.start + offset, self.stop + offset, self.size)


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
        return self._read(spec.kv_heads)

    def q_heads(self, spec: Attention) -> SharePart:
        """Return the rank's query heads: they read its KV heads."""
        return self._readers(spec.kv_heads, spec.groups)

    def mamba_groups(self, spec: Mamba2) -> SharePart:
        """Return the rank's groups of heads. Where there are more ranks than groups, several ranks hold the same B and
        C."""
        return self._read(spec.groups)

    def mamba_heads(self, spec: Mamba2) -> SharePart:
        """Return the rank's Mamba-2 heads: they read B and C of its groups."""
        return self._readers(spec.groups, spec.heads // spec.groups)

    def key_heads(self, spec: DeltaNet) -> SharePart:
        """Return the rank's key heads of a delta net."""
        return self._even(spec.key_heads, 1)

    def value_heads(self, spec: DeltaNet) -> tuple[SharePart, ...]:
        """Return the rank's value heads: they read its key heads."""
        keys, turns = self.key_heads(spec), spec.value_heads // spec.key_heads
        if spec.alternating:
            return tuple(keys.after(turn * spec.key_heads) for turn in range(turns))
        return (keys.times(turns),)

    def copies(self, heads: int) -> int:
        """Return how many ranks hold the same one of so many KV heads or groups."""
        return max(self.ranks // heads, 1)

    def _read(self, heads: int) -> SharePart:
        """Return the rank's part of heads that others read."""
        if heads >= self.ranks:
            return self._even(heads, 1)
        head = self.rank // self.copies(heads)
        return SharePart(head, head + 1, 1) if head < heads else SharePart(0, 0, 1)

    def _readers(self, heads: int, each: int) -> SharePart:
        """Return the rank's part of the heads that read them, `each` of them neighbours that read the same one."""
        if heads >= self.ranks:
            return self._read(heads).times(each)
        sharing = self.copies(heads)
        head, place = divmod(self.rank, sharing)
        size = -(-each // sharing)
        if head >= heads:
            return SharePart(0, 0, size)
        start, stop = (head * each + min(at * size, each) for at in (place, place + 1))
        return SharePart(start, stop, size)

    @property
    def spec(self) -> ModelSpec:
        """The spec of the network that each rank computes: the same for all ranks."""
        return replace(
            each_layer(self.whole, lambda _, layer: self._layer(layer)), vocab_size=self.vocab.size
        )

    def _layer(self, layer: Layer) -> Layer:
        feed = layer.feed_forward
        if isinstance(feed, Experts):
            feed = self._experts(feed)
        elif feed is not None:
            feed = self._feed(feed)
        return replace(layer, mixer=self._mixer(layer.mixer), feed_forward=feed)

    def _mixer(self, mixer: Mixer | None) -> Mixer | None:
        if isinstance(mixer, Attention):
            return replace(mixer, heads=self.q_heads(mixer).size, kv_heads=self.kv_heads(mixer).size)
        if isinstance(mixer, Mamba2):
            return replace(mixer, heads=self.mamba_heads(mixer).size, groups=self.mamba_groups(mixer).size)
        if isinstance(mixer, DeltaNet):
            values = sum(part.size for part in self.value_heads(mixer))
            return replace(mixer, key_heads=self.key_heads(mixer).size, value_heads=values)
        return mixer  # not divided

    def _experts(self, experts: Experts) -> Experts:
        shared = None if experts.shared is None else self._feed(experts.shared)
        return replace(experts, expert=self._feed(experts.expert), shared=shared)

    def _feed(self, feed: FeedForward) -> FeedForward:
        return replace(feed, size=self.width(feed.size).size)

    def _even(self, count: int, unit: int) -> SharePart:
        size = -(-count // (self.ranks * unit)) * unit
        return SharePart(min(self.rank * size, count), min((self.rank + 1) * size, count), size)
