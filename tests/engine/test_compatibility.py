"""The compatibility check: what people are told of models that kernels of ours cannot run, and who runs them then."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import engine.build
from engine.build import Pieces, build
from engine.errors import EngineError
from engine.execute.build_options import BuildOptions
from engine.execute.compatibility import FUSED, NATIVE, PLAIN_ATTENTION, lacking, not_fused, not_native
from engine.execute.cpu.executor import unsupported
from models.families.common import pre_norm_layer, uniform
from models.features import Feature, features
from models.loading.assemble import TensorStore
from models.loading.assemble import assemble as network_of
from models.loading.plan import LoadPlan, Target
from models.network import Network
from models.recurrences import DeltaNet, Mamba2, Recurrence
from models.spec import (
    AltUp,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Laurel,
    LayerInputs,
    ModelSpec,
    Norm,
    QueryScaling,
    Rope,
    ShortConvolution,
)
from models.weights.slots import group_shapes, slots

CPU = torch.device("cpu")
ODD_HEADS = "there are no native kernels for a head_dim of 12"


def a_spec(**attention: Any) -> ModelSpec:
    """A small network with heads of 64; `attention` is what is unusual about them."""
    return uniform(
        "LlamaForCausalLM",
        layers=2,
        vocab_size=32,
        hidden_size=64,
        max_positions=64,
        layer=pre_norm_layer(Attention(2, 1, 64, **{"rope": Rope(), **attention}), FeedForward(64), Norm()),
        tied=True,
    )


def changed(spec: ModelSpec, **layer: Any) -> ModelSpec:
    return replace(spec, layers=tuple(replace(each, **layer) for each in spec.layers))


def with_odd_heads() -> ModelSpec:
    """Heads of a size that no kernels of ours have."""
    return changed(a_spec(), mixer=Attention(2, 1, 12, rope=Rope()))


ASKING: dict[Feature, ModelSpec] = {
    Feature.WINDOW: a_spec(window=8),
    Feature.CHUNKS: a_spec(chunk=8),
    Feature.NEXT_POSITION: a_spec(query_scaling=QueryScaling(0.1, 16, offset=1)),
    Feature.NO_WEIGHT: a_spec(head_norm=Norm(weighted=False)),
    Feature.EXPERT_INPUTS: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), scales_inputs=True)),
    Feature.SCALE: a_spec(scale=1.0),
    Feature.SCORE_CAP: a_spec(score_cap=50.0),
    Feature.QUERY_SCALING: a_spec(query_scaling=QueryScaling(0.1, 16)),
    Feature.SINKS: a_spec(sinks=True),
    Feature.HEAD_NORM: a_spec(head_norm=Norm()),
    Feature.NORM_ALL_HEADS: a_spec(head_norm=Norm(), norms_all_heads=True),
    Feature.NORM_ROTATED: a_spec(head_norm=Norm(), norms_rotated=True),
    Feature.GATE: a_spec(gate="numbers"),
    Feature.VALUE_NORM: a_spec(v_norm=Norm()),
    Feature.VALUE_IS_KEY: a_spec(v_is_k=True),
    Feature.QKV_BIAS: a_spec(qkv_bias=True),
    Feature.OUT_BIAS: a_spec(out_bias=True),
    Feature.PARTIAL_ROPE: a_spec(rope=Rope(dims=32)),
    Feature.INTERLEAVED_ROPE: a_spec(rope=Rope(interleaved=True)),
    Feature.EXACT_ROPE: a_spec(rope=Rope(exact=True)),
    Feature.NO_ROPE: a_spec(rope=None),
    Feature.LEARNED_POSITIONS: replace(a_spec(), learned_positions=True),
    Feature.EXPERTS: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64))),
    Feature.EXACT_ROUTER: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), exact_router=True)),
    Feature.ROUTER_BIAS: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), router_bias=True)),
    Feature.SPARSE_GATE: changed(a_spec(), feed_forward=FeedForward(64, cutoff=1.5)),
    Feature.LAUREL: changed(a_spec(), laurel=Laurel(8)),
    Feature.STREAMS: replace(a_spec(), altup=AltUp(2)),
    Feature.CLAMP: changed(a_spec(), feed_forward=FeedForward(64, limit=7.0)),
    Feature.SELECTION_BIAS: changed(
        a_spec(), feed_forward=Experts(4, 2, FeedForward(64), selection_bias=True)
    ),
    Feature.EXPERT_GROUPS: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), groups=2)),
    Feature.EXPERT_SCALE: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), scale=2.5)),
    Feature.ROUTER_INPUT: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), router_scale=0.5)),
    Feature.EXPERT_SCALES: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), expert_scales=True)),
    Feature.LATENT_EXPERTS: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), latent=32)),
    Feature.EXPERT_NORMS: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), expert_norm=Norm())),
    Feature.ACTIVATION: changed(a_spec(), feed_forward=FeedForward(64, "relu")),
    Feature.LEARNED_ACTIVATION: changed(a_spec(), feed_forward=FeedForward(64, "xielu", gated=False)),
    Feature.SQUARED_RELU: changed(a_spec(), feed_forward=FeedForward(64, "relu2")),
    Feature.BESIDE: replace(
        a_spec(),
        layers=(
            replace(a_spec().layers[0], feed_forward=None, feed_forward_norm=None),
            replace(a_spec().layers[0], beside=True, attention_norm=None),
        ),
    ),
    Feature.HALF_LAYERS: changed(a_spec(), feed_forward=None, feed_forward_norm=None),
    Feature.UNGATED: changed(a_spec(), feed_forward=FeedForward(64, gated=False)),
    Feature.FEED_FORWARD_BIAS: changed(a_spec(), feed_forward=FeedForward(64, bias=True)),
    Feature.LAYER_NORM: replace(a_spec(), final_norm=Norm(kind="layer")),
    Feature.NORM_OFFSET: replace(a_spec(), final_norm=Norm(offset=1.0)),
    Feature.NORM_PLACE: changed(a_spec(), attention_post_norm=Norm()),
    Feature.PARALLEL: changed(a_spec(), parallel=True, feed_forward_norm=None),
    Feature.NORM_ROUNDING: replace(a_spec(), final_norm=Norm(rounds_last=True)),
    Feature.RESIDUAL_SCALE: changed(a_spec(), residual_scale=0.22),
    Feature.LAYER_SCALE: changed(a_spec(), scalar=True),
    Feature.LAYER_INPUTS: replace(a_spec(), layer_inputs=LayerInputs(8)),
    Feature.EMBEDDING_NORM: replace(a_spec(), embedding_norm=Norm(weighted=False)),
    Feature.EMBEDDING_SCALE: replace(a_spec(), embedding_scale=8.0),
    Feature.LOGIT_SCALE: replace(a_spec(), logit_scale=0.5),
    Feature.LOGIT_CAP: replace(a_spec(), logit_cap=30.0),
    Feature.MIXED_EPS: replace(a_spec(), final_norm=Norm(1e-3)),
    Feature.MIXED_LAYERS: replace(a_spec(), layers=(a_spec().layers[0], a_spec(qkv_bias=True).layers[0])),
    Feature.MIXED_HEADS: replace(
        a_spec(),
        layers=(
            a_spec().layers[0],
            replace(a_spec().layers[0], mixer=Attention(2, 2, 64, rope=Rope())),
        ),
    ),
    Feature.LATENT: changed(a_spec(), mixer=LatentAttention(2, None, 64, 16, 32, 16, rope=Rope())),
    Feature.CONVOLUTION: replace(
        a_spec(), layers=(a_spec().layers[0], replace(a_spec().layers[0], mixer=ShortConvolution(64, 3)))
    ),
    Feature.RECURRENCE: replace(
        a_spec(), layers=(a_spec().layers[0], replace(a_spec().layers[0], mixer=DeltaNet(1, 2, 32, 32)))
    ),
    Feature.SHARED_KV: replace(a_spec(), layers=(a_spec().layers[0], a_spec(kv_from=0).layers[0])),
}
"""For each feature a network that asks for it."""


def test_every_feature_is_noticed_and_kernels_refuse_what_they_do_not_know() -> None:
    assert set(ASKING) == set(Feature), "a feature has no example"
    for feature, spec in ASKING.items():
        assert feature in features(spec), feature
        for known, said in ((NATIVE, not_native(spec)), (FUSED, not_fused(spec))):
            assert (features(spec) <= known) == (said is None), feature
            assert said is None or feature in known or feature.value in said, feature
    assert not features(a_spec())


def test_the_fused_kernels_know_latents_in_whole_pieces() -> None:
    for sizes in ((512, 128, 64, 128), (256, 64, 32, 96)):
        assert not_fused(changed(a_spec(), mixer=LatentAttention(2, None, *sizes, rope=Rope()))) is None
    for sizes in ((500, 128, 64, 128), (512, 128, 48, 128), (512, 100, 64, 128), (512, 128, 64, 100)):
        said = not_fused(changed(a_spec(), mixer=LatentAttention(2, None, *sizes, rope=Rope())))
        assert said is not None
        assert "no fused kernels for latent attention of" in said


def test_the_native_kernels_know_experts_in_any_layer() -> None:
    dense, mixed = a_spec().layers[0], ASKING[Feature.EXPERTS].layers[0]
    windowed = replace(mixed, mixer=replace(mixed.attention, window=8), residual_scale=0.25)
    assert not_native(replace(a_spec(), layers=(dense, mixed, windowed))) is None
    clamped = FeedForward(64, limit=7.0)
    for experts in (Experts(4, 2, clamped), Experts(4, 2, FeedForward(64), shared=clamped)):
        assert not_native(replace(a_spec(), layers=(dense, replace(mixed, feed_forward=experts)))) is None


def test_norms_of_experts_that_the_native_kernels_do_not_know() -> None:
    gated = Experts(4, 2, FeedForward(64), shared=FeedForward(64), shared_gate=True, shared_norm=Norm())
    assert not_native(changed(a_spec(), feed_forward=gated)) == (
        "the native kernels do not support a shared expert with a gate and a norm"
    )
    normed = Experts(4, 2, FeedForward(64), expert_post_norm=Norm())
    assert not_native(changed(a_spec(), feed_forward=normed, parallel=True, feed_forward_norm=None)) == (
        "the native kernels do not support experts with norms beside the attention"
    )


def test_mixers_beside_each_other_that_kernels_do_not_know() -> None:
    """What the second one reads must still be there."""
    spec = ASKING[Feature.BESIDE]
    first, second = spec.layers
    known = replace(spec, layers=(first, replace(second, feed_forward_post_norm=Norm())))
    assert (not_native(known), not_fused(known)) == (None, None)
    words = "kernels support two mixers beside each other only in layers without more"
    parallel = replace(second, parallel=True, feed_forward_norm=None)
    assert not_native(replace(spec, layers=(first, parallel))) == f"the native {words}"
    for layers in (
        (second,),
        (a_spec().layers[0], second),
        (first, second, second),
        (replace(first, scalar=True), second),
        (replace(first, mixer=None, feed_forward=FeedForward(64)), second),
    ):
        asked = replace(spec, layers=layers)
        assert (not_native(asked), not_fused(asked)) == (f"the native {words}", f"the fused {words}")


def test_what_lacks_is_told_as_a_part_of_a_sentence() -> None:
    spec = replace(a_spec(window=8, score_cap=50.0), logit_cap=30.0)
    known = NATIVE - {Feature.WINDOW, Feature.SCORE_CAP, Feature.LOGIT_CAP}
    assert lacking(a_spec(), known) is None
    assert lacking(a_spec(window=8), known) == "a sliding window"
    assert lacking(spec, known) == "a sliding window, capped attention scores and capped logits"


@pytest.mark.parametrize(
    ("dim", "native", "fused"),
    [(64, True, True), (96, True, True), (512, True, True), (16, True, False), (12, False, False)],
)
def test_sizes_of_heads_that_kernels_do_not_have(dim: int, native: bool, fused: bool) -> None:
    spec = changed(a_spec(), mixer=Attention(2, 1, dim, rope=Rope()))
    assert (not_native(spec) is None, not_fused(spec) is None) == (native, fused)
    for said in (not_native(spec), not_fused(spec)):
        assert said is None or f"a head_dim of {dim}" in said


def test_the_fused_kernels_need_embeddings_for_every_layer_of_all_tokens() -> None:
    assert not_fused(replace(a_spec(), layer_inputs=LayerInputs(8))) is None
    some = replace(a_spec(), layer_inputs=LayerInputs(8, vocab_size=24))
    assert "of some tokens alone" in str(not_fused(some))


def test_experts_are_blamed_only_for_what_the_fused_kernels_know_without_them() -> None:
    experts = Experts(4, 2, FeedForward(64))
    given = replace(changed(a_spec(), feed_forward=experts), layer_inputs=LayerInputs(8))
    assert (
        str(not_fused(given)) == f"the fused kernels do not support {Feature.LAYER_INPUTS.value} with experts"
    )
    beside = changed(a_spec(), feed_forward=experts, parallel=True, feed_forward_norm=None)
    assert str(not_fused(beside)) == f"the fused kernels do not support {Feature.PARALLEL.value}"


GATED, SHARED = FeedForward(64), FeedForward(24)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (Experts(4, 2, GATED, shared=SHARED, scoring="sigmoid", router_bias=True), None),
        (Experts(4, 2, FeedForward(64, bias=True, gain=1.7, limit=7.0, up_offset=1.0)), None),
        (Experts(4, 2, GATED, shared=FeedForward(24, "gelu", bias=True)), None),
        (Experts(4, 2, FeedForward(64, "relu2", gated=False), scale=2.5), None),
        (Experts(4, 2, GATED, groups=2), Feature.EXPERT_GROUPS.value),
        (Experts(4, 2, GATED, shared=SHARED, shared_gate=True), None),
        (Experts(4, 2, FeedForward(60)), "experts of 64 by 60"),
    ],
)
def test_experts_that_the_fused_kernels_know(experts: Experts, words: str | None) -> None:
    first, second = changed(a_spec(), feed_forward=experts).layers
    dense = replace(first, feed_forward=FeedForward(96))
    for layers in (
        (first, second),
        (dense, second),
    ):  # layers with and without experts may stand side by side
        said = not_fused(replace(a_spec(), layers=layers))
        assert (said is None) == (words is None)
        assert words is None or words in str(said)
    if words is None:
        after, bare = replace(first, feed_forward_post_norm=Norm()), replace(first, feed_forward_norm=None)
        assert not_fused(replace(a_spec(), layers=(after, second))) is None
        assert "experts without a norm" in str(not_fused(replace(a_spec(), layers=(bare, second))))


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (Mamba2(4, 80, 128, 2, norms_first=True), None),
        (Mamba2(2, 64, 256, multipliers=(0.5,) * 5), None),
        (DeltaNet(2, 4, 128, 24), None),
        (Mamba2(4, 64, 24), "states of 64 by 24"),
        (Mamba2(4, 136, 64), "states of 136 by 64"),
        (DeltaNet(2, 4, 64, 20), "states of 64 by 20"),
    ],
)
def test_states_that_the_fused_kernels_know(mixer: Recurrence, words: str | None) -> None:
    first, second = a_spec().layers
    said = not_fused(replace(a_spec(), layers=(replace(first, mixer=mixer), second)))
    assert said is None if words is None else words in str(said)


def a_network(
    spec: ModelSpec, dtype: torch.dtype = torch.float32, held: torch.dtype | None = None
) -> Network:
    """Its weights are random; with `held`, they are numbers of that dtype."""
    torch.manual_seed(0)
    shapes = group_shapes(list(slots(spec)))
    plain = {group: torch.randn(shape) / shape[-1] ** 0.5 for group, shape in shapes.items()}
    plain = {group: numbers.to(held or dtype).to(dtype) for group, numbers in plain.items()}
    return network_of(LoadPlan(Target(dtype, CPU), spec, [], {}), TensorStore(plain))


def put_together(spec: ModelSpec, *notes: str, **options: Any) -> Pieces:
    given = BuildOptions(context=32, free=10**8, threads=1, notes=notes, **options)
    return build(a_network(spec), CPU, given)


def test_a_model_that_the_native_kernels_do_not_know_is_said_to_be_slower() -> None:
    pieces = put_together(with_odd_heads(), "Something else.")
    assert pieces.notes == ("Something else.", f"Computed by plain PyTorch, which is slower: {ODD_HEADS}.")
    assert pieces.runner.name == "plain modules"


def test_what_was_said_or_asked_for_is_not_said_again() -> None:
    said = f"Quantised weights were expanded, so decoding is slower ({ODD_HEADS})."
    assert put_together(with_odd_heads(), said).notes == (said,)
    assert put_together(with_odd_heads(), fused=False).notes == ()


def test_a_model_that_the_native_kernels_know_has_no_note() -> None:
    reason = unsupported(a_spec())  # where there is no compiler, that is the note
    assert put_together(a_spec()).notes == (
        () if reason is None else (f"Computed by plain PyTorch, which is slower: {reason}.",)
    )


def test_recurrent_layers_alone_or_of_several_kinds_are_refused_in_words() -> None:
    spec = ASKING[Feature.RECURRENCE]
    with pytest.raises(EngineError, match="This model has recurrent layers alone"):
        put_together(replace(spec, layers=spec.layers[1:]))
    other = replace(spec.layers[1], mixer=DeltaNet(1, 2, 32, 32, conv_width=3))
    with pytest.raises(EngineError, match="recurrent layers with different convolutions"):
        put_together(replace(spec, layers=(*spec.layers, other)))


@pytest.mark.parametrize("feature", sorted(Feature, key=str))
def test_only_plain_attention_decodes_ahead_on_a_gpu(
    feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs attend over all rows before, with the same heads in all layers."""
    made: list[Network] = []

    class Stop(Exception):
        pass

    def make(network: Network, *_: object) -> None:
        made.append(network)
        raise Stop

    monkeypatch.setattr("engine.kernels.on_gpu.problem", lambda device: None)
    monkeypatch.setattr(engine.build, "make_decode_runner", make)
    spec = ASKING[feature]
    pieces = put_together(spec, fused=False)
    engine.build._speed_up_gpu(pieces, a_network(spec), CPU, BuildOptions(fused=False, graphs=False))
    assert bool(made) == (feature in PLAIN_ATTENTION)
