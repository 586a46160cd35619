"""A tokenizer from the metadata of a GGUF file, with the same token ids as in llama.cpp."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.models import BPE

from models.errors import ModelError
from models.text.generation_config import generation_defaults, generation_of_gguf, unused_of_gguf
from models.text.sentencepiece import NORMAL, UNUSED, SentencePiece, add_typed_tokens, sentencepiece_backend
from models.text.splits import SPLITS, WHOLE_WORDS_FIRST, byte_level
from models.text.tokenizer_parts import END_OF_TURN, META_SPACE, TokenizerParts, sentencepiece_decoder

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# llama.cpp also counts "</s>" among them, but in Qwen's vocabulary that is a piece of HTML.
_ALWAYS_CONTROL = {name for name in END_OF_TURN if name.startswith("<|")} | {
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
}  # fmt: skip
"""Tokens with these names are control tokens, whatever type a file gives them."""

_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "t5": {"eos": 1, "unknown": 2, "padding": 0}}
"""Ids of special tokens by kind of tokenizer, for files that name none."""

_NO_SPLIT = (
    "The GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), so text is split in the usual way, which may "
    "not be that of the model; if its answers are poor, use a newer file of this model."
)


def parts_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Return the tokenizer that GGUF `metadata` (plain Python values by key) describes.

    Raises ModelError if the metadata is incomplete, contradictory or of an unsupported kind.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    template = metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        backend=_backend(metadata, tokens),
        special_tokens=_special_tokens(metadata, tokens),
        stop_ids=_stop_ids(metadata, tokens),
        unused_ids=frozenset(i for i, kind in enumerate(_types(metadata, tokens)) if kind == UNUSED),
        chat_template=template if isinstance(template, str) else None,
        text_start=_text_start(metadata, tokens),
        generation_defaults=generation_defaults(generation_of_gguf(metadata)),
        notes=tuple(filter(None, (_NO_SPLIT if _lacks_split(metadata) else None, unused_of_gguf(metadata)))),
    )


def _lacks_split(metadata: Mapping[str, Any]) -> bool:
    return metadata["tokenizer.ggml.model"] == "gpt2" and "tokenizer.ggml.pre" not in metadata


def _backend(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _sentencepiece, "gemma4": _lines}
    if not isinstance(kind, str) or kind not in builders:
        raise ModelError(
            f"The GGUF file has a tokenizer of the kind {kind!r}; supported are 'gpt2' (byte-level BPE), "
            "'llama' (SentencePiece BPE), 'gemma4' (BPE of lines) and 't5' (SentencePiece unigram). Use another "
            "file of this model."
        )
    try:
        return builders[kind](metadata, tokens)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(str(error).split())
        raise ModelError(
            f"The GGUF file's tokenizer is damaged ({reason}); download the file again."
        ) from error


def _special_id(metadata: Mapping[str, Any], role: str) -> Any:
    default = _DEFAULT_IDS.get(metadata["tokenizer.ggml.model"], {}).get(role)
    return metadata.get(f"tokenizer.ggml.{role}_token_id", default)


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    ids = {name: _special_id(metadata, role) for name, role in _ROLES.items()}
    return {name: tokens[i] for name, i in ids.items() if _is_token(i, tokens)}


def _stop_ids(metadata: Mapping[str, Any], tokens: Sequence[str]) -> frozenset[int]:
    ids = (_special_id(metadata, role) for role in ("eos", "eot", "eom"))
    return frozenset(i for i in ids if _is_token(i, tokens))


def _text_start(metadata: Mapping[str, Any], tokens: Sequence[str]) -> str:
    """Return the bos token if every text begins with it, by the file or by llama.cpp's default; otherwise ""."""
    usual = metadata.get("tokenizer.ggml.model") in ("llama", "gemma4") or (
        metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS_FIRST
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
    whole = pre in WHOLE_WORDS_FIRST
    backend = byte_level(_vocabulary(tokens), merges, SPLITS[pre], whole_words_first=whole)
    add_typed_tokens(backend, tokens, _types(metadata, tokens), _ALWAYS_CONTROL)
    return backend


def _lines(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer of characters, whose merges do not cross the ends of lines; spaces become U+2581.

    What lies between two ends of lines, and a run of these, becomes one token if it is one, whatever the merges say.
    """
    merges = [_merge(merge) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(
        BPE(vocab=_vocabulary(tokens), merges=merges, byte_fallback=True, ignore_merges=True)
    )
    backend.normalizer = normalizers.Replace(" ", META_SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    backend.decoder = sentencepiece_decoder(prefixed=False)
    add_typed_tokens(backend, tokens, _types(metadata, tokens), _ALWAYS_CONTROL, normalized=True)
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores") or ()
    if len(scores) != len(tokens):
        raise ModelError("The GGUF file's tokenizer has no score for every token; download the file again.")
    vocabulary = SentencePiece(
        list(_vocabulary(tokens)),
        scores,
        _types(metadata, tokens),
        unigram=metadata["tokenizer.ggml.model"] == "t5",
        unknown=_special_id(metadata, "unknown"),
        prefixed=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        squeezed=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        charsmap=bytes(value & 0xFF for value in metadata.get("tokenizer.ggml.precompiled_charsmap") or ()),
    )
    return sentencepiece_backend(vocabulary, _ALWAYS_CONTROL)


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
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError("The GGUF file's tokenizer has no type for every token; download the file again.")
    return types
