"""What a tokenizer is made of, however a model comes: as a folder or as a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers

END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "</s>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Special tokens with these names end a turn in every model that has them."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Everything that a model's files say about text and tokens."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    """bos_token, eos_token, ... with their text, as chat templates use them."""
    stop_ids: frozenset[int]
    """Tokens that the files name as the end of a turn."""
    chat_template: str | None
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
