"""How byte-level vocabularies split text into words before any merges."""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers.models import BPE

_DIGIT = r"\p{N}"
_SHORT = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_WORDS = (
    rf"(?i:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WITH_MARKS = _WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_SEED = _WORDS.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")
# As in the models' own tokenizers; llama.cpp separates combining marks from their letters here.
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SHORT"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SHORT"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEKKEN = _CASED.replace("SHORT", "").replace("DIGITS", _DIGIT)
"""The word pattern of Mistral's tekken."""

_GROUPS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2 phi-2 mpt olmo jais mellum trillion exaone4 gigachat a.x-4.0 modern-bert granite-docling": (
        _GPT2,
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (_DIGIT, _GPT2),
    "qwen2 deepseek-r1-qwen megrez stablelm2 kormo hunyuan solar-open grok-2": (
        _WORDS.replace("DIGITS", _DIGIT),
    ),
    "qwen35": (_WITH_MARKS.replace("DIGITS", _DIGIT),),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 smaug-bpe dbrx glm4 chatglm-bpe": (
        _WORDS.replace("DIGITS", r"\p{N}{1,3}"),
    ),
    "minicpm5": (r"\p{N}{1,3}", _WORDS.replace("DIGITS", r"\p{N}+")),
    "seed-coder": (_SEED.replace("DIGITS", _DIGIT),),
    "tekken": (TEKKEN,),
    "gpt-4o llama4 kanana2 minimax-m2": (
        _CASED.replace("SHORT", rf"(?i:{_SHORT})?").replace("DIGITS", r"\p{N}{1,3}"),
    ),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "deepseek-v3 hunyuan-dense joyai-llm": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK),
}
SPLITS = {name: patterns for names, patterns in _GROUPS.items() for name in names.split()}
"""The patterns that split text into words, by `tokenizer.ggml.pre`; each one is applied to the pieces of the last."""

WHOLE_WORDS_FIRST = frozenset(
    {
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"),
        *("pixtral", "midm-2.0", "lfm2", "minicpm5", "tekken"),
    }
)
"""Pre-tokenizers with which a word that is a token becomes that token, whatever the merges say."""


def byte_level(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    patterns: Sequence[str],
    *,
    whole_words_first: bool,
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer: tokens by spelling, merges best first, and patterns from SPLITS."""
    backend = tokenizers.Tokenizer(
        BPE(vocab=dict(vocabulary), merges=list(merges), ignore_merges=whole_words_first)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*map(_split, patterns), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == _DIGIT:  # as models publish it: a regular expression lacks some new Unicode digits
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")
