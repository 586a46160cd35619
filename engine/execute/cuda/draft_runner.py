"""The decode runner of a draft model: the device feeds each token of a chain into the next step, the host reads all.

    device   | the missing rows of each text -> guess 1 | guess 1 -> guess 2 | ... | -> guess k
    host     | enqueues all of this                                                | waits, and reads k tokens

If a text continues differently than guessed, the next chain simply begins elsewhere: each chain says where its slot
begins, and rows of wrong guesses are overwritten.
"""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from engine.batch import StateMoves
from engine.cache.block_table import BlockTable
from engine.cache.kv_cache import KVCache
from engine.device import has_pdl
from engine.errors import EngineError
from engine.execute.cuda.decode_runner import ROWS, DecodeRunner, rows_for
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.tiles import FEW, context_limit
from engine.execute.cuda.verify import Chaining, DraftStart
from engine.params import SamplingParams
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import SampledToken
from models.network import Network


class Chain(NamedTuple):
    """A chain of tokens to draft."""

    start: DraftStart
    table: BlockTable
    """That of its text. Of recurrent layers, the state after the first row of `start` is planned."""
    length: int
    """How many tokens."""
    guess_state: int | None = None
    """Of recurrent layers, the slot for the state after a guess."""

    def moves(self, number: int) -> StateMoves | None:
        """Return what the step of its row `number` does with states, counted from 0 for the rows of `start`."""
        state = self.table.state
        if state is None or self.guess_state is None or number == 0:
            return None if state is None else state.moves
        row = _newest(self.start) + number
        source, seen = (self.guess_state, row) if number > 1 else (state.target, state.stop)
        return StateMoves(source, seen, ((row + 1, self.guess_state),))


class DraftRunner(DecodeRunner[Any]):
    """Drafts tokens in slots. Sequences do not `join`: a slot belongs to the text for which it was loaded last."""

    counts = tuple(rows for rows in ROWS if rows <= FEW)
    tells = True

    def load(
        self, slot: int, params: SamplingParams, prompt: Items[int], answer: Items[int], seed: int
    ) -> None:
        """Make `slot` draw as the answer with these parameters draws, but without its constraint, and with the
        log-probability of each token."""
        bias = {token: more for token, more in params.logit_bias.items() if token < self.sampler.vocab_size}
        drawn = replace(params, constraint=None, logprobs=0, logit_bias=bias)
        self.sampler.load(slot, drawn, prompt, answer, seed)

    def begin(self, slot: int) -> None:
        """Prepare `slot` for another text, or for another block table of the same one."""
        self.slots.put(slot, 0, 0)

    def chain(self, chains: Items[Chain]) -> list[list[SampledToken]]:
        """Draft all chains, wait for them, and return the tokens of each.

        A chain begins with at most FEW missing rows, and its table has room for the rows of all tokens except the last.
        Raises EngineError if an output is not a number.
        """
        for chain in chains:
            table = chain.table
            self.slots.show(chain.start.slot, table.blocks, table.first, table.firsts)
            self._move(chain, 0)
        self.slots.send()
        for group in _groups([chain.start for chain in chains]):
            self._begin(group)
        for more in range(1, max(chain.length for chain in chains)):
            going = [chain for chain in chains if chain.length > more]
            for chain in going:
                self._move(chain, more)
            furthest = max(_newest(chain.start) for chain in going) + more
            self.step([chain.start.slot for chain in going], furthest)
        self._wait()
        found = [
            self.sampler.drawn(
                [(chain.start.slot, chain.start.said + number, 0) for number in range(chain.length)]
            )
            for chain in chains
        ]
        if any(token.token_id < 0 for drawn in found for token in drawn):
            raise EngineError("its output is not a number")
        return found

    def _move(self, chain: Chain, number: int) -> None:
        """Tell the device what the next step of a chain does with states (see `Chain.moves`)."""
        if (moves := chain.moves(number)) is not None:
            row = chain.start.row if number == 0 else _newest(chain.start) + number
            self.slots.move(chain.start.slot, moves, row)

    def _begin(self, starts: list[DraftStart]) -> None:
        """Enqueue the step that draws the first token of each chain."""
        chaining = self._several
        assert isinstance(chaining, Chaining)
        chaining.plan(starts)
        rows = rows_for(sum(len(start.tokens) for start in starts))
        limit = context_limit(max(map(_newest, starts)))
        self._run_several(chaining, rows, limit, self.sampler.draw([start.slot for start in starts]))


def _newest(start: DraftStart) -> int:
    """Return the row of the text's newest token."""
    return start.row + len(start.tokens) - 1


def _groups(starts: list[DraftStart]) -> list[list[DraftStart]]:
    """Group the beginnings of chains into steps of at most FEW rows, in order."""
    groups, rows = [list[DraftStart]()], 0
    for start in starts:
        if rows + len(start.tokens) > FEW:
            groups.append([])
            rows = 0
        groups[-1].append(start)
        rows += len(start.tokens)
    return groups


def make_draft_runner(
    network: Network,
    cache: KVCache,
    rows: int,
    vocab_size: int,
    graphs: Graphs | None,
    cuts: KernelConfigs | None = None,
) -> DraftRunner:
    """Return a runner on the GPU of `cache`, for texts of up to `rows` rows and the first `vocab_size` tokens.

    Raises EngineError if the fused kernels do not support the network, and ImportError if triton is not installed.
    """
    from engine.execute.cuda.fused_program import FusedDecoder, unsupported

    if (reason := unsupported(network)) is not None:
        raise EngineError(reason)
    device = cache.device
    pdl = has_pdl(device)
    sampler = DeviceSampler(vocab_size, FEW, device, pdl)
    slots = Slots(FEW, FEW, -(-rows // cache.block_size) + 1, sampler.token, cache.pools)
    program = FusedDecoder(network, cache, slots.given, pdl, cuts=cuts)
    chaining = Chaining(program, sampler, slots, cache.block_size)
    return DraftRunner(program, sampler, slots, rows, graphs, torch.cuda.Event, chaining)
