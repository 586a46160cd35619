"""Bamba: Mamba-2 in most layers, attention with half rotated heads in the others."""

from dataclasses import replace

from models.families.common import base_spec
from models.families.experts import whole_numbers
from models.families.family import NAMES, Family
from models.families.fields import Fields
from models.families.layer_kinds import with_mixer
from models.families.mamba2 import MAMBA2_CHANGES, MAMBA2_NAMES, mamba2_from_hf
from models.spec import ModelSpec


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields = fields.or_else(num_key_value_heads=8, max_position_embeddings=262_144, rms_norm_eps=1e-5)
    # As in `BambaConfig` of transformers, whatever the config says.
    fields = replace(fields, raw={**fields.raw, "partial_rotary_factor": 0.5})
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))
    mixer = mamba2_from_hf(fields, fields.integer("mamba_expand", 2) * spec.hidden_size)
    attending = whole_numbers(fields, "attn_layer_indices")
    return with_mixer(spec, mixer, [i not in attending for i in range(len(spec.layers))])


BAMBA_NAMES = {
    **NAMES,
    **MAMBA2_NAMES,
    "feed_forward_norm": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
    "final_norm": "model.final_layernorm",
}

FAMILY = Family(
    architectures=("BambaForCausalLM",),
    model_types=("bamba",),
    from_hf=_from_hf,
    names=BAMBA_NAMES,
    changes=MAMBA2_CHANGES,
)
