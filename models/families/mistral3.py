"""Mistral Small 3.1 and later, Magistral Small: Mistral with a vision model; only the text model is run."""

from dataclasses import replace

from models.errors import ModelError
from models.families import llama
from models.families.common import text_name
from models.families.family import Family
from models.families.fields import Fields
from models.spec import ModelSpec


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    text = fields.mapping("text_config")
    if (kind := text.raw.get("model_type", "mistral")) != "mistral":
        raise ModelError(
            f"The text part of {fields.where} is {str(kind)[:60]}, which is not supported; supported: mistral."
        )
    tied = fields.flag("tie_word_embeddings")
    spec = llama.FAMILY.from_hf(
        "MistralForCausalLM", replace(text, raw={"tie_word_embeddings": tied, **text.raw})
    )
    return replace(spec, architecture=architecture)


FAMILY = Family(
    architectures=("Mistral3ForConditionalGeneration",),
    model_types=("mistral3",),
    from_hf=_from_hf,
    rename=text_name,
)
"""GGUF files of these models have the architecture of Llama."""
