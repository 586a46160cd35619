"""The fields that no endpoint of OpenAI's API honours here, though other servers do."""

from collections.abc import Collection, Mapping
from typing import Any

REFUSED: Mapping[str, Collection[Any]] = {
    # OpenAI
    **dict.fromkeys(("audio", "function_call", "prompt_logprobs", "prompt_embeds", "web_search_options"), ()),
    "functions": ([],),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    # vLLM and SGLang
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"), ()),
    **dict.fromkeys(("allowed_token_ids", "truncate_prompt_tokens", "chat_template"), ()),
    **dict.fromkeys(("stop_token_ids", "bad_words", "logits_processors", "documents"), ([],)),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "continue_final_message"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "include_reasoning", "add_generation_prompt"), (True,)),
    "min_tokens": (0,),
    "length_penalty": (1,),
    # llama-server
    **dict.fromkeys(("typical_p", "repeat_penalty"), (1,)),
    **dict.fromkeys(("mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability", "n_probs"), (0,)),
    **dict.fromkeys(("n_predict", "reasoning_budget"), (-1,)),
    "grammar": ("",),
    "json_schema": ({},),
    "lora": ([],),
    "parse_tool_calls": (True,),
    "reasoning_format": ("auto", "deepseek"),
    # Mistral and OpenRouter
    "random_seed": (),
    "safe_prompt": (False,),
    "top_a": (0,),
}
"""Fields that change the answers of other servers, and the values that do not."""
