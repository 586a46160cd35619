"""Prompts of any messages that a chat template knows: tools, their calls and results, several messages in a row.

The template is rendered once, with a placeholder for each text that somebody said, and once with the texts themselves,
which shows where it trims them. What stands between is tokenised as the template's own, what was said as text, whatever
it spells; an answer of which the sampled ids are known contributes these.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from engine.conversation.turns import Answer
from engine.errors import EngineError
from models.text.tokenizer import Message, Piece, Tokenizer

_SLOT = re.compile("\ue000([0-9]+)\ue001")


def rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    answers: Mapping[int, Answer],
    *,
    think: bool | None,
    tools: Sequence[Mapping[str, Any]] = (),
    names: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of the prompt that asks for an answer to `messages`, which are as templates know them.

    `answers` are those of the messages of which the ids are known, by their index. Raises ModelError when the template
    fails, EngineError when it leaves out a message.
    """
    texts: list[str] = []
    slotted: list[dict[str, Any]] = []
    wanted: dict[int, int] = {}
    """The slot of the content of each message that has one."""
    for index, message in enumerate(messages):
        copy = dict(message)
        for name in ("content", "reasoning_content"):
            if copy.get(name):
                if name == "content":
                    wanted[index] = len(texts)
                copy[name] = f"\ue000{len(texts)}\ue001"
                texts.append(message[name])
        slotted.append(copy)
    asks: dict[str, Any] = {
        "add_generation_prompt": True,
        "enable_thinking": think,
        "tools": tools,
        "more": names,
    }
    glue = _SLOT.split(tokenizer.render(cast("Sequence[Message]", slotted), **asks))
    shown = [int(slot) for slot in glue[1::2]]
    if not set(wanted.values()) <= set(shown):
        raise EngineError("The model's chat template leaves out messages like these; send others.")
    if any(slot >= len(texts) for slot in shown):
        raise EngineError(
            "The model's chat template writes something else than it was given; use another model."
        )
    whole = tokenizer.render(cast("Sequence[Message]", messages), **asks)
    said = _as_written(whole, glue[::2], [texts[slot] for slot in shown])
    sampled = {wanted[index]: answer for index, answer in answers.items() if index in wanted}
    ids: list[int] = []
    pieces = [Piece(glue[0], typed=False)]
    for slot, text, after in zip(shown, said, glue[2::2], strict=True):
        if slot in sampled and sampled[slot].content_ids:
            ids += tokenizer.encode_pieces(pieces, ids[-1] if ids else None)
            ids += sampled[slot].content_ids
            pieces = []
        else:
            pieces.append(Piece(text, typed=True))
        pieces.append(Piece(after, typed=False))
    return ids + tokenizer.encode_pieces(pieces, ids[-1] if ids else None)


def _as_written(whole: str, glue: Sequence[str], texts: Sequence[str]) -> list[str]:
    """`texts` as the template wrote them in `whole`: as they are, or without the spaces around them."""
    if not whole.startswith(glue[0]):
        return list(texts)
    at, found = len(glue[0]), []
    for text, after in zip(texts, glue[1:], strict=True):
        forms = (text, text.strip(), text.lstrip(), text.rstrip())
        fitting = next((form for form in forms if whole.startswith(form + after, at)), None)
        if fitting is None:
            return list(texts)
        found.append(fitting)
        at += len(fitting) + len(after)
    return found
