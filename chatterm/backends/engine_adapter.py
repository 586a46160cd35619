"""Conversion of exchanges to the engine's turns, and of the engine's answers to outcomes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chatterm.backends.backend import EngineError, FinishReason, ModelError, Part, TokenEvent, TurnStats
from chatterm.backends.exchange import Exchange, Outcome
from chatterm.backends.tool_calls import to_tool_calls
from chatterm.tool_calls.format import json_value

if TYPE_CHECKING:
    from engine.conversation.batch_generation import Part as EnginePart
    from engine.conversation.turns import Answer, Turn
    from engine.engine import Engine

_LONGEST = 100_000
"""Characters of a message that suffix speculation may draw on."""


def to_turn(exchange: Exchange, same_model: bool) -> "Turn":
    """Convert an exchange to a turn of the engine; token ids of another model are dropped."""
    from engine.conversation.turns import Answer, Turn

    answer = Answer(
        text=exchange.text,
        reasoning=exchange.reasoning,
        token_ids=list(exchange.token_ids) if same_model else [],
        finish_reason=_reason(exchange.finish_reason),
        stats=TurnStats.of(exchange.stats),
        shown=exchange.shown,
        seed=exchange.seed,
        ends_at=exchange.ends_at,
        calls=[(call.name, json_value(call.arguments)) for call in exchange.calls],
    )
    opening = list(exchange.opening) if same_model else []
    return Turn(exchange.user, answer, opening, tuple(result.text for result in exchange.results))


def exchange_tokens(engine: "Engine", exchange: Exchange) -> list[int]:
    """Return the tokens of a message and its answer, roughly as in a prompt; ids outside the vocabulary are dropped."""
    try:
        said = engine.tokenizer.encode_plain(exchange.user[:_LONGEST])
    except ModelError:
        said = []
    return [*said, *(token for token in exchange.token_ids if 0 <= token < engine.vocab_size)]


def to_outcome(answer: "Answer", opening: Sequence[int]) -> Outcome:
    """Convert an answer of the engine that followed this opening."""
    return Outcome(
        answer.text,
        answer.reasoning,
        answer.finish_reason,
        answer.stats,
        answer.token_ids,
        answer.shown,
        opening,
        answer.seed,
        answer.ends_at,
        calls=to_tool_calls(answer.calls),
    )


def to_part(part: "EnginePart", opening: Sequence[int] = ()) -> Part:
    """Convert an item of one of several answers."""
    if isinstance(part, TokenEvent | EngineError | ModelError):
        return part
    from engine.conversation.batch_generation import AnswerEnd  # brings torch, which is there by now

    return to_outcome(part.answer if isinstance(part, AnswerEnd) else part, opening)


def _reason(name: str | None) -> FinishReason | None:
    """Return the finish reason of a saved answer; an unknown one, as in a file from elsewhere, is CANCELLED."""
    known = FinishReason(name) if name in set(FinishReason) else FinishReason.CANCELLED
    return None if name is None else known
