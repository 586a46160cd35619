"""The compatibility check: what people are told of models that kernels of ours cannot run, and who runs them then."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import engine.build
from engine.build import Options, Pieces, build
from engine.execute.compatibility import KERNELS, NATIVE, PLAIN_ATTENTION, lacking, not_fused, not_native
from engine.execute.cpu.executor import unsupported
from models.assemble import Store
from models.assemble import assemble as network_of
from models.features import Feature, features
from models.network import Network
from models.spec import Attention, Experts, FeedForward, ModelSpec, Norm, Rope, uniform
from models.weights.slots import group_shapes, slots

CPU = torch.device("cpu")
WINDOW = "the native kernels do not know a sliding window"


def a_spec(**attention: Any) -> ModelSpec:
    """A small network with heads of 64; `attention` is what is unusual about them."""
    return uniform(
        "LlamaForCausalLM",
        layers=2,
        vocab_size=32,
        hidden_size=64,
        max_positions=64,
        attention=Attention(2, 1, 64, **{"rope": Rope(), **attention}),
        feed_forward=FeedForward(64),
        norm=Norm(),
        tied=True,
    )


def changed(spec: ModelSpec, **layer: Any) -> ModelSpec:
    return replace(spec, layers=tuple(replace(each, **layer) for each in spec.layers))


ASKING: dict[Feature, ModelSpec] = {
    Feature.WINDOW: a_spec(window=8),
    Feature.SCALE: a_spec(scale=1.0),
    Feature.SCORE_CAP: a_spec(score_cap=50.0),
    Feature.SINKS: a_spec(sinks=True),
    Feature.HEAD_NORM: a_spec(head_norm=Norm()),
    Feature.NORM_ALL_HEADS: a_spec(head_norm=Norm(), norms_all_heads=True),
    Feature.QKV_BIAS: a_spec(qkv_bias=True),
    Feature.OUT_BIAS: a_spec(out_bias=True),
    Feature.PARTIAL_ROPE: a_spec(rope=Rope(dims=32)),
    Feature.INTERLEAVED_ROPE: a_spec(rope=Rope(interleaved=True)),
    Feature.EXACT_ROPE: a_spec(rope=Rope(exact=True)),
    Feature.NO_ROPE: a_spec(rope=None),
    Feature.LEARNED_POSITIONS: replace(a_spec(), learned_positions=True),
    Feature.EXPERTS: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64))),
    Feature.EXACT_ROUTER: changed(a_spec(), feed_forward=Experts(4, 2, FeedForward(64), exact_router=True)),
    Feature.SELECTION_BIAS: changed(
        a_spec(), feed_forward=Experts(4, 2, FeedForward(64), selection_bias=True)
    ),
    Feature.ACTIVATION: changed(a_spec(), feed_forward=FeedForward(64, "relu")),
    Feature.UNGATED: changed(a_spec(), feed_forward=FeedForward(64, gated=False)),
    Feature.FEED_FORWARD_BIAS: changed(a_spec(), feed_forward=FeedForward(64, bias=True)),
    Feature.LAYER_NORM: replace(a_spec(), final_norm=Norm(kind="layer")),
    Feature.NORM_OFFSET: replace(a_spec(), final_norm=Norm(offset=1.0)),
    Feature.NORM_PLACE: changed(a_spec(), attention_post_norm=Norm()),
    Feature.NORM_ROUNDING: replace(a_spec(), final_norm=Norm(rounds_last=True)),
    Feature.RESIDUAL_SCALE: changed(a_spec(), residual_scale=0.22),
    Feature.EMBEDDING_SCALE: replace(a_spec(), embedding_scale=8.0),
    Feature.LOGIT_SCALE: replace(a_spec(), logit_scale=0.5),
    Feature.LOGIT_CAP: replace(a_spec(), logit_cap=30.0),
    Feature.MIXED_EPS: replace(a_spec(), final_norm=Norm(1e-3)),
    Feature.MIXED_LAYERS: replace(a_spec(), layers=(a_spec().layers[0], a_spec(qkv_bias=True).layers[0])),
    Feature.MIXED_HEADS: replace(
        a_spec(),
        layers=(
            a_spec().layers[0],
            replace(a_spec().layers[0], attention=Attention(2, 2, 64, rope=Rope())),
        ),
    ),
}
"""For each feature a network that asks for it."""


def test_every_feature_is_noticed_and_kernels_refuse_what_they_do_not_know() -> None:
    assert set(ASKING) == set(Feature), "a feature has no example"
    for feature, spec in ASKING.items():
        assert feature in features(spec), feature
        for known, said in ((NATIVE, not_native(spec)), (KERNELS, not_fused(spec))):
            assert (features(spec) <= known) == (said is None), feature
            assert said is None or feature in known or feature.value in said, feature
    assert not features(a_spec())


def test_layers_may_have_experts_or_none() -> None:
    """And feed-forwards of one size; other differences between layers are a feature that an executor must know."""
    dense, mixed = a_spec().layers[0], ASKING[Feature.EXPERTS].layers[0]
    larger = replace(dense, feed_forward=FeedForward(96))
    windowed = replace(mixed, attention=replace(mixed.attention, window=8))
    assert not_native(replace(a_spec(), layers=(dense, mixed, dense))) is None
    for layers in ((dense, larger), (dense, mixed, larger), (dense, windowed)):
        assert Feature.MIXED_LAYERS in features(replace(a_spec(), layers=layers))


def test_what_lacks_is_told_as_a_part_of_a_sentence() -> None:
    spec = replace(a_spec(window=8, score_cap=50.0), logit_cap=30.0)
    assert lacking(a_spec(), KERNELS) is None
    assert lacking(a_spec(window=8), KERNELS) == "a sliding window"
    assert lacking(spec, KERNELS) == "a sliding window, capped attention scores and capped logits"


@pytest.mark.parametrize(
    ("dim", "native", "fused"), [(64, True, True), (16, True, False), (12, False, False)]
)
def test_sizes_of_heads_that_kernels_do_not_have(dim: int, native: bool, fused: bool) -> None:
    spec = changed(a_spec(), attention=Attention(2, 1, dim, rope=Rope()))
    assert (not_native(spec) is None, not_fused(spec) is None) == (native, fused)
    for said in (not_native(spec), not_fused(spec)):
        assert said is None or f"a head_dim of {dim}" in said


def a_network(spec: ModelSpec) -> Network:
    """Its weights are random."""
    torch.manual_seed(0)
    shapes = group_shapes(list(slots(spec)))
    plain = {group: torch.randn(shape) / shape[-1] ** 0.5 for group, shape in shapes.items()}
    return network_of(spec, Store(plain), spec.max_positions, torch.float32, CPU)


def put_together(spec: ModelSpec, *notes: str, **options: Any) -> Pieces:
    return build(
        a_network(spec), CPU, torch.float32, Options(context=32, free=10**8, threads=1, **options), notes
    )


def test_a_model_that_the_native_kernels_do_not_know_is_said_to_be_slower() -> None:
    pieces = put_together(a_spec(window=8), "Something else.")
    assert pieces.notes == ("Something else.", f"Computed by plain PyTorch, which is slower: {WINDOW}.")
    assert pieces.runner.name == "plain modules"


def test_what_was_said_or_asked_for_is_not_said_again() -> None:
    said = f"Quantised weights were expanded, so decoding is slower ({WINDOW})."
    assert put_together(a_spec(window=8), said).notes == (said,)
    assert put_together(a_spec(window=8), fused=False).notes == ()


def test_a_model_that_the_native_kernels_know_has_no_note() -> None:
    reason = unsupported(a_spec())  # where there is no compiler, that is the note
    assert put_together(a_spec()).notes == (
        () if reason is None else (f"Computed by plain PyTorch, which is slower: {reason}.",)
    )


@pytest.mark.parametrize("feature", sorted(set(Feature) - {Feature.MIXED_HEADS}, key=str))
def test_only_plain_attention_decodes_ahead_on_a_gpu(
    feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs attend over all rows before. (Heads that differ are refused: no KV cache holds them.)"""
    made: list[Network] = []

    class Stop(Exception):
        pass

    def make(network: Network, *_: object) -> None:
        made.append(network)
        raise Stop

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(engine.build, "make_decode_runner", make)
    spec = ASKING[feature]
    pieces = put_together(spec, fused=False)
    engine.build._speed_up_gpu(pieces, a_network(spec), CPU, Options(fused=False, graphs=False))
    assert bool(made) == (feature in PLAIN_ATTENTION)
