"""Text to token ids and back, and conversations to text."""

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from models.chat_template import ChatTemplate, Message
from models.errors import ModelError
from models.folder_tokenizer import parts_from_folder
from models.gguf_tokenizer import parts_from_gguf
from models.text_stream import TextStream, decode, token_bytes_of
from models.tokenizer_parts import END_OF_TURN, TokenizerParts

if TYPE_CHECKING:
    from models.sources import ModelFiles

__all__ = ["Message", "TextStream", "Tokenizer", "load_tokenizer"]

_LONG = 20_000
"""Characters from which on a text is tokenised without holding up the other threads of Python."""


class Tokenizer:
    """One model's tokenizer. Thread-safe."""

    def __init__(self, parts: TokenizerParts) -> None:
        """Raises ModelError for a tokenizer that cannot be decoded."""
        backend = parts.backend
        self._backend = backend
        self._lock = threading.Lock()
        self._token_bytes = token_bytes_of(backend)
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._unused = parts.unused_ids
        self._hidden = self._special | self._unused
        template = parts.chat_template
        self._template = ChatTemplate(template, parts.special_tokens) if template else None
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Token ids that this tokenizer knows; the model may have rows for more."""
        self.special_strings: tuple[str, ...] = tuple(
            added[token_id].content for token_id in sorted(self._special)
        )
        """The text of every special token."""
        named = {self._added[name] for name in END_OF_TURN & set(self.special_strings)}
        self.stop_ids: frozenset[int] = parts.stop_ids | named
        """Tokens that end a turn."""
        self.generation_defaults: dict[str, float | int] = dict(parts.generation_defaults)
        """Sampling settings that the model's authors recommend; empty when they do not say."""
        self.think_start: int | None = self._single("<think>")
        """The token that opens a think span, for models that have one."""
        self.think_end: int | None = self._single("</think>")
        """The token that closes it."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can work."""
        return self._template is not None

    def start_template(self) -> None:
        """Start the process of the chat template, so that the first `render` need not wait for it."""
        if self._template is not None:
            self._template.start()

    def close(self) -> None:
        """End the process of the chat template. Another `render` starts it again."""
        if self._template is not None:
            self._template.close()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens in it taken as such; no bos is added.

        Raises ModelError for text that is not valid Unicode.
        """
        return self._encode(text, plain=False)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` as a person typed it: the text of a special token is just text.

        Added tokens that are not special (`<think>` of Qwen3) are taken as such here too. Raises ModelError
        for text that is not valid Unicode.
        """
        return self._encode(text, plain=True)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return decode(self._token_bytes, ids, self._hidden if skip_special else self._unused)

    def stream(self) -> TextStream:
        """A new incremental decoder; special tokens have no text in it."""
        return TextStream(self._token_bytes, self._hidden)

    def token_id(self, text: str) -> int | None:
        """Id of the added or special token with exactly this text; None when there is none."""
        return self._added.get(text)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, enable_thinking: bool | None = None
    ) -> str:
        """The conversation as text, by the model's chat template.

        Raises ModelError when it has none, or it is not valid or fails.
        """
        if self._template is None:
            raise ModelError(
                "This model has no chat template, so it cannot chat; use an instruction-tuned model."
            )
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )

    def _encode(self, text: str, *, plain: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ModelError(
                f"The text is not valid Unicode at character {error.start + 1} (a lone surrogate); "
                "remove that character."
            ) from error
        with self._lock:  # the setting below belongs to the backend, not to a call
            if self._backend.encode_special_tokens != plain:
                self._backend.encode_special_tokens = plain
            if len(text) < _LONG:
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            else:  # a batch lets other threads run: 1 MB takes most of a second
                ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _single(self, text: str) -> int | None:
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 else None


def load_tokenizer(files: "ModelFiles") -> Tokenizer:
    """The tokenizer that comes with a model. Raises ModelError when there is none that can be used."""
    if files.gguf is not None:
        from models.gguf import read_gguf

        return Tokenizer(parts_from_gguf(read_gguf(files.gguf).metadata))
    if files.folder is not None:
        return Tokenizer(parts_from_folder(files.folder))
    raise ModelError(f"{files.name} has neither a folder nor a GGUF file; name the model again.")
