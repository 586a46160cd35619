"""Decode with a network divided among several GPUs, with fused kernels and CUDA graphs.

All ranks have the same runner and enqueue the same steps. Rank 0 sends the changes of each step, and samples.
"""

import torch

from engine.cache.kv_cache import KVCache
from engine.device import has_pdl
from engine.errors import EngineError
from engine.execute.cuda.all_reduce import AllReduce
from engine.execute.cuda.all_reduce_layout import MOST_ROWS, AllReduceLayout
from engine.execute.cuda.decode_runner import DecodeRunner, S, rows_for
from engine.execute.cuda.following import NullSampler
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.peer_memory import share_memory
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.verify import Checking, GuessedRows
from engine.execute.group import LOST, Group
from engine.sampling.device_sampler import DeviceSampler
from models.network import Network


def meet(network: Network, device: torch.device, group: Group, prompt: int) -> AllReduce | str:
    """Return the exchange for decode steps, and for up to `prompt` rows of prompts.

    Where there is none, return the reason, as the middle of a sentence. Either all ranks of `network` get an exchange
    or none does. Raises EngineError when a rank is lost.
    """
    share = network.share
    assert share is not None
    plan, memory, reason = (
        AllReduceLayout.of(network, MOST_ROWS, prompt),
        None,
        "the GPUs of another process cannot share memory",
    )
    try:
        memory = share_memory(plan.nbytes, share.rank, device, lambda data: group.swap("memory", data))
    except RuntimeError as error:
        reason = str(error)
    if not group.least(int(memory is not None)):
        if memory is not None:
            memory.close()
        return reason
    assert memory is not None
    exchange = AllReduce(memory, plan, share.rank, device, network.dtype, has_pdl(device))
    group.leave.append(exchange.give_up)
    group.shared.append(exchange.close)
    return exchange


def make_divided_runner(
    network: Network, cache: KVCache, exchange: AllReduce, rows: int, graphs: Graphs | None
) -> DecodeRunner[S]:
    """Return a runner for up to MOST_ROWS sequences of up to `rows` rows each; all ranks make theirs together."""
    device, vocab = cache.device, network.whole.vocab_size
    pdl = has_pdl(device)
    sampler: DeviceSampler | NullSampler
    if exchange.rank:
        sampler = NullSampler(vocab, MOST_ROWS, device, exchange.count)
    else:
        sampler = DeviceSampler(vocab, MOST_ROWS, device, pdl)
    blocks = -(-rows // cache.block_size) + 1
    held = Slots(MOST_ROWS, rows_for(MOST_ROWS), blocks, sampler.token, cache.pools)
    program = FusedDecoder(network, cache, held.given, pdl, exchange=exchange)
    checking = (
        Checking(program, sampler, held, cache.block_size)
        if isinstance(sampler, DeviceSampler)
        else GuessedRows(program, held, cache.block_size)
    )
    runner: DecodeRunner[S] = DecodeRunner(program, sampler, held, rows, graphs, torch.cuda.Event, checking)

    def watch() -> None:
        if exchange.is_lost:
            raise EngineError(LOST)

    runner.watch = watch
    return runner
