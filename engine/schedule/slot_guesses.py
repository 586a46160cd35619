"""Steps of slots that check guesses, and the times of all steps there, from which the cost model learns."""

from dataclasses import dataclass
from time import perf_counter

from engine.schedule.decoding import Decoding
from engine.schedule.sequence import Sequence
from engine.schedule.speculating import Speculating


@dataclass(slots=True)
class SlotGuesses:
    """Checks guesses of sequences in slots. Only the loop thread may use it."""

    _launched_at: float = 0.0
    """When the host finished the last step of a decode runner; 0.0 if that says nothing about the next step."""
    _firsts: int = 0
    _checked: tuple[list[tuple[Sequence, int, int]], float] | None = None
    """The results of the guesses checked in the last step, and when that step began."""
    _waiting: float = 0.0
    """Since when the device has been idle because the step waited for guesses; 0.0: it has work."""

    def forget(self) -> None:
        """Do not record the time of the last step that checked guesses, because other work follows it."""
        self._checked = None

    def check(self, speculating: Speculating, decoding: Decoding, launched: list[Sequence]) -> bool:
        """Run a step of these sequences that checks guesses, if that pays. False: launch them as usual."""
        began, firsts = perf_counter(), decoding.runner.firsts
        spans, reads = speculating.spans(launched), bool(decoding.in_flight)
        if reads:
            if not any(guesses for _, guesses in spans):
                return False
            decoding.read(0)
            began = perf_counter()
            spans = speculating.spans([sequence for sequence in launched if sequence.joined])
        guesses, waited = any(guesses for _, guesses in spans), began + speculating.apart_s
        if not guesses and not reads and waited == began:
            return False
        self._settle(speculating, began)
        self._launched_at = 0.0
        if not guesses:
            self._waiting = waited
            return False
        checked = decoding.check_guesses(spans)
        for one in checked:
            speculating.checked(*one)
        if decoding.runner.firsts == firsts:
            self._checked = checked, waited
        return True

    def launched(self, speculating: Speculating, sequences: list[Sequence]) -> None:
        """Record that the device has a step again: the time it was idle is a cost of guesses."""
        self._settle(speculating, now := perf_counter())
        if self._waiting:
            speculating.waited(sequences, now - self._waiting)
        self._waiting = 0.0

    def time(self, speculating: Speculating, firsts: int, launched: list[Sequence], follows: bool) -> None:
        """Record the time of steps launched back to back. `launched` is empty if other work was computed too."""
        now = perf_counter()
        if launched and follows and self._launched_at and firsts == self._firsts:
            speculating.saw([(sequence, 0, 0) for sequence in launched], now - self._launched_at)
        self._launched_at, self._firsts = now if launched else 0.0, firsts

    def _settle(self, speculating: Speculating, now: float) -> None:
        """Record the time of the last step that checked guesses: it ends when the device gets its next step."""
        if self._checked is not None:
            speculating.saw(self._checked[0], now - self._checked[1])
        self._checked = None
