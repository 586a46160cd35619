"""Falcon-H1: Mamba-2 beside attention, with multipliers nearly everywhere.

Each layer of a checkpoint is described as three: Mamba-2, attention that reads what Mamba-2 reads, and a feed-forward.
"""

import re
from dataclasses import replace

from models.errors import ModelError
from models.families.bamba import BAMBA_NAMES
from models.families.common import base_spec
from models.families.family import Family
from models.families.fields import Fields
from models.families.mamba2 import MAMBA2_CHANGES, mamba2_from_hf
from models.recurrences import Mamba2
from models.spec import Attention, FeedForward, Layer, ModelSpec

_LAYER = re.compile(r"layers\.(\d{1,4})\.(\w+)")
_PLACES = {"self_attn": 1, "feed_forward": 2, "pre_ff_layernorm": 2}
"""Which of the three layers has a part, if not the first."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields = fields.or_else(num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5)
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))
    given = spec.layers[0]
    assert isinstance(given.feed_forward, FeedForward)
    (attention, attention_scale), (feed, feed_scale) = (
        _attention(fields, given.attention),
        _feed(fields, given.feed_forward),
    )
    mamba, mamba_scale = _mamba2(fields, spec.hidden_size), fields.number("ssm_out_multiplier", 1.0)
    norm = spec.final_norm
    layers = (
        Layer(mamba, None, norm, feed_forward_norm=None, residual_scale=mamba_scale),
        Layer(attention, None, None, feed_forward_norm=None, residual_scale=attention_scale, beside=True),
        Layer(None, feed, None, feed_forward_norm=norm, residual_scale=feed_scale),
    )
    return replace(
        spec,
        layers=layers * len(spec.layers),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
    )


def _attention(fields: Fields, plain: Attention) -> tuple[Attention, float]:
    """Return the attention of an input that is not multiplied, and what multiplies its output."""
    parts = ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier")
    before, after, key = (fields.number(part, 1.0) for part in parts)
    if (plain.qkv_bias and (before, key) != (1.0, 1.0)) or (plain.out_bias and before != 1.0):
        raise ModelError(
            f"{fields.where} has attention_bias and multipliers of the attention's input, which is not supported; "
            "choose another model."
        )
    scale = plain.softmax_scale * before**2 * key
    return replace(plain, scale=None if scale == plain.softmax_scale else scale), before * after


def _feed(fields: Fields, plain: FeedForward) -> tuple[FeedForward, float]:
    """Return the feed-forward, and what multiplies its output: silu(m * gate) is m * (gate * sigmoid(m * gate))."""
    if fields.raw.get("mlp_multipliers") is None:
        return plain, 1.0
    gate, down = fields.numbers("mlp_multipliers", 2)
    if plain.bias and gate != 1.0:
        raise ModelError(
            f"{fields.where} has mlp_bias and a multiplier of the gate, which is not supported; choose another model."
        )
    return replace(plain, gain=gate), gate * down


def _mamba2(fields: Fields, hidden: int) -> Mamba2:
    size = fields.integer("mamba_expand", 2) * hidden
    if fields.raw.get("mamba_d_ssm", 1024) is not None:
        size = fields.integer("mamba_d_ssm", 1024)
    mixer = mamba2_from_hf(fields, size)
    before, listed = fields.number("ssm_in_multiplier", 1.0), tuple([1.0] * 5)
    if fields.raw.get("ssm_multipliers") is not None:
        listed = fields.numbers("ssm_multipliers", 5)
    if mixer.in_bias and before != 1.0:
        raise ModelError(
            f"{fields.where} has mamba_proj_bias and an ssm_in_multiplier, which is not supported; choose another "
            "model."
        )
    z, x, b, c, dt = (before * each for each in listed)
    return replace(
        mixer,
        out_bias=fields.flag("projectors_bias"),
        multipliers=None if (z, x, b, c, dt) == (1.0,) * 5 else (z, x, b, c, dt),
        norm_eps=mixer.norm_eps if fields.flag("mamba_rms_norm") else None,
        norms_first=fields.flag("mamba_norm_before_gate", True),
    )


def _name(name: str) -> str:
    """Return the name of a tensor with the number of the layer that it has here."""
    return _LAYER.sub(
        lambda found: f"layers.{3 * int(found[1]) + _PLACES.get(found[2], 0)}.{found[2]}", name, count=1
    )


FAMILY = Family(
    architectures=("FalconH1ForCausalLM",),
    model_types=("falcon_h1",),
    from_hf=_from_hf,
    names=BAMBA_NAMES,
    rename=_name,
    changes=MAMBA2_CHANGES,
)
