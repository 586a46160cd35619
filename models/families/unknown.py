"""Reasons why an unknown architecture does not run, from its config and its name."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_GATED = "a gate for the attention's output"
_PARALLEL = "attention beside the feed-forward"
_SUM_NORMS = "norms of the sum with the residual"
_NO_WEIGHTS = "norms without weights"
_STATE_SPACE, _LINEAR = "state-space layers", "linear attention"
_INDEXED = "sparse attention by an index"
_ALIBI = "ALiBi positions"

_FIELDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (_INDEXED, ("index_topk", "attention.indexer.top_k")),
    (_LINEAR, ("linear_attn_config", "lightning_attn")),
    ("hyper-connections", ("hc_count",)),
    ("embeddings of n-grams", ("ple_layer_ids",)),
    ("recurrent layers", ("lru_width", "rescale_every", "head_size_divisor", "wkv.head_size")),
    (_PARALLEL, ("parallel_attn", "use_parallel_residual")),
    ("clamped queries, keys and values", ("clip_qkv", "attention.clamp_kqv")),
    ("LayerNorm of query and key heads", ("qk_layernorm",)),
    (_ALIBI, ("alibi", "use_alibi", "attention.max_alibi_bias")),
    ("an encoder", ("is_encoder_decoder", "type_vocab_size", "tokenizer.ggml.token_type_count", "encoder")),
    (
        "images",
        (
            *("vision_config", "vision_tower", "mm_vision_tower", "vision_model"),
            *("vlm_config", "vq_config", "backbone_config"),
        ),
    ),
    (
        "sound",
        (
            *("audio_config", "audio_encoder", "audio_encoder_config", "audio_token_index", "speech_config"),
            *("speech_encoder_layers", "num_codebooks", "acoustic_tokenizer_encoder_config"),
        ),
    ),
    ("proteins", ("protein_encoder_config",)),
)
"""Features by their words for the user, and the config.json or GGUF fields that ask for them unless 0 or empty."""

_OF_STATE_SPACE = ("ssm_state_size", "state_size", "mamba_d_state", "d_state", "ssm_cfg", "ssm.state_size")
_OF_MAMBA2 = ("mamba_n_heads", "mamba_num_heads")
_OF_DELTA_NETS = "linear_num_value_heads"
_ACTIVATIONS = (
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "mlp_hidden_act",
    "hidden_activation_fn",
)
_KNOWN_ACTIVATION = re.compile(r"silu|swish|relu2?|gelu.*|xielu")

_KINDS = {
    **dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention", "attention", "conv")),
    **dict.fromkeys(("moe", "mlp", "dense", "sparse")),
    **dict.fromkeys(("mamba", "mamba2"), _STATE_SPACE),
    "linear_attention": _LINEAR,
    "indexed_attention": _INDEXED,
    "recurrent": "recurrent layers",
}
"""Words for unsupported kinds of layers; None: the kind is supported."""

_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "afmoe": (_GATED,),
    "beam": (_GATED,),
    "bert-generation": (_SUM_NORMS,),
    "bitnet": ("norms inside attention and feed-forward",),
    "bloom": (_ALIBI, "a norm of the embeddings"),
    "blt": ("patches of bytes in place of tokens",),
    "codegen": (_PARALLEL,),
    "cohere": (_PARALLEL,),
    "cohere2_moe": (_PARALLEL,),
    "cohere_compass_text": (_PARALLEL,),
    "cpmant": ("biases of attention scores by distance",),
    "ctrl": ("sinusoidal positions",),
    "dbrx": ("clamped queries, keys and values",),
    "diffusion_gemma": ("text that is written in blocks",),
    "diffllama": ("differential attention",),
    "doge": ("attention with a learned mask",),
    "emu3": ("images",),
    "flaubert": (_SUM_NORMS,),
    "fuyu": ("images",),
    "gemma4_assistant": ("guesses from another model's hidden states",),
    "gemma4_unified_assistant": ("guesses from another model's hidden states",),
    "gptj": (_PARALLEL,),
    "gradium_phonon_tts": ("sound",),
    "hrm_text": (_GATED, "layers that are passed several times"),
    "inkling2_text": ("biases of attention scores by distance",),
    "inkling_text": ("biases of attention scores by distance",),
    "jetmoe": ("a mixture of attention heads",),
    "kolibri1": ("experts that are chosen by biased logits",),
    "laguna": (_GATED,),
    "longcat_flash": ("experts that return their input",),
    "mimo_v2_flash": ("values of another width than keys",),
    "minimax_m3_vl_text": (_INDEXED,),
    "mistral4": ("latent attention whose queries are scaled by their positions",),
    "modernbert-decoder": ("a norm of the embeddings",),
    "moshi": ("sound",),
    "mpt": (_ALIBI,),
    "nanochat": (_NO_WEIGHTS,),
    "olmo": (_NO_WEIGHTS,),
    "olmo_hybrid": ("delta nets with negative eigenvalues",),
    "openai-gpt": (_SUM_NORMS,),
    "phi": (_PARALLEL,),
    "phimoe": ("experts that are chosen by sparsemixer",),
    "pocket_tts": ("sound",),
    "reformer": ("attention within hashed buckets",),
    "trocr": ("images",),
    "xglm": ("sinusoidal positions",),
    "xlm": (_SUM_NORMS,),
    "xlnet": ("positions that are relative to each other",),
    "xlstm": ("recurrent layers",),
    "zaya": ("convolutions of queries and keys",),
}
"""The features that a model_type of transformers needs without a field of its config saying so."""

_ONLY_UNREAD = frozenset({
    "arcee", "aria_text", "axk1", "biogpt", "cwm", "dots1", "exaone_moe", "flex_olmo", "flint", "gemma", "glm",
    "glm4", "glm4_moe", "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "granite_swa", "granitemoe_swa",
    "granitemoehybrid", "helium", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "mellum", "minicpm3", "minimax_m2",
    "mixtral", "nemotron", "olmoe", "opt", "qwen2_moe", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
})  # fmt: skip
"""Values of model_type whose networks need nothing unsupported, unless a field of their config asks for it."""

_OF_GGUF = {
    "command-r": "cohere",
    "glm4moe": "glm4_moe",
    "granitehybrid": "granitemoehybrid",
    "hunyuan-moe": "hunyuan_v1_moe",
    "jais": "mpt",
    "mimo2": "mimo_v2_flash",
    "minimax-m2": "minimax_m2",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "refact": "mpt",
    "starcoder": "gpt_bigcode",
}
"""GGUF architectures that need the same as a model_type of another name."""

_WRITERS = (
    *("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "WithLMHead", "GenerationDecoder"),
    *("Text2Text", "ToText", "EncoderDecoderModel", "ForBlockDiffusion"),
)
_OTHERS = re.compile(r"(For[A-Z]\w+|Model|Encoder|Decoder|Backbone|Transformer|VAE|Gan)$")


def why_unknown(what: str, name: object, config: Mapping[str, Any], prefix: str = "") -> str:
    """Return a line for the user about an architecture that no family describes.

    `what` is the kind of `name`; `config` is its config.json, or GGUF metadata whose fields begin with `prefix`.
    """
    missing = missing_features(config, prefix)
    *most, last = missing or [""]
    if _has_no_head(str(name), config) and not {"an encoder", "images", "sound"} & set(missing):
        why = "it has no head that writes text"
    elif missing:
        why = (
            f"chatterm does not compute {', '.join(most)} and {last}"
            if most
            else f"chatterm does not compute {last}"
        )
    elif _types(config) & _ONLY_UNREAD:
        why = "chatterm computes all of its parts, but cannot read its config and weights yet"
    else:
        why = "chatterm does not know it"
    return f"The {what} {str(name)[:60]} is not supported: {why}. `chatterm show` lists what is supported."


def missing_features(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the features that `config` requires and nothing here computes; `prefix` precedes GGUF field names."""
    found: dict[str, None] = {}
    for part in _parts(config):
        found |= dict.fromkeys(_of_part({name.removeprefix(prefix): value for name, value in part.items()}))
    return list(found)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config and those of the networks inside it that write text."""
    yield config
    for name in ("text_config", "llm_config", "language_config", "thinker_config", "attn_config", "decoder"):
        if isinstance(inner := config.get(name), Mapping):
            yield from _parts(inner)


def _of_part(config: Mapping[str, Any]) -> Iterator[str]:
    for kind in _types(config):
        yield from _BY_TYPE.get(kind, ())
    for words, names in _FIELDS:
        if any(_says(config.get(name)) for name in names):
            yield words
    if config.get("do_layer_norm_before") is False:
        yield _SUM_NORMS
    kinds = {
        kind
        for name in ("layer_types", "layers_block_type")
        if isinstance(listed := config.get(name), list)
        for kind in listed
        if isinstance(kind, str)
    }
    # A list of the kinds of layers includes state-space layers, which transformers 5 calls linear attention.
    has_states = any(_says(config.get(name)) for name in _OF_STATE_SPACE)
    if has_states and (not kinds or kinds & {"mamba", "mamba2", "linear_attention"}):
        if not any(config.get(name) for name in _OF_MAMBA2):
            yield _STATE_SPACE
        kinds -= {"mamba", "mamba2", "linear_attention"}
    if _says(config.get(_OF_DELTA_NETS)):
        kinds -= {"linear_attention"}
    yield from (
        words for kind in sorted(kinds) if (words := _KINDS.get(kind, f"layers of the kind {kind[:40]}"))
    )
    for activation in (config.get(name) for name in _ACTIVATIONS):
        if isinstance(activation, str) and not _KNOWN_ACTIVATION.fullmatch(activation):
            yield f"the activation {activation[:40]}"


def _says(value: Any) -> bool:
    if isinstance(value, list) and all(item == value[0] for item in value):
        return False  # the same in all layers
    return value not in (None, False, 0, "", {})


def _types(config: Mapping[str, Any]) -> set[str]:
    architecture = str(config.get("general.architecture", ""))
    return {str(config.get("model_type", "")), _OF_GGUF.get(architecture, architecture)}


def _has_no_head(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a class of transformers, by its `name` and `config`, has another purpose than writing text."""
    writes = "ForCausalLM" in str(config.get("auto_map")) or name.endswith(_WRITERS)
    return not writes and _OTHERS.search(name) is not None
