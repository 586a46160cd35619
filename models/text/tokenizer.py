"""Text to token ids and back, and conversations to text."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from models.errors import ModelError
from models.text.chat_template import ChatTemplate, Message
from models.text.folder_tokenizer import parts_from_folder
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.pieces import PieceEncoder, PromptPiece, control_tokens
from models.text.text_stream import TextStream, decode, find_token_bytes
from models.text.tokenizer_parts import (
    ADDRESSED,
    CHANNELS,
    END_OF_TURN,
    THINK_MARKERS,
    TO_THE_ANSWER,
    TO_THE_USER,
    Channels,
    ThinkMarkers,
    TokenizerParts,
)
from models.text.vocab_diff import difference

if TYPE_CHECKING:
    from models.files import ModelFiles

__all__ = ["Message", "PromptPiece", "TextStream", "Tokenizer", "load_tokenizer"]


_LIKELY = 16
"""More characters than tokens stand for on average in almost all texts."""


class Tokenizer:
    """One model's tokenizer. Thread-safe."""

    def __init__(self, parts: TokenizerParts) -> None:
        """Build the tokenizer. Raises ModelError if its decoder is not supported."""
        backend = parts.backend
        self._backend = backend
        self._token_bytes = find_token_bytes(backend)
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._unused = parts.unused_ids
        self._hidden = self._special | self._unused
        template = parts.chat_template
        self._template = ChatTemplate(template, parts.special_tokens) if template else None
        self._text_start = parts.text_start
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Number of token ids that this tokenizer knows; the model may have rows for more."""
        self.special_strings: tuple[str, ...] = tuple(
            added[token_id].content for token_id in sorted(self._special)
        )
        """The text of every special token."""
        self.channels: Channels | None = self._find_channels()
        """The tokens of answers that come as several messages (the harmony format, Muse Glimmer); otherwise None."""
        named = {self._added[name] for name in END_OF_TURN & set(self.special_strings)}
        between = {self.channels.end} if self.channels is not None else set()
        self.stop_ids: frozenset[int] = (parts.stop_ids | named) - between
        """Tokens that end a turn."""
        self.generation_defaults: dict[str, float | int] = dict(parts.generation_defaults)
        """Sampling settings that the model's authors recommend; empty if they recommend none."""
        self.suppressed_ids: frozenset[int] = parts.suppressed_ids
        """Tokens that the model's authors never want sampled."""
        self.notes: tuple[str, ...] = parts.notes
        """Lines for the user about unsupported settings in the model's files, and about what the files lack."""
        self.think_markers: ThinkMarkers | None = self._find_markers(template or "")
        """The marks around a model's thinking; None for models without a think span."""
        markers = self.think_markers
        self.think_start: int | None = self._single(markers.open) if markers else None
        """The token that opens a think span."""
        self.think_end: int | None = self._single(markers.close) if markers else None
        """The token that closes a think span."""
        steering = [*self.stop_ids, *(id for id in (self.think_start, self.think_end) if id is not None)]
        steering += self.channels.steering if self.channels is not None else ()
        texts = {token_id: backend.id_to_token(token_id) or "" for token_id in steering}
        self._control = control_tokens(backend, template)
        self._control |= {token_id: text for token_id, text in texts.items() if any(map(str.isalpha, text))}
        self._pieces = PieceEncoder(backend, self._control)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was made to chat; otherwise it completes text."""
        return self._template is not None

    @property
    def template(self) -> str:
        """The source of the chat template; "" if there is none."""
        return self._template.source if self._template is not None else ""

    def start_template(self) -> None:
        """Start the process of the chat template, so that the first `render` need not wait for it."""
        if self._template is not None:
            self._template.start()

    def close(self) -> None:
        """End the process of the chat template. Another `render` starts it again."""
        if self._template is not None:
            self._template.close()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, recognising added tokens in it; no bos is added.

        Raises ModelError for text that is not valid Unicode.
        """
        _check(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def completes(self, text: str) -> list[int]:
        """Return the token ids of `text` as a prompt to complete, after the token that begins the model's texts.

        Added tokens in the text are recognised. Raises ModelError as `encode` does.
        """
        start = self._text_start
        return self.encode(text if text.startswith(start) else start + text)

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of `text` as a user typed it: whatever it spells, it is text and no control token.

        Raises ModelError for text that is not valid Unicode.
        """
        return self.encode_pieces([PromptPiece(text, typed=True)])

    def encode_pieces(self, pieces: Sequence[PromptPiece], after: int | None = None) -> list[int]:
        """Return the token ids of the pieces as one text, with control tokens only in pieces that were not typed.

        `after` is the preceding token; None at the beginning. Raises ModelError for text that is not valid Unicode.
        """
        for piece in pieces:
            _check(piece.text)
        return self._pieces.encode(pieces, after)

    def may_fit(self, texts: Sequence[str], tokens: int) -> bool:
        """Return False if `texts` surely have more than `tokens` tokens, from their lengths and beginnings alone.

        Raises ModelError for text that is not valid Unicode.
        """
        if sum(map(len, texts)) > tokens * self.longest_token:
            return False
        start = tokens * _LIKELY
        long = (text[:start] for text in texts if len(text) > start)
        return all(len(self.encode_plain(text)) <= 2 * tokens for text in long)

    @cached_property
    def longest_token(self) -> int:
        """The most characters that a token stands for."""
        return max(len(self._token_bytes(token_id)) for token_id in range(self.vocab_size))

    def spells_control(self, text: str) -> bool:
        """Return whether control tokens would be recognised in `text` if it were not typed.

        Raises ModelError for text that is not valid Unicode.
        """
        _check(text)
        return self._pieces.spells_control(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, goes_on: bool = False) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD. `goes_on`: other text precedes it."""
        hidden = self._hidden if skip_special else self._unused
        return decode(self._token_bytes, ids, hidden, strip=not goes_on)

    def is_text(self, token_id: int) -> bool:
        """Return whether the token spells text and does not control the model."""
        steers = token_id in self._control or token_id in self._hidden
        return not steers and bool(self._token_bytes(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; empty for an id that the vocabulary does not have."""
        return self._token_bytes(token_id)

    def stream(self, shown: frozenset[int] = frozenset(), *, goes_on: bool = False) -> TextStream:
        """Return a new incremental decoder, in which special tokens have no text, except those in `shown`.

        `goes_on`: other text precedes it.
        """
        return TextStream(self._token_bytes, self._hidden - shown, strip=not goes_on)

    def token_id(self, text: str) -> int | None:
        """Return the id of the added or special token with exactly this text; None if there is none."""
        return self._added.get(text)

    def difference(self, other: "Tokenizer") -> str | None:
        """Return how `other` differs, as the middle of a sentence; None if both turn every text into the same ids."""
        return difference(self._backend, other._backend, self._unused, other._unused)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the conversation by the model's chat template; without one, join its messages into a text to complete.

        `tools` and `more` are as in `ChatTemplate.render`.

        Raises ModelError if the template is invalid or fails, or for a system message to a model that completes text.
        """
        if self._template is None:
            if any(message["role"] == "system" for message in messages):
                raise ModelError(
                    "This model completes text and takes no system prompt; put it into the text."
                )
            return self._text_start + "".join(message["content"] for message in messages)
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
            tools=tools,
            more=more,
        )

    def _find_markers(self, template: str) -> ThinkMarkers | None:
        """Return the pair of marks that are both tokens; of several, the one that the template writes."""
        pairs = [p for p in THINK_MARKERS if None not in (self._single(p.open), self._single(p.close))]
        return next((pair for pair in pairs if pair.open in template), next(iter(pairs), None))

    def _find_channels(self) -> Channels | None:
        if not self._added.keys() >= CHANNELS:
            return self._find_recipients()
        start, channel, message, end = (
            self._added[f"<|{name}|>"] for name in ("start", "channel", "message", "end")
        )
        closing = tuple(self._backend.encode(TO_THE_ANSWER, add_special_tokens=False).ids)
        name = closing[closing.index(channel) + 1 : -1]
        return Channels(start, channel, message, end, name, closing)

    def _find_recipients(self) -> Channels | None:
        if not self._added.keys() >= ADDRESSED:
            return None
        start, message, end = (self._added[f"<|{name}|>"] for name in ("start", "message", "eom"))
        header = self.encode(TO_THE_USER)
        return Channels(
            start,
            None,
            message,
            end,
            tuple(header[:-1]),
            (*self.encode("<|eom|><|start|>assistant"), *header),
        )

    def _single(self, text: str) -> int | None:
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 else None


def _check(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ModelError(
            f"The text is not valid Unicode at character {error.start + 1} (a lone surrogate); "
            "remove that character."
        ) from error


def load_tokenizer(files: "ModelFiles") -> Tokenizer:
    """Return the tokenizer that comes with a model. Raises ModelError if there is none that can be used."""
    if files.gguf is not None:
        from models.weights.gguf import read_gguf

        return Tokenizer(parts_from_gguf(read_gguf(files.gguf).metadata))
    if files.folder is not None:
        return Tokenizer(parts_from_folder(files.folder))
    raise ModelError(f"{files.name} has neither a folder nor a GGUF file; name the model again.")
