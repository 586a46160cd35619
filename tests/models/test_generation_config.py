"""What generation_config.json asks for is used, or a line says that it is not."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from models.files import ModelFiles
from models.text.generation_config import generation_defaults, suppressed_ids, unused_settings
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.tokenizer import Tokenizer, load_tokenizer
from tests.models.test_tokenizer import write_folder
from tests.models.tokenizer_data import tiny

USED = {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1}
ANOTHER_WAY = {
    *("max_length", "max_new_tokens", "max_time", "eos_token_id", "bos_token_id", "pad_token_id"),
    *("decoder_start_token_id", "num_return_sequences", "do_sample"),
}
"""Settings for which a chat has its own: how long an answer may be, and what begins and ends it."""
OF_BEAMS = {"early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", "low_memory"}
"""Settings without effect unless num_beams is more than 1."""
HARMLESS = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "use_mtp"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "renormalize_logits", "remove_invalid_values", "compile_config"),
    *("disable_compile", "continuous_batching_config", "is_assistant", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "speculation_type", "_from_model_config", "transformers_version"),
}
"""Settings that do not change which tokens are sampled."""
WITHOUT_EFFECT: dict[str, Any] = {
    **dict.fromkeys(("typical_p", "guidance_scale", "num_beams", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("begin_suppress_tokens", "suppress_tokens", "bad_words_ids"), ()),
    "token_healing": False,
}


def test_every_setting_of_transformers_is_used_or_told_or_harmless() -> None:
    known = set(GenerationConfig().to_dict())
    told = {name for name in known if f" {name}" in (unused_settings({name: [[3, 4]]}) or "")}
    used = {*USED, "suppress_tokens"}
    assert known - told - used == ANOTHER_WAY | OF_BEAMS | HARMLESS
    assert generation_defaults(USED) == USED
    assert unused_settings(dict.fromkeys(known)) is None
    assert unused_settings(WITHOUT_EFFECT) is None


@pytest.mark.parametrize(
    ("generation", "suppressed", "told"),
    [
        ({"suppress_tokens": [3, 1]}, {1, 3}, None),
        ({"bad_words_ids": [[5], [2], [6, 7]]}, {5}, "bad_words_ids of several tokens"),
        ({"suppress_tokens": [2], "bad_words_ids": [[5]]}, {2, 5}, None),
        ({"suppress_tokens": -1, "bad_words_ids": "x"}, set(), None),
        ({"suppress_tokens": [True, -1, "3"], "bad_words_ids": [4, [], [None]]}, set(), None),
        ({"suppress_tokens": [*range(513)]}, set(), "more than 512 suppressed tokens"),
    ],
)
def test_tokens_that_are_never_sampled(
    generation: dict[str, Any], suppressed: set[int], told: str | None
) -> None:
    assert suppressed_ids(generation, frozenset({2})) == suppressed
    line = unused_settings(generation)
    assert (line is None) == (told is None)
    assert told is None or f"also asks for {told}, which chatterm does not use." in str(line)


def test_a_folder_tells_what_it_asks_for_in_vain(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        generation_config={"suppress_tokens": [7], "no_repeat_ngram_size": 3, "stop_strings": ["\n\n"]},
    )
    tokenizer = load_tokenizer(ModelFiles("tiny", folder=folder))
    assert tokenizer.suppressed_ids == {7}
    (note,) = tokenizer.notes
    assert "no_repeat_ngram_size, stop_strings, which" in note


def test_a_gguf_file_without_its_pre_tokenizer_is_told() -> None:
    metadata = tiny("tiny_bpe")
    assert Tokenizer(parts_from_gguf(metadata)).notes == ()
    del metadata["tokenizer.ggml.pre"]
    (note,) = Tokenizer(parts_from_gguf(metadata)).notes
    assert "does not name its pre-tokenizer (tokenizer.ggml.pre)" in note
    assert Tokenizer(parts_from_gguf(tiny("tiny_spm"))).notes == ()


def test_a_gguf_file_recommends_sampling_too() -> None:
    said = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.1, "mirostat": 0}
    metadata = tiny("tiny_bpe") | {f"general.sampling.{key}": value for key, value in said.items()}
    tokenizer = Tokenizer(parts_from_gguf(metadata))
    assert tokenizer.generation_defaults == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
    }
    assert tokenizer.notes == ()
    (note,) = Tokenizer(parts_from_gguf(metadata | {"general.sampling.xtc_probability": 0.5})).notes
    assert (
        note == "The GGUF file also asks for general.sampling.xtc_probability, which chatterm does not use."
    )
