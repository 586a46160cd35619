"""The tokens of answers: drawn by the host, forced by a constraint, or drawn by a GPU. Each is recorded here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from engine.errors import EngineError
from engine.events import FinishReason
from engine.sampling.sampler import SampledToken, SamplerState, log_chances, sample
from engine.schedule.forced_tokens import MOST_FORCED
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Priority, Sequence, SequenceStatus


@dataclass(slots=True)
class Answers:
    """Takes the tokens of answers, and sends their events. Only the loop thread may use it."""

    scheduler: Scheduler
    stop_ids: frozenset[int]
    watch: Callable[[], None] = lambda: None
    """Called after a token is sampled. Raises EngineError if other ranks are lost, because it is meaningless then."""

    def sample(self, sequence: Sequence, logits: torch.Tensor) -> SampledToken:
        """Draw the next token from logits [vocab]; -1 if they are not numbers."""
        params, guide = sequence.params, sequence.guide
        assert params is not None
        if sequence.sampler is None:
            seeded = replace(params, seed=sequence.seed)
            sequence.sampler = SamplerState.create(
                seeded, sequence.rows.token_ids, logits.shape[-1], logits.device, sequence.generated
            )
        mask = None
        if guide is not None:
            guide.follow(sequence.generated)
            words, numbers = sequence.sampler.room_of_mask(len(logits))
            guide.fill(numbers)
            mask = words if logits.device.type == "cpu" else words.to(logits.device)
        token_id = sample(logits, sequence.sampler, mask)
        self.watch()
        if token_id >= 0:
            sequence.sampler.note(token_id)
        return (
            SampledToken(token_id)
            if params.logprobs is None
            else log_chances(logits, token_id, params.logprobs)
        )

    def take(self, sequence: Sequence, drawn: SampledToken) -> None:
        """Record a new token: update the text, send the event, and finish the sequence if it ends here.

        Raises EngineError if the token was drawn from something that is not a number.
        """
        output, rows, token_id = sequence.output, sequence.rows, drawn.token_id
        assert output is not None
        if token_id < 0:
            raise EngineError(
                "The model's output is not a number; its weights are damaged, or the dtype is too narrow for it: "
                "try --dtype float32."
            )
        now = perf_counter()
        if sequence.priority is Priority.PERSON:
            self.scheduler.tally.drew(sequence, now)
        sequence.last_token, sequence.first_token = now, sequence.first_token or now
        sequence.generated.append(token_id)
        rows.append(token_id)
        sequence.told = 1
        reason: FinishReason | None = FinishReason.EOS
        if token_id in self.stop_ids:
            event = output.end(token_id)
        else:
            event = output.push(token_id)
            reason = sequence.ending or (FinishReason.CONTEXT_FULL if self.scheduler.is_full(rows) else None)
            if reason is not None:
                event = replace(event, text=event.text + output.flush())
        if token_id == sequence.expected:
            event = replace(event, guessed=True)
        sequence.expected = -1
        if drawn.logprob is not None:
            event = replace(event, logprob=drawn.logprob, top=drawn.top)
        sequence.events.put(event)
        if reason is not None:
            self.scheduler.finish(sequence, reason)

    def jump(self, sequence: Sequence, fewest: int = 1) -> None:
        """Take the tokens that a constraint forces after the newest one, if there are at least `fewest`.

        Their rows are computed together, so the sequence leaves its slot. No token is taken if log-probabilities are
        asked for: each needs its logits.
        """
        guide, params = sequence.guide, sequence.params
        assert params is not None
        if guide is None or params.logprobs is not None or sequence.known:
            return
        while sequence.status is SequenceStatus.RUNNING and sequence.told < MOST_FORCED:
            guide.follow(sequence.generated)
            forced = guide.forced()[: MOST_FORCED - sequence.told]
            if len(forced) < fewest:
                return
            if sequence.joined:
                self.scheduler.leave(sequence)
            for token_id in forced:
                if sequence.status is SequenceStatus.RUNNING:
                    self._force(sequence, token_id)
            fewest = 1

    def _force(self, sequence: Sequence, token_id: int) -> None:
        if sequence.sampler is not None:
            sequence.sampler.skip(token_id)
        told = sequence.told
        self.take(sequence, SampledToken(token_id))
        sequence.told = told + 1
