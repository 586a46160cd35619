"""A tokenizer from the metadata of a GGUF file, with the token ids that llama.cpp gives."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from models.errors import ModelError
from models.text.tokenizer_parts import END_OF_TURN, META_SPACE, TokenizerParts, sentencepiece_decoder

# Token types as GGUF numbers them.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# llama.cpp also counts "</s>" among them; but in Qwen's vocabulary that is a piece of HTML.
_ALWAYS_CONTROL = {name for name in END_OF_TURN if name.startswith("<|")} | {
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
}  # fmt: skip
"""Tokens with these names are control tokens, whatever type a file gives them."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As the model's own tokenizer has it; llama.cpp keeps combining marks apart from their letters here.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GROUPS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2 mpt olmo mellum trillion": (_GPT2,),
    "smollm starcoder refact command-r minerva-7b": (r"\p{N}", _GPT2),
    "qwen2 deepseek-r1-qwen megrez": (_WORDS.replace("DIGITS", r"\p{N}"),),
    "llama-bpe llama3 llama-v3 falcon3 smaug-bpe": (_WORDS.replace("DIGITS", r"\p{N}{1,3}"),),
    "tekken": (_TEKKEN,),
}
SPLITS = {name: patterns for names, patterns in _GROUPS.items() for name in names.split()}
"""For each `tokenizer.ggml.pre`: the patterns that cut text into words, each within the last one's pieces."""

_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}
"""A word that is a token becomes that token, whatever the merges say."""


def parts_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """The tokenizer that GGUF `metadata` (plain Python values by key) describes.

    Raises ModelError when the metadata is incomplete, contradictory or of a kind that is not supported.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    template = metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        backend=_backend(metadata, tokens),
        special_tokens=_special_tokens(metadata, tokens),
        stop_ids=_stop_ids(metadata, tokens),
        unused_ids=frozenset(i for i, kind in enumerate(_types(metadata, tokens)) if kind == _UNUSED),
        chat_template=template if isinstance(template, str) else None,
        text_start=_text_start(metadata, tokens),
    )


def _backend(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise ModelError(
            f"The GGUF file has a tokenizer of the kind {model!r}; supported are 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE). Use another file of this model."
        )
    try:
        backend = builders[model](metadata, tokens)
        _add_tokens(backend, metadata, tokens)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(str(error).split())
        raise ModelError(
            f"The GGUF file's tokenizer is damaged ({reason}); download the file again."
        ) from error
    return backend


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _ROLES.items()}
    return {name: tokens[i] for name, i in ids.items() if _is_token(i, tokens)}


def _stop_ids(metadata: Mapping[str, Any], tokens: Sequence[str]) -> frozenset[int]:
    ids = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    return frozenset(i for i in ids if _is_token(i, tokens))


def _text_start(metadata: Mapping[str, Any], tokens: Sequence[str]) -> str:
    """The bos token, where it stands before every text: the file says so, else it is llama.cpp's default."""
    usual = metadata.get("tokenizer.ggml.model") == "llama" or (
        metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    )
    begins = bool(metadata.get("tokenizer.ggml.add_bos_token", usual))
    return _special_tokens(metadata, tokens).get("bos_token", "") if begins else ""


def _is_token(token_id: Any, tokens: Sequence[str]) -> TypeGuard[int]:
    return isinstance(token_id, int) and 0 <= token_id < len(tokens)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ModelError(
            f"The GGUF file uses the pre-tokenizer {pre!r}, which is not supported; supported: "
            f"{', '.join(sorted(SPLITS))}. Use another model."
        )
    merges = [_merge(merge) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    model = BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    vocabulary = _vocabulary(tokens)
    merges = _merges_by_score(metadata, tokens, vocabulary)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend(META_SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", META_SPACE)])
    backend.decoder = sentencepiece_decoder(prefixed=prefixed)
    return backend


def _merges_by_score(
    metadata: Mapping[str, Any], tokens: Sequence[str], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: the order in which SentencePiece merges."""
    scores = metadata.get("tokenizer.ggml.scores") or ()
    if len(scores) != len(tokens):
        raise ModelError("The GGUF file's tokenizer has no score for every token; download the file again.")
    types = _types(metadata, tokens)
    # A control or byte token is never made of the text that spells it.
    mergeable = [i for i in range(len(tokens)) if types[i] not in (_UNKNOWN, _CONTROL, _BYTE)]
    mergeable.sort(key=lambda i: -scores[i])
    return [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in mergeable)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _add_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Make control tokens special, and user-defined ones whole wherever they stand in a text."""
    types = _types(metadata, tokens)
    special = [
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL) or token in _ALWAYS_CONTROL
    ]
    whole = [
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind == _USER_DEFINED and token not in _ALWAYS_CONTROL
    ]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token or f"[EMPTY_{i}]": i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError("The GGUF file's tokenizer lists a token twice; use another file of this model.")
    return vocabulary


def _merge(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the first character may itself be a space
    return merge[:1] + left, right


def _strings(metadata: Mapping[str, Any], key: str) -> Sequence[str]:
    values = metadata.get(key)
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ModelError(f"The GGUF file has no {key}, so it has no tokenizer; use a file that includes one.")
    return values


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Sequence[int]:
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError("The GGUF file's tokenizer has no type for every token; download the file again.")
    return types
