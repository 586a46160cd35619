"""The engine: owns the pieces, and says what the loop thread does with them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from engine.attention import AttentionBackend
from engine.attention.choose import choose_attention, make_backend
from engine.bandwidth import known_bandwidth
from engine.block_map import BlockMap, block_map
from engine.blocks import BlockManager, Key
from engine.chat import Chat, Think, ThinkCache
from engine.decode import Lane
from engine.device import FULL_SPEED, available_memory, pick_device, pick_dtype
from engine.errors import ContextFullError, EngineError
from engine.events import Figures, TokenEvent
from engine.kv_cache import KVCache
from engine.loop import Loop
from engine.memory import (
    is_out_of_memory,
    kv_refused,
    kv_share,
    most_prefill_rows,
    plan_kv,
    reserved_bytes,
)
from engine.native import NativeError, check_threads, default_threads
from engine.native_decode import supports
from engine.output import Output
from engine.params import SamplingParams
from engine.reasoning import ThinkTracker
from engine.rows import Rows
from engine.runner import Runner
from engine.scheduler import MaskedRowsEvictedError, Scheduler
from engine.sequence import Priority, Sequence
from engine.stepper import Stepper, explain
from models.decoder import DecoderModel
from models.load import load_model
from models.progress import OnProgress, Progress
from models.quantized import quantized_weights, weight_bytes
from models.sources import ModelFiles, resolve
from models.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")
Follow = Callable[[Sequence], None]


class Engine:
    """One model, its KV cache, and a thread that serves sequences from it.

    Every public method may be called from any thread. Made by `Engine.load`; close it when done.
    """

    def __init__(
        self,
        loop: Loop,
        model: DecoderModel,
        tokenizer: Tokenizer,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        context: int | None = None,
        block_size: int | None = None,
        max_chunk: int | None = None,
        num_blocks: int | None = None,
        attention: str = "auto",
        graphs: bool = True,
        fused: bool = True,
        lane: bool = True,
        threads: int | None = None,
        free: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """`num_blocks` overrides the size that the free memory gives, `block_size` what suits the attention.

        `attention` names a backend; without `graphs` decode steps run kernel by kernel, without `fused` through the
        plain modules, without `lane` as prompts do. `threads` are those of a CPU (None: `default_threads`), `free` the
        bytes that the weights have left of the memory (None: what is free now). Raises EngineError when nothing fits
        or the backend does not work here.
        """
        config = model.config
        on_gpu = device.type == "cuda"
        max_chunk = max_chunk or most_prefill_rows(device)
        choice = choose_attention(attention, device, dtype, config.head_dim)
        block_size = block_size or choice.block_size
        per_token = (
            2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
        )
        reserve = reserved_bytes(config, max_chunk, dtype, device)
        free = available_memory(device) if free is None else free
        plan = plan_kv(per_token, block_size, free, model.positions, context, kv_share(device), reserve)
        self.model_name = name
        self.device = device
        self.dtype = dtype
        self.tokenizer = tokenizer
        self.generation_defaults = tokenizer.generation_defaults
        self.max_positions = model.positions
        self.context_length = plan.context_length
        self._vocab_size = config.vocab_size
        self._weight_bytes = weight_bytes(model)
        try:
            self._cache = KVCache(
                config.num_hidden_layers,
                num_blocks or plan.num_blocks,
                block_size,
                config.num_key_value_heads,
                config.head_dim,
                dtype,
                device,
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise kv_refused(plan, per_token, block_size, available_memory(device)) from None
        self._kv_bytes = self._cache.nbytes
        self._blocks = BlockManager(num_blocks or plan.num_blocks, block_size)
        groups = config.num_attention_heads // config.num_key_value_heads
        self._backend: AttentionBackend = make_backend(choice, self._cache, groups)
        self._attention_name = self._backend.name
        self._notes = (*notes, choice.note) if choice.note else notes
        self._bandwidth = known_bandwidth(device)
        self._scheduler = Scheduler(self._blocks, max_chunk, idle_chunk=32)
        self._runner = Runner(model, self._backend, device)
        self._lane: Lane | None = None
        threads = threads or default_threads()
        if device.type == "cpu" and fused:
            try:
                self._runner.go_native(model, self._cache, threads)
            except NativeError as error:
                self._notes += (f"Tokens are decoded by the plain modules, which is slower ({error}).",)
        if on_gpu and torch.cuda.get_device_capability(device) >= FULL_SPEED:
            try:
                if fused:
                    self._runner.fuse(model)
                if lane:
                    self._lane = Lane(
                        model, self._cache, self._attention_name, self.context_length, graphs, fused
                    )
                    self._lane.prepare()
            except Exception as error:  # noqa: BLE001 - without them there is still the plain way
                self._runner = Runner(model, self._backend, device)
                self._lane = None
                self._notes += (
                    f"Tokens are decoded by the plain modules, which is slower ({_one_line(error)}).",
                )
            if self._lane is not None and self._lane.problem is not None:
                self._notes += (f"CUDA graphs are off, decoding is slower ({self._lane.problem}).",)
        self._decode_name = self._runner.name
        if self._runner.all_native:
            self._attention_name = "native"
        self._stepper = Stepper(
            device,
            tokenizer.stop_ids,
            self.context_length,
            self.max_positions,
            self._scheduler,
            self._blocks,
            self._cache,
            self._runner,
            self._lane,
            threads,
        )
        self._loop = loop
        # Not the stepper's own methods: the loop outlives it (see `close`).
        loop.work(
            lambda: self._scheduler.has_work,
            lambda: self._stepper.step(),
            lambda error: self._stepper.end(error),
        )

    @classmethod
    def load(
        cls,
        model: str | ModelFiles,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantize: str = "auto",
        context: int | None = None,
        attention: str = "auto",
        graphs: bool = True,
        threads: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> "Engine":
        """Fetch what is missing, read the weights and start. Raises ModelError and EngineError.

        `model` is what `models.sources.resolve` takes, or local files; `quantize` is how weights are held, see
        `models.load`; `context` is in tokens (None: as long as the model and the memory allow). `threads` compute on
        a CPU (None: the physical cores, less one for the screen where there are more than two).
        """
        check_threads(threads)
        choice = pick_device(device)
        picked = choice.device
        picked_dtype = pick_dtype(dtype, picked)
        files = model if isinstance(model, ModelFiles) else resolve(model, on_progress=on_progress)
        tokenizer = load_tokenizer(files)
        loop = Loop()
        threads = threads or default_threads()

        def build() -> Engine:
            if picked.type == "cpu":
                torch.set_num_threads(threads)
            before = available_memory(picked)
            load = partial(load_model, files, dtype=picked_dtype, device=picked, on_progress=on_progress)
            network = load(quantize=quantize)
            if quantize == "auto" and quantized_weights(network) and supports(network) is not None:
                network = load(quantize="none")  # torch has no kernels of its own that read the blocks
            return cls(
                loop,
                network,
                tokenizer,
                name=files.name,
                device=picked,
                dtype=picked_dtype,
                context=context,
                attention=attention,
                graphs=graphs,
                threads=threads,
                # Mapped weights go on counting as free memory: they would be taken twice.
                free=max(before - weight_bytes(network), 0) if picked.type == "cpu" else None,
                notes=choice.notes,
            )

        try:
            engine = loop.call(build)
        except BaseException:
            loop.close()
            raise
        if on_progress is not None:
            size = engine.figures().kv_bytes
            on_progress(Progress("prepare", f"KV cache for {engine.context_length:,} tokens", size, size))
        return engine

    # -- what people use

    def default_params(self, **overrides: Any) -> SamplingParams:
        """The sampling that the model's authors recommend, else (where they say nothing at all) ours, with changes.

        Raises EngineError for a value out of range.
        """
        ours = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
        return SamplingParams(**{**(self.generation_defaults or ours), **overrides})

    def stream(self, token_ids: list[int], params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Answer a prompt, token by token. Closing the generator cancels the request within one step.

        Raises EngineError for an empty prompt or an unknown token id, ContextFullError when it does not fit.
        """
        sequence = self.start(Rows.of(token_ids), params or self.default_params())
        try:
            yield from self.events(sequence)
        finally:
            self.cancel(sequence)

    def warm(self, token_ids: list[int]) -> int:
        """Make the KV of these tokens present. Returns how many had to be computed.

        Raises EngineError for an unknown token id, ContextFullError when they do not fit.
        """
        return self.warm_rows(Rows.of(token_ids))

    def chat(
        self, system: str | None = None, think: Think = "auto", think_cache: ThinkCache = "exact"
    ) -> Chat:
        """A conversation. Raises EngineError when the model cannot chat."""
        return Chat(self, system, think, think_cache)

    def figures(self) -> Figures:
        """What the engine holds and does right now."""
        done = total = 0
        warmed = None
        for sequence in list(self._scheduler.running):
            if sequence.priority is Priority.IDLE:
                warmed = sequence.computed
            elif sequence.priority is Priority.PERSON and len(sequence.generated) == sequence.earlier:
                done = max(sequence.computed - sequence.cached_tokens, 0)
                total = sequence.prompt_tokens - sequence.cached_tokens
        return Figures(
            model_name=self.model_name,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            attention=self._attention_name,
            context_length=self.context_length,
            weight_bytes=self._weight_bytes,
            kv_bytes=self._kv_bytes,
            block_size=self._blocks.block_size,
            blocks_free=self._blocks.num_free,
            blocks_cached=self._blocks.num_cached,
            blocks_held=self._blocks.num_held,
            prefill_done=done,
            prefill_total=total,
            decode=self._lane.name if self._lane is not None else self._decode_name,
            notes=self._notes,
            warmed=warmed,
            bandwidth=self._bandwidth,
        )

    def look_at_blocks(self, keys: list[Key], found: Callable[[BlockMap], None]) -> None:
        """Have `found` called with a picture of the blocks, between two steps. Returns at once.

        The branch is that of the person's running sequence, else `keys`. Raises EngineError once closed.
        """

        def job() -> None:
            running = [s.rows.keys for s in self._scheduler.running if s.priority is Priority.PERSON]
            found(block_map(self._blocks, running[-1] if running else keys))

        self._loop.post(job)

    def on_lane(self, function: Callable[[Lane], T], empty: bool = True) -> T:
        """Call `function` on the loop thread between two steps, for measurements; `empty` the prefix cache before.

        Raises EngineError where tokens are not decoded in a lane or something runs.
        """

        def job() -> T:
            if self._lane is None or self._scheduler.has_work:
                raise EngineError(
                    "There is no decode lane to measure, or it is busy; a GPU and triton are needed."
                )
            if empty:
                self._blocks.evict_all()
            return function(self._lane)

        return self._loop.call(job)

    def with_rows(self, keys: list[Key], more: int, function: Callable[[list[int]], T]) -> T:
        """Call `function` with the blocks of cached rows and of `more` to come. For the loop thread."""
        table, copies = self._blocks.open(keys)
        try:
            self._cache.copy_blocks(copies)
            self._blocks.reserve(table, len(keys) - table.length + more)
            return function(table.blocks)
        finally:
            self._blocks.close(table)

    def close(self) -> None:
        """End the thread and free the memory. Running streams end as cancelled. Closing twice is fine."""
        self._loop.close()
        for owner_of_memory in ("_cache", "_runner", "_backend", "_lane", "_stepper"):
            self.__dict__.pop(owner_of_memory, None)

    # -- what Chat uses

    def output(self, params: SamplingParams, inside_think: bool = False) -> Output:
        """What makes events of the tokens of one answer; `inside_think`: its prompt opened a think span."""
        tracker = ThinkTracker(self.tokenizer.think_start, self.tokenizer.think_end, inside_think)
        return Output(self.tokenizer.stream(), tracker, params.stop)

    def start(
        self,
        rows: Rows,
        params: SamplingParams,
        output: Output | None = None,
        earlier: list[int] | None = None,
    ) -> Sequence:
        """Queue a prompt to be answered. Take its events with `events`. Raises as `stream` does.

        `earlier` are the last tokens of `rows` when they are an answer that goes on; `max_tokens` counts them too.
        """
        if not rows:
            raise EngineError("The prompt is empty; write something first.")
        self._check(rows, spare=1)
        sequence = Sequence(rows, Priority.PERSON, params, output or self.output(params))
        sequence.generated = list(earlier or ())
        sequence.earlier = len(sequence.generated)
        self.submit(sequence)
        return sequence

    def submit(self, sequence: Sequence) -> None:
        """Hand a sequence to the loop."""
        self._loop.post(lambda: self._scheduler.add(sequence))

    def events(self, sequence: Sequence) -> Iterator[TokenEvent]:
        """The events of a started sequence until it ends. Raises what went wrong with it."""
        while (event := sequence.events.get()) is not None:
            yield event
        if sequence.error is not None:
            raise sequence.error

    def wait(self, sequence: Sequence) -> None:
        """Return when the sequence has ended, whatever it still has to say. Not for the loop's own thread."""
        sequence.finished.wait()

    @property
    def on_loop_thread(self) -> bool:
        """Whether the caller is on the loop's thread: garbage may be collected there, nobody may wait there."""
        return self._loop.inside

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence within one step. Returns at once."""
        sequence.cancelled = True

    def warm_rows(
        self, rows: Rows, follow: Follow | None = None, priority: Priority = Priority.PERSON
    ) -> int:
        """Make the KV of `rows` present. Returns how many rows had to be computed.

        `follow` gets the sequence that does it, to cancel it.
        """
        self._check(rows, spare=0)
        sequence = Sequence(rows, priority)
        self.submit(sequence)
        if follow is not None:
            follow(sequence)
        self.wait(sequence)
        if sequence.error is not None:
            raise sequence.error
        return sequence.prompt_tokens - sequence.cached_tokens

    def keep(self, rows: Rows) -> None:
        """The conversation in use has these rows: they are evicted last, and by no idle work. Returns at once."""
        self._loop.post(lambda: self._blocks.keep(rows.keys))

    def cached_rows(self, rows: Rows) -> int:
        """How many leading rows are present."""
        return self._loop.call(lambda: self._blocks.match(rows.keys))

    def hide(
        self,
        rows: Rows,
        start: int,
        end: int,
        follow: Follow | None = None,
        priority: Priority = Priority.PERSON,
        keep: bool = False,
    ) -> Rows:
        """Take rows `start` to `end` out: the rows after them move up, with their KV as it is (see Rows.hide).

        What of `rows` is not present is computed first; `follow` as in `warm_rows`. With `keep`, `rows` stay as
        cache beside what is left of them, for an answer that may go on. Raises OutOfBlocksError when there is no
        room, EngineError when computing or copying fails.
        """
        hidden = rows.hide(start, end)
        if self.cached_rows(hidden) < len(hidden):
            idle = priority is Priority.IDLE
            if not idle:
                self.keep(rows)  # until they have moved, whatever idle work there is
            self.warm_rows(rows, follow, priority)
            try:
                self._loop.call(lambda: self._move_up(rows, hidden, start, end, keep, idle))
            except (RuntimeError, MemoryError) as error:
                raise explain(error) from error
        return hidden

    # -- how it is done

    def _move_up(self, rows: Rows, hidden: Rows, start: int, end: int, keep: bool, idle: bool) -> None:
        if self._blocks.match(hidden.keys) == len(hidden):
            return  # idle work that was at the same turn has done it meanwhile
        source, copies = self._blocks.open(rows.keys, idle)
        try:
            self._cache.copy_blocks(copies)
            if source.length < len(rows):
                raise MaskedRowsEvictedError("masked rows were evicted")
            target, copies = self._blocks.open(hidden.keys, idle)
            try:
                self._cache.copy_blocks(copies)
                first = target.length
                self._scheduler.reserve(target, len(hidden) - first, idle)
                shift = end - start
                if first < len(hidden):
                    self._cache.copy_rows(
                        self._cache.slots(source.blocks, first, start)
                        + self._cache.slots(source.blocks, max(first, start) + shift, len(rows)),
                        self._cache.slots(target.blocks, first, len(hidden)),
                    )
                self._blocks.commit(target, hidden.keys[first:])
            finally:
                self._blocks.close(target)
        finally:
            self._blocks.close(source)
        if not keep:
            self._blocks.forget(rows.keys, start)

    def _check(self, rows: Rows, spare: int) -> None:
        size = self._vocab_size
        unknown = [id for id in rows.token_ids if not 0 <= id < size]
        if unknown:
            raise EngineError(f"There is no token {unknown[0]}; this model knows tokens 0 to {size - 1}.")
        if len(rows) + spare > self.context_length:
            over = len(rows) + spare - self.context_length
            raise ContextFullError(
                f"The prompt is {over:,} tokens too long for the context of {self.context_length:,}; "
                "shorten it or start with a larger --context.",
                needed=len(rows) + spare,
                available=self.context_length,
            )


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200]
