"""What holds for every recurrence of the reference: `walk` over a text, whole and in pieces."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from models.network import Network
from models.reference.decoder import Decoder
from tests.models.checkpoints import PlainAttention, run
from tests.models.test_reference import assert_close

Walk = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log rows, state) -> (outputs, the state after them)"""


def check_cuts(walk: Walk, rows: Tensor, start: Tensor, before: int, ways: Sequence[Sequence[int]]) -> Tensor:
    """Assert that a text has the same bits in one piece and in pieces of these lengths, and leaves `start` alone.

    `rows` begin with `before` rows that only the convolution sees. Return the outputs.
    """
    kept = start.clone()
    whole, end = walk(rows, start)
    assert start.equal(kept)
    for cuts in ways:
        state, outs, at = start, [], 0
        for count in cuts:
            out, state = walk(rows[at : at + before + count], state)
            outs.append(out)
            at += count
        assert at == len(rows) - before
        assert torch.cat(outs).equal(whole)
        assert state.equal(end)
    return whole


def check_order(walk: Walk, rows: Tensor, start: Tensor, before: int) -> None:
    """Assert that a changed row changes the outputs from there on, and none before."""
    changed = rows.clone()
    changed[before + 9] += 1.0
    (whole, _), (other, _) = walk(rows, start), walk(changed, start)
    assert other[:9].equal(whole[:9])
    assert (other[9:] != whole[9:]).any(-1).all()


def check_network(network: Network, tokens: list[int], expected: Tensor, ends: Sequence[int]) -> None:
    """Assert that logits [tokens, vocab] are the expected ones, in one step and in steps that end before `ends`."""
    assert_close(run(network, tokens), expected)
    step = partial(run, Decoder(network), attention=PlainAttention(network))
    pieces = [step(tokens[start:end], start=start) for start, end in zip((0, *ends), ends, strict=False)]
    assert_close(torch.cat(pieces), expected)
