"""What is said about architectures that cannot be run: a reason for each that transformers knows, and a true one."""

import json
from functools import cache
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.families.registry import FAMILIES
from models.families.unknown import missing_features, why_unknown

SUPPORTED = {name for family in FAMILIES for name in family.architectures}
READ = "chatterm computes all of its parts, but cannot read its config and weights yet"


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the default config.json of a type of model, with changes."""
    raw: dict[str, Any] = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
    return raw | changes


def why(model_type: str, **changes: Any) -> str:
    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    said = why_unknown("architecture", name, config_of(model_type, **changes))
    start, end = f"The architecture {name} is not supported: ", ". `chatterm show` lists what is supported."
    assert said.startswith(start)
    assert said.endswith(end)
    return said.removeprefix(start).removesuffix(end)


@cache
def raw_of(model_type: str) -> dict[str, Any]:
    try:
        return config_of(model_type)
    except (ValueError, StrictDataclassError):  # its defaults contradict each other
        return {"model_type": model_type}


def test_every_architecture_of_transformers_has_a_reason() -> None:
    told = 0
    for mapping in sorted(name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")):
        if mapping == "CONFIG_MAPPING_NAMES":
            continue
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in [names] if isinstance(names, str) else names:
                if name and name not in SUPPORTED:
                    said = why_unknown("architecture", name, {"model_type": model_type})
                    if "know it" in said:
                        said = why_unknown("architecture", name, raw_of(model_type))
                    assert "know it" not in said, (model_type, name)
                    told += 1
    assert told > 1500


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("granitemoehybrid", {}, READ),
        ("granitemoehybrid", {"layer_types": ["attention"] * 4}, READ),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, READ),
        ("jamba", {}, "chatterm does not compute state-space layers"),
        ("glm4_moe", {"n_group": 8, "routed_scaling_factor": 2.5}, READ),
        ("youtu", {}, READ),
        ("deepseek_v32", {}, "chatterm does not compute sparse attention by an index"),
        ("qwen3_5", {}, "chatterm does not compute images"),
        ("olmo_hybrid", {}, "chatterm does not compute delta nets with negative eigenvalues"),
        (
            "qwen4_exp",
            {},
            "chatterm does not compute images, hyper-connections and sparse attention by an index",
        ),
        ("kimi_linear", {}, "chatterm does not compute linear attention"),
        ("nanochat", {}, "chatterm does not compute norms without weights"),
        ("nemotron", {}, READ),
        ("laguna", {}, "chatterm does not compute a gate for the attention's output"),
        ("opt", {}, READ),
        (
            "opt",
            {"do_layer_norm_before": False},
            "chatterm does not compute norms of the sum with the residual",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "chatterm does not compute clamped queries, keys and values"),
        ("dbrx", {}, "chatterm does not compute clamped queries, keys and values"),
        (
            "stablelm",
            {"use_parallel_residual": True},
            "chatterm does not compute attention beside the feed-forward",
        ),
        ("mixtral", {}, READ),
    ],
)
def test_the_reason_is_that_of_the_config(model_type: str, changes: dict[str, Any], reason: str) -> None:
    assert why(model_type, **changes).endswith(reason)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LlamaForSequenceClassification", "it has no head that writes text"),
        ("Qwen3Model", "it has no head that writes text"),
        ("ViTForImageClassification", "it has no head that writes text"),
        ("SomethingForCausalLM", "chatterm does not know it"),
    ],
)
def test_names_alone(name: str, reason: str) -> None:
    assert f"not supported: {reason}. `" in why_unknown("architecture", name, {"model_type": "llama"})


def test_a_model_with_code_of_its_own_may_write_text_whatever_it_is_called() -> None:
    raw = {"auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"}}
    assert "chatterm does not know it" in why_unknown("architecture", "ChatGLMModel", raw)


WITH_MORE = (
    *("gemma3", "gemma3n", "llama4", "mistral3", "muse_glimmer", "granitemoehybrid"),
    *("qwen3_5", "qwen3_5_moe"),
)
"""Types of models only a part of which is run, or some of which are."""


def test_nothing_that_can_be_run_lacks_anything() -> None:
    for family in FAMILIES:
        for model_type in family.model_types:
            if model_type in CONFIG_MAPPING and model_type not in WITH_MORE:
                assert missing_features(config_of(model_type)) == [], model_type


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (
            {"general.architecture": "mamba", "mamba.ssm.state_size": 16},
            "chatterm does not compute state-space",
        ),
        ({"general.architecture": "qwen2moe"}, READ),
        ({"general.architecture": "command-r"}, "chatterm does not compute attention beside"),
        ({"general.architecture": "dots1", "dots1.expert_weights_scale": 2.5}, READ),
        ({"general.architecture": "unheard"}, "chatterm does not know it"),
    ],
)
def test_gguf_files(metadata: dict[str, Any], reason: str) -> None:
    name = metadata["general.architecture"]
    assert reason in why_unknown("GGUF architecture", name, metadata, f"{name}.")
