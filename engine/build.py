"""Builds the parts of an engine to suit the machine, the model and the memory that is left."""

from dataclasses import dataclass, replace
from functools import partial
from sys import maxsize

import torch

from engine.attention import AttentionBackend
from engine.attention.choose import choose_attention, make_backend
from engine.attention.triton import TritonBackend
from engine.attention.unusual import kinds, unusual_layers
from engine.cache.blocks import BlockManager
from engine.cache.group_pool import GroupPool
from engine.cache.host_memory import HostKV
from engine.cache.kv_cache import KVCache
from engine.cache.kv_needs import MOST_GUESSED, STREAM_STATES
from engine.cache.kv_rows import KVRow, attention_row, layer_rows
from engine.cache.marks import LOG_ROWS, Marks
from engine.cache.offload import HostTier
from engine.cache.sizing import KVPlan, kv_refused, offload_bytes
from engine.cache.state_bytes import runs, state_bytes
from engine.cache.states import make_states
from engine.cache.window import Window
from engine.device import available_memory, is_unfit
from engine.errors import EngineError
from engine.execute.build_options import BuildOptions
from engine.execute.compatibility import (
    DIVIDED,
    DRAFTS_NEED,
    ONE_ROW_FORMAT,
    PLAIN_ATTENTION,
    by_torch,
    lacking,
    not_fused,
)
from engine.execute.cuda.decode_runner import ROWS, DecodeRunner, make_decode_runner
from engine.execute.cuda.draft_runner import DraftRunner, make_draft_runner
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.faults import first_line
from engine.execute.runner import Runner
from engine.execute.sized import size_up
from engine.kernels import on_gpu
from engine.kernels.native.library import NativeError, Pool, default_threads
from engine.schedule.chunk_pace import RowCost
from engine.schedule.drafting import Drafting
from engine.schedule.drafting_in_slots import SlotDrafting
from engine.schedule.idle_pace import IdlePace
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence
from models.features import Feature, features
from models.loading.load import is_out_of_memory
from models.network import Network
from models.recurrences import Recurrence
from models.spec import ModelSpec, kv_sources

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Pieces:
    """The parts of an engine. They belong to the loop thread."""

    network: Network
    cache: KVCache
    blocks: BlockManager
    scheduler: Scheduler
    backend: AttentionBackend
    runner: Runner
    decode_runner: DecodeRunner[Sequence] | None
    on_host: HostExperts | None
    """The executor of the experts in host memory."""
    context_length: int
    threads: int
    draft: Drafting | None
    """The draft model, if there is room for one."""
    notes: tuple[str, ...]
    """Lines for the user: what does not work here, and what that means."""
    kv_share: float
    """The share that the KV cache takes of the memory that the weights leave free; 0 if that was not determined."""

    @property
    def attention_name(self) -> str:
        """The name of the attention in use, for display."""
        return "native" if self.runner.all_native else self.backend.name

    @property
    def decode_name(self) -> str:
        """The name of the program that decodes, for display."""
        return self.decode_runner.name if self.decode_runner is not None else self.runner.name


def build(network: Network, device: torch.device, options: BuildOptions) -> Pieces:
    """Build an engine around `network`. Raises EngineError if nothing fits or the attention backend cannot run here."""
    spec, dtype, notes = network.spec, network.dtype, options.notes
    if (refused := _no_states(spec)) is not None:
        raise EngineError(refused)
    asked = kinds(spec.attentions.values())
    rows = layer_rows(spec, dtype, device, options.kv_dtype)
    row = attention_row(rows)
    if row.is_quantized and device.type == "cuda" and (reason := on_gpu.problem(device)) is not None:
        raise EngineError(f"--kv-dtype {row.kind} cannot be used: {reason}. Use --kv-dtype auto.")
    head_dim = asked[0].head_dim if asked else 0  # without attention heads, any backend will do
    beside = () if options.drafter is None else features(options.drafter.spec)
    most_rows = LOG_ROWS if Feature.RECURRENCE in {*features(spec), *beside} else maxsize
    choice = choose_attention(
        _attention_name(spec, options), device, dtype, head_dim, asked, options.kv_dtype, most_rows
    )
    block_size = options.block_size or choice.block_size
    on_host = _host_experts(network, device, options)
    if on_host is not None:
        notes = (*notes, on_host.told(len(spec.layers)))
    sized = size_up(network, device, row, block_size, on_host, options)
    plan, window = sized.plan, sized.plan.needs.window
    cache = _allocate(plan, rows, network, options.kv_dtype)
    cache.host = _host_memory(cache, options, device)
    tier = HostTier(cache.host.grow, cache.host.size) if cache.host is not None else None
    manager = BlockManager(
        plan.num_blocks, block_size, cache.carry_out, tier, window, cache.pools, _marks(plan, cache, options)
    )
    backend = make_backend(choice.name, cache, unusual_layers(network))
    pieces = Pieces(
        network,
        cache,
        manager,
        Scheduler(
            manager,
            sized.max_chunk,
            IdlePace().rows,
            row_cost=RowCost.of(spec),
            context_length=plan.context_length,
            max_positions=network.positions,
        ),
        backend,
        Runner(network, backend, device, on_host, options.group),
        None,
        on_host,
        plan.context_length,
        options.threads or default_threads(),
        None,
        (*notes, choice.note) if choice.note else notes,
        plan.share,
    )
    if device.type == "cuda":
        if network.share is None:
            _speed_up_gpu(pieces, network, device, options)
        else:
            _refuse_deterministic(options, DIVIDED)
            _speed_up_parts(pieces, network, device, options)
    elif options.fused:
        try:
            _tell(pieces, pieces.runner.go_native(network, cache, pieces.threads, options.pool))
        except NativeError as error:
            pieces.notes += (f"Decoding runs on plain PyTorch modules, which is slower ({error}).",)
    if options.drafter is not None:
        why = _no_draft(pieces)
        if why is None and sized.draft is None:
            why = "there is too little memory for the KV cache of a draft model"
        elif why is None and sized.draft is not None:
            try:
                pieces.draft = _build_draft(options.drafter, network, pieces, sized.draft, options)
            except Exception as error:  # noqa: BLE001 - a draft model is optional
                why = first_line(error)
        if why is not None:
            pieces.notes += (f"No draft model is used: {why}.",)
    return pieces


def _no_states(spec: ModelSpec) -> str | None:
    """Return why the recurrent layers of a network cannot be computed, in a sentence; None if they can or there are
    none."""
    found = features(spec)
    if Feature.RECURRENCE not in found:
        return None
    if not spec.attentions:
        return "This model has recurrent layers alone, without attention; choose another model."
    widths = {layer.mixer.conv_width for layer in spec.layers if isinstance(layer.mixer, Recurrence)}
    if len(widths) > 1:
        return "This model has recurrent layers with different convolutions; choose another model."
    return None


def _marks(plan: KVPlan, cache: KVCache, options: BuildOptions) -> Marks | None:
    """Return the marks of recurrent layers, whose log is one of the groups; None without such layers. In a draft model
    the last slots are for states after guesses."""
    for group, pool in zip(plan.needs.groups, cache.pools, strict=True):
        if group.tail is not None:
            guessed = min(plan.states // STREAM_STATES, MOST_GUESSED) if options.drafts_for else 0
            return Marks(plan.states - guessed, group.tail, pool, plan.needs.block_size)
    return None


def _no_draft(pieces: Pieces) -> str | None:
    """Return why there can be no draft model here, as the end of a sentence; None if there can."""
    decodes = pieces.decode_runner
    checks_guesses = decodes.checks_guesses if decodes is not None else pieces.runner.checks_guesses
    return None if checks_guesses else DRAFTS_NEED


def _build_draft(
    draft: Network, network: Network, pieces: Pieces, plan: KVPlan, options: BuildOptions
) -> Drafting:
    """Build the engine of a draft model, whose KV cache is that of `plan`. Raises EngineError and torch's errors."""
    device, context = pieces.cache.device, min(plan.context_length, draft.positions)
    vocab_size = min(draft.spec.vocab_size, network.whole.vocab_size)
    asked = BuildOptions(
        attention=pieces.backend.name if device.type == "cuda" else "auto",
        graphs=options.graphs,
        tune=options.tune,
        plan=replace(plan, context_length=context),
        block_size=plan.needs.block_size,
        threads=pieces.threads,
        offload=0,
        pool=pieces.runner.pool,
        drafts_for=vocab_size,
    )
    own = build(draft, device, asked)
    runner = own.decode_runner
    if device.type == "cuda" and not isinstance(runner, DraftRunner):
        raise EngineError(own.notes[-1] if own.notes else DRAFTS_NEED)
    make = partial(SlotDrafting, decode_runner=runner) if isinstance(runner, DraftRunner) else Drafting
    marks, states = own.blocks.marks, own.cache.states
    drafting: Drafting = make(
        options.draft_name,
        own.runner,
        own.blocks,
        vocab_size,
        context,
        own.scheduler.max_chunk,
        draft.spec.vocab_size >= network.whole.vocab_size,
        draft.nbytes + own.cache.nbytes,
        draft.nbytes / network.nbytes,
        None if marks is None or states is None else range(marks.num_slots, states.slots),
    )
    return drafting


def _host_experts(network: Network, device: torch.device, options: BuildOptions) -> HostExperts | None:
    """Return the executor of the experts in host memory, if there are any. Raises EngineError."""
    if not network.on_host:
        return None
    try:
        found = HostExperts(network, Pool(options.threads or default_threads()))
    except (NativeError, RuntimeError) as error:  # RuntimeError: torch could not pin a little memory
        raise EngineError(
            "The GPU has no room for all experts, and the CPU cannot compute them: "
            f"{first_line(error)}. Choose a smaller model."
        ) from None
    found.prepare(options.fused and _not_fused(network, device) is None, options.deterministic)
    return found


def _tell(pieces: Pieces, reason: str | None) -> None:
    """Note why our kernels do not compute the network, unless a note says so already."""
    if reason is not None and not any(reason in note for note in pieces.notes):
        pieces.notes += (f"Computed by {by_torch(reason, pieces.runner.multiplies)}.",)


def _attention_name(spec: ModelSpec, options: BuildOptions) -> str:
    """Return the attention backend to use: only torch's attends to latents, and without fused kernels to rows that
    differ."""
    lacks, attends = lacking(spec, ONE_ROW_FORMAT), bool(spec.attentions)
    if lacks is None or options.attention == "sdpa" or (attends and not_fused(spec) is None):
        return options.attention
    if options.attention != "auto":
        raise EngineError(
            f"--attention {options.attention} cannot be used: this model has {lacks}. Use --attention auto."
        )
    return "sdpa"


def _allocate(
    plan: KVPlan,
    rows: list[KVRow],
    network: Network,
    kind: str,
) -> KVCache:
    device, needs = network.device, plan.needs
    pools = [
        (group.layers, GroupPool(slots, Window(group.window, needs.step)))
        for group, slots in zip(needs.groups, plan.slots, strict=True)
    ]
    sources, is_free = kv_sources(network.spec), kind == "auto"
    size, dtype = needs.block_size, network.dtype
    try:
        cache = KVCache(rows, plan.num_blocks, size, dtype, device, needs.window, sources, is_free, pools)
        cache.states = make_states(network.spec, plan.states, device)
        return cache
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise kv_refused(plan, available_memory(device)) from None


def _host_memory(cache: KVCache, options: BuildOptions, device: torch.device) -> HostKV | None:
    most, group = options.offload, options.group
    if group is not None and group.rank:
        most = maxsize  # rank 0 says what is offloaded
    elif most is None and device.type == "cuda":
        ranks = 1 if group is None else group.ranks
        most = offload_bytes(options.offload_gb, ranks * cache.nbytes, available_memory(_CPU)) // ranks
    if not most:
        return None
    return HostKV(
        cache.block,
        cache.block_size,
        most,
        [group for group in cache.every_group if group != cache.log],
        lambda copy: runs(cache, copy.state, copy.blocks, copy.row),
        partial(state_bytes, cache),
    )


def _speed_up_gpu(pieces: Pieces, network: Network, device: torch.device, options: BuildOptions) -> None:
    """Set up the fused kernels, graphs and the decode runner, as far as this GPU supports them."""
    reason = on_gpu.problem(device)
    if reason is not None or not options.fused:
        _refuse_deterministic(options, reason or "the fused kernels do not run here")
    if reason is not None:
        if not is_unfit(device):  # otherwise a note was given when the device was chosen
            _tell(pieces, reason)
        return
    graphs = Graphs() if options.graphs else None
    fused = options.fused
    try:
        cuts = _cuts(network, device, options) if fused else None
        if cuts is not None and isinstance(pieces.backend, TritonBackend):
            attentions, itemsize = network.spec.attentions.values(), network.dtype.itemsize
            pieces.backend.tiles = {each.head_dim: cuts.prompt(each, itemsize) for each in attentions}
        if fused:
            reason = pieces.runner.fuse(
                network, pieces.cache, pieces.context_length, graphs, options.deterministic
            )
            fused = reason is None
            if options.deterministic and reason is not None:
                raise NotImplementedError(reason)
            _tell(pieces, reason)
        if options.deterministic:
            pieces.notes += (
                "Deterministic: sums have a fixed order, however prompts are split and whatever else runs "
                "at the same time.",
            )
        # The decode runner's plain program attends over all earlier rows, so the network must want just that.
        if options.decode_runner and (fused or lacking(network.spec, PLAIN_ATTENTION) is None):
            pieces.decode_runner = (
                make_draft_runner(
                    network, pieces.cache, pieces.context_length, options.drafts_for, graphs, cuts
                )
                if options.drafts_for
                else make_decode_runner(
                    network,
                    pieces.cache,
                    pieces.backend.name,
                    pieces.context_length,
                    ROWS[-1],
                    graphs,
                    fused,
                    options.deterministic,
                    pieces.on_host,
                    cuts,
                )
            )
            pieces.decode_runner.prepare(options.streams)
    except Exception as error:  # noqa: BLE001 - the plain modules still work
        pieces.runner = Runner(network, pieces.backend, device, pieces.on_host)
        pieces.decode_runner = None
        why = first_line(error)
        _refuse_deterministic(options, why)
        pieces.notes += (f"Decoding runs on plain PyTorch modules, which is slower ({why}).",)
    pieces.scheduler.recorded = pieces.runner.recorded
    if graphs is not None and graphs.problem is not None:
        pieces.notes += (f"CUDA graphs are off, so decoding is slower ({graphs.problem}).",)


def _speed_up_parts(pieces: Pieces, network: Network, device: torch.device, options: BuildOptions) -> None:
    """Do the same for a divided network: all ranks decide alike, so a failure on one applies to all."""
    group = options.group
    assert group is not None
    reason = _not_fused(network, device) if options.fused and options.decode_runner else DIVIDED
    if group.least(int(reason is None)):
        from engine.execute.cuda.prefill_all_reduce import PromptSums
        from engine.execute.cuda.tensor_parallel import make_divided_runner, meet

        found = meet(network, device, group, pieces.scheduler.max_chunk)
        if not isinstance(found, str):
            graphs = Graphs() if options.graphs else None
            sums = PromptSums(found, group, device, network.dtype)
            pieces.runner.fuse(network, pieces.cache, pieces.context_length, graphs, False, sums)
            runner: DecodeRunner[Sequence] = make_divided_runner(
                network, pieces.cache, found, pieces.context_length, graphs
            )
            runner.prepare(options.streams)
            found.wait_at_most()
            pieces.decode_runner = runner
            return
        reason = found
    pieces.notes += (f"Computed by {by_torch(reason or 'another part of it cannot be fused', False)}.",)


def _not_fused(network: Network, device: torch.device) -> str | None:
    """Return why fused kernels cannot compute a network or a part of one, within a sentence; None if they can."""
    if (reason := on_gpu.problem(device)) is not None:
        return reason
    try:
        from engine.execute.cuda.fused_program import unsupported
    except ImportError as error:
        return str(error)
    return unsupported(network)


def _cuts(network: Network, device: torch.device, options: BuildOptions) -> KernelConfigs | None:
    """Return the cuts measured here, or None."""
    if not options.tune or options.deterministic:
        return None
    from engine.execute.cuda.tuner import tuned_cuts

    return tuned_cuts(network, device)


def _refuse_deterministic(options: BuildOptions, why: str) -> None:
    """Raise EngineError if it was asked for: results that only look deterministic would be worse."""
    if options.deterministic:
        raise EngineError(f"--deterministic cannot be used on this GPU: {why}. Use --device cpu.")
