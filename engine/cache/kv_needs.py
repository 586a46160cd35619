"""What a network needs of the KV cache: the bytes of a token, and the rows that its layers see."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.cache.kv_rows import token_bytes
from engine.cache.layer_groups import LayerGroup, layer_groups
from engine.cache.states import state_sizes
from engine.cache.window import Window
from models.spec import ModelSpec

BRANCH_PART = 4
"""Branches have room for at least 1 / BRANCH_PART of a context."""
BRANCH_WINDOWS = (8, 4, 2, 1, 0)
"""In groups with a window, branches have room for so many windows of rows, but for no more than a part of a context.
Each is the end of a path that can be resumed. It is the first number with which the groups take no more than a part
of the memory."""


STREAM_STATES = 3
"""Slots of states that a sequence takes: one, and the marks to go a few rows back."""
MOST_GUESSED = 8
"""The most slots of a draft model for states after guesses, one for each text; at most a third of all its slots."""
MOST_MARKS = 48
"""The most marks beside those, in a quarter of the memory: message starts and ends of some conversations."""


@dataclass(frozen=True, slots=True)
class KVNeeds:
    """The bytes of a token in the layers that keep all rows, and the groups of layers that do not."""

    token_bytes: int
    block_size: int = 32
    window: Window | None = None
    """The window of the whole network, if any."""
    groups: tuple[LayerGroup, ...] = ()
    step: int = 0
    """The most rows that are computed at once; not needed without groups."""
    state_bytes: int = 0
    """Bytes of the states of all recurrent layers at one row; 0: there are no such layers."""

    def beside(self, draft: "KVNeeds") -> "KVNeeds":
        """Return the needs of this network and a draft model, whose cache has as many blocks and states; its groups
        come last."""
        total, states = self.token_bytes + draft.token_bytes, self.state_bytes + draft.state_bytes
        return replace(self, token_bytes=total, groups=(*self.groups, *draft.groups), state_bytes=states)

    def slots(self, streams: int, context: int, windows: int) -> tuple[int, ...]:
        """Return the blocks of each group for `streams` contexts, a copy, and branches with `windows` windows."""
        size = self.block_size
        found = []
        for group in self.groups:
            branches = min(windows * group.window, context // BRANCH_PART)
            found.append(
                streams * Window(group.window, self.step).most_blocks(size) + 1 + -(-branches // size)
            )
        return tuple(found)

    def slots_within(self, usable: int, streams: int, context: int, states: int = 0) -> tuple[int, ...]:
        """Return what `slots` returns for as much as suits `usable` bytes, but at least for one context.

        There are fewer than `streams` contexts if they would take more than half of the memory, and as many windows
        for branches as leave most of it to the primary group (see BRANCH_WINDOWS). With slots for so many `states`, the
        log has a block more for each mark, as far as that does.
        """
        while streams > 1 and self.group_bytes(self.slots(streams, context, 0)) > usable // 2:
            streams //= 2
        most = usable // BRANCH_PART
        for windows in BRANCH_WINDOWS:
            found = self.slots(streams, context, windows)
            if (left := most - self.group_bytes(found)) >= 0:
                marks = max(states - STREAM_STATES * streams, 0)
                return tuple(
                    count + min(marks, left // (group.token_bytes * self.block_size))
                    if group.tail is not None
                    else count
                    for group, count in zip(self.groups, found, strict=True)
                )
        return self.slots(streams, context, 0)

    def states_within(self, usable: int, streams: int) -> int:
        """Return how many slots of states suit `usable` bytes, at least those of one sequence (see `Marks`)."""
        if not self.state_bytes:
            return 0
        most = usable // BRANCH_PART // self.state_bytes
        return max(min(most, STREAM_STATES * streams + MOST_MARKS), STREAM_STATES)

    def group_bytes(self, slots: Sequence[int]) -> int:
        """Return the bytes of so many blocks of each group."""
        pairs = zip(self.groups, slots, strict=True)
        return sum(group.token_bytes * count for group, count in pairs) * self.block_size

    def nbytes(self, blocks: int, slots: Sequence[int] = ()) -> int:
        """Return the bytes of a cache of `blocks` blocks, with at most `slots` blocks of each group."""
        own = self.token_bytes * blocks * self.block_size
        return own + self.group_bytes([min(count, blocks) for count in slots])

    def tokens_in(self, usable: int, slots: Sequence[int] = ()) -> int:
        """Return the tokens of a context whose cache takes at most `usable` bytes, spare block included."""
        size = self.block_size
        blocks = usable // self.token_bytes // size
        if slots:
            low = 0
            while low < blocks:
                middle = (low + blocks + 1) // 2
                low, blocks = (middle, blocks) if self.nbytes(middle, slots) <= usable else (low, middle - 1)
        return blocks * size - size

    def conversation_bytes(self, tokens: int) -> int:
        """Return the bytes of the rows of one conversation of `tokens` tokens, without any room for computing more."""
        windows = sum(group.token_bytes * min(tokens, group.window) for group in self.groups)
        return self.token_bytes * tokens + windows + STREAM_STATES * self.state_bytes


def kv_needs(
    spec: ModelSpec,
    dtype: torch.dtype,
    kind: str = "auto",
    step: int = 0,
    block_size: int = 32,
) -> KVNeeds:
    """Return what a network needs that computes in `dtype` and in steps of at most `step` rows.

    `kind` is as in `kv_row`.
    """
    groups = tuple(layer_groups(spec, dtype, kind))
    primary = token_bytes(spec, dtype, kind) - sum(group.token_bytes for group in groups)
    window = Window(spec.window, step) if spec.window is not None else None
    return KVNeeds(primary, block_size, window, groups, step, sum(state_sizes(spec).values()))
