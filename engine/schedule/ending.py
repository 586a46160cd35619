"""Ends the sequences whose work failed in a step, or lets them try once more."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.schedule.chunk_pace import FEWEST
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence, SequenceStatus
from models.loading.load import is_out_of_memory


@dataclass(slots=True)
class Ending:
    """Ends sequences with the errors of their steps. After running out of memory, they first try again once."""

    scheduler: Scheduler
    is_short: bool = False
    """Whether memory ran out in this step."""
    _idles: bool = True

    @contextmanager
    def of(self, sequences: Callable[[], Iterable[Sequence]], rows: int = 0) -> Iterator[None]:
        """Finish `sequences` with any error that is raised in the context.

        If memory ran out, those that have computed rows since they last tried again are preempted instead and try
        again; the rows that they have written stay in the cache. `rows` is how many rows of prompts were being
        computed; from then on, chunks have at most half as many.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, no client may be left waiting
            is_short = is_out_of_memory(error)
            self.is_short = self.is_short or is_short
            if is_short and rows:
                self.scheduler.max_chunk = min(self.scheduler.max_chunk, max(rows // 2, FEWEST))
            for sequence in sequences():
                if not is_short or sequence.computed <= sequence.tried_again:
                    self.scheduler.finish(sequence, None, error)
                    continue
                sequence.tried_again = sequence.computed
                if sequence.status is SequenceStatus.RUNNING:
                    self.scheduler.preempt(sequence)

    def idle(self, work: Callable[[], bool]) -> bool:
        """Do some idle work and return whether more is left. Once memory has run out in it, no more is done."""
        try:
            return self._idles and work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._idles = False
        return False
