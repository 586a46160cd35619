"""Turns of a conversation: a message, its answer in tokens, and the rows made of them."""

from dataclasses import dataclass, field, replace
from typing import Any

from engine.events import FinishReason, Kind, TurnStats
from engine.params import SamplingParams
from engine.schedule.output import Output
from engine.schedule.sequence import Sequence
from models.text.pieces import PromptPiece
from models.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Answer:
    """One answer, complete or as far as it has come (`finish_reason` is None while it runs)."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every token of the answer, think markers and end of turn included."""
    finish_reason: FinishReason | None = None
    stats: TurnStats = field(default_factory=TurnStats)
    """The figures of the latest run: after a continuation, those of what was added."""
    shown: tuple[int, int] = (0, 0)
    """The range of `token_ids` that the history shows, without the thinking and the end of turn."""
    seed: int | None = None
    """Together with the number of tokens, the state of sampling. None: unknown."""
    ends_at: int | None = None
    """While it runs, the number of tokens at which `max_tokens` ends it; None without a limit or once it has ended."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """The tools that it calls, with their arguments as JSON values; once it has ended, `text` is without the calls."""

    def add(self, text: str, kind: Kind) -> None:
        """Add a piece of text."""
        if kind == "reasoning":
            self.reasoning += text
        else:
            self.text += text

    @property
    def content_ids(self) -> list[int]:
        """The tokens of the answer that are part of the history."""
        return self.token_ids[self.shown[0] : self.shown[1]]

    @property
    def is_complete(self) -> bool:
        """Whether the model or a stop string ended it, so that there is nothing to continue."""
        return self.finish_reason in (FinishReason.EOS, FinishReason.STOP)


@dataclass(slots=True)
class Turn:
    """A message and its answer."""

    user: str
    answer: Answer
    opening: list[int] = field(default_factory=list)
    """The tokens of the generation prompt before the answer: an empty think span, or the header of the answer."""
    results: tuple[str, ...] = ()
    """The results of the previous answer's tool calls, if they are the message; `user` is then empty."""


def ended(answer: Answer, sequence: Sequence, stats: TurnStats, tokenizer: Tokenizer) -> Answer:
    """Return `answer` as its sequence left it. Events already taken from the sequence are in its text.

    If a stop string begins within a token, the tokens of the text before it take the place of that one.
    """
    while not sequence.events.empty():  # produced but not taken
        if (event := sequence.events.get()) is not None:
            answer.add(event.text, event.kind)
    if sequence.output is not None:
        answer.add(sequence.tail, sequence.output.kind)
    answer.token_ids = list(sequence.generated)
    if sequence.output is not None and sequence.output.cut:
        answer.token_ids = _before_stop(answer.token_ids, sequence.output, tokenizer)
    answer.finish_reason = sequence.finish_reason or FinishReason.CANCELLED
    answer.ends_at = None
    answer.stats = stats
    return answer


def _before_stop(ids: list[int], output: Output, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens up to the stop string, if it begins within one of them; else all."""
    stream, at, cut = output.stream.again(), len(ids), output.cut
    texts = [stream.push(id) for id in ids]
    while cut > 0 and at > 0:
        at -= 1
        cut -= len(texts[at])
    if cut == 0:
        return ids  # the history shows those before
    rest = texts[at][:-cut]
    while at > 0 and not texts[at - 1] and tokenizer.is_text(ids[at - 1]):
        at -= 1  # these begin the first character of the rest
    return ids[:at] + tokenizer.encode_pieces([PromptPiece(rest, typed=True)], after=ids[max(at - 1, 0)])


def joined(first: TurnStats | None, last: Sequence) -> TurnStats:
    """Return the figures of an answer that took two prompts, the second of which continued the first, if any."""
    then = last.stats()
    if first is None:
        return then
    lost = first.prompt_tokens - last.hit.rows if last.admitted else 0  # evicted between the two
    cached = first.cached_tokens - min(max(lost, 0), first.cached_tokens)
    return replace(
        first,
        cached_tokens=cached,
        warmed_tokens=min(first.warmed_tokens, cached),
        prefilled_tokens=first.prompt_tokens - cached,
        generated_tokens=first.generated_tokens + then.generated_tokens,
        reasoning_tokens=first.reasoning_tokens + then.reasoning_tokens,
        ttft_s=first.ttft_s or then.ttft_s,
        decode_s=first.decode_s + (then.ttft_s if first.ttft_s else 0.0) + then.decode_s,
        guessed_tokens=first.guessed_tokens + then.guessed_tokens,
        accepted_tokens=first.accepted_tokens + then.accepted_tokens,
        drafted_tokens=first.drafted_tokens + then.drafted_tokens,
        accepted_drafts=first.accepted_drafts + then.accepted_drafts,
        saved_s=first.saved_s + then.saved_s,
    )


def gone_on(params: SamplingParams, answer: Answer) -> SamplingParams:
    """Return `params` for continuing an answer: with its seed, and with its tokens counted in `max_tokens`."""
    limit = params.max_tokens
    if limit is not None:
        limit = answer.ends_at or limit + len(answer.token_ids)
    return replace(params, max_tokens=limit, seed=answer.seed if params.seed is None else params.seed)


def is_same(known: Turn | None, turn: Turn) -> bool:
    """Return whether `turn` equals a turn that the chat holds already."""
    return (
        known is not None
        and turn.answer.finish_reason is not None
        and (known.user, known.results, known.answer.calls) == (turn.user, turn.results, turn.answer.calls)
        and known.opening == turn.opening
        and known.answer.token_ids == turn.answer.token_ids
        and known.answer.text == turn.answer.text
    )
