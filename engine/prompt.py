"""What the next prompt is in tokens, assembled from a chat template and from the ids that were sampled.

The template is rendered with a placeholder for each message, which cuts it into glue. Glue and typed text are
tokenised; an answer contributes the ids that were sampled, never a second tokenisation of its text:

    "<|im_start|>user\\n" U "<|im_end|>\\n<|im_start|>assistant\\n" | ids of A | "<|im_end|>\\n<|im_start|>user\\n" ...
    `---------------------- one segment ------------------------´              `---------- the next ----------

So a conversation of n answers is n + 1 segments of tokens with the answers between them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import EngineError
from models.tokenizer import Message, Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt. Special tokens are taken as such in what the template wrote, not in typed text."""

    text: str
    typed: bool


class PromptFormat:
    """A model's chat template and tokenizer as the maker of prompts. Remembers what it tokenised."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises EngineError when the model has no chat template."""
        if not tokenizer.has_chat_template:
            raise EngineError(
                "This model has no chat template, so it cannot chat; use an instruction-tuned model "
                "(its name often ends in -Instruct)."
            )
        self._tokenizer = tokenizer
        self._special = re.compile("|".join(map(re.escape, tokenizer.special_strings)) or r"(?!)")
        self._ids: dict[tuple[Piece, ...], list[int]] = {}
        self._older_ids: dict[tuple[Piece, ...], list[int]] = {}
        self._contents: dict[tuple[str, str], str] = {}
        asked = {think: self._asked(think) for think in (None, True, False)}
        self._openings = {think: self._opening(ids) for think, ids in asked.items()}
        self._inside = {think: self.opens_think(ids) for think, ids in asked.items()}

    def thinks(self) -> bool:
        """Whether the template and the vocabulary know a think span."""
        if self._tokenizer.think_start is None or self._tokenizer.think_end is None:
            return False
        user: list[Message] = [{"role": "user", "content": "x"}]
        texts = {
            self._tokenizer.render(user, add_generation_prompt=True, enable_thinking=think)
            for think in (None, True, False)
        }
        return len(texts) > 1 or any("<think>" in text for text in texts)

    def segments(
        self, system: str | None, users: Sequence[str], *, generate: bool, think: bool | None = None
    ) -> list[list[int]]:
        """The token ids before, between and after the answers to `users`.

        With `generate` the last message waits for its answer: len(users) segments, the last one ends in the
        generation prompt. Without, every message has been answered, and the last of len(users) + 1 segments is
        what stands before the next message, whatever that will be.
        Raises ModelError when the template fails, EngineError when it drops a message.
        """
        messages = [("system", system)] if system else []
        for text in users:
            messages += [("user", text), ("assistant", "")]
        if generate:
            messages.pop()
        else:
            messages.append(("user", ""))
        glue = self._glue([role for role, _ in messages], generate, think)
        segments: list[list[Piece]] = [[Piece(glue[0], typed=False)]]
        for (role, text), after in zip(messages, glue[1:], strict=True):
            if role == "assistant":
                segments.append([])
            elif text:
                segments[-1].append(Piece(self._content(role, text), typed=True))
            segments[-1].append(Piece(after, typed=False))
        if not generate:
            segments[-1].pop()  # what comes after the next message
        # Only what this call and the one before were made of is remembered: drafts come and go.
        # Another thread may be here too: what is shared is looked at once and replaced whole.
        known, older, contents = self._ids, self._older_ids, self._contents
        ids = [
            known.get(pieces) or older.get(pieces) or self._encode(pieces) for pieces in map(tuple, segments)
        ]
        self._ids, self._older_ids = dict(zip(map(tuple, segments), ids, strict=True)), known
        self._contents = {key: contents[key] for key in messages if key in contents}
        return ids

    def opening(self, think: bool | None) -> list[int]:
        """What the generation prompt writes before an answer and the history leaves out, in tokens."""
        return self._openings[think]

    def inside(self, think: bool | None) -> bool:
        """Whether the generation prompt opens a think span; what people write in their messages opens none."""
        return self._inside[think]

    def closing(self, thought: Sequence[int]) -> list[int]:
        """The tokens that end a think span and lead over to the answer, as the template writes them.

        `thought` is what stands in the span after its opening marker.
        """
        start, end = self._tokenizer.think_start, self._tokenizer.think_end
        if start is None or end is None:
            return []
        empty = self._openings[False]
        known = start in empty and end in empty
        if known and not thought:
            return empty[empty.index(start) + 1 :]
        then = self._tokenizer.decode(empty[empty.index(end) + 1 :]) if known else "\n\n"
        break_before = "" if self._tokenizer.decode(thought).endswith("\n") else "\n"
        return self._tokenizer.encode(
            f"{break_before}{self._tokenizer.decode([end], skip_special=False)}{then}"
        )

    def answer_ids(self, text: str) -> list[int]:
        """The tokens of an answer that is only known as text, as the template writes it."""
        content = self._content("assistant", text)
        if not content:
            return []
        before = Piece(self._glue(["user", "assistant", "user"], False, None)[1], typed=False)
        alone, together = self._encode((before,)), self._encode((before, Piece(content, typed=True)))
        if together[: len(alone)] == alone:
            return together[len(alone) :]
        return self._tokenizer.encode_plain(content)

    def shows(self, ids: Sequence[int], text: str) -> bool:
        """Whether `ids` are the tokens by which the history shows an answer with this text."""
        return self._content("assistant", text) in self._tokenizer.decode(ids)

    def _asked(self, think: bool | None) -> list[int]:
        return self.segments(None, ["x"], generate=True, think=think)[-1]

    def _opening(self, asked: list[int]) -> list[int]:
        answered = self.segments(None, ["x"], generate=False)[0]
        return asked[len(answered) :] if asked[: len(answered)] == answered else []

    def answer_span(self, ids: Sequence[int], text: str) -> tuple[int, int]:
        """Which of the sampled `ids` of an answer the history shows, where the answer's text was `text`.

        The template may trim an answer; then so many whole tokens are left out at its ends.
        """
        shown = self._content("assistant", text)
        if not shown:
            return 0, 0
        decode, stream = self._tokenizer.decode, self._tokenizer.stream()
        ends, length = [], 0
        for id in ids:
            length += len(stream.push(id))
            ends.append(length)
        at = max(decode(ids).find(text), 0) + max(text.rfind(shown), 0)
        first = next((i for i, end in enumerate(ends) if end > at), 0)
        last = next((i for i, end in enumerate(ends) if end >= at + len(shown)), len(ids) - 1)
        # A character's text counts for the token that completes it: up to three before may belong to it.
        for begin in range(first, max(first - 4, -1), -1):
            if shown in decode(ids[begin : last + 1]):
                return begin, last + 1
        return first, last + 1

    def opens_think(self, prompt: Sequence[int]) -> bool:
        """Whether `prompt` ends within a think span that it opened itself."""
        start, end = self._tokenizer.think_start, self._tokenizer.think_end
        for id in reversed(prompt):
            if id == end or start is None:
                return False
            if id == start:
                return True
        return False

    # -- text

    def _glue(self, roles: Sequence[str], generate: bool, think: bool | None) -> list[str]:
        """What the template writes around the messages: len(roles) + 1 texts."""
        slots = [f"\ue000{index}\ue001" for index in range(len(roles))]
        messages: list[Message] = [
            {"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)
        ]
        text = self._tokenizer.render(messages, add_generation_prompt=generate, enable_thinking=think)
        glue = []
        for slot in slots:
            before, found, text = text.partition(slot)
            if not found:
                raise EngineError(
                    "The model's chat template leaves out messages, so this model cannot chat here."
                )
            glue.append(before)
        return [*glue, text]

    def _content(self, role: str, text: str) -> str:
        """`text` as the template writes it: some strip it, some rewrite it."""
        key = (role, text)
        content = self._contents.get(key)
        if content is None:
            slot = "\ue000"
            before, after = self._around(role, slot).split(slot, 1)
            whole = self._around(role, text)
            fits = (
                whole.startswith(before) and whole.endswith(after) and len(whole) >= len(before) + len(after)
            )
            content = whole[len(before) : len(whole) - len(after)] if fits else text
            self._contents[key] = content
        return content

    def _around(self, role: str, text: str) -> str:
        message: Message = {"role": role, "content": text}
        ask: Message = {"role": "user", "content": "x"}
        messages = {"user": [message], "system": [message, ask], "assistant": [ask, message, ask]}[role]
        return self._tokenizer.render(messages, add_generation_prompt=False)

    # -- tokens

    def _encode(self, pieces: tuple[Piece, ...]) -> list[int]:
        if not any(piece.typed and self._special.search(piece.text) for piece in pieces):
            return self._tokenizer.encode("".join(piece.text for piece in pieces))
        # Somebody typed the text of a special token: cut at the template's own, the rest is plain text.
        ids: list[int] = []
        plain = ""
        for piece in pieces:
            done = 0
            for match in () if piece.typed else self._special.finditer(piece.text):
                ids += self._tokenizer.encode_plain(plain + piece.text[done : match.start()])
                ids += self._tokenizer.encode(match[0])
                plain, done = "", match.end()
            plain += piece.text[done:]
        return ids + self._tokenizer.encode_plain(plain)
