"""Makes the tokens of the next prompt from a chat template and from the ids that were sampled.

The template is rendered with a placeholder for each message; the text between the placeholders is the glue. Glue and
typed text are tokenised. An answer contributes the ids that were sampled, never a second tokenisation of its text:

    "<|im_start|>user\\n" U "<|im_end|>\\n<|im_start|>assistant\\n" | ids of A | "<|im_end|>\\n<|im_start|>user\\n" ...
    `---------------------- one segment ------------------------´              `---------- the next ----------

So a conversation of n answers is n + 1 segments of tokens with the answers between them. Apart from the sampled ids,
the tokens are those of the rendered text:

- A segment after an answer is tokenised as the continuation of a text, not as its beginning.
- Sampled ids may spell spaces that the template writes around an answer (the first word of SentencePiece begins with
  one). The glue then leaves out these spaces.
- The segments around an answer without ids are tokenised as one text.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, cast

from engine.cache.offload import common_prefix
from engine.conversation.turns import Answer, Turn
from engine.errors import EngineError
from engine.schedule.channels import ChannelTracker
from engine.schedule.reasoning import ThinkTracker
from models.errors import ModelError
from models.text.tokenizer import Message, PromptPiece, Tokenizer

COMPLETES = "This model completes text and has no chat format: it continues the conversation as one text."
SYSTEM_IN_MESSAGE = (
    "This model takes no system prompt, so yours is put before your first message, with a blank line between."
)

_Text = tuple[tuple[PromptPiece, ...], int | None]
"""Pieces of text, and the token before them."""

_USER: Message = {"role": "user", "content": "x"}

_EDGE = 4
"""How many tokens at each end of an answer are searched for spaces."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """The ids of an answer."""

    ids: list[int]
    index: int = -1
    """The index of its message."""
    unseen: list[int] | None = None
    """The tokens generated before `ids` that the history leaves out; None: unknown."""


Part = PromptPiece | Spoken
"""Text of the template or of a message, or an answer whose ids are known."""


class PromptFormat:
    """Makes prompts with a model's chat template and tokenizer. Remembers what it tokenised."""

    def __init__(self, tokenizer: Tokenizer, names: Mapping[str, Any] | None = None) -> None:
        """`names` are additional variables for the template.

        Raises EngineError if the chat template drops messages, ModelError if it fails.
        """
        self.tokenizer = tokenizer
        self.names = names
        self._ids: dict[_Text, list[int]] = {}
        self._older_ids: dict[_Text, list[int]] = {}
        self._contents: dict[tuple[str, str, bool], str] = {}
        self._sides: dict[tuple[str, bool], tuple[str, str]] = {}
        before = self._before_answers()
        self._lead = before if before.isspace() else ""
        self._header = "" if self._lead or tokenizer.channels is None else before
        """The text that the history writes before an answer, and a generation prompt only if there is no thinking."""
        self._system_apart: bool | None = None
        """Whether the template takes a system prompt; None until one is used."""
        self.header = tokenizer.encode(self._header)
        """The tokens of that text if answers come in channels; otherwise empty."""
        self.instead: list[int] = []
        """The tokens that the history writes where a prompt opened a think span: the end of one, or an empty one."""
        asked = {think: self._asked(think) for think in (None, True, False)}
        self.openings = {think: self._opening(think, ids) for think, ids in asked.items()}
        """For each setting, the tokens that the generation prompt writes before an answer and the history leaves out;
        or the `header`, which the history writes, too."""
        self.inside = {think: self.opens_think(ids) for think, ids in asked.items()}
        """For each setting, whether the generation prompt opens a think span. The text of a message never opens one."""

    def thinks(self) -> bool:
        """Return whether the template and the vocabulary have think spans."""
        if self.tokenizer.channels is not None:
            return True
        if (markers := self.tokenizer.think_markers) is None:
            return False
        texts = {self.render([_USER], True, think) for think in (None, True, False)}
        return len(texts) > 1 or any(markers.open in text for text in texts)

    def notes(self, system: str | None) -> tuple[str, ...]:
        """Return lines for the user on how this model's prompts are made, from what is known already."""
        found = () if self.tokenizer.has_chat_template else (COMPLETES,)
        return (*found, SYSTEM_IN_MESSAGE) if system and self._system_apart is False else found

    def dialogue(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: Mapping[int, Turn],
        think: bool | None = None,
        before_next: bool = False,
    ) -> list[Part]:
        """Return the parts of the prompt that asks for an answer to the last of `messages`, which are messages and
        answers in turn, after a system prompt if any; or `before_next`, those with which the next prompt begins.

        `answers` has the turns of the answers whose ids are known, by their index. Thinking is left out. Raises
        ModelError if the template fails, EngineError if it drops a message.
        """
        whole = [*messages, {"role": "user", "content": ""}] if before_next else messages
        fitted = self.with_system(whole)
        left_out = len(whole) - len(fitted)
        glue = self._glue([message["role"] for message in fitted], not before_next, think)
        contents: dict[tuple[str, str, bool], str] = {}
        before, role = glue[0], ""
        parts: list[Part] = []
        for index, (message, after) in enumerate(zip(fitted, glue[1:], strict=True), left_out):
            previous, role, text = role, message["role"], message["content"]
            if (turn := answers.get(index)) is not None:
                before = before[: len(before) - self._spoken_before(turn.answer, before)]
                after = after[self._spoken_after(turn.answer, after, contents) :]
                before, spoken = self.instead_of_thought(before, self._spoken(index, turn))
                parts += [PromptPiece(before.removesuffix(self._header), typed=False), spoken]
            else:
                content = self._content(role, text, previous == "system", contents) if text else ""
                parts += [PromptPiece(before, typed=False), PromptPiece(content, typed=True)]
            before = after
        if not before_next:  # otherwise this is the glue after the next message
            parts.append(PromptPiece(before, typed=False))
        self._contents = contents
        return parts

    def closing(self, thinking: ThinkTracker | ChannelTracker, said: Sequence[int]) -> list[int]:
        """Return the tokens that end the thinking after `said` and lead to the answer, as the template writes them."""
        if isinstance(thinking, ChannelTracker):
            return thinking.closing()
        thought = thinking.thought(said)
        start, end, markers = (
            self.tokenizer.think_start,
            self.tokenizer.think_end,
            self.tokenizer.think_markers,
        )
        if start is None or end is None or markers is None:
            return []
        empty = self.openings[False]
        is_known = start in empty and end in empty
        shown = empty[empty.index(start) + 1 :] if is_known else self.instead
        if shown and not thought:
            return shown
        then = self.tokenizer.decode(shown[shown.index(end) + 1 :]) if shown else markers.after_close
        is_ended = self.tokenizer.decode(thought).endswith("\n") or (not is_known and shown[:1] == [end])
        break_before = "" if is_ended else markers.before_close
        closing = f"{break_before}{self.tokenizer.decode([end], skip_special=False)}{then}"
        return self.tokenizer.encode_pieces(
            [PromptPiece(closing, typed=False)], thought[-1] if thought else start
        )

    def answer_ids(self, text: str) -> list[int]:
        """Return the tokens of an answer known only as text, as the template writes it."""
        content = PromptPiece(self._content("assistant", text), typed=True)
        if not content.text:
            return []
        before = self._glue(["user", "assistant", "user"], False, None)[1]
        encode = self.tokenizer.encode_pieces
        alone = encode([PromptPiece(before.removesuffix(self._lead), typed=False)])
        together = encode([PromptPiece(before, typed=False), content])
        if together[: len(alone)] == alone:
            return together[len(alone) :]
        return encode([content], next(reversed(alone), None))

    def is_said_by(self, ids: Sequence[int], text: str) -> bool:
        """Return whether `ids` spell exactly the answer `text` as the history shows it."""
        return self._content("assistant", text).strip() == self.tokenizer.decode(ids).strip()

    def is_opening(self, ids: Sequence[int]) -> bool:
        """Return whether the template may write these tokens between a message and its answer."""
        return any(list(ids) == opening for opening in self.openings.values())

    def _asked(self, think: bool | None) -> list[int]:
        return self.encode(self.dialogue([_USER], {}, think))[-1]

    def _opening(self, think: bool | None, asked: list[int]) -> list[int]:
        if self.header and asked[-len(self.header) :] == self.header:
            return self.header
        messages = [_USER, {"role": "assistant", "content": ""}]
        answered = self.encode(self.dialogue(messages, {1: Turn("", Answer())}, think, before_next=True))[0]
        shared = common_prefix(asked, answered)
        if shared == len(answered):
            return asked[shared:]
        if self.tokenizer.think_end not in answered[shared:] or not self.opens_think(asked):
            return []
        self.instead = answered[shared:]
        return asked[shared:]

    def answer_span(
        self, ids: Sequence[int], text: str, start: int = 0, has_calls: bool = False
    ) -> tuple[int, int]:
        """Return the range of the sampled `ids` that the history shows of an answer whose text was `text`.

        The text begins after `start` ids of thinking. The template may trim an answer; then whole tokens are left out
        at its ends. An answer with calls is shown without leading blanks and the end-of-turn token.
        """
        if has_calls:
            channels = self.tokenizer.channels
            ends = self.tokenizer.stop_ids | ({channels.end} if channels is not None else set())
            end = len(ids) - (bool(ids) and ids[-1] in ends)
            while 0 < start < end and self.tokenizer.token_bytes(ids[start]).isspace():
                start += 1
            return start, end
        shown = self._content("assistant", text)
        if not shown:
            return start, start
        first, end = self._span(ids[start:], text, shown)
        return start + first, start + end

    def _span(self, ids: Sequence[int], text: str, shown: str) -> tuple[int, int]:
        decode, stream = self.tokenizer.decode, self.tokenizer.stream()
        ends, length = [], 0
        for id in ids:
            length += len(stream.push(id))
            ends.append(length)
        at = max(decode(ids).find(text), 0) + max(text.rfind(shown), 0)
        first = next((i for i, end in enumerate(ends) if end > at), 0)
        last = next((i for i, end in enumerate(ends) if end >= at + len(shown)), len(ids) - 1)
        # A character counts for the token that completes it, so up to three tokens before may belong to it.
        for begin in range(first, max(first - 4, -1), -1):
            if shown in decode(ids[begin : last + 1]):
                return begin, last + 1
        return first, last + 1

    def with_system(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return `messages` for this template: if it takes no system prompt, theirs is put before the first message."""
        if not messages or messages[0]["role"] != "system" or self.takes_system():
            return list(messages)
        system, *rest = messages
        if system["content"] and rest and rest[0]["role"] == "user":
            rest[0] = {**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}
        return rest

    def begins(self, think: bool | None, asked: Sequence[int] | None = None) -> tuple[bool, bool]:
        """Return, for this setting, whether the prompt opens a think span, and whether the answer may open one.

        `asked` are the last message of the prompt and what follows; None: a message, and not results of calls, after
        which some templates open one.
        """
        return self.inside[think] if asked is None else self.opens_think(asked), think is not False

    def opens_think(self, prompt: Sequence[int]) -> bool:
        """Return whether `prompt` ends inside a think span that it opened itself."""
        if (channels := self.tokenizer.channels) is not None:
            last = max((at for at, id in enumerate(prompt) if id == channels.start), default=len(prompt))
            spells = self.tokenizer.token_bytes if channels.channel is None else None
            tracker = ChannelTracker(channels, spells, calls=False)
            for id in prompt[last:]:
                tracker.push(id)
            return tracker.inside and tracker.header is None
        start, end = self.tokenizer.think_start, self.tokenizer.think_end
        for id in reversed(prompt):
            if id == end or start is None:
                return False
            if id == start:
                return True
        return False

    # -- text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        generate: bool,
        think: bool | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render messages by the template. Raises ModelError if it fails."""
        return self.tokenizer.render(
            cast("Sequence[Message]", messages),
            add_generation_prompt=generate,
            enable_thinking=think,
            tools=tools,
            more=self.names,
        )

    def takes_system(self) -> bool:
        """Return whether the template writes a system prompt before all messages: some refuse it or move it."""
        if self._system_apart is None:
            try:
                self._glue(["system", "user", "assistant", "user"], True, None)
                self._system_apart = True
            except (EngineError, ModelError):
                self._system_apart = False
        return self._system_apart

    def _glue(self, roles: Sequence[str], generate: bool, think: bool | None) -> list[str]:
        """Return the text that the template writes around the messages: len(roles) + 1 strings."""
        slots = [f"\ue000{index}\ue001" for index in range(len(roles))]
        messages: list[Message] = [
            {"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)
        ]
        text = self.render(messages, generate, think)
        if generate and think is False:
            text += self._header
        glue = []
        for slot in slots:
            before, found, text = text.partition(slot)
            if not found:
                raise EngineError(
                    "The model's chat template leaves out messages, so this model cannot chat here."
                )
            glue.append(before)
        return [*glue, text]

    def _content(
        self,
        role: str,
        text: str,
        after_system: bool = False,
        used: dict[tuple[str, str, bool], str] | None = None,
    ) -> str:
        """Return `text` as the template writes it (some strip or rewrite it), and remember it, in `used` if given."""
        key = (role, text, after_system)
        content = self._contents.get(key)
        if content is None:
            before, after = self._beside(role, after_system)
            whole = self._said(role, text, after_system)
            fits = (
                whole.startswith(before) and whole.endswith(after) and len(whole) >= len(before) + len(after)
            )
            content = whole[len(before) : len(whole) - len(after)] if fits else text
        (self._contents if used is None else used)[key] = content
        return content

    def _beside(self, role: str, after_system: bool) -> tuple[str, str]:
        """Return the text before and after a message in `_around`. Cached, because rendering asks another process."""
        if (found := self._sides.get((role, after_system))) is None:
            slot = "\ue000"
            before, after = self._around(role, slot, after_system).split(slot, 1)
            found = self._sides[role, after_system] = before, after
        return found

    def _said(self, role: str, text: str, after_system: bool) -> str:
        """Return the result of `_around`, or "" if a template with channels refuses an answer."""
        try:
            return self._around(role, text, after_system)
        except ModelError:
            if role != "assistant" or self.tokenizer.channels is None:
                raise
            return ""

    def _around(self, role: str, text: str, after_system: bool) -> str:
        message: Message = {"role": role, "content": text}
        system: Message = {"role": "system", "content": "x"}
        user = [system, message] if after_system else [message]
        messages = {"user": user, "system": [message, _USER], "assistant": [_USER, message, _USER]}[role]
        return self.render(messages, False, None)

    def _before_answers(self) -> str:
        """Return the text that the history has before an answer and the generation prompt does not."""
        asked = self._glue(["user"], True, None)[1]
        answered = self._glue(["user", "assistant", "user"], False, None)[1]
        return answered.removeprefix(asked) if answered.startswith(asked) else ""

    def _spoken(self, index: int, turn: Turn) -> Spoken:
        """Return the answer number `index` as the history shows it: in channels, it begins with its header."""
        answer, size = turn.answer, len(self.header)
        said, first = [*turn.opening, *answer.token_ids], len(turn.opening) + answer.shown[0]
        starts = range(first - size, -1, -1) if size else ()
        thought = next((at for at in starts if said[at : at + size] == self.header), first)
        return Spoken([*self.header, *answer.content_ids], index, said[:thought])

    @property
    def instead_text(self) -> str:
        """The text of `instead`."""
        return self.tokenizer.decode(self.instead, skip_special=False, goes_on=True)

    def instead_of_thought(self, before: str, spoken: Spoken) -> tuple[str, Spoken]:
        """Return the text before an answer, and the answer, where the history has `instead` in place of its thinking.

        If the sampled tokens spell `instead`, it is theirs; otherwise what they were generated after is unknown.
        """
        unseen, size, text = spoken.unseen, len(self.instead), self.instead_text
        if not unseen or not size:
            return before, spoken
        if unseen[-size:] != self.instead or not before.endswith(text):
            return before, replace(spoken, unseen=None)
        return before.removesuffix(text), replace(
            spoken, ids=[*self.instead, *spoken.ids], unseen=unseen[:-size]
        )

    def _spoken_before(self, answer: Answer, before: str) -> int:
        """Return how many characters at the end of the glue `before` an answer its ids spell themselves."""
        if not self._lead or not before.endswith(self._lead):
            return 0
        start = self.tokenizer.decode(answer.content_ids[:_EDGE], goes_on=True)
        return len(self._lead) if start.startswith(self._lead) else 0

    def _spoken_after(self, answer: Answer, after: str, used: dict[tuple[str, str, bool], str]) -> int:
        """Return how many characters at the start of the glue `after` an answer its ids spell themselves: spaces, if
        the template strips them from the answer.
        """
        if not after[:1].isspace():
            return 0
        end = self.tokenizer.decode(answer.content_ids[-_EDGE:], goes_on=True)
        trail = end[len(end.rstrip()) :]
        if not trail:
            return 0
        content = self._content("assistant", answer.text, used=used)
        trail = trail[len(content) - len(content.rstrip()) :]
        return next(size for size in range(len(trail), -1, -1) if after.startswith(trail[:size]))

    # -- tokens

    def encode(self, parts: Sequence[Part]) -> list[list[int]]:
        """Return the tokens before, between and after the answers in `parts`.

        The text around an answer without ids is tokenised as one text, then cut. The result is remembered for the next
        two calls. Raises ModelError for text that is not valid Unicode.
        """
        # Remember only what this call and the one before used, because drafts come and go.
        # Another thread may be here, too, so shared state is read once and replaced whole.
        known, used = {**self._older_ids, **self._ids}, dict[_Text, list[int]]()

        def encode(pieces: Sequence[PromptPiece], after: int | None) -> list[int]:
            text = (tuple(pieces), after)
            ids = used[text] = known.get(text) or self.tokenizer.encode_pieces(pieces, after)
            return ids

        groups: list[tuple[int | None, list[list[PromptPiece]]]] = [(None, [[]])]
        for part in parts:
            if isinstance(part, PromptPiece):
                groups[-1][1][-1].append(part)
            elif part.ids:
                groups.append((part.ids[-1], [[]]))
            else:
                groups[-1][1].append([])
        segments: list[list[int]] = []
        for follows, group in groups:
            alone = [encode(group[0], follows)]
            for pieces in group[1:]:
                alone.append(encode(pieces, next(reversed(alone[-1]), None)))
            if len(group) > 1:
                whole = encode([*chain(*group)], follows)
                alone = alone if [*chain(*alone)] == whole else self._cut(whole, alone)
            segments += alone
        self._ids, self._older_ids = used, self._ids
        return segments

    def _cut(self, whole: list[int], alone: Sequence[Sequence[int]]) -> list[list[int]]:
        """Cut `whole` where the parts `alone` of its text end, or before the token that spans such an end."""

        def lengths(ids: Sequence[int]) -> list[int]:
            return [len(self.tokenizer.decode([id], skip_special=False, goes_on=True)) for id in ids]

        reached = [*accumulate(lengths(whole))]
        ends = accumulate(sum(lengths(ids)) for ids in alone[:-1])
        cuts = [bisect_right(reached, end) for end in ends]
        return [whole[first:last] for first, last in pairwise([0, *cuts, len(whole)])]
