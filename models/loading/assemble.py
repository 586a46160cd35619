"""Assemble a network from its filled tensors."""

from dataclasses import dataclass, field

from torch import Tensor

from models.loading.plan import LoadPlan
from models.network import (
    AltUpWeights,
    AttentionWeights,
    ConvolutionWeights,
    DeltaNetWeights,
    ExpertWeights,
    FeedForwardWeights,
    InputWeights,
    LatentWeights,
    LaurelWeights,
    LayerInputWeights,
    LayerWeights,
    Linear,
    Mamba2Weights,
    MixerWeights,
    Network,
    NormWeights,
    StreamWeights,
    Weight,
)
from models.recurrences import DeltaNet, Mamba2
from models.reference.rope import rotary_table
from models.spec import (
    AltUp,
    Attention,
    Experts,
    LatentAttention,
    Laurel,
    Layer,
    LayerInputs,
    Mixer,
    ModelSpec,
    Norm,
    Rope,
    ShortConvolution,
    ropes,
)

Tables = dict[tuple[Rope, int], Tensor]
"""Rotary tables by rope and width; layers with the same rope and width share one."""


@dataclass(slots=True)
class TensorStore:
    """The tensors of a network by group (see models/weights/slots.py)."""

    plain: dict[str, Tensor] = field(default_factory=dict)
    blocks: dict[tuple[str, int | None], dict[int, Weight]] = field(default_factory=dict)
    """The parts of a quantised layer by their first row; the key is (group, expert number or None)."""

    def linear(self, group: str, split_columns: bool = False, expert: int | None = None) -> Linear:
        """Return the layer of a group, or of one of its experts, with its bias if it has one."""
        bias = self.plain.get(f"{group}.bias")
        if bias is not None and expert is not None:
            bias = bias[expert]
        if parts := self.blocks.get((f"{group}.weight", expert)):
            return Linear(tuple(part for _, part in sorted(parts.items())), bias)
        numbers = self.plain[f"{group}.weight"]
        if expert is not None:
            numbers = numbers[expert]
        return Linear((Weight.plain(numbers, "columns" if split_columns else "rows"),), bias)

    def norm(self, group: str) -> NormWeights:
        """Return the norm of a group."""
        return NormWeights(self.plain[f"{group}.weight"], self.plain.get(f"{group}.bias"))

    def norm_if(self, group: str, spec: Norm | None) -> NormWeights | None:
        """Return the norm of a group, or None if `spec` is None."""
        return None if spec is None else self.norm(group)


def assemble(plan: LoadPlan, store: TensorStore) -> Network:
    """Return the network of a plan, whose tensors are in `store`."""
    spec, target, positions = plan.spec, plan.target, plan.positions
    tables = {
        (rope, width): rotary_table(rope, width, positions, spec.max_positions, target.dtype, target.device)
        for rope, width in ropes(spec)
    }
    embedding = store.linear("embedding").parts[0]
    return Network(
        spec=spec,
        embedding=embedding,
        layers=tuple(
            _layer(store, f"layers.{i}.", layer, spec, tables, i in plan.host_layers)
            for i, layer in enumerate(spec.layers)
        ),
        final_norm=store.norm("final_norm"),
        head=Linear((embedding,)) if spec.tied else store.linear("head"),
        positions=positions,
        position_embedding=store.plain.get("position_embedding.weight"),
        layer_inputs=_layer_inputs(store, spec.layer_inputs),
        streams=_streams(store, spec.altup),
        share=plan.share,
    )


def _layer_inputs(store: TensorStore, spec: LayerInputs | None) -> LayerInputWeights | None:
    if spec is None:
        return None
    (embedding,) = store.linear("layer_embedding").parts
    return LayerInputWeights(embedding, store.linear("layer_projection"), store.norm("layer_input_norm"))


def _layer(
    store: TensorStore, at: str, spec: Layer, whole: ModelSpec, tables: Tables, on_host: bool
) -> LayerWeights:
    return LayerWeights(
        mixer=_mixer(store, at, spec.mixer, tables),
        feed_forward=_feed_forward(store, at, spec, on_host),
        attention_norm=store.norm_if(f"{at}attention_norm", spec.attention_norm),
        feed_forward_norm=store.norm_if(f"{at}feed_forward_norm", spec.feed_forward_norm),
        attention_post_norm=store.norm_if(f"{at}attention_post_norm", spec.attention_post_norm),
        feed_forward_post_norm=store.norm_if(f"{at}feed_forward_post_norm", spec.feed_forward_post_norm),
        input=_input(store, at, whole.layer_inputs),
        scalar=store.plain.get(f"{at}scalar"),
        laurel=_laurel(store, at, spec.laurel),
        altup=_altup(store, at, whole.altup),
    )


def _streams(store: TensorStore, spec: AltUp | None) -> StreamWeights | None:
    if spec is None:
        return None
    inputs, outputs = (
        tuple(store.linear(f"{part}.{index}") for index in range(spec.count - 1))
        for part in ("stream_in", "stream_out")
    )
    return StreamWeights(inputs, outputs)


def _laurel(store: TensorStore, at: str, spec: Laurel | None) -> LaurelWeights | None:
    if spec is None:
        return None
    left, right = (store.linear(f"{at}laurel_{side}") for side in ("left", "right"))
    return LaurelWeights(left, right, store.norm(f"{at}laurel_norm"))


def _altup(store: TensorStore, at: str, spec: AltUp | None) -> AltUpWeights | None:
    if spec is None:
        return None
    router, predict, correct = (
        store.linear(f"{at}altup_{part}") for part in ("router", "predict", "correct")
    )
    norm, scale = store.norm(f"{at}altup_norm"), store.plain[f"{at}altup_scale"]
    return AltUpWeights(norm, router, predict, correct, scale)


def _input(store: TensorStore, at: str, spec: LayerInputs | None) -> InputWeights | None:
    if spec is None:
        return None
    return InputWeights(
        store.linear(f"{at}input_gate"), store.linear(f"{at}input_out"), store.norm(f"{at}input_post_norm")
    )


def _mixer(store: TensorStore, at: str, spec: Mixer | None, tables: Tables) -> MixerWeights | None:
    if spec is None:
        return None
    if isinstance(spec, DeltaNet):
        return DeltaNetWeights(
            inputs=store.linear(f"{at}delta_in"),
            gates=store.linear(f"{at}delta_gates"),
            filters=store.plain[f"{at}filters.weight"],
            dt_bias=store.plain[f"{at}dt_bias"],
            decay=store.plain[f"{at}decay"],
            norm=store.norm(f"{at}gated_norm"),
            out=store.linear(f"{at}delta_out", split_columns=True),
        )
    if isinstance(spec, Mamba2):
        return Mamba2Weights(
            inputs=store.linear(f"{at}ssm_in"),
            filters=store.plain[f"{at}filters.weight"],
            dt_bias=store.plain[f"{at}dt_bias"],
            decay=store.plain[f"{at}decay"],
            skip=store.plain[f"{at}skip"],
            out=store.linear(f"{at}ssm_out", split_columns=True),
            conv_bias=store.plain.get(f"{at}filters.bias"),
            norm=None if spec.norm_eps is None else store.norm(f"{at}gated_norm"),
        )
    if isinstance(spec, ShortConvolution):
        return ConvolutionWeights(
            inputs=store.linear(f"{at}conv_in"),
            filters=store.plain[f"{at}filters.weight"],
            out=store.linear(f"{at}conv_out", split_columns=True),
            bias=store.plain.get(f"{at}filters.bias"),
        )
    assert isinstance(spec, Attention | LatentAttention)
    rotary = tables[spec.rope, spec.rotated] if spec.rope is not None else None
    if isinstance(spec, LatentAttention):
        return LatentWeights(
            q=store.linear(f"{at}q"),
            kv_a=store.linear(f"{at}kv_a"),
            kv_norm=store.norm(f"{at}kv_a_norm"),
            k_b=store.linear(f"{at}k_b"),
            v_b=store.linear(f"{at}v_b"),
            out=store.linear(f"{at}out", split_columns=True),
            q_norm=None if spec.q_rank is None else store.norm(f"{at}q_a_norm"),
            q_b=None if spec.q_rank is None else store.linear(f"{at}q_b"),
            rotary=rotary,
        )
    return AttentionWeights(
        qkv=store.linear(f"{at}qkv"),
        out=store.linear(f"{at}out", split_columns=True),
        head_norm=store.plain.get(f"{at}head_norm.weight"),
        sinks=store.plain.get(f"{at}sinks"),
        gate=store.linear(f"{at}attention_gate") if spec.gate is not None else None,
        rotary=rotary,
    )


def _feed_forward(
    store: TensorStore, at: str, spec: Layer, on_host: bool
) -> FeedForwardWeights | ExpertWeights | None:
    feed = spec.feed_forward
    if feed is None:
        return None
    if not isinstance(feed, Experts):
        return _dense(store, at)
    return ExpertWeights(
        router=store.linear(f"{at}router"),
        experts=tuple(_dense(store, f"{at}experts.", expert) for expert in range(feed.count)),
        selection_bias=store.plain.get(f"{at}selection_bias"),
        shared=_dense(store, f"{at}shared.") if feed.shared is not None else None,
        shared_gate=store.linear(f"{at}shared_gate") if feed.shared_gate else None,
        expert_scales=store.plain.get(f"{at}expert_scales"),
        latent_in=store.linear(f"{at}latent_in") if feed.latent is not None else None,
        latent_out=store.linear(f"{at}latent_out") if feed.latent is not None else None,
        norms={name: store.norm(at + name) for name in feed.norms},
        on_host=on_host,
    )


def _dense(store: TensorStore, at: str, expert: int | None = None) -> FeedForwardWeights:
    return FeedForwardWeights(
        store.linear(f"{at}gate_up", expert=expert),
        store.linear(f"{at}down", True, expert),
        store.plain.get(f"{at}alphas"),
    )
