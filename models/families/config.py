"""What a decoder looks like: one dataclass, built from a config.json or from GGUF metadata."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from models.errors import ModelError

if TYPE_CHECKING:
    from models.hub.sources import ModelFiles  # brings the Hub's client, which nothing here needs

RopeType = Literal["default", "linear", "dynamic", "llama3"]

ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
"""What can be run. Mistral is Llama without biases; its sliding window is refused."""

GGUF_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

_MODEL_TYPES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

_MISTRAL_WINDOW = 4096
"""What a Mistral config means by not naming its sliding window."""


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """How positions become angles; names as in Hugging Face's rope_parameters."""

    rope_theta: float = 10_000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    frequency_factors: tuple[float, ...] | None = None
    """Divisors of each frequency, [head_dim / 2], where a GGUF file stores them (rope_freqs.weight)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder; field names are Hugging Face's."""

    architecture: str
    """One of ARCHITECTURES."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: RopeParameters = RopeParameters()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """From the contents of a config.json. Raises ModelError for what is missing or cannot be run."""
        return _from_hf(_Fields(raw, "config.json"))

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tie_word_embeddings: bool = True,
        attention_bias: bool = False,
        frequency_factors: tuple[float, ...] | None = None,
    ) -> "ModelConfig":
        """From GGUF metadata; what only the file's tensors tell comes as keywords. Raises ModelError."""
        config = _from_gguf(_Fields(metadata, "the GGUF file"))
        if frequency_factors is not None and len(frequency_factors) != config.head_dim // 2:
            raise ModelError(
                f"rope_freqs.weight has {len(frequency_factors)} values, but a head of {config.head_dim} "
                f"needs {config.head_dim // 2}; the GGUF file is damaged: download it again."
            )
        return replace(
            config,
            tie_word_embeddings=tie_word_embeddings,
            attention_bias=attention_bias,
            rope_parameters=replace(config.rope_parameters, frequency_factors=frequency_factors),
        )


def load_config(files: "ModelFiles") -> ModelConfig:
    """The config of local files. Raises ModelError when it is missing, damaged or not supported."""
    if files.gguf is not None:
        from models.weights.gguf import config_of, read_gguf

        return config_of(read_gguf(files.gguf))
    if files.folder is None:
        raise ModelError(f"{files.name} has neither a folder nor a GGUF file; name one of them.")
    return ModelConfig.from_hf(read_json(files.folder / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError when there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; name a folder in Hugging Face layout.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not valid JSON; download it again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; download it again.")
    return value


@dataclass(frozen=True, slots=True)
class _Fields:
    """Checked access to a mapping of which nothing is known yet."""

    raw: Mapping[str, Any]
    where: str

    def integer(self, key: str, default: int | None = None, *, limit: int = 2**24) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise self._wrong(key, value, f"a whole number from 1 to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1e30:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def mapping(self, key: str) -> "_Fields":
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return _Fields(value, f"{key} of {self.where}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where} has no {key}; it is incomplete or not of a supported model.")
        return value

    def _wrong(self, key: str, value: Any, allowed: str) -> ModelError:
        return ModelError(f"{key} in {self.where} is {str(value)[:60]!r}; it must be {allowed}.")


def _from_hf(fields: _Fields) -> ModelConfig:
    raw = fields.raw
    names = raw.get("architectures")
    kind = str(raw.get("model_type", "(none named)"))
    # A config without architectures means the causal model of its type.
    architecture = names[0] if isinstance(names, list) and names else _MODEL_TYPES.get(kind, kind)
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"The architecture {str(architecture)[:60]} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}."
        )
    if raw.get("quantization_config") is not None:
        raise ModelError(
            "The checkpoint is quantised (quantization_config in config.json), which chatterm does not read; "
            "use the original checkpoint or a GGUF file."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"hidden_act {str(raw['hidden_act'])[:60]} in config.json is not supported; supported: silu."
        )
    mistral = architecture == "MistralForCausalLM"
    heads = fields.integer("num_attention_heads")
    head_dim = 128 if architecture == "Qwen3ForCausalLM" else _head_dim(fields.integer("hidden_size"), heads)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers", limit=1024),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", head_dim),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=not mistral and fields.flag("attention_bias"),
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias"),
        rope_parameters=_rope_from_hf(fields),
    )
    _refuse_sliding_window(fields, config)
    return _checked(config)


def _rope_from_hf(fields: _Fields) -> RopeParameters:
    """From rope_parameters (transformers 5) or from rope_theta and rope_scaling (before)."""
    rope = fields.mapping("rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling")
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind not in get_args(RopeType):
        raise ModelError(
            f"RoPE scaling {str(kind)[:60]!r} in {rope.where} is not supported; "
            f"supported: {', '.join(get_args(RopeType))}."
        )
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"partial_rotary_factor in {rope.where} is not 1, which is not supported.")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeParameters(theta)
    factor = rope.number("factor")
    if kind != "llama3":
        return RopeParameters(theta, cast(RopeType, kind), factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ModelError(
            f"low_freq_factor in {rope.where} is {low}; it must be below high_freq_factor, {high}."
        )
    original = rope.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))
    return RopeParameters(theta, "llama3", factor, low, high, original)


def _refuse_sliding_window(fields: _Fields, config: ModelConfig) -> None:
    """Raise ModelError where a layer sees only the last tokens; a window as long as the context is none."""
    window: Any = None
    if config.architecture == "MistralForCausalLM":
        window = fields.raw.get("sliding_window", _MISTRAL_WINDOW)
    elif fields.raw.get("use_sliding_window"):
        window = fields.raw.get("sliding_window")
    layers = fields.raw.get("layer_types")
    other = [kind for kind in layers if kind != "full_attention"] if isinstance(layers, list) else []
    reached = isinstance(window, int) and window < config.max_position_embeddings
    if reached or (other and other[0] != "sliding_attention"):
        what = f"a sliding window of {window} tokens" if reached else f"layers of type {str(other[0])[:60]}"
        raise ModelError(
            f"{fields.where} requires {what}, which is not supported; choose a model without it."
        )


def _from_gguf(fields: _Fields) -> ModelConfig:
    name = fields.raw.get("general.architecture", "(none named)")
    if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
        supported = ", ".join(GGUF_ARCHITECTURES)
        raise ModelError(f"The GGUF architecture {str(name)[:60]} is not supported; supported: {supported}.")
    if fields.raw.get(f"{name}.expert_count"):
        raise ModelError(
            "The GGUF file contains a mixture of experts, which is not supported; choose a dense model."
        )
    if fields.raw.get(f"{name}.attention.sliding_window"):
        raise ModelError("The GGUF file requires sliding-window attention, which is not supported.")
    heads = fields.integer(f"{name}.attention.head_count")
    hidden = fields.integer(f"{name}.embedding_length")
    head_dim = fields.integer(f"{name}.attention.key_length", _head_dim(hidden, heads))
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise ModelError(
                f"{key} is {fields.raw[key]}, not the head size {head_dim}, which is not supported."
            )
    tokens = fields.raw.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else fields.integer(f"{name}.vocab_size")
    return _checked(
        ModelConfig(
            architecture=GGUF_ARCHITECTURES[name],
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=fields.integer(f"{name}.feed_forward_length"),
            num_hidden_layers=fields.integer(f"{name}.block_count", limit=1024),
            num_attention_heads=heads,
            num_key_value_heads=fields.integer(f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=fields.integer(f"{name}.context_length"),
            rms_norm_eps=fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
            rope_parameters=_rope_from_gguf(fields, name),
        )
    )


def _rope_from_gguf(fields: _Fields, name: str) -> RopeParameters:
    theta = fields.number(f"{name}.rope.freq_base", 10_000.0)
    kind = fields.raw.get(f"{name}.rope.scaling.type", "none")
    if kind == "linear":
        return RopeParameters(theta, "linear", fields.number(f"{name}.rope.scaling.factor"))
    if kind != "none":
        raise ModelError(
            f"RoPE scaling {str(kind)[:60]!r} of the GGUF file is not supported; supported: linear."
        )
    return RopeParameters(theta)


def _head_dim(hidden_size: int, heads: int) -> int | None:
    """What head_dim is where nothing says; None where the heads do not divide the hidden size."""
    return hidden_size // heads if hidden_size % heads == 0 else None


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}; the config is damaged: download it again."
        )
    if config.head_dim % 2:
        raise ModelError(f"head_dim {config.head_dim} is odd, but RoPE rotates pairs; the config is damaged.")
    return config
