"""The reference network and its attention against float64, on random descriptions with every feature of a spec."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.sdpa import SdpaBackend
from engine.attention.unusual import unusual_layers
from engine.batch import Span, StepBatch
from engine.build import build
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows, token_bytes
from engine.errors import EngineError
from engine.execute.build_options import BuildOptions
from engine.execute.compatibility import not_fused, not_native
from models.errors import ModelError
from models.features import Feature, features
from models.loading.load import fill_network
from models.loading.plan import Target, needed_bytes, plan_tensors
from models.network import Network
from models.reference import latent
from models.reference.decoder import Decoder
from models.spec import (
    AltUp,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Laurel,
    Layer,
    LayerInputs,
    ModelSpec,
    Norm,
    QueryScaling,
    Rope,
    ShortConvolution,
    kv_sources,
    ropes,
)
from models.weights.checkpoint import StoredTensor
from models.weights.matching import match
from models.weights.quantize import choose_kinds
from models.weights.slots import Names, slots
from models.weights.tp_shard import shard
from tests.fresh import examples
from tests.models.checkpoints import PlainAttention, run, tensors_in
from tests.models.plain_network import PlainNetwork

VOCAB = 31
POSITIONS = 32
BLOCK = 4
CPU = torch.device("cpu")
EXAMPLES = examples(30)

norms = st.builds(
    Norm,
    eps=st.sampled_from([1e-6, 1e-2]),
    kind=st.sampled_from(["rms", "layer"]),
    offset=st.sampled_from([0.0, 1.0]),
    bias=st.booleans(),
    rounds_last=st.booleans(),
)
maybe_norms = st.none() | norms


def feeds_of(*sizes: int) -> st.SearchStrategy[FeedForward]:
    """Return any feed-forward of these sizes."""
    return st.builds(
        FeedForward,
        size=st.sampled_from(sizes),
        activation=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]),
        gated=st.booleans(),
        bias=st.booleans(),
        gain=st.sampled_from([1.0, 1.7]),
        limit=st.none() | st.sampled_from([0.1, 1.0]),
        up_offset=st.sampled_from([0.0, 1.0]),
    ).map(lambda feed: feed if feed.activation == "silu" else replace(feed, gain=1.0))


feeds = feeds_of(8, 12)
maybe_weighted = maybe_norms.map(lambda norm: norm and replace(norm, bias=False))
windows = st.none() | st.integers(1, 8)


@st.composite
def experts(draw: st.DrawFn, mixed: bool = False) -> Experts:
    """Draw a mixture of up to six experts, perhaps with a shared one; see `specs` for `mixed`."""
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    size = draw(st.integers(1, 4 if groups == 1 else 2))
    chosen_groups = draw(st.integers(1, groups))
    shared = draw(st.none() | feeds)
    return Experts(
        groups * size,
        chosen=draw(st.integers(1, chosen_groups * size)),
        expert=draw(feeds),
        renormalise=draw(st.booleans()),
        scales_inputs=mixed and draw(st.booleans()),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        router_bias=draw(st.booleans()),
        exact_router=draw(st.booleans()),
        selection_bias=draw(st.booleans()),
        groups=groups,
        chosen_groups=chosen_groups,
        group_best=draw(st.integers(1, size)),
        scale=draw(st.sampled_from([1.0, 2.5])),
        shared=shared,
        shared_gate=shared is not None and draw(st.booleans()),
        router_norm=draw(maybe_weighted),
        router_scale=draw(st.sampled_from([1.0, 0.5])),
        expert_scales=draw(st.booleans()),
        expert_norm=draw(maybe_norms),
        expert_post_norm=draw(maybe_norms),
        shared_norm=draw(maybe_norms) if shared is not None else None,
        shared_post_norm=draw(maybe_norms) if shared is not None else None,
    )


inputs = st.builds(
    LayerInputs,
    size=st.sampled_from([4, 8]),
    activation=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]),
    norm=norms,
    post_norm=norms,
    vocab_size=st.sampled_from([None, VOCAB - 2]),
)
altups = st.builds(AltUp, st.integers(2, 4), norms)


any_feeds = feeds | experts()
sparse = feeds.map(lambda feed: replace(feed, cutoff=0.5) if feed.gated else feed)
latent_experts = experts(True).map(lambda feed: replace(feed, latent=6, latent_bias=feed.router_bias))
squared = feeds.map(lambda feed: replace(feed, activation="relu2", gain=1.0))
learned = st.builds(
    FeedForward,
    size=st.sampled_from([8, 12]),
    activation=st.just("xielu"),
    gated=st.just(False),
    bias=st.booleans(),
    alphas=st.sampled_from([None, (0.5, -1.0)]),
)


convolutions = st.builds(
    ShortConvolution, size=st.sampled_from([4, 12]), width=st.integers(1, 7), bias=st.booleans()
)


def ropes_of(dim: int) -> st.SearchStrategy[Rope]:
    """Return rotations of whole or part heads of `dim` numbers."""
    return st.sampled_from([None, *range(2, dim + 1, 2)]).flatmap(
        lambda dims: st.builds(
            Rope,
            theta=st.sampled_from([100.0, 10_000.0]),
            kind=st.sampled_from(["default", "linear"]),
            factor=st.sampled_from([1.0, 4.0]),
            frequency_factors=st.none()
            | st.lists(
                st.sampled_from([1.0, 3.0]), min_size=(dims or dim) // 2, max_size=(dims or dim) // 2
            ).map(tuple),
            dims=st.just(dims),
            interleaved=st.booleans(),
        )
    )


latents = st.sampled_from([2, 6]).flatmap(
    lambda rope_dim: st.builds(
        LatentAttention,
        heads=st.integers(1, 3),
        q_rank=st.none() | st.sampled_from([4, 10]),
        kv_rank=st.sampled_from([2, 12, 40]),
        nope_dim=st.sampled_from([2, 8]),
        rope_dim=st.just(rope_dim),
        v_dim=st.sampled_from([4, 8, 12]),
        norm=norms.map(lambda norm: replace(norm, bias=False)),
        rope=st.none()
        | ropes_of(rope_dim).map(lambda rope: replace(rope, dims=None, frequency_factors=None)),
        scale=st.none() | st.sampled_from([0.05, 1.0]),
        bias=st.booleans(),
    )
)


@st.composite
def attentions(
    draw: st.DrawFn,
    heads: int,
    kv_heads: int,
    head_dim: int,
    windows: st.SearchStrategy[int | None],
    mixed: bool = False,
) -> Attention:
    """Draw attention with any features, over heads of this shape; see `specs` for `mixed`."""
    head_norm = draw(maybe_weighted)
    normed = draw(st.sampled_from(["each", "all", "rotated"])) if head_norm is not None else "each"
    if mixed and head_norm is not None and normed != "all":
        head_norm = replace(head_norm, weighted=draw(st.booleans()))
    window = draw(windows)
    return Attention(
        heads,
        kv_heads,
        head_dim,
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        head_norm=head_norm,
        rope=draw(st.none() | ropes_of(head_dim)),
        window=window,
        chunk=draw(st.none() | st.integers(1, 8)) if mixed and window is None else None,
        scale=draw(st.none() | st.sampled_from([0.05, 1.0])),
        score_cap=draw(st.none() | st.sampled_from([0.5, 5.0])),
        norms_all_heads=normed == "all",
        norms_rotated=normed == "rotated",
        query_scaling=draw(
            st.none()
            | st.builds(
                QueryScaling,
                st.just(0.5),
                st.sampled_from([1, 5]),
                st.sampled_from([0, 1] if mixed else [0]),
            )
        ),
        sinks=draw(st.booleans()),
        v_norm=draw(st.none() | st.just(Norm(1e-2)) | st.just(Norm(kind="layer"))) if mixed else None,
        v_is_k=mixed and draw(st.booleans()),
        gate=draw(st.sampled_from([None, "heads", "numbers"])) if mixed else None,
    )


@st.composite
def specs(
    draw: st.DrawFn,
    hidden: tuple[int, ...] = (8, 20),
    head_dims: tuple[int, ...] = (8, 12),
    feeds: st.SearchStrategy[FeedForward | Experts] = any_feeds,
    windows: st.SearchStrategy[int | None] = windows,
    positions: int = POSITIONS,
    mixed: bool = False,
) -> ModelSpec:
    """Draw a network of up to three layers, each of them different; `mixed` ones differ in the shapes of their heads,
    too, read the keys and values of another, or are latent attention or convolutions, and have what only plain modules
    compute."""

    def shapes() -> st.SearchStrategy[tuple[int, int, int]]:
        kv_heads = st.sampled_from([1, 2])
        return st.tuples(kv_heads, st.sampled_from([1, 2, 3]), st.sampled_from(head_dims)).map(
            lambda shape: (shape[0] * shape[1], shape[0], shape[2])
        )

    same = draw(shapes())
    mixers = (shapes() if mixed else st.just(same)).flatmap(lambda shape: attentions(*shape, windows, mixed))
    layers = st.builds(
        Layer,
        mixers | latents | convolutions if mixed else mixers,
        feeds | sparse | squared | learned | experts(True) | latent_experts if mixed else feeds,
        maybe_norms,
        maybe_norms,
        maybe_norms,
        maybe_norms,
        st.sampled_from([1.0, 0.25]),
        *(
            [st.booleans()] * 2 + [st.none() | st.builds(Laurel, st.sampled_from([2, 4]), norms)]
            if mixed
            else []
        ),
    ).map(lambda layer: replace(layer, feed_forward_norm=None) if layer.parallel else layer)
    altup = draw(st.none() | altups) if mixed else None
    if altup is not None:
        layers = layers.map(lambda layer: replace(layer, scalar=False))
    drawn = draw(st.lists(layers, min_size=1, max_size=3))
    if mixed:
        drawn = halved(drawn, draw(st.lists(st.sampled_from(["", "", *HALVES]), min_size=3, max_size=3)))
        drawn = beside(drawn, draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    return ModelSpec(
        "Random",
        VOCAB,
        draw(st.sampled_from(hidden)),
        positions,
        tuple(shared(drawn, draw(st.lists(st.booleans(), min_size=3, max_size=3))) if mixed else drawn),
        final_norm=draw(norms),
        tied=draw(st.booleans()),
        embedding_norm=draw(st.none() | st.just(Norm(1e-2, weighted=False))) if mixed else None,
        embedding_scale=draw(st.sampled_from([1.0, 4.5])),
        logit_scale=draw(st.sampled_from([1.0, 0.25])),
        logit_cap=draw(st.none() | st.sampled_from([1.0, 30.0])),
        learned_positions=draw(st.booleans()),
        layer_inputs=draw(st.none() | inputs) if mixed else None,
        altup=altup,
    )


HALVES: dict[str, dict[str, Any]] = {
    "mixer": {
        "feed_forward": None,
        "feed_forward_norm": None,
        "feed_forward_post_norm": None,
        "parallel": False,
    },
    "feed": {
        "mixer": None,
        "attention_norm": None,
        "attention_post_norm": None,
        "parallel": False,
        "laurel": None,
    },
}
"""What a layer lacks that is a mixer or a feed-forward alone."""


def halved(layers: list[Layer], wanted: list[str]) -> list[Layer]:
    """Make halves of layers where it is wanted, but leave one mixer."""
    found = [replace(layer, **HALVES.get(half, {})) for layer, half in zip(layers, wanted, strict=False)]
    return found if any(layer.mixer for layer in found) else [*found[:-1], layers[-1]]


def beside(layers: list[Layer], wanted: list[bool]) -> list[Layer]:
    """Have mixers where it is wanted read what the mixer of the layer before reads."""
    pairs = zip([None, *layers], layers, wanted, strict=False)
    return [
        replace(layer, beside=True, attention_norm=None)
        if is_wanted and before is not None and before.mixer and layer.mixer
        else layer
        for before, layer, is_wanted in pairs
    ]


def shared(layers: list[Layer], wanted: list[bool]) -> list[Layer]:
    """Have layers where it is wanted read the keys and values of an earlier layer whose heads have the same shape."""
    found: list[Layer] = []
    for layer, is_wanted in zip(layers, wanted, strict=False):
        given = layer.mixer
        if not isinstance(given, Attention):
            found.append(layer)
            continue
        sources = [
            index
            for index, other in enumerate(each.mixer for each in found)
            if isinstance(other, Attention)
            and other.kv_from is None
            and (other.kv_heads, other.head_dim) == (given.kv_heads, given.head_dim)
        ]
        source = sources[-1] if is_wanted and sources else None
        found.append(replace(layer, mixer=replace(given, kv_from=source)))
    return found


texts = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=POSITIONS // 2), min_size=1, max_size=3
)


def checkpoint(spec: ModelSpec, seed: int) -> tuple[dict[str, Tensor], Names]:
    """Return random tensors for every part of a network, named by the parts, and these names."""
    torch.manual_seed(seed)
    parts = {slot.part: slot.part + ("" if slot.expert is None else ".{}") for slot in slots(spec)}
    names = {**{part: part for part in ("head", "k", "v", "k_norm")}, **parts, "layers": "layers.{}."}
    tensors = {}
    for slot in slots(spec):
        made = torch.randn(slot.shape)
        if slot.is_matrix or slot.is_by_head or slot.expert is not None:
            made /= slot.shape[-1] ** 0.5
        if slot.field == "weight" and slot.part.endswith("norm"):
            made = 1.0 + made / 4
        tensors[slot.name(names)] = made
    return tensors, names


def stored(tensors: dict[str, Tensor]) -> list[StoredTensor]:
    """Return the tensors as those of a checkpoint."""
    return [
        StoredTensor(
            name,
            tuple(t.shape),
            t.nbytes,
            lambda to, t=t: to.copy_(t),
            parts=lambda t=t: iter([(0, t)]),
        )
        for name, t in tensors.items()
    ]


def network_of(spec: ModelSpec, tensors: dict[str, Tensor], names: Names, quantize: str = "none") -> Network:
    """Load the network as from a file."""
    found = stored(tensors)
    kinds = choose_kinds(found, match(spec, found, names), quantize, CPU)
    return fill_network(plan_tensors(spec, found, Target(torch.float32, CPU), names, kinds=kinds))


class Engine:
    """The reference with the engine's plain attention, over blocks in arbitrary places."""

    def __init__(self, network: Network, kind: str = "auto") -> None:
        rows = layer_rows(network.spec, torch.float32, CPU, kind)
        sources = kv_sources(network.spec)
        cache = KVCache(rows, 3 * POSITIONS // BLOCK, BLOCK, torch.float32, CPU, sources=sources)
        for part in cache.parts:
            part.fill_(torch.nan if part.is_floating_point() else 255)
        self._model = Decoder(network)
        self._backend = SdpaBackend(cache, unusual_layers(network))

    def step(self, pieces: dict[int, tuple[int, list[int]]]) -> dict[int, Tensor]:
        """Return the logits of the tokens of some texts, each beginning at its given row."""
        spans = tuple(Span(_blocks(text), start, len(tokens)) for text, (start, tokens) in pieces.items())
        ids = [token for _, tokens in pieces.values() for token in tokens]
        positions = [row for span in spans for row in range(span.start, span.stop)]
        with torch.inference_mode():
            hidden = self._model.forward(
                torch.tensor(ids), torch.tensor(positions), self._backend.plan(StepBatch(spans))
            )
            logits = self._model.logits(hidden).split([span.count for span in spans])
        return dict(zip(pieces, logits, strict=True))


def _blocks(text: int) -> tuple[int, ...]:
    """Return every third block for each text, from the last to the first."""
    return tuple(reversed(range(text, 3 * POSITIONS // BLOCK, 3)))


def in_pieces(engine: Engine, given_texts: list[list[int]], size: int) -> list[Tensor]:
    """Return the logits of every text, computed side by side with `size` tokens of each per step."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    for start in range(0, max(map(len, given_texts)), size):
        pieces = {
            index: (start, tokens[start : start + size])
            for index, tokens in enumerate(given_texts)
            if start < len(tokens)
        }
        for index, logits in engine.step(pieces).items():
            found[index].append(logits)
    return [torch.cat(found[index]) for index in range(len(given_texts))]


def assert_close(ours: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Assert that logits agree within `tolerance` of the largest logit of each position."""
    assert ours.shape == expected.shape
    scale = expected.abs().amax(dim=-1, keepdim=True)
    assert ((ours - expected).abs() / scale).max().item() < tolerance


def weight_bytes(network: Network) -> int:
    """Return the bytes of all tensors except the rotary tables, each memory counted once."""
    found = {t.data_ptr(): t for name, t in tensors_in(network) if not name.endswith("rotary")}
    return sum(tensor.nbytes for tensor in found.values())


@EXAMPLES
@given(specs() | specs(mixed=True), texts, st.integers(1, 7), st.integers(0, 2**16))
def test_any_network_computes_what_its_description_says(
    spec: ModelSpec, given_texts: list[list[int]], size: int, seed: int
) -> None:
    tensors, names = checkpoint(spec, seed)
    plain = PlainNetwork(spec, tensors)
    expected = [plain.logits(tokens) for tokens in given_texts]
    assume(plain.router_gap > 1e-4)  # with a smaller gap, fp32 may choose another expert
    network = network_of(spec, tensors, names)
    for count in (POSITIONS, size):
        for ours, truth in zip(in_pieces(Engine(network), given_texts, count), expected, strict=True):
            assert_close(ours, truth)


@EXAMPLES
@given(specs() | specs(mixed=True))
def test_every_tensor_counts_once_in_what_a_network_takes(spec: ModelSpec) -> None:
    network = network_of(spec, *checkpoint(spec, 0))
    assert network.nbytes == weight_bytes(network)
    tables = sum(POSITIONS * width * 4 for _, width in ropes(spec))
    assert needed_bytes(spec, torch.float32, POSITIONS) == network.nbytes + tables


def small(**changes: object) -> ModelSpec:
    """Return a plain network of two layers whose matrices can be quantised."""
    layer = Layer(Attention(2, 1, 32, rope=Rope()), FeedForward(64))
    return replace(ModelSpec("Small", VOCAB, 64, POSITIONS, (layer, layer)), **changes)


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_layers_with_one_rope_and_other_heads_have_tables_of_their_own() -> None:
    wide = Layer(Attention(2, 1, 48, rope=Rope()), FeedForward(64))
    spec = small(layers=(small().layers[0], wide, small().layers[0]))
    assert Feature.MIXED_HEADS in features(spec)
    tensors, names = checkpoint(spec, 0)
    network = network_of(spec, tensors, names)
    first, second, third = (layer.attention.rotary for layer in network.layers)
    assert first is third
    assert first is not None
    assert second is not None
    assert (first.shape, second.shape) == ((POSITIONS, 32), (POSITIONS, 48))
    assert needed_bytes(spec, torch.float32, POSITIONS) == network.nbytes + POSITIONS * (32 + 48) * 4
    assert_close(run(network, TOKENS, PlainAttention()), PlainNetwork(spec, tensors).logits(TOKENS))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_experts_and_learned_positions_stay_plain_where_the_rest_is_in_blocks(quantize: str) -> None:
    mixture = Experts(
        4, 4, FeedForward(32, bias=True), router_bias=True, shared=FeedForward(64), shared_gate=True
    )
    layer = replace(small().layers[0], feed_forward=mixture)
    spec = small(layers=(layer, layer), learned_positions=True)
    tensors, names = checkpoint(spec, 0)
    network = network_of(spec, tensors, names, quantize)
    assert network.is_quantized
    assert network.nbytes == weight_bytes(network)
    ours = in_pieces(Engine(network), [TOKENS], 3)[0]
    assert_close(ours, PlainNetwork(spec, tensors).logits(TOKENS), 0.05 if quantize == "int8" else 0.4)


def test_a_network_with_learned_positions_has_no_more_of_them() -> None:
    spec = small(learned_positions=True)
    tensors, names = checkpoint(spec, 0)
    target = Target(torch.float32, CPU, context_length=4 * POSITIONS)
    network = fill_network(plan_tensors(spec, stored(tensors), target, names))
    assert network.positions == POSITIONS
    assert network_of(spec, tensors, names).positions == POSITIONS


def test_an_engine_keeps_rows_of_any_format_and_those_of_a_shared_layer_once() -> None:
    wide = Layer(Attention(4, 2, 48, rope=Rope()), FeedForward(64))
    reader = Layer(Attention(4, 2, 48, rope=Rope(), kv_from=1), FeedForward(64))
    spec = small(layers=(small().layers[0], wide, reader, small().layers[0]))
    network = network_of(spec, *checkpoint(spec, 0))
    cache = build(network, CPU, BuildOptions()).cache
    assert [part.shape[1] for part in cache.parts] == [2, 1]
    assert [rows.shape[1:] for rows in cache.k] == [(1, 32), (2, 48), (2, 48), (1, 32)]
    assert cache.k[2].data_ptr() == cache.k[1].data_ptr() != cache.v[1].data_ptr()
    assert cache.token_bytes == token_bytes(spec, torch.float32) == 2 * 4 * (2 * 32 + 2 * 48)
    assert cache.nbytes == cache.token_bytes * len(cache.k[0])


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_an_engine_keeps_the_inputs_of_convolutions_as_they_are(kind: str) -> None:
    convolution = Layer(ShortConvolution(48, 3), FeedForward(64))
    spec = small(layers=(convolution, small().layers[0], convolution))
    network = network_of(spec, *checkpoint(spec, 0))
    cache = build(network, CPU, BuildOptions(kv_dtype=kind)).cache
    assert [part.shape[:2] for part in cache.parts] == [(1, 2), (2, 1)]
    assert [(rows.shape[1:], rows.dtype) for rows in cache.k[::2]] == [((1, 48), torch.float32)] * 2
    assert (cache.row.name, cache.keeps_exactly) == (("fp8", False) if kind == "fp8" else ("float32", True))
    row = 2 * (48 if kind == "fp8" else 4 * 32)  # a row of fp8 with its scale fills 48 bytes
    held = sum(part[:, :, 0].nbytes for part in cache.parts)
    assert held == token_bytes(spec, torch.float32, kind) == 2 * 4 * 48 + row
    assert (spec.attention, spec.window) == (small().attention, None)


LATENT_ATTENTION = LatentAttention(2, 24, 128, 16, 64, 24, rope=Rope(interleaved=True))
LATENT = Layer(LATENT_ATTENTION, FeedForward(64))


@pytest.mark.parametrize(("kind", "each"), [("auto", 4 * 192), ("bf16", 2 * 192), ("fp8", 208)])
def test_an_engine_keeps_latents_once(kind: str, each: int) -> None:
    spec = small(layers=(LATENT, LATENT))
    network = network_of(spec, *checkpoint(spec, 0))
    cache = build(network, CPU, BuildOptions(kv_dtype=kind)).cache
    assert cache.parts[0].shape[:2] == (1, 2)  # 3 scales of fp8 fill 16 bytes
    assert cache.token_bytes == token_bytes(spec, torch.float32, kind) == 2 * each
    assert cache.k[1].data_ptr() == cache.v[1].data_ptr()


@pytest.mark.parametrize(("kind", "tolerance"), [("fp8", 0.2), ("int8", 0.04)])
def test_latents_may_be_quantised(kind: str, tolerance: float) -> None:
    spec = small(layers=(LATENT, LATENT))
    tensors, names = checkpoint(spec, 0)
    engine = Engine(network_of(spec, tensors, names), kind)
    whole, pieces = (in_pieces(engine, [TOKENS], size)[0] for size in (len(TOKENS), 1))
    expected = PlainNetwork(spec, tensors).logits(TOKENS)
    assert_close(whole, expected, tolerance)
    assert_close(pieces, expected, tolerance)
    assert (whole - expected).abs().max() > 1e-4


def test_few_rows_attend_to_latents_and_many_to_expanded_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LatentAttention(4, None, 512, 128, 64, 128)
    assert [latent._absorbs(spec, 1, rows) for rows in (1, 2, 1000)] == [False, True, True]
    assert [latent._absorbs(spec, count, 1000) for count in (64, 512, 1000)] == [True, False, False]
    torch.manual_seed(0)
    expands = torch.randn(4, 512, 128) / 512**0.5, torch.randn(4, 128, 512) / 512**0.5
    q, rows = torch.randn(5, 4, 192), torch.randn(9, 576)

    def found(absorbs: bool, at_once: int = latent.AT_ONCE) -> Tensor:
        monkeypatch.setattr(latent, "AT_ONCE", at_once)
        monkeypatch.setattr(latent, "_absorbs", lambda *_: absorbs)
        return latent.attend(spec, expands, q, rows, lambda layer, x: x @ layer.weight.mT).flatten(1)

    assert_close(found(True), found(False))
    assert_close(found(False, at_once=9 * 3 * 320), found(False))  # three heads, then one
    assert_close(found(True, at_once=9 * 4 * 2), found(True))  # two rows at a time


@pytest.mark.parametrize(
    ("layer", "lacks"),
    [
        (Layer(Attention(4, 1, 32, rope=Rope()), FeedForward(64)), Feature.MIXED_HEADS),
        (LATENT, Feature.LATENT),
    ],
)
def test_only_torch_attends_to_rows_that_differ(layer: Layer, lacks: Feature) -> None:
    spec = small(layers=(small().layers[0], layer))
    network = network_of(spec, *checkpoint(spec, 0))
    said = f"--attention triton cannot be used: this model has {lacks.value}."
    with pytest.raises(EngineError, match=said):
        build(network, CPU, BuildOptions(attention="triton"))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Layer(ShortConvolution(48, 3), FeedForward(64)), "short convolutions in place of attention"),
        (LATENT, "multi-head latent attention"),
    ],
)
def test_what_has_no_heads_to_divide_is_refused(layer: Layer, words: str) -> None:
    spec = small(layers=(layer, small().layers[0]))
    tensors, names = checkpoint(spec, 0)
    with pytest.raises(ModelError, match=f"A model with {words} cannot be divided"):
        shard(spec, stored(tensors), names, 0, 2)


def test_layers_may_be_attention_or_a_feed_forward_alone() -> None:
    attention, feed = small().layers[0].mixer, FeedForward(64, "relu2", gated=False)
    seeing, feeding = Layer(attention, None, feed_forward_norm=None), Layer(None, feed, None)
    spec = small(layers=(feeding, seeing, feeding, feeding, seeing))
    tensors, names = checkpoint(spec, 0)
    network = network_of(spec, tensors, names)
    cache = build(network, CPU, BuildOptions()).cache
    assert [part.shape[1] for part in cache.parts] == [2]
    assert cache.token_bytes == token_bytes(spec, torch.float32) == 2 * 2 * 4 * 32
    assert not_native(spec) is None
    assert not_fused(spec) == "there are no fused kernels for a head_dim of 32"
    assert_close(run(network, TOKENS, PlainAttention()), PlainNetwork(spec, tensors).logits(TOKENS))
