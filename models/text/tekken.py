"""Read a `tekken.json`: Mistral's byte-level vocabulary, ranked as in tiktoken."""

import base64
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from models.errors import ModelError
from models.files import read_json
from models.text.splits import TEKKEN, byte_level
from models.text.text_stream import byte_alphabet
from models.text.tokenizer_parts import derive_merges

_MOST = 100_000
"""The maximum number of special tokens in a file; Mistral's have a thousand."""

_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

_SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
            "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")  # fmt: skip
"""The special tokens of the first files, which do not list them."""


def read_tekken(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the tokenizer, and the text of its bos_token, eos_token, unk_token and pad_token.

    Raises ModelError if the file is damaged.
    """
    content = read_json(path)
    try:
        config = content["config"]
        count, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        listed = sorted(content["vocab"], key=lambda entry: int(entry["rank"]))
        if not 0 <= count <= _MOST or not count <= size <= count + len(listed):
            raise ValueError(f"{size} tokens, {count} of them special, and a list of {len(listed)}")
        special = _special(content.get("special_tokens"), count)
        letters = {byte: letter for letter, byte in byte_alphabet().items()}
        ranked = [
            "".join(map(letters.__getitem__, base64.b64decode(entry["token_bytes"], validate=True)))
            for entry in listed[: size - count]
        ]
        # A special token takes precedence over a word with the same text.
        names = frozenset(special)
        words = {token: len(special) + rank for rank, token in enumerate(ranked) if token not in names}
        vocabulary = {**{token: token_id for token_id, token in enumerate(special)}, **words}
        pattern = str(config.get("pattern") or TEKKEN)
        merges = derive_merges(list(words), words)
        backend = byte_level(vocabulary, merges, [pattern], whole_words_first=True)
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ModelError(f"{path} cannot be read ({reason}); download the model again.") from error
    return backend, {role: token for role, token in _ROLES.items() if token in special}


def _special(listed: list[dict[str, object]] | None, count: int) -> list[str]:
    names = dict(enumerate(_SPECIAL))
    if listed is not None:
        names = {int(str(entry["rank"])): str(entry["token_str"]) for entry in listed}
    return [names.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]
