"""Qwen2 and Qwen2.5: Llama with biases for queries, keys and values."""

from functools import partial

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family
from models.families.fields import Fields
from models.families.windows import windows_of_qwen
from models.spec import ModelSpec


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    return windows_of_qwen(base_spec(architecture, fields, qkv_bias=True), fields)


FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    from_hf=_from_hf,
    gguf_architecture="qwen2",
    from_gguf=partial(base_spec_of_gguf, "Qwen2ForCausalLM", "qwen2"),
)
