"""What a network computes, layer by layer: data that every executor reads. A family (models/families) writes it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or LayerNorm, of the last dimension."""

    eps: float = 1e-6
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    """Added to the stored weight: some checkpoints keep how far it is from 1."""
    bias: bool = False
    rounds_last: bool = False
    """Rounded to the dtype after it is multiplied by its weight, and not before; with an offset always."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions become angles (Su et al. 2021); the numbers are those of Hugging Face's rope_parameters."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    """original_max_position_embeddings"""
    frequency_factors: tuple[float, ...] | None = None
    """Divisors of each frequency, [dims / 2]: of longrope the short ones, else what a GGUF file stores."""
    long_factors: tuple[float, ...] | None = None
    """Of longrope: the divisors where the context is longer than `original_positions`."""
    attention_factor: float = 1.0
    """cos and sin are multiplied by it (yarn and longrope)."""
    beta_fast: float = 32.0
    """Of yarn: frequencies that turn more often than this within `original_positions` are kept."""
    beta_slow: float = 1.0
    """Of yarn: those that turn less often are divided by the factor."""
    truncate: bool = True
    """Of yarn: whether the two bounds are rounded to whole dimensions."""
    dims: int | None = None
    """How many numbers of a head are rotated, its first ones; None: all."""
    interleaved: bool = False
    """Whether neighbours are rotated together, and not the two halves."""
    exact: bool = False
    """Whether heads are rotated in fp32, and rounded then, whatever the dtype of the network."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: Norm | None = None
    """Of every q and k head, before the rotation; it has no bias."""
    rope: Rope | None = None
    """None: no rotation in this layer."""
    window: int | None = None
    """A row sees itself and the `window` - 1 rows before it; None: all rows before it."""
    scale: float | None = None
    """Of the scores; None: head_dim ** -0.5."""
    score_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    norms_all_heads: bool = False
    """`head_norm` is of all q heads together and of all k heads together, not of each."""
    sinks: bool = False
    """A learned score for each head that takes part in the softmax and has no value."""

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def groups(self) -> int:
        """Query heads for each KV head."""
        return self.heads // self.kv_heads

    @property
    def rotated(self) -> int:
        """How many numbers of a head are rotated."""
        return 0 if self.rope is None else self.rope.dims or self.head_dim

    @property
    def is_plain(self) -> bool:
        """Softmax over all rows before, scaled as usual: what every attention kernel computes."""
        return (self.window, self.scale, self.score_cap, self.sinks) == (None, None, None, False)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) where it is not gated."""

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gain: float = 1.0
    """Of SiLU: x * sigmoid(gain * x)."""
    limit: float | None = None
    """Before the activation gate is made to be at most this, and up to lie between this and its negative."""
    up_offset: float = 0.0
    """Added to up then."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: the router's best ones, each weighted by its score."""

    count: int
    chosen: int
    expert: FeedForward
    renormalise: bool = True
    """Whether the weights of the chosen ones are made to add up to 1."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    """Added to the router's logits."""
    exact_router: bool = False
    """Whether the router is kept and computed in fp32, whatever the dtype of the network."""
    selection_bias: bool = False
    """A number for each expert, added to the scores where experts are chosen and not where they are weighted."""
    shared: FeedForward | None = None
    """An expert that every token takes, too."""
    shared_gate: bool = False
    """Whether that one is weighted by the sigmoid of a product of its own."""


@dataclass(frozen=True, slots=True)
class Layer:
    """x = x + after(attention(before(x))), then the same with the feed-forward; a norm that is None does nothing."""

    attention: Attention
    feed_forward: FeedForward | Experts
    attention_norm: Norm | None = Norm()
    attention_post_norm: Norm | None = None
    feed_forward_norm: Norm | None = Norm()
    feed_forward_post_norm: Norm | None = None
    residual_scale: float = 1.0
    """What attention and feed-forward give is multiplied by it before it is added to x."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only network."""

    architecture: str
    """As in config.json, for people."""
    vocab_size: int
    hidden_size: int
    max_positions: int
    """What the model was made for."""
    layers: tuple[Layer, ...]
    final_norm: Norm = Norm()
    tied: bool = False
    """The embedding is the head, too."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""
    learned_positions: bool = False
    """A learned vector for each position is added to the embedding."""

    @property
    def attention(self) -> Attention:
        """Of the first layer: all layers have the same heads (see `same_heads`)."""
        return self.layers[0].attention

    @property
    def window(self) -> int | None:
        """How many rows the layer that sees furthest back sees; None where one sees all rows before."""
        windows = [layer.attention.window for layer in self.layers]
        return None if None in windows else max(window for window in windows if window is not None)

    @property
    def kv_numbers(self) -> int:
        """Numbers that a token leaves in the KV cache: K and V of every layer."""
        return 2 * len(self.layers) * self.attention.kv_heads * self.attention.head_dim


def for_context(spec: ModelSpec, context: int) -> ModelSpec:
    """`spec` for texts of at most `context` tokens: the short divisors of longrope alone, if they reach so far."""

    def kept(rope: Rope | None) -> Rope | None:
        if rope is None or rope.long_factors is None or context > rope.original_positions:
            return rope
        return replace(rope, long_factors=rope.frequency_factors)

    return each_attention(spec, lambda _, attention: replace(attention, rope=kept(attention.rope)))


def same_heads(spec: ModelSpec) -> bool:
    """Whether q, K and V of all layers have the same shape, as the KV cache and its attention need it."""
    attentions = [layer.attention for layer in spec.layers]
    return len({(attention.heads, attention.kv_heads, attention.head_dim) for attention in attentions}) == 1


def each_layer(spec: ModelSpec, change: Callable[[int, Layer], Layer]) -> ModelSpec:
    """`spec` with what `change` makes of every layer, given its number and the layer."""
    return replace(spec, layers=tuple(change(index, layer) for index, layer in enumerate(spec.layers)))


def each_attention(spec: ModelSpec, change: Callable[[int, Attention], Attention]) -> ModelSpec:
    """The same of the attention of every layer."""
    return each_layer(spec, lambda index, layer: replace(layer, attention=change(index, layer.attention)))


def norms(spec: ModelSpec) -> frozenset[Norm]:
    """Every kind of norm in it."""
    found = {spec.final_norm}
    for layer in spec.layers:
        before = (layer.attention_norm, layer.feed_forward_norm, layer.attention.head_norm)
        after = (layer.attention_post_norm, layer.feed_forward_post_norm)
        found |= {norm for norm in (*before, *after) if norm is not None}
    return frozenset(found)


def ropes(spec: ModelSpec) -> frozenset[tuple[Rope, int]]:
    """Every rotary table that the layers need: how it is made, and its width."""
    attentions = [layer.attention for layer in spec.layers]
    return frozenset((a.rope, a.rotated) for a in attentions if a.rope is not None)


def uniform(
    architecture: str,
    *,
    layers: int,
    vocab_size: int,
    hidden_size: int,
    max_positions: int,
    attention: Attention,
    feed_forward: FeedForward | Experts,
    norm: Norm,
    tied: bool,
) -> ModelSpec:
    """A network whose layers are all alike, with the norms before attention and feed-forward."""
    layer = Layer(attention, feed_forward, attention_norm=norm, feed_forward_norm=norm)
    return ModelSpec(architecture, vocab_size, hidden_size, max_positions, (layer,) * layers, norm, tied)
