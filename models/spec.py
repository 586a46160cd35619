"""The description of a network, layer by layer: data that families (models/families) write and executors read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from models.recurrences import Recurrence

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
XIELU_BETA = 0.5
"""The slope at 0 of xIELU (Huang and Schlag 2024)."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm or LayerNorm over the last dimension."""

    eps: float = 1e-6
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    """Added to the stored weight: some checkpoints store its difference from 1."""
    bias: bool = False
    weighted: bool = True
    """Whether it has a weight; without one it has no bias, and norms the heads of q and k."""
    rounds_last: bool = False
    """Whether the result is rounded to the dtype only after it is multiplied by the weight; an offset implies this."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions become angles (Su et al. 2021); the values are those of Hugging Face's rope_parameters."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    """original_max_position_embeddings"""
    frequency_factors: tuple[float, ...] | None = None
    """A divisor for each frequency, [dims / 2]: longrope's short ones, those stored in a GGUF file, or infinity for
    pairs that do not turn."""
    long_factors: tuple[float, ...] | None = None
    """longrope: the divisors for contexts longer than `original_positions`."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn and longrope)."""
    beta_fast: float = 32.0
    """yarn: frequencies that turn more often than this within `original_positions` are kept."""
    beta_slow: float = 1.0
    """yarn: frequencies that turn less often than this are divided by `factor`."""
    truncate: bool = True
    """yarn: whether the two bounds are rounded to whole dimensions."""
    dims: int | None = None
    """How many numbers of each head are rotated, counted from its first; None: all of them."""
    interleaved: bool = False
    """Whether each pair is two neighbours, rather than one number from each half of the head."""
    exact: bool = False
    """Whether heads are rotated in fp32 and then rounded, whatever the dtype of the network."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """A scale of queries, 1 + beta * log(1 + floor((position + offset) / positions)): `get_llama_4_attn_scale` in
    transformers."""

    beta: float
    positions: int
    """The context length before its extension: up to it, queries are not changed."""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: Norm | None = None
    """Applied to every q and k head, before the rotation unless `norms_rotated`; it has no bias."""
    rope: Rope | None = None
    """None: no rotation in this layer."""
    window: int | None = None
    """A row sees itself and the `window` - 1 rows before it; None: all rows before it."""
    chunk: int | None = None
    """A row sees itself and those rows before it whose number divided by `chunk`, rounded down, is the same; None: all
    rows before it. Not together with `window`."""
    scale: float | None = None
    """Multiplies the scores; None: head_dim ** -0.5."""
    score_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    norms_all_heads: bool = False
    """Whether `head_norm` covers all q heads together and all k heads together, instead of each head alone."""
    norms_rotated: bool = False
    """Whether `head_norm` is applied after the rotation (`HunYuanDenseV1Attention` in transformers); not together with
    `norms_all_heads`."""
    v_norm: Norm | None = None
    """Applied to every v head; it has neither weight nor bias."""
    v_is_k: bool = False
    """Whether the layer has no projection for values: they are the keys before norm and rotation."""
    gate: Literal["heads", "numbers"] | None = None
    """The attention's output is multiplied by the sigmoid of a projection of the layer's input, which has one number
    for each query head, or for each number of these; None: it is not."""
    sinks: bool = False
    """Whether each head has a learned score that takes part in the softmax but has no value."""
    query_scaling: QueryScaling | None = None
    """Applied to q after the rotation; None: queries are not scaled by their positions."""
    kv_from: int | None = None
    """The earlier layer whose keys and values this layer reads; None: it has its own."""

    @property
    def softmax_scale(self) -> float:
        """The factor that multiplies the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def own_kv_heads(self) -> int:
        """Number of KV heads that the layer computes: none if it reads those of another layer."""
        return self.kv_heads if self.kv_from is None else 0

    @property
    def groups(self) -> int:
        """Number of query heads for each KV head."""
        return self.heads // self.kv_heads

    @property
    def rotated(self) -> int:
        """How many numbers of each head are rotated."""
        return 0 if self.rope is None else self.rope.dims or self.head_dim

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax over all preceding rows with the usual scale: every attention kernel computes it."""
        unusual = self.window, self.chunk, self.scale, self.score_cap
        return unusual == (None,) * len(unusual) and not self.sinks


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose keys and values are projections of a short vector of each row, the latent (DeepSeek-V2, 2024).

    With the latent c = norm(kv_a(x)[: kv_rank]) and k = rotated(kv_a(x)[kv_rank :]), which all heads share, the key of
    a head is its k_b, transposed, times c, followed by k, and its value v_b(c). Of each row, c and k are kept.
    """

    heads: int
    q_rank: int | None
    """Queries are q_b(norm(q(x))), where q has this many outputs; None: q(x)."""
    kv_rank: int
    """The size of a latent."""
    nope_dim: int
    """How many numbers of each query and key come first and are not rotated."""
    rope_dim: int
    """How many numbers of each query and key follow, and are rotated."""
    v_dim: int
    """The size of the values of each head."""
    norm: Norm = Norm()
    """Applied to the latents, and to what q_b expands; it has no bias."""
    rope: Rope | None = None
    """None: no rotation in this layer."""
    scale: float | None = None
    """Multiplies the scores; None: (nope_dim + rope_dim) ** -0.5."""
    bias: bool = False
    """Whether the projections to ranks and the output have biases."""
    window: ClassVar[None] = None

    @property
    def softmax_scale(self) -> float:
        """The factor that multiplies the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def head_dim(self) -> int:
        """The size of each query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """How many numbers each head expands a latent to."""
        return self.nope_dim + self.v_dim

    @property
    def row_size(self) -> int:
        """How many numbers of each row are kept."""
        return self.kv_rank + self.rope_dim

    @property
    def rotated(self) -> int:
        """How many numbers of each head are rotated."""
        return 0 if self.rope is None else self.rope.dims or self.rope_dim


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """out(c * conv(b * x)): three projections b, c, x of each row, and a sum over the last rows of each channel (LFM2).

    The convolution has one filter for each channel: conv(h)[row] = the sum of filter[i] * h[row - width + 1 + i] over i
    from 0 to `width` - 1, where rows before the first are zeros.
    """

    size: int
    """The number of channels."""
    width: int
    """The number of rows that a row sees, itself included."""
    bias: bool = False
    """Whether all its projections and the convolution have biases."""

    @property
    def window(self) -> int:
        """The number of rows that a row sees, as for attention."""
        return self.width


Mixer = Attention | LatentAttention | ShortConvolution | Recurrence
"""The part of a layer in which rows see each other."""


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gain: float = 1.0
    """The gain of SiLU: x * sigmoid(gain * x)."""
    limit: float | None = None
    """Before the activation, gate is clamped to at most `limit`, and up to the range from -`limit` to `limit`."""
    up_offset: float = 0.0
    """Added to up after the clamp."""
    cutoff: float | None = None
    """Before the activation, mean + `cutoff` * standard deviation of a row of gate is subtracted from it, and what is
    below 0 becomes 0; None: nothing is subtracted."""
    alphas: tuple[float, float] | None = None
    """xIELU's alpha_p and alpha_n, before their softplus; None: those in the checkpoint. Only without a gate."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: the router's best experts, each weighted by its score."""

    count: int
    chosen: int
    expert: FeedForward
    renormalise: bool = True
    """Whether the weights of the chosen experts are scaled to add up to 1."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scales_inputs: bool = False
    """Whether the weights multiply the inputs of the chosen experts rather than their outputs."""
    router_bias: bool = False
    """Whether a bias is added to the router's logits."""
    exact_router: bool = False
    """Whether the router is held and computed in fp32, whatever the dtype of the network."""
    selection_bias: bool = False
    """Whether each expert has a number that is added to its score to choose experts, but not to weight them."""
    groups: int = 1
    """The experts are divided into this many groups of neighbours, and chosen from the best `chosen_groups` alone."""
    chosen_groups: int = 1
    group_best: int = 1
    """The score of a group is the sum of the scores of its best `group_best` experts, selection bias included."""
    scale: float = 1.0
    """Multiplies the weights of the chosen experts, after `renormalise`."""
    shared: FeedForward | None = None
    """An expert that every token uses in addition."""
    shared_gate: bool = False
    """Whether the shared expert is weighted by the sigmoid of a projection of its own."""
    latent: int | None = None
    """The chosen experts read a projection of their input to this many numbers; their sum is projected back."""
    latent_bias: bool = False
    router_norm: Norm | None = None
    """Applied to the router's input; it has no bias."""
    router_scale: float = 1.0
    """Multiplies the router's logits."""
    expert_scales: bool = False
    """Whether each expert has a number that multiplies its weight in the end."""
    expert_norm: Norm | None = None
    """Applied to the input of the chosen experts, but not to those of the router and the shared expert."""
    expert_post_norm: Norm | None = None
    """Applied to the sum of the chosen experts, before the shared one is added."""
    shared_norm: Norm | None = None
    """Applied to the input of the shared expert."""
    shared_post_norm: Norm | None = None
    """Applied to the output of the shared expert."""

    @property
    def norms(self) -> dict[str, Norm]:
        """The norms inside the mixture, by the names of their fields."""
        found = {
            "router_norm": self.router_norm,
            "expert_norm": self.expert_norm,
            "expert_post_norm": self.expert_post_norm,
            "shared_norm": self.shared_norm,
            "shared_post_norm": self.shared_post_norm,
        }
        return {name: norm for name, norm in found.items() if norm is not None}


@dataclass(frozen=True, slots=True)
class Laurel:
    """A residual beside the mixer (LAuReL, Menghani et al. 2024): given + norm(right(left(given))), with given the
    input of the mixer, and left and right projections to `rank` numbers and back."""

    rank: int
    norm: Norm = Norm()


@dataclass(frozen=True, slots=True)
class Layer:
    """x = x + post_norm(mixer(norm(x))), then the same with the feed-forward; a norm that is None does nothing.

    A `parallel` feed-forward reads what the mixer reads, norm(x), and has no norm before it. Mixer or feed-forward may
    be None: then nothing is added to x, and its norms are None.
    """

    mixer: Mixer | None
    feed_forward: FeedForward | Experts | None
    attention_norm: Norm | None = Norm()
    attention_post_norm: Norm | None = None
    feed_forward_norm: Norm | None = Norm()
    feed_forward_post_norm: Norm | None = None
    residual_scale: float = 1.0
    """Multiplies the outputs of mixer and feed-forward before they are added to x."""
    scalar: bool = False
    """Whether a number of the checkpoint multiplies the layer's result."""
    parallel: bool = False
    laurel: Laurel | None = None
    """Added to the sum with the mixer, which is then divided by 2 ** 0.5; None: nothing is."""
    beside: bool = False
    """Whether the mixer reads what that of the layer before reads; there is no norm before it."""

    @property
    def attention(self) -> Attention:
        """The attention of a layer that is known to have one."""
        assert isinstance(self.mixer, Attention)
        return self.mixer


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A second input of every layer, `size` numbers for each token (per-layer embeddings of Gemma 3n and 4).

    With x, the input of the first layer, all of them are

        (norm(projection(x) * hidden_size ** -0.5) + embedding(token) * size ** 0.5) * 2 ** -0.5

    where `norm` covers the numbers of one layer. Each layer adds post_norm(out(activation(gate(x)) * input)) to its
    result x, before the scalar. With AltUp, x is its first stream times a learned vector,
    and the sum goes to the other streams.
    """

    size: int
    activation: Activation = "gelu_tanh"
    norm: Norm = Norm()
    post_norm: Norm = Norm()
    vocab_size: int | None = None
    """The number of embeddings; tokens beyond them have that of token 0. None: every token has its own."""


@dataclass(frozen=True, slots=True)
class AltUp:
    """Alternating updates (Baykal et al. 2023): streams x[0], x[1], ... of hidden states, the first of which layers
    compute.

    x[0] is the embedding, the others are projections of it, scaled to its root mean square. With

        r(x) = tanh(router(norm(x) / hidden_size)), one number for each stream,

    a layer predicts p[i] = x[i] + the sum of predict(r(x[0]))[i, j] * x[j], computes y from p[0], and corrects to
    x[i] = p[i] + (1 + correct(r(y))[i]) * (y - p[0]). After the last layer, the other streams are projected and scaled
    to the root mean square of the first, and the mean of all goes to the final norm.
    """

    count: int
    """The number of streams."""
    norm: Norm = Norm()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only network."""

    architecture: str
    """The name in config.json, for display."""
    vocab_size: int
    hidden_size: int
    max_positions: int
    """The context length that the model was made for."""
    layers: tuple[Layer, ...]
    final_norm: Norm = Norm()
    tied: bool = False
    """Whether the embedding is also the head."""
    embedding_norm: Norm | None = None
    """Applied to the embeddings; it has neither weight nor bias."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""
    learned_positions: bool = False
    """Whether a learned vector for each position is added to the embedding."""
    layer_inputs: LayerInputs | None = None
    altup: AltUp | None = None
    """Not with layers that have a scalar."""

    @property
    def attention(self) -> Attention:
        """The attention of the first layer that has one; where `same_heads`, all have its heads."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def attentions(self) -> dict[int, Attention]:
        """The attention of each layer that has one, by the layer's index."""
        return {i: layer.mixer for i, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention)}

    @property
    def window(self) -> int | None:
        """The most rows that any layer sees, the row itself included; None if at least one sees all preceding rows."""
        windows = [reach(layer.mixer) for layer in self.layers if layer.mixer is not None]
        return None if None in windows else max(window for window in windows if window is not None)


def reach(mixer: Mixer) -> int | None:
    """Return the most rows that a row sees in a layer, itself included; None if it sees all rows before it."""
    return mixer.chunk if isinstance(mixer, Attention) and mixer.chunk is not None else mixer.window


def same_heads(spec: ModelSpec) -> bool:
    """Return whether q, K and V have the same shapes in all layers with attention, as most kernels require."""
    return len({(each.heads, each.kv_heads, each.head_dim) for each in spec.attentions.values()}) <= 1


def kv_sources(spec: ModelSpec) -> list[int]:
    """Return for each layer the index of the layer whose rows it reads: usually its own.

    A layer without a mixer has and reads none; its index is that of the first layer with one.
    """
    given = {index: attention.kv_from for index, attention in spec.attentions.items()}
    first = next(index for index, layer in enumerate(spec.layers) if layer.mixer is not None)
    own = [index if layer.mixer is not None else first for index, layer in enumerate(spec.layers)]
    return [index if (source := given.get(index)) is None else source for index in own]


def each_layer(spec: ModelSpec, change: Callable[[int, Layer], Layer]) -> ModelSpec:
    """Return `spec` with every layer replaced by `change(index, layer)`."""
    return replace(spec, layers=tuple(change(index, layer) for index, layer in enumerate(spec.layers)))


def each_attention(spec: ModelSpec, change: Callable[[int, Attention], Attention]) -> ModelSpec:
    """Return `spec` with the attention of every layer that has one replaced by `change(index, attention)`."""
    attentions = spec.attentions

    def changed(index: int, layer: Layer) -> Layer:
        return replace(layer, mixer=change(index, attentions[index])) if index in attentions else layer

    return each_layer(spec, changed)


def norms(spec: ModelSpec) -> frozenset[Norm]:
    """Return every kind of norm that the network uses."""
    found: set[Norm | None] = {spec.final_norm}
    if (inputs := spec.layer_inputs) is not None:
        found |= {inputs.norm, inputs.post_norm}
    if spec.altup is not None:
        found.add(spec.altup.norm)
    for layer in set(spec.layers):
        if isinstance(layer.mixer, LatentAttention):
            found.add(layer.mixer.norm)
        elif isinstance(layer.mixer, Attention):
            found |= {layer.mixer.head_norm, layer.mixer.v_norm}
        found |= {layer.attention_norm, layer.feed_forward_norm}
        found |= {layer.attention_post_norm, layer.feed_forward_post_norm}
        if layer.laurel is not None:
            found.add(layer.laurel.norm)
        if isinstance(layer.feed_forward, Experts):
            found |= set(layer.feed_forward.norms.values())
    return frozenset(norm for norm in found if norm is not None)


def ropes(spec: ModelSpec) -> frozenset[tuple[Rope, int]]:
    """Return every rotary table that the layers need, as (rope, width)."""
    mixers = [layer.mixer for layer in spec.layers]
    rotating = [mixer for mixer in mixers if isinstance(mixer, Attention | LatentAttention)]
    return frozenset((mixer.rope, mixer.rotated) for mixer in rotating if mixer.rope is not None)
