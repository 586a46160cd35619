"""Turns from a session or a file: checks their token ids before they are used."""

from dataclasses import dataclass, replace

from engine.conversation.prompt import PromptFormat
from engine.conversation.tools import ToolUse
from engine.conversation.turns import Answer, Turn
from engine.core import EngineCore
from engine.events import FinishReason
from engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Adopter:
    """Converts turns from elsewhere into turns of this model."""

    engine: EngineCore
    format: PromptFormat
    think: bool | None
    """The thinking setting for turns whose opening does not show it."""
    params: SamplingParams
    """The sampling of an answer without a finish reason."""
    tools: ToolUse | None = None
    """What the model knows of tools."""

    def adopted(self, turn: Turn) -> Turn:
        """Return `turn` with an answer in tokens of this model.

        Token ids are kept if they spell exactly what the answer shows and contain no control tokens except the think
        markers and the end of turn; otherwise the text is tokenised. An opening is kept if the template may write it.
        """
        opening = list(turn.opening) if self.format.is_opening(turn.opening) else []
        answer = turn.answer
        if answer.token_ids and all(0 <= id < self.engine.vocab_size for id in answer.token_ids):
            inside = self.format.inside[infer_thinking(self.format, opening, self.think)]
            kept, answer = self._checked(answer, inside)
            if kept:
                return Turn(turn.user, answer, opening, turn.results)
        ids = [] if answer.calls else self.format.answer_ids(answer.text)
        reason = answer.finish_reason or FinishReason.CANCELLED
        answer = replace(answer, token_ids=ids, shown=(0, len(ids)), finish_reason=reason, ends_at=None)
        # An answer stopped before its first token is not in the history, but may still continue from its prompt.
        return Turn(turn.user, answer, [] if ids else opening, turn.results)

    def _checked(self, claimed: Answer, inside: bool) -> tuple[bool, Answer]:
        """Return whether the ids of an answer can be kept, and the answer that they spell.

        An answer without a finish reason was cut off by a crash. The journal has only its ids, and they are our own.
        """
        cut, ids = claimed.finish_reason is None, list(claimed.token_ids)
        tokenizer = self.engine.tokenizer
        ended = ids[-1] in tokenizer.stop_ids and (cut or claimed.finish_reason is FinishReason.EOS)
        said = ids[:-1] if ended else ids
        shown = self.tools.shown if self.tools is not None else frozenset()
        output = self.engine.output(self.params if cut else SamplingParams(), inside, shown=shown)
        told = Answer()
        for event in output.replay(said):
            told.add(event.text, event.kind)
        told.add(output.flush(), output.kind)
        markers = output.thinking.markers
        answer = replace(claimed, token_ids=ids)
        if self.tools is not None and (found := self.tools.read(told.text))[1]:
            told.text, told.calls = found[0], list(found[1])
        if cut:
            answer.calls = told.calls
            answer.text, answer.reasoning = told.text, told.reasoning
            answer.finish_reason = _finish(ended, output.stopped, len(ids) == claimed.ends_at)
            answer.ends_at = claimed.ends_at if answer.finish_reason is FinishReason.CANCELLED else None
        calls = bool(answer.calls or told.calls)
        answer.shown = self.format.answer_span(ids, answer.text, output.thinking.answer_start, calls)
        if calls:
            are_text = all(
                tokenizer.is_text(id) or id in shown or at in markers for at, id in enumerate(said)
            )
            is_same = (told.text, told.calls, told.reasoning) == (answer.text, answer.calls, answer.reasoning)
            return cut or (is_same and are_text), answer
        stopped = claimed.finish_reason is FinishReason.STOP and told.text.startswith(claimed.text)
        return (
            (told.text == answer.text or stopped)
            and told.reasoning == answer.reasoning
            and (cut or self.format.is_said_by(answer.content_ids, answer.text))
            and (cut or all(tokenizer.is_text(id) for at, id in enumerate(said) if at not in markers))
        ), answer


def _finish(ended: bool, stopped: bool, is_long: bool) -> FinishReason:
    """Return the finish reason of an answer that a crash cut off: it may have been complete."""
    if ended:
        return FinishReason.EOS
    if stopped:
        return FinishReason.STOP
    return FinishReason.LENGTH if is_long else FinishReason.CANCELLED


def infer_thinking(format: PromptFormat, opening: list[int], think: bool | None) -> bool | None:
    """Return the setting under which a turn with this `opening` was generated; `think` if that cannot be told."""
    settings = (think, None, False, True)
    return next((setting for setting in settings if format.openings[setting] == opening), think)
