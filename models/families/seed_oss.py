"""Seed-OSS: Llama with biases for queries, keys and values."""

from functools import partial

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import GGUF_NAMES, Family
from models.families.fields import Fields
from models.spec import ModelSpec


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    biases = fields.flag("attention_bias", True), fields.flag("attention_out_bias"), fields.flag("mlp_bias")
    qkv, out, mlp = biases
    return base_spec(architecture, fields, head_dim=128, qkv_bias=qkv, out_bias=out, mlp_bias=mlp)


FAMILY = Family(
    architectures=("SeedOssForCausalLM",),
    model_types=("seed_oss",),
    from_hf=_from_hf,
    gguf_architecture="seed_oss",
    from_gguf=partial(base_spec_of_gguf, "SeedOssForCausalLM", "seed_oss"),
    gguf_names={**GGUF_NAMES, "feed_forward_norm": "post_attention_norm"},
)
