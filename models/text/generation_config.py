"""The sampling settings in a model's generation_config.json or GGUF metadata: those that are used, and the others."""

import sys
from collections.abc import Mapping
from typing import Any

_RANGES = {
    "temperature": (0, sys.float_info.max),
    "top_k": (0, 2**31),
    "top_p": (sys.float_info.min, 1),
    "min_p": (0, 1),
    "repetition_penalty": (sys.float_info.min, sys.float_info.max),
}
_MOST_SUPPRESSED = 512
"""The most tokens that a model may exclude from sampling: half as many as a request may bias."""
_UNUSED: Mapping[str, object] = {
    **dict.fromkeys(("typical_p", "guidance_scale", "num_beams", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(
        (
            *("begin_suppress_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "top_h"),
            *("epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens", "forced_bos_token_id"),
            *("forced_eos_token_id", "exponential_decay_length_penalty", "sequence_bias", "penalty_alpha"),
            *("watermarking_config", "dola_layers", "constraints", "force_words_ids", "stop_strings"),
            "token_healing",
        )
    ),
}
"""Settings of transformers that change which tokens are sampled and have no counterpart here, with values beside None,
0 and empty ones at which they have no effect."""

_OF_GGUF = {"temp": "temperature", "penalty_repeat": "repetition_penalty"} | {
    name: name for name in ("top_k", "top_p", "min_p")
}
"""The names here of general.sampling.* in GGUF files, as llama.cpp reads them (common_init_sampler_from_model)."""
_UNUSED_OF_GGUF = ("xtc_probability", "mirostat")


def generation_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings in GGUF metadata, as a generation_config.json would have them."""
    return {name: metadata.get(f"general.sampling.{key}") for key, name in _OF_GGUF.items()}


def unused_of_gguf(metadata: Mapping[str, Any]) -> str | None:
    """Return a line for the user that names unsupported sampling settings in GGUF metadata; None without any."""
    keys = [f"general.sampling.{key}" for key in _UNUSED_OF_GGUF]
    return _told("The GGUF file", [key for key in keys if metadata.get(key)])


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the sampling settings in a generation_config.json, without values that no sampler could use."""
    found: dict[str, float | int] = {}
    for name, (low, high) in _RANGES.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            found[name] = int(value) if name == "top_k" else value
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def suppressed_ids(generation: Mapping[str, Any], stop_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that are never sampled: suppress_tokens, and the bad words that are single tokens.

    As in transformers, bad words among the `stop_ids` do not count. Return an empty set if there are too many.
    """
    words = {word[0] for word in _words(generation) if len(word) == 1} - stop_ids
    found = frozenset(words.union(_ids(generation.get("suppress_tokens"))))
    return found if len(found) <= _MOST_SUPPRESSED else frozenset()


def unused_settings(generation: Mapping[str, Any]) -> str | None:
    """Return a line for the user that names unsupported settings in a generation_config.json; None without any."""
    names = [name for name, off in _UNUSED.items() if generation.get(name) and generation[name] != off]
    names += ["bad_words_ids of several tokens"] * any(len(word) > 1 for word in _words(generation))
    if len(_ids(generation.get("suppress_tokens"))) + len(_words(generation)) > _MOST_SUPPRESSED:
        names.append(f"more than {_MOST_SUPPRESSED} suppressed tokens")
    return _told("generation_config.json", names)


def _told(where: str, names: list[str]) -> str | None:
    return f"{where} also asks for {', '.join(names)}, which chatterm does not use." if names else None


def _words(generation: Mapping[str, Any]) -> list[list[int]]:
    words = generation.get("bad_words_ids")
    return [ids for word in words if (ids := _ids(word))] if isinstance(words, list) else []


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else []
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
