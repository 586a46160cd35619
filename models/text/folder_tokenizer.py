"""A tokenizer from a folder in Hugging Face layout, with the same token ids as in transformers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from models.errors import ModelError
from models.files import read_json
from models.text.generation_config import generation_defaults, suppressed_ids, unused_settings
from models.text.sentencepiece import sentencepiece_backend
from models.text.sentencepiece_file import read_sentencepiece
from models.text.tekken import read_tekken
from models.text.tokenizer_parts import META_SPACE, TokenizerParts, sentencepiece_decoder

_FILE = "tokenizer.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SLOW_FILES = ("vocab.json", "tiktoken.model")


def parts_from_folder(folder: Path) -> TokenizerParts:
    """Read tokenizer.json, tokenizer_config.json, generation_config.json, config.json and the chat template.

    Without a tokenizer.json, tekken.json or tokenizer.model is read; the latter gives the ids of SentencePiece.

    Raises ModelError if a file is missing or damaged.
    """
    config = _read_json(folder / "tokenizer_config.json")
    model_config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    backend, roles = _load_backend(folder, config)
    special_tokens = {**roles, **_special_tokens(folder, config)}
    if (folder / _FILE).is_file():
        _as_llama_class(backend, config, model_config)
    else:
        config = {"added_tokens_decoder": _added_by_name(folder, special_tokens), **config}
    try:
        _add_tokens(backend, config, special_tokens, model_config.get("vocab_size"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'} lists its tokens in an unknown format; download the model again."
        ) from error
    eos = [backend.token_to_id(special_tokens["eos_token"])] if "eos_token" in special_tokens else []
    eos += [*_ids(generation.get("eos_token_id")), *_ids(model_config.get("eos_token_id"))]
    stop_ids = frozenset(token_id for token_id in eos if token_id is not None)
    unused = unused_settings(generation)
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        stop_ids=stop_ids,
        chat_template=_chat_template(folder, config),
        generation_defaults=generation_defaults(generation),
        suppressed_ids=suppressed_ids(generation, stop_ids),
        notes=() if unused is None else (unused,),
        text_start=_text_start(backend, special_tokens.get("bos_token")),
    )


def _text_start(backend: tokenizers.Tokenizer, bos: str | None) -> str:
    """Return the bos token if the tokenizer puts it before every text, otherwise ""."""
    begins = bos is not None and backend.encode("").ids[:1] == [backend.token_to_id(bos)]
    return bos if begins and bos is not None else ""


def _load_backend(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the tokenizer, and the special tokens that its own file names, by role."""
    path = folder / _FILE
    if not path.is_file():
        return _load_other(folder, config)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path} cannot be read ({reason}); download the model again.") from error
    backend.no_truncation()
    backend.no_padding()
    return backend, {}


def _load_other(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    if (path := folder / "tekken.json").is_file():
        return read_tekken(path)
    if (path := folder / "tokenizer.model").is_file():
        vocabulary, roles = read_sentencepiece(path)
        prefixed = config.get("add_prefix_space")
        if isinstance(prefixed, bool):
            vocabulary = replace(vocabulary, prefixed=prefixed)
        try:
            return sentencepiece_backend(vocabulary), roles
        except Exception as error:  # tokenizers raises bare Exception
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"{path} cannot be used ({reason}); download the model again.") from error
    return _convert_slow(folder), {}


def _as_llama_class(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], model_config: Mapping[str, Any]
) -> None:
    """Treat spaces as transformers' LlamaTokenizer does, whose rules differ from those in tokenizer.json."""
    if config.get("tokenizer_class") not in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return
    if model_config.get("model_type") != "llama" or "ByteLevel" in repr(backend.decoder):
        return
    prefixed = config.get("add_prefix_space") is not False
    scheme = "never" if not prefixed else "always" if config.get("legacy") else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(META_SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = sentencepiece_decoder(prefixed=prefixed)


def _convert_slow(folder: Path) -> tokenizers.Tokenizer:
    if not any((folder / name).is_file() for name in _SLOW_FILES):
        raise ModelError(f"{folder} has no tokenizer.json; download the model again, with its tokenizer.")
    from transformers import AutoTokenizer  # importing it takes seconds, so only as a last resort

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend: tokenizers.Tokenizer = slow.backend_tokenizer
    except Exception as error:  # a foreign tokenizer may raise anything
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{folder} has no tokenizer.json, and its tokenizer cannot be converted ({reason}); "
            "use a model with a tokenizer.json."
        ) from error
    return backend


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    texts = {role: _text(named.get(role)) for role in _ROLES}
    return {role: text for role, text in texts.items() if text}


def _added_by_name(folder: Path, special_tokens: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Read added_tokens.json, which older models have, in the form of tokenizer_config.json's added_tokens_decoder."""
    special = set(special_tokens.values())
    listed = _read_json(folder / "added_tokens.json")
    return {str(token_id): {"content": text, "special": text in special} for text, token_id in listed.items()}


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str], rows: Any
) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks, in the same order as transformers."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            flags = {name: bool(entry.get(name, False)) for name in _FLAGS}
            backend.add_tokens([AddedToken(entry["content"], **flags)])
    lists = [config.get(name) or [] for name in _LISTS]
    more = [
        _text(token) for names in lists for token in (names.values() if isinstance(names, dict) else names)
    ]
    for text in dict.fromkeys([*special_tokens.values(), *more]):
        # A token that is not in the vocabulary would get an id for which the model has no row.
        room = not isinstance(rows, int) or backend.get_vocab_size() < rows
        if text and (room or backend.token_to_id(text) is not None):
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _text(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again.") from error
