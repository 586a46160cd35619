"""Makes the `Output` of each answer of a model: its text stream, its tracker of thinking, and its guide."""

from threading import Lock
from typing import TYPE_CHECKING

from engine.params import Constraint, SamplingParams
from engine.schedule.channel_guide import ChannelGuide
from engine.schedule.channels import ChannelTracker
from engine.schedule.guide import Guide
from engine.schedule.output import Output
from engine.schedule.reasoning import ThinkTracker
from models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.sampling.grammar import Grammars


class Outputs:
    """Makes outputs. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars: Grammars | None = None
        self._grammars_lock = Lock()

    def output(
        self,
        params: SamplingParams,
        inside_think: bool = False,
        thinks: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> Output:
        """Return what turns the tokens of one answer into events; `inside_think`: its prompt opened a think span.

        `shown` are special tokens that count as text: those of headers, if calls of tools are messages in channels.
        `thinks`: an answer with a constraint may begin with thinking. Raises EngineError for a constraint that cannot
        be used.
        """
        tracker, guided = self._tracker(inside_think, shown), params.constraint is not None
        # Text that must match a grammar keeps everything, even a blank at its start.
        stream = self.tokenizer.stream(shown, goes_on=guided)
        guide = (
            self._guide(params.constraint, inside_think, thinks) if params.constraint is not None else None
        )
        return Output(stream, tracker, params.stop, guide=guide)

    def _tracker(
        self, inside_think: bool, shown: frozenset[int] = frozenset()
    ) -> ThinkTracker | ChannelTracker:
        known = self.tokenizer
        if (channels := known.channels) is not None:
            calls = channels.message in shown
            spells = known.token_bytes if calls or channels.channel is None else None
            return ChannelTracker(channels, spells, calls, inside=inside_think)
        label = known.think_markers.label if known.think_markers is not None else ""
        return ThinkTracker(known.think_start, known.think_end, inside=inside_think, label=label)

    def _guide(self, constraint: Constraint, inside_think: bool, thinks: bool) -> Guide | ChannelGuide:
        from engine.sampling.grammar import Grammars  # only when needed, because its library takes memory

        with self._grammars_lock:
            self._grammars = self._grammars or Grammars(self.tokenizer, self._vocab_size)
        matcher = self._grammars.matcher(constraint)
        channels = self.tokenizer.channels
        if channels is not None and channels.channel is not None and matcher.allows(channels.channel):
            return ChannelGuide.of(self.tokenizer, matcher, channels, thinks)
        return Guide.of(self.tokenizer, matcher, lambda: self._tracker(inside_think), thinks)
