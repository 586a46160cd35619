"""The engine: loads a model and holds conversations with it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.cache.rows import Rows
from engine.cache.sizing import LEAST_CONTEXT, SHORT_CONTEXT, gb_to_bytes, least_beside
from engine.conversation.chat import Chat, Think, ThinkCache
from engine.conversation.chunks import Chunks
from engine.core import EngineCore
from engine.device import available_memory, check_parallel, pick_device, pick_dtype
from engine.draft import find_draft, read_draft
from engine.errors import EngineError
from engine.events import DiskFigures, Figures
from engine.execute.cpu.weight_loading import read_model
from engine.execute.faults import not_loaded
from engine.kernels.native.library import check_threads, default_threads
from engine.machine.instead import instead_of_gpu
from engine.machine.memory_check import fewest_ranks, mapped_bytes
from engine.parallel.ranks import Order, Ranks
from engine.schedule.loop import Loop
from engine.store.disk import DiskTier
from engine.store.identity import of_code, of_weights
from models.errors import NoRoomError
from models.files import ModelFiles
from models.hub.sources import resolve
from models.load import Room
from models.network import Network, Weight
from models.progress import OnProgress, Progress
from models.text.tokenizer import Tokenizer, load_tokenizer

_CPU = torch.device("cpu")


class Engine(EngineCore):
    """One model, and conversations with it. Create it with `Engine.load`, and close it when done.

    Every public method may be called from any thread.
    """

    _mapped_at_load = 0

    def __init__(self, loop: Loop, network: Network, tokenizer: Tokenizer, **options: Any) -> None:
        """Take the arguments of `EngineCore`."""
        super().__init__(loop, network, tokenizer, **options)
        self.chunks = Chunks(self, self._blocks, loop)
        """Named prompt prefixes that stay in the cache."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights mapped from a file and not copied since; the system counts them as free memory."""
        return max(self._mapped_at_load - self.copied_bytes, 0)

    @classmethod
    def load(
        cls,
        model: str | ModelFiles,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantize: str = "auto",
        kv_dtype: str = "auto",
        context: int | None = None,
        attention: str = "auto",
        graphs: bool = True,
        tuned: bool = True,
        tunes: bool = False,
        deterministic: bool = False,
        threads: int | None = None,
        offload_gb: float | None = None,
        streams: int = 1,
        taken: int = 0,
        tensor_parallel: int = 1,
        disk: Path | None = None,
        disk_gb: float | None = None,
        room: Room | None = None,
        draft: str | ModelFiles | None = None,
        on_progress: OnProgress | None = None,
    ) -> "Engine":
        """Download what is missing, read the weights and start the engine. Raises ModelError and EngineError.

        `model` is a name for `models.hub.sources.resolve`, or local files. `quantize` says how weights are held (see
        `models.load`), `kv_dtype` is the format of the KV cache (see `kv_row`). `context` is in tokens (None: as many
        as the model and the memory allow). `threads` is for computing on a CPU (None: the physical cores, less one for
        the screen if there are more than two). `offload_gb` limits the host memory for blocks that a GPU evicts (None:
        a share of it). The KV cache has room for `streams` requests at once, as far as memory allows. `taken` bytes of
        a CPU's memory count as free but are not (mapped weights of other models).
        `tuned`: a GPU's kernels use the cuts measured on it, if any; `tunes`: if none were measured, measure them while
        the engine is idle, for the next start. `deterministic`: on a GPU, too, the rows of a prompt get the same bits
        however it is cut, and the rows of an answer regardless of other sequences, which costs time.
        `tensor_parallel` GPUs (on a CPU: processes) compute every layer together; 0: as few as have room.
        The blocks that conversations have cached are kept in the folder `disk` (None: nowhere), up to `disk_gb` GB
        (None: a share of the free space). A model that does not fit on the GPU is refused before it is read, or, with
        the `device` "auto", computed by the CPU, and a note says so. `room` is for tests: the bytes of the device that
        weights may take before experts are held in host memory. `draft` is a smaller model with the same tokenizer that
        guesses the next tokens ("auto": the one that the catalogue names, if it is on this machine).
        """
        check_threads(threads)
        if streams < 1:
            raise EngineError(f"streams is {streams}; it must be 1 or more.")
        choice = pick_device(device)
        picked = choice.device
        picked_dtype = pick_dtype(dtype, picked)
        files = model if isinstance(model, ModelFiles) else resolve(model, on_progress=on_progress)
        tensor_parallel = tensor_parallel or fewest_ranks(files, device, dtype, quantize, context, kv_dtype)
        check_parallel(tensor_parallel, picked)
        draft_files, no_draft = (None, ()) if draft is None else find_draft(draft, files.name, on_progress)
        tokenizer = load_tokenizer(files)
        tokenizer.start_template()
        threads = threads or default_threads()
        loop = Loop()
        ranks, asked, together = None, None, None
        if tensor_parallel > 1:  # the ranks load while this process does
            threads = max(threads // tensor_parallel, 1) if picked.type == "cpu" else threads
            asked = Order.of(
                files,
                device=picked.type,
                dtype=str(picked_dtype).removeprefix("torch."),
                quantize=quantize,
                context=context,
                kv_dtype=kv_dtype,
                attention=attention,
                graphs=graphs,
                threads=threads,
                streams=streams,
            )
            parts = "GPUs" if picked.type == "cuda" else "processes"
            together = f"{tensor_parallel} {parts} compute the model together."

        def build(place: torch.device, numbers: torch.dtype, notes: tuple[str, ...]) -> Engine:
            if place.type == "cpu":
                torch.set_num_threads(threads)
            elif place.index is not None:
                torch.cuda.set_device(place)  # for this thread: streams, events and kernels are of this GPU
            before = available_memory(place)
            short = SHORT_CONTEXT if device == "auto" and place.type == "cuda" else LEAST_CONTEXT
            network, told = read_model(
                files,
                numbers,
                place,
                quantize,
                on_progress,
                context,
                room,
                (0, tensor_parallel),
                lambda spec: least_beside(spec, numbers, place, context, kv_dtype, short),
            )
            group = ranks.meet(place) if ranks is not None else None
            # Mapped weights still count as free memory, so subtract them, or that memory would be used twice.
            free = max(before - taken - network.nbytes * tensor_parallel, 0) // tensor_parallel
            drafter, drafter_told = None, no_draft
            if draft_files is not None:
                drafter, drafter_told = read_draft(
                    draft_files, network, tokenizer, place, quantize, context, free, on_progress
                )
                free -= drafter.nbytes if drafter is not None else 0
            engine = cls(
                loop,
                network,
                tokenizer,
                name=files.name,
                device=place,
                dtype=numbers,
                kv_dtype=kv_dtype,
                context=context,
                attention=attention,
                graphs=graphs,
                tuned=tuned,
                deterministic=deterministic,
                threads=threads,
                free=free if place.type == "cpu" else None,
                offload_gb=offload_gb,
                streams=streams,
                notes=tuple(
                    filter(None, (files.note, *notes, together, *tokenizer.notes, *told, *drafter_told))
                ),
                ranks=ranks,
                group=group,
                draft=drafter,
                draft_name=draft_files.name if draft_files is not None else "",
            )
            if disk is not None:
                engine._keep_in(disk, None if disk_gb is None else gb_to_bytes(disk_gb), files, deterministic)
            engine._mapped_at_load = mapped_bytes(files, place, network.nbytes, network.is_quantized)
            if drafter is not None and draft_files is not None:
                mapped = mapped_bytes(draft_files, place, drafter.nbytes, drafter.is_quantized)
                engine._mapped_at_load += mapped
            return engine

        def build_here() -> Engine:
            """Build on the device, or on the CPU if the GPU was not asked for and has no room."""
            try:
                return build(picked, picked_dtype, choice.notes)
            except NoRoomError as error:
                if device != "auto" or picked.type == "cpu" or ranks is not None:
                    raise
                refusal = error.with_traceback(None)  # its frames refer to the weights that were read
            torch.cuda.empty_cache()
            try:
                return build(
                    _CPU, pick_dtype(dtype, _CPU), (instead_of_gpu(refusal, files, dtype, quantize),)
                )
            except NoRoomError:
                raise refusal from None

        try:
            # They load while this process does.
            ranks = Ranks(asked, tensor_parallel, loop.fail) if asked is not None else None
            engine = loop.call(build_here)
        except BaseException as error:
            if ranks is not None:
                ranks.close()
            loop.close()
            tokenizer.close()
            if picked.type == "cuda" and isinstance(error, RuntimeError):
                raise not_loaded(error) from error
            raise
        if tunes and not deterministic:
            engine.tune_when_idle()
        if on_progress is not None:
            size = engine.figures().kv_bytes
            on_progress(Progress("prepare", f"KV cache for {engine.context_length:,} tokens", size, size))
        return engine

    def _keep_in(
        self, folder: Path, most_bytes: int | None, files: ModelFiles, deterministic: bool = False
    ) -> None:
        """Create the disk tier, if this model can have one. Call it on the loop's thread."""
        if self._ranks is not None or self.spec.window is not None:
            why = "the model is divided" if self._ranks is not None else "every layer sees only a window"
            self._no_disk = DiskFigures.none(f"nothing is kept, because {why}")
            return
        pieces = self._pieces
        row, threads = pieces.cache.row, torch.get_num_threads() if self.device.type == "cpu" else 0
        place = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        kernels = f"{pieces.attention_name}, {pieces.decode_name}, {pieces.runner.name}"
        facts = {
            "spec": repr(self.spec),
            "weights": repr(sorted((w.format, w.rows, w.columns) for w in pieces.network.parts(Weight))),
            "dtype": f"{self.dtype}, {row}, {self.block_size}",
            "kernels": f"{kernels}, {threads}, {place}{', deterministic' * deterministic}",
        }
        # The hashes require reading files, so the disk tier calls this where nobody waits.
        self._disk = self._engine_step.disk = DiskTier(
            folder, most_bytes, pieces.cache, self._blocks, self._loop.post,
            lambda: {**facts, "files": of_weights(files), "code": of_code()},
        )  # fmt: skip

    @property
    def weight_format(self) -> str:
        """The format of most of the weights, by size: BF16, Q4_0, ..."""
        sizes = Counter[str]()
        for weight in self._pieces.network.parts(Weight):
            sizes[weight.format.name] += weight.nbytes
        return next((name for name, _ in sizes.most_common(1)), "")

    def figures(self) -> Figures:
        """Return what the engine holds and does right now."""
        return replace(super().figures(), chunks=self.chunks.look())

    def kept_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of `tokens` need not be computed: they are in the cache or on disk."""
        keys = Rows.of(tokens).keys
        disk = self._engine_step.disk
        return self._loop.call(lambda: max(self._blocks.match(keys), disk.reach(keys) if disk else 0))

    def chat(
        self, system: str | None = None, think: Think = "auto", think_cache: ThinkCache = "exact"
    ) -> Chat:
        """Start a conversation. Raises EngineError if the model cannot chat."""
        return Chat(self, system, think, think_cache)
