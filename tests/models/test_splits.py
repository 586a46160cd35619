"""Each GGUF pre-tokenizer splits text as the published tokenizer.json of its family does."""

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from models.text.gguf_tokenizer import parts_from_gguf
from models.text.splits import SPLITS, WHOLE_WORDS_FIRST
from models.text.tokenizer import Tokenizer as OurTokenizer
from tests.models.nasty import nasty_texts
from tests.models.tokenizer_data import tiny

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
MINICPM = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
"""The setting of GPT-2, OLMo and similar tokenizers: the pattern is that of ByteLevel itself."""


def split(*patterns: str, behavior: str = "isolated", invert: bool = False) -> list[Any]:
    """Return the pre-tokenizers as a tokenizer.json has them."""
    return [
        *(pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=invert) for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


DIGITS = pre_tokenizers.Digits(individual_digits=True)
PUBLISHED: dict[str, list[Any]] = {
    "gpt-2": [GPT2],
    "olmo": [GPT2],
    "exaone4": [GPT2],
    "smollm": [DIGITS, GPT2],
    "starcoder": [DIGITS, GPT2],
    "refact": [DIGITS, GPT2],  # Granite 3
    "command-r": [DIGITS, GPT2],
    "exaone": [DIGITS, GPT2],
    "qwen2": split(QWEN2),
    "stablelm2": split(QWEN2, behavior="removed", invert=True),
    "qwen35": split(QWEN35),
    "llama-bpe": split(CL100K),  # Llama 3
    "smaug-bpe": split(CL100K),  # SmolLM3
    "dbrx": split(CL100K, behavior="removed", invert=True),  # Phi-4, OLMo 2 and 3, Granite 4
    "minicpm5": split(r"\p{N}{1,3}", MINICPM),
    "seed-coder": split(SEED),
    "tekken": split(TEKKEN),  # Ministral, Mistral Small
    "gpt-4o": split(O200K, behavior="removed", invert=True),  # Phi-4-mini
    "llama4": split(O200K),
    "deepseek-coder": [
        *split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")[:-1],
        DIGITS,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "deepseek-v3": split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK),
}

SAME_AS = {
    "exaone4": "jais gigachat a.x-4.0 mellum modern-bert phi-2 mpt trillion granite-docling",
    "starcoder": "codeshell minerva-7b mellum2",
    "qwen2": "deepseek-r1-qwen megrez kormo hunyuan solar-open grok-2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4 chatglm-bpe",
    "llama4": "kanana2 minimax-m2",
    "deepseek-v3": "hunyuan-dense joyai-llm",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_is_cut_as_published(name: str) -> None:
    ours = parts_from_gguf(tiny("tiny_bpe") | {"tokenizer.ggml.pre": name}).backend.pre_tokenizer
    theirs = pre_tokenizers.Sequence(PUBLISHED[name])
    for text in nasty_texts():
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_those_of_the_published_tokenizer(name: str) -> None:
    """The vocabulary merges words, digits, spaces and line breaks, so that every split shows in the ids."""
    metadata = tiny("tiny_bpe") | {"tokenizer.ggml.pre": name}
    ours = OurTokenizer(parts_from_gguf(metadata))
    types = metadata["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"]) if types[i] == 1}
    merges = [
        (left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])
    ]
    theirs = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=name in WHOLE_WORDS_FIRST))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[name])
    for text in nasty_texts():
        ids = ours.encode_plain(text)
        assert ids == theirs.encode(text).ids, text
        assert ours.decode(ids) == text


def test_every_name_is_tested() -> None:
    same = {name: like for like, names in SAME_AS.items() for name in names.split()}
    assert all(SPLITS[name] == SPLITS[like] for name, like in same.items())
    assert set(SPLITS) == {*same, *PUBLISHED, "default"}  # the last is llama.cpp's own: see the golden tokens
    assert set(SPLITS) >= WHOLE_WORDS_FIRST
