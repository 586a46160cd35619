"""The decode runner of a draft model: the device feeds each token of a chain into the next step, the host reads all.

    device   | the missing rows of each text -> guess 1 | guess 1 -> guess 2 | ... | -> guess k
    host     | enqueues all of this                                                | waits, and reads k tokens

If a text continues differently than guessed, the next chain simply begins elsewhere: each chain says where its slot
begins, and rows of wrong guesses are overwritten.
"""

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import torch

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

Chain = tuple[DraftStart, BlockTable, int]
"""Where the chain begins, the block table of its text, and the number of tokens to draft."""


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
        for start, table, _ in chains:
            self.slots.show(start.slot, table.blocks, table.first, table.firsts)
        self.slots.send()
        for group in _groups([start for start, _, _ in chains]):
            self._begin(group)
        for more in range(1, max(count for _, _, count in chains)):
            going = [start for start, _, count in chains if count > more]
            self.step([start.slot for start in going], max(_newest(start) for start in going) + more)
        self._wait()
        found = [
            self.sampler.drawn([(start.slot, start.said + number, 0) for number in range(count)])
            for start, _, count in chains
        ]
        if any(token.token_id < 0 for drawn in found for token in drawn):
            raise EngineError("its output is not a number")
        return found

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
