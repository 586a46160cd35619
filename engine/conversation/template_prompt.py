"""Prompts of any messages that a chat template knows: tools, their calls and results, several messages in a row.

Those of a dialogue without tools are made in `engine/conversation/prompt.py`, without rendering its texts again at each
keystroke. For others, the template is rendered once with a placeholder for each text in the messages, and once with the
texts themselves, which shows how it writes them. What is between the texts is tokenised as the template's own, and the
texts as text, whatever they spell. So are texts of tools, names and ids, if they spell control tokens: anyone may have
written them. An answer whose sampled ids are known contributes these ids. The ids of an answer with calls stand for
everything from the end of the generation prompt to the end of the turn, including thinking that the template shows.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256
from sys import maxsize
from typing import Any

from engine.cache.rows import AnswerRows, Rows
from engine.conversation.masked import masked_prompt
from engine.conversation.prompt import Part, PromptFormat, Spoken
from engine.conversation.thinking_visibility import Unseen, Views, leaving
from engine.conversation.token_recall import AnswerPlace
from engine.conversation.tools import CALL_START, said_calls, with_results
from engine.conversation.turns import Turn
from engine.errors import EngineError
from engine.events import FinishReason
from models.errors import ModelError
from models.text.tokenizer import PromptPiece, Tokenizer

_SLOT = re.compile("\ue000([0-9]+)\ue001")
_PLAIN = re.compile(r"[\w.-]{1,128}", re.ASCII)
"""Names that cannot spell a control token."""
_THOUGHT = ("reasoning_content", "thinking")
_TOOLS = -1
_GEMMA_CALL = "<|tool_call>"
"""In Gemma 4's template, which writes calls before the text of their message."""
_PROBE = {"role": "user", "content": "x"}


@dataclass(frozen=True, slots=True)
class Rendering:
    """How to render conversations: with a model's chat template, the thinking setting, and tools."""

    format: PromptFormat
    think: bool | None
    tools: Sequence[Mapping[str, Any]] = ()
    views: Views = field(default_factory=Views)
    masks: bool = False
    """Whether answers stay as they were generated, with the thinking hidden that has left the view."""
    max_positions: int = maxsize
    """Masked rows have to end before this position."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the format."""
        return self.format.tokenizer

    def rows(
        self, messages: Sequence[Mapping[str, Any]], answers: Mapping[int, Turn], before_next: bool = False
    ) -> Rows:
        """Return the rows of the prompt that asks for an answer to `messages`, which have the form templates expect; or
        `before_next`, the rows with which the next prompt begins, whatever follows.

        `answers` has the turns of the messages whose ids are known, by their index. The rows are masked if `masks` is
        set, unless that is impossible. Raises ModelError if the template fails, EngineError if it leaves out a message.
        """
        parts = self._parts(messages, answers, before_next)
        *befores, then = self.format.encode(parts)
        spoken = list(zip(befores, _spoken(parts), strict=True))
        if self.masks and (leaves := self._leaves(messages, answers, parts, before_next)) is not None:
            said = [self._as_generated(before, one, answers[one.index], leaves) for before, one in spoken]
            rows = masked_prompt(said, then)
            if rows.next_position < self.max_positions:
                return rows
        rows = Rows()
        for before, one in spoken:
            rows.extend(before)
            rows.edges.append(len(rows))
            rows.extend(one.ids)
            rows.edges.append(len(rows))
        rows.extend(then)
        return rows

    def _leaves(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: Mapping[int, Turn],
        parts: Sequence[Part],
        before_next: bool,
    ) -> Set[int] | None:
        """Return the answers after which all thinking so far leaves the view: the template first leaves it out then.

        Return None if the template leaves it out in ways that rows cannot follow.
        """
        spoken = _spoken(parts)
        known = [one.index for one in spoken]
        if self._is_dialogue(messages):
            return {*known}
        if any(one.unseen is None for one in spoken):
            return None
        hashes, last = self._hashes(messages, answers), _unseen(parts)
        if not before_next:
            self.views.note(hashes[len(messages)], last)

        def unseen(index: int) -> Unseen:
            before = {at: turn for at, turn in answers.items() if at < index}
            return self.views.of(hashes[index], lambda: _unseen(self._parts(messages[:index], before)))

        thinks = frozenset(index for index in known if answers[index].answer.reasoning.strip())
        return leaving(known, unseen, last, thinks)

    def _as_generated(self, before: list[int], one: Spoken, turn: Turn, leaves: Set[int]) -> AnswerRows:
        answer = turn.answer
        # In channels the history ends a turn with another token.
        is_ended = answer.finish_reason is FinishReason.EOS and self.tokenizer.channels is None
        end = answer.token_ids[answer.shown[1] :] if is_ended else []
        return AnswerRows(before, one.unseen or [], [*one.ids, *end], one.index in leaves)

    def _hashes(self, messages: Sequence[Mapping[str, Any]], answers: Mapping[int, Turn]) -> list[bytes]:
        """Return a hash of everything before each message, and last of everything; each names a prompt."""
        place = AnswerPlace(tools=self.tools, names={**(self.format.names or {}), "think": self.think})
        found = [place.key("")]
        for index, message in enumerate(messages):
            place.add(message)
            if (turn := answers.get(index)) is not None:
                place.add_ids(turn.answer.token_ids)
            found.append(place.key(""))
        return found

    def _parts(
        self, messages: Sequence[Mapping[str, Any]], answers: Mapping[int, Turn], before_next: bool = False
    ) -> list[Part]:
        if self._is_dialogue(messages):
            return self.format.dialogue(messages, answers, self.think, before_next)
        if before_next:
            calls = messages[-1].get("tool_calls")
            told = {"role": "tool", "content": "x"}
            if calls:
                told |= {"tool_call_id": calls[0]["id"], "name": calls[0]["function"]["name"]}
            parts = self._parts([*messages, told if calls else _PROBE], answers)
            return parts[: max(at for at, part in enumerate(parts) if _is_typed(part))]
        known = [self._known(message, answers.get(index)) for index, message in enumerate(messages)]
        try:
            return self._written(known, answers)
        except (EngineError, ModelError):
            # Some templates allow only one call per message.
            apart, places = _one_call_each(known)
            if len(apart) == len(known):
                raise
            back = {places[index]: index for index in answers if index in places}
            parts = self._written(apart, {place: answers[index] for place, index in back.items()})
            return [replace(one, index=back[one.index]) if isinstance(one, Spoken) else one for one in parts]

    def _is_dialogue(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether these are messages and answers in turn, after a system prompt if any, without tools."""
        has_system = bool(messages) and messages[0]["role"] == "system"
        # An empty system prompt is not the same as none: many templates then write one of their own.
        is_empty = has_system and messages[0]["content"] == ""
        if self.tools or any(one.get("tool_calls") for one in messages):
            return False
        roles = [message["role"] for message in messages[has_system:]]
        in_turn = ["user", "assistant"] * (len(roles) // 2 + 1)
        return roles == in_turn[: len(roles)] and not (is_empty and self.format.takes_system())

    def _known(self, message: Mapping[str, Any], turn: Turn | None) -> dict[str, Any]:
        """Return a message in the form that this template expects, with thinking that a client may have left out."""
        made, answer = dict(message), turn.answer if turn is not None else None
        if made["role"] == "assistant" and answer is not None and answer.reasoning.strip():
            made.setdefault("reasoning_content", answer.reasoning)
        channels = self.tokenizer.channels
        if channels is not None and channels.channel is not None and made["role"] == "assistant":
            thought = made.pop("reasoning_content", "")
            if made.get("tool_calls"):
                made["thinking"] = "\n\n".join(filter(None, (thought, made["content"])))
                made["content"] = ""
                if not made["thinking"]:
                    del made["thinking"]
        if "tool_call_id" in made:
            made["tool_call_id"] = self._id(made["tool_call_id"])
        if answer is not None and made.get("tool_calls") and _GEMMA_CALL in self.tokenizer.template:
            made["content"] = (
                ""  # the template writes it after the results; the answer's ids spell it before the calls
            )
        if made.get("tool_calls") and self._says_calls():
            made["content"] += said_calls(made.pop("tool_calls"))
        if made.get("tool_calls"):
            made["tool_calls"] = [{**call, "id": self._id(call["id"])} for call in made["tool_calls"]]
        return made

    def _says_calls(self) -> bool:
        """Return whether the template takes calls as part of an answer's text: the first ones of LFM2 do."""
        return "tool_calls" not in self.tokenizer.template and self.tokenizer.token_id(CALL_START) is not None

    def _id(self, id: str) -> str:
        """Return a call's id as the template may write it; Mistral's templates refuse ids of another length."""
        return _short(id) if "[TOOL_CALLS]" in self.tokenizer.template or self._is_hostile(id) else id

    def _is_hostile(self, text: str) -> bool:
        """Return whether a text, written as it is, would be taken for a control token or for a placeholder."""
        return not _PLAIN.fullmatch(text) and ("\ue000" in text or self.tokenizer.spells_control(text))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        template = self.tokenizer.template
        if _GEMMA_CALL in template and "tool_responses" in template and "tool_call_id" not in template:
            messages = with_results(messages)
        return self.format.render(messages, True, self.think, self.tools if tools is None else tools)

    def _written(self, messages: Sequence[dict[str, Any]], answers: Mapping[int, Turn]) -> list[Part]:
        slots = _Slots(self._is_hostile)
        if self._is_hostile(json.dumps(self.tools, ensure_ascii=False)):
            slots.tools = slots.guarded(_TOOLS, self.tools)
        slotted = [slots.slotted(index, message, index in answers) for index, message in enumerate(messages)]
        split = _SLOT.split(self._render(slotted, slots.tools))
        glue, shown = split[::2], [int(slot) for slot in split[1::2]]
        if not slots.wanted <= set(shown):
            raise EngineError("The model's chat template leaves out messages like these; send others.")
        if any(slot >= len(slots.texts) for slot in shown):
            raise EngineError("The model's chat template changes the text it is given; use another model.")
        said = _as_written(self._render(messages), glue, [slots.texts[slot] for slot in shown])
        bodies = self._bodies(slotted, slots, glue, shown, answers)
        parts: list[Part] = []
        at = offset = 0
        while at < len(shown):
            if (body := bodies.get(at)) is not None and body.start >= offset:
                parts += [PromptPiece(glue[at][offset : body.start], typed=False), body.spoken]
                at, offset = body.last, body.end
                continue
            owner = slots.owners[shown[at]]
            ids = answers[owner].answer.content_ids if slots.contents.get(owner) == shown[at] else []
            spoken = Spoken(ids, owner) if ids else PromptPiece(said[at], typed=True)
            parts += [PromptPiece(glue[at][offset:], typed=False), spoken]
            at, offset = at + 1, 0
        return [*parts, PromptPiece(glue[at][offset:], typed=False)]

    def _bodies(
        self,
        slotted: Sequence[Mapping[str, Any]],
        slots: "_Slots",
        glue: Sequence[str],
        shown: Sequence[int],
        answers: Mapping[int, Turn],
    ) -> dict[int, "_Body"]:
        """Return the extent of each answer for which it can be determined, by its first slot."""
        found: dict[int, _Body] = {}
        tails: dict[str, str] = {}
        ends = [self.tokenizer.decode([id], skip_special=False) for id in self.tokenizer.stop_ids]
        for index, turn in answers.items():
            answer = turn.answer
            first = next((at for at, slot in enumerate(shown) if slots.owners[slot] == index), None)
            if (
                first is None
                or (start := self._start(slotted, slots.tools, index, glue[first], tails)) is None
            ):
                continue
            before, tail = glue[first], tails[slotted[index - 1]["role"]]
            if slots.contents.get(index) == shown[first] and answer.content_ids:
                spoken = self._after_thought(
                    index, self._unseen(turn, before[:start], tail), turn, before[start:]
                )
                if spoken is not None:
                    found[first] = _Body(start, first + 1, 0, spoken)
                continue
            for last in range(first + 1, len(glue)):
                cuts = [cut for end in ends if end and (cut := glue[last].find(end)) >= 0]
                if cuts or last == len(shown) or slots.owners[shown[last]] != index:
                    break
            thought = any(slot in slots.thoughts for slot in shown[first:last])
            ids = answer.token_ids[: answer.shown[1]] if thought else answer.content_ids
            if cuts and ids and (thought or slotted[index].get("tool_calls")):
                unseen = [] if thought else self._unseen(turn, before[:start], tail)
                spoken, instead = Spoken(ids, index, unseen), self.format.instead_text
                if not thought and before.startswith(instead, start):
                    lead, spoken = self.format.instead_of_thought(before[: start + len(instead)], spoken)
                    start = len(lead)
                found[first] = _Body(start, last, min(cuts), spoken)
        return found

    def _unseen(self, turn: Turn, before: str, tail: str) -> list[int]:
        """Return the tokens generated before the part of an answer that the history shows after the text `before`.

        `tail` is the end of the prompt that asks for such an answer: after results some write no opening.
        """
        opening = [] if self.tokenizer.channels is not None else turn.opening
        text = self.tokenizer.decode(opening, skip_special=False, goes_on=True)
        is_written = tail.endswith(text) or opening != self.format.openings[self.think]
        if before.endswith(text) or not is_written:
            opening = []
        return [*opening, *turn.answer.token_ids[: turn.answer.shown[0]]]

    def _after_thought(self, index: int, unseen: list[int], turn: Turn, between: str) -> Spoken | None:
        """Return an answer with the text `between` that the template writes before it, if its own ids spell that."""
        ids = turn.answer.content_ids
        if not between:
            return Spoken(ids, index, unseen)
        lead = self.tokenizer.encode_pieces([PromptPiece(between, typed=False)], next(reversed(unseen), None))
        if unseen[len(unseen) - len(lead) :] != lead:
            return None
        return Spoken([*lead, *ids], index, unseen[: len(unseen) - len(lead)])

    def _start(
        self,
        slotted: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        index: int,
        before: str,
        tails: dict[str, str],
    ) -> int | None:
        """Return how much of `before`, the text before a message's first slot, the generation prompt wrote; or None."""
        role = slotted[index - 1]["role"]
        markers = self.tokenizer.think_markers
        for _ in range(2):
            fresh = role not in tails
            if fresh:
                try:
                    tails[role] = _SLOT.split(self._render(slotted[:index], tools))[-1]
                except ModelError:
                    return None
            tail = tails[role]
            if before.startswith(tail):
                return len(tail)
            # The history does not open a think span that the template leaves out of it.
            cut = tail.rfind(markers.open) if markers is not None else -1
            if cut > 0 and before.startswith(tail[:cut]):
                return cut
            if fresh:
                return None
            del tails[role]  # the tail depends on more than the role of the last message
        return None


@dataclass(frozen=True, slots=True)
class _Body:
    """The extent of an answer: from `start` in the glue before its first slot to `end` in glue number `last`."""

    start: int
    last: int
    end: int
    spoken: Spoken


@dataclass(slots=True)
class _Slots:
    """The texts of the messages, with a placeholder (slot) for each."""

    is_hostile: Callable[[str], bool]
    """Whether a text that a template may compare or change needs a placeholder all the same."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools with placeholders; None: they need none."""
    texts: list[str] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    """The message index of each text; `_TOOLS` for those of tools."""
    wanted: set[int] = field(default_factory=set)
    """The slots that a template may not leave out."""
    thoughts: set[int] = field(default_factory=set)
    contents: dict[int, int] = field(default_factory=dict)
    """By message index, the slot of the content of an answer with known ids and no calls."""

    def slotted(self, index: int, message: Mapping[str, Any], is_known: bool) -> dict[str, Any]:
        """Return the message with placeholders; `is_known`: its ids are known."""
        made = dict(message)
        calls = made.get("tool_calls")
        for name in (*_THOUGHT, "content"):
            if not made.get(name):
                continue
            slot = len(self.texts)
            made[name] = self._put(index, message[name])
            if name in _THOUGHT:
                self.thoughts.add(slot)
            elif not calls:
                self.wanted.add(slot)
                if is_known:
                    self.contents[index] = slot
        if made.get("name"):
            made["name"] = self.guarded(index, made["name"])
        if calls:
            made["tool_calls"] = [self._call(index, call, is_known or len(calls) > 1) for call in calls]
        return made

    def _call(self, index: int, call: Mapping[str, Any], names_it: bool) -> dict[str, Any]:
        function = dict(call["function"])
        if names_it or not _PLAIN.fullmatch(function["name"]):
            self.wanted.add(len(self.texts))
            function["name"] = self._put(index, function["name"])
        function["arguments"] = self._within(index, function["arguments"])
        return {**call, "function": function}

    def guarded(self, index: int, value: Any) -> Any:
        """Return a JSON value with placeholders for the hostile texts in it."""

        def guard(text: str) -> str:
            return self._put(index, text) if self.is_hostile(text) else text

        return _replaced(value, guard, guard)

    def _within(self, index: int, value: Any) -> Any:
        """Return a JSON value with placeholders for the texts in it."""
        return _replaced(
            value,
            lambda text: self._put(index, text) if text else text,
            lambda key: key if _PLAIN.fullmatch(key) else self._put(index, key),
        )

    def _put(self, index: int, text: str) -> str:
        self.texts.append(text)
        self.owners.append(index)
        return f"\ue000{len(self.texts) - 1}\ue001"


def _replaced(value: Any, text: Callable[[str], str], key: Callable[[str], str]) -> Any:
    """Return a JSON value with its texts and the keys of its objects replaced."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list | tuple):
        return [_replaced(item, text, key) for item in value]
    if isinstance(value, dict):
        return {key(name): _replaced(item, text, key) for name, item in value.items()}
    return value


def _is_typed(part: Part) -> bool:
    return isinstance(part, PromptPiece) and part.typed


def _spoken(parts: Sequence[Part]) -> list[Spoken]:
    return [part for part in parts if isinstance(part, Spoken)]


def _unseen(parts: Sequence[Part]) -> Unseen:
    return frozenset(one.index for one in _spoken(parts) if one.unseen)


def _one_call_each(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Split messages with several calls into one message per call, each followed by its result. Return the messages,
    and the new index of each message that was not split."""
    made: list[dict[str, Any]] = []
    places: dict[int, int] = {}
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            places[at - 1] = len(made)
            made.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            said = message if number == 0 else {"role": "assistant", "content": ""}
            made.append({**said, "tool_calls": [call]})
            is_last = number == len(calls) - 1
            made += [one for one in results if one.get("tool_call_id") == call["id"] or is_last]
            results = [one for one in results if one not in made]
    return made, places


def _short(id: str) -> str:
    """Return a call's id as nine letters and digits."""
    is_short = len(id) == 9 and id.isascii() and id.isalnum()
    return id if is_short else sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _as_written(whole: str, glue: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return `texts` as the template wrote them in `whole`: unchanged, without the spaces around them, or in JSON."""
    quoted = [_quoted(text)[0] if before[-1:] == after[:1] == '"' else text
              for text, before, after in zip(texts, glue, glue[1:], strict=False)]  # fmt: skip
    if not whole.startswith(glue[0]):
        return quoted
    at, found = len(glue[0]), []
    for text, after in zip(texts, glue[1:], strict=True):
        lines = text.strip("\n"), text.lstrip("\n"), text.rstrip("\n")  # blanks of a first line stay
        forms = (text, text.strip(), text.lstrip(), text.rstrip(), *lines, *_quoted(text))
        fitting = next((form for form in forms if whole.startswith(form + after, at)), None)
        if fitting is None:
            return quoted
        found.append(fitting)
        at += len(fitting) + len(after)
    return found


def _quoted(text: str) -> tuple[str, str]:
    """Return `text` as in a JSON string without its quotes: as usually written for models, and in ASCII."""
    return json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]
