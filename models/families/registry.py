"""The supported families, and reading the description of a local model."""

from typing import TYPE_CHECKING, Any

from models.errors import ModelError
from models.families import (
    apertus,
    bamba,
    cohere2,
    deepseek,
    ernie,
    exaone4,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    gpt2,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    lfm3,
    llama,
    llama4,
    mistral3,
    muse_glimmer,
    nemotron_h,
    olmo,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.unknown import why_unknown
from models.files import ModelFiles, read_json
from models.spec import ModelSpec
from models.weights.formats.mxfp4 import MXFP4
from models.weights.formats.registry import read_scheme

if TYPE_CHECKING:
    from models.weights.gguf import GGUFFile  # brings numpy, which a listing of models need not wait for

FAMILIES: tuple[Family, ...] = (
    *(qwen3.FAMILY, llama.FAMILY, mistral3.FAMILY, qwen2.FAMILY, qwen3_moe.FAMILY, qwen3_5.FAMILY),
    *(qwen3_5.SPARSE, qwen3_5.NEXT, phi3.FAMILY, smollm3.FAMILY, olmo.FAMILY, granite.FAMILY),
    *(granite.SPARSE, gemma.FAMILY_2, gemma.FAMILY_3, gemma4.FAMILY, gpt2.FAMILY, ernie.FAMILY),
    *(ernie.SPARSE, gpt_oss.FAMILY, exaone4.FAMILY, seed_oss.FAMILY, mistral3.TEXT, granite.HYBRID),
    *(hunyuan.FAMILY, lfm2.FAMILY, lfm2.SPARSE, lfm3.FAMILY, muse_glimmer.FAMILY, cohere2.FAMILY),
    *(apertus.FAMILY, gemma3n.FAMILY, llama4.FAMILY, deepseek.V2, deepseek.V3, deepseek.GLM),
    *(bamba.FAMILY, falcon_h1.FAMILY, nemotron_h.FAMILY, nemotron_h.SPARSE_GGUF),
)


def load_spec(files: ModelFiles) -> ModelSpec:
    """Return the description of local files. Raises ModelError if the config is missing, damaged or not supported."""
    if files.gguf is not None:
        from models.weights.gguf import read_gguf

        return spec_of_gguf(read_gguf(files.gguf))[1]
    if files.folder is None:
        raise ModelError(f"{files.name} has neither a folder nor a GGUF file; name one of them.")
    return spec_of_hf(read_json(files.folder / "config.json"))[1]


def spec_of_hf(raw: dict[str, Any]) -> tuple[Family, ModelSpec]:
    """Return family and spec for a config.json. Raises ModelError if something is missing or not supported."""
    names = raw.get("architectures")
    kind = str(raw.get("model_type", "(none named)"))
    types = {
        t: name
        for family in FAMILIES
        for t, name in zip(family.model_types, family.architectures, strict=True)
    }
    architecture = names[0] if isinstance(names, list) and names else types.get(kind, kind)
    family = next((family for family in FAMILIES if architecture in family.architectures), None)
    if family is None:
        raise ModelError(why_unknown("architecture", architecture, raw))
    scheme = read_scheme(raw)
    if scheme is not None and family.turned and scheme.formats != (MXFP4(),):
        raise ModelError(
            f"Quantised checkpoints of {architecture} ({scheme.name}) are not read: it stores its matrices transposed; "
            "use the original checkpoint or a GGUF file."
        )
    return family, family.from_hf(architecture, Fields(raw, "config.json"))


def spec_of_gguf(file: "GGUFFile") -> tuple[Family, ModelSpec]:
    """Return family and spec for a parsed GGUF file. Raises ModelError if something is missing or not supported."""
    from models.weights.gguf import float_values

    name = file.metadata.get("general.architecture", "(none named)")
    family = next((family for family in FAMILIES if family.gguf_architecture == name), None)
    if family is None or family.from_gguf is None:
        raise ModelError(why_unknown("GGUF architecture", name, file.metadata, f"{name}."))

    def factors(*names: str) -> tuple[float, ...] | None:
        return next((float_values(file.path, file.tensors[n]) for n in names if n in file.tensors), None)

    config = GGUFConfig(
        Fields(_alike(file.metadata, name), "the GGUF file"),
        file.tensors,
        factors("rope_freqs.weight", "rope_factors_short.weight"),
        factors("rope_factors_long.weight"),
    )
    return family, family.from_gguf(config)


def _alike(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the metadata, with one number for each list that repeats it for all layers of the architecture `name`."""
    layers = metadata.get(f"{name}.block_count")

    def of_all(key: str, value: Any) -> Any:
        by_layer = isinstance(value, list) and len(value) == layers and key.startswith(f"{name}.")
        is_number = by_layer and type(value[0]) in (int, float) and value.count(value[0]) == layers
        return value[0] if is_number and not key.endswith("_pattern") else value

    return {key: of_all(key, value) for key, value in metadata.items()}
