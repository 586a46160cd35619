"""A short answer outside the conversation: computed in idle time, and forgotten afterwards."""

from dataclasses import dataclass

from engine.cache.offload import common_prefix
from engine.cache.rows import Rows
from engine.conversation.prompt import PromptFormat
from engine.conversation.template_prompt import Rendering
from engine.core import EngineCore
from engine.events import FinishReason
from engine.params import SamplingParams
from engine.schedule.sequence import Priority, Sequence


@dataclass(slots=True)
class _Task:
    sequence: Sequence
    shared: int
    """Leading rows that the conversation has, too."""


class AsideRunner:
    """Asks one question at a time as idle work. `stop` it before anything of the conversation is computed, so that the
    two are never in one batch."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._format: PromptFormat | None = None
        """Separate from the conversation's format, because a format remembers what it tokenised."""
        self._task: _Task | None = None

    @property
    def is_running(self) -> bool:
        task = self._task
        return task is not None and not task.sequence.finished.is_set() and not task.sequence.cancelled

    def ask(self, text: str, history: Rows, max_tokens: int) -> None:
        """Have the model answer `text` without thinking; `said` holds the answer. Returns at once.

        `history` is the conversation in use. Raises ModelError if the template fails.
        """
        self.stop()
        self._forget()
        engine = self._engine
        self._format = self._format or PromptFormat(engine.tokenizer)
        rows = Rendering(self._format, False).rows([{"role": "user", "content": text}], {})
        if len(rows) + max_tokens >= min(engine.context_length, engine.max_positions):
            return
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        output = engine.output(params, self._format.inside[False])
        shared = common_prefix(rows.keys, history.keys)
        self._task = _Task(Sequence(rows, Priority.IDLE, params, output), shared)
        engine.submit(self._task.sequence)

    @property
    def said(self) -> str | None:
        """The model's answer; None until it is complete, or if it was interrupted. From any thread."""
        task = self._task
        if task is None or not task.sequence.finished.is_set():
            return None
        sequence = task.sequence
        if sequence.error is not None or sequence.finish_reason not in (
            FinishReason.EOS,
            FinishReason.LENGTH,
        ):
            return None
        assert sequence.output is not None
        # The model may think although it was asked not to.
        answer = sequence.generated[sequence.output.thinking.answer_start :]
        return self._engine.tokenizer.decode(answer, skip_special=True)

    def stop(self) -> None:
        """End the answer within one step. Returns at once."""
        if self._task is not None:
            self._task.sequence.cancelled = True

    def _forget(self) -> None:
        """Free the rows that it cached, to make room for conversations."""
        task, self._task = self._task, None
        if task is not None and task.sequence.finished.is_set():
            sequence = task.sequence
            self._engine.forget(sequence.rows.prefix(sequence.reached), task.shared)
