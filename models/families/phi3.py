"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with packed projections, partly rotated heads and longrope."""

from collections.abc import Mapping
from functools import partial

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family
from models.families.fields import Fields
from models.families.windows import windows
from models.spec import ModelSpec

_OLD_KINDS = ("su", "yarn")
"""The names of longrope in early configs."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    raw = dict(fields.or_else(original_max_position_embeddings=4096, rms_norm_eps=1e-5).raw)
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in _OLD_KINDS:
            raw[key] = {**rope, "rope_type": "longrope"}
    fields = Fields(raw, fields.where)
    return windows(base_spec(architecture, fields), fields, raw.get("sliding_window"))


FAMILY = Family(
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    from_hf=_from_hf,
    gguf_architecture="phi3",
    from_gguf=partial(base_spec_of_gguf, "Phi3ForCausalLM", "phi3", partial=True),
    packed={"self_attn.qkv_proj.{field}": ("q", "k", "v"), "mlp.gate_up_proj.{field}": ("gate", "up")},
    gguf_packed={"attn_qkv.{field}": ("q", "k", "v"), "ffn_up.{field}": ("gate", "up")},
)
