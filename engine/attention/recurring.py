"""The recurrences of a step's spans, with states and the log of the KV cache."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.latent import LatentStep
from engine.attention.parts import span_slots
from engine.batch import Span, StateMoves
from models.reference.attention import Walk


class RecurringStep(LatentStep):
    """The attention of one step for a network some of whose layers are recurrences (`RecurrentRows`)."""

    def recur(self, layer_index: int, rows: Tensor, walk: Walk) -> Tensor:
        """See `models.reference.attention.RecurrentRows`.

        Each span first walks from the row of its state to its start, over rows of the log, and drops what that returns.
        It leaves its state behind after each of the rows that its `StateMoves` name.
        """
        each = torch.split(rows, [span.count for span in self._spans])
        outs = [self._walk(layer_index, span, own, walk) for span, own in zip(self._spans, each, strict=True)]
        group = self.cache.groups[layer_index]
        if group not in self._logs:  # the same in all such layers
            self._logs[group] = span_slots(self.cache, self._spans, group)
        self.cache.keep(layer_index, self._logs[group], rows)
        return torch.cat(outs)

    @cached_property
    def _logs(self) -> dict[int, Tensor]:
        """The slots of the step's rows in the log, by group, int64 [T]."""
        return {}

    def _walk(self, layer: int, span: Span, rows: Tensor, walk: Walk) -> Tensor:
        states, moves = self.cache.states, span.states
        assert states is not None
        assert moves is not None
        tail, at = states.tail, moves.row
        text = torch.cat((self._earlier(layer, span, moves, tail), rows))  # from row at - tail on
        state = states.read(layer, moves.source)
        if at < span.start:
            _, state = walk(text[: tail + span.start - at], state)
            text, at = text[span.start - at :], span.start
        outs = []
        for row, slot in (*moves.saves, (span.stop, None)):
            if row > at:
                out, state = walk(text[: tail + row - at], state)
                outs.append(out)
                text, at = text[row - at :], row
            if slot is not None:
                states.layers[layer][slot] = state
        return torch.cat(outs)

    def _earlier(self, layer: int, span: Span, moves: StateMoves, tail: int) -> Tensor:
        """Return the log rows of a span before its own, from `tail` rows before its state on, [rows, log_size]: zeros
        before the first row of the sequence."""
        cache, first = self.cache, max(moves.row - tail, 0)
        if first < span.start:
            rows = cache.k[layer][self._log_slots(span, first, cache.groups[layer])].flatten(1)
        else:
            rows = cache.k[layer][:0].flatten(1)
        return F.pad(rows, (0, 0, max(tail - moves.row, 0), 0))

    def _log_slots(self, span: Span, first: int, group: int) -> Tensor:
        """Return the slots of the log rows of a span from `first` to its start, int64 [rows]."""
        key = id(span), group
        if key not in self._earlier_slots:  # the same in all such layers
            slots = self.cache.every_slot(span.blocks, first, span.start, group)
            self._earlier_slots[key] = slots.to(self.cache.device, non_blocking=True)
        return self._earlier_slots[key]

    @cached_property
    def _earlier_slots(self) -> dict[tuple[int, int], Tensor]:
        """What `_log_slots` returned, by span and group."""
        return {}
