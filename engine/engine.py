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
from engine.execute.build_options import BuildOptions
from engine.execute.faults import not_loaded
from engine.execute.loading import gpu_room, load_here, plan_here
from engine.kernels.native.library import check_threads, default_threads
from engine.machine.instead import instead_of_gpu
from engine.machine.memory_check import fewest_ranks, mapped_bytes
from engine.parallel.ranks import Ranks
from engine.params import LoadOptions
from engine.schedule.loop import Loop
from engine.store.disk import DiskTier
from engine.store.identity import of_code, of_weights
from models.errors import NoRoomError
from models.files import ModelFiles
from models.hub.sources import resolve
from models.loading.plan import Room
from models.network import Network, Weight
from models.progress import OnProgress, Progress
from models.text.tokenizer import Tokenizer, load_tokenizer

_CPU = torch.device("cpu")


class Engine(EngineCore):
    """One model, and conversations with it. Create it with `Engine.load`, and close it when done.

    Every public method may be called from any thread.
    """

    _mapped_at_load = 0

    def __init__(self, loop: Loop, network: Network, tokenizer: Tokenizer, *given: Any, **more: Any) -> None:
        """Take the arguments of `EngineCore`."""
        super().__init__(loop, network, tokenizer, *given, **more)
        self.chunks = Chunks(self)
        """Named prompt prefixes that stay in the cache."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights mapped from a file and not copied since; the system counts them as free memory."""
        return max(self._mapped_at_load - self.copied_bytes, 0)

    @classmethod
    def load(
        cls,
        model: str | ModelFiles,
        options: LoadOptions | None = None,
        *,
        taken: int = 0,
        disk: Path | None = None,
        room: Room | None = None,
        on_progress: OnProgress | None = None,
        **chosen: Any,
    ) -> "Engine":
        """Download what is missing, read the weights and start the engine. Raises ModelError and EngineError.

        `model` is a name for `models.hub.sources.resolve`, or local files. `chosen` are fields of `LoadOptions`, which
        take precedence over `options`, as in `Engine.load("smollm2", device="cpu")`. `taken` bytes of a CPU's memory
        count as free but are not (mapped weights of other models). The blocks that conversations have cached are kept
        in the folder `disk` (None: nowhere). A model that does not fit on the GPU is refused before it is read, or,
        with the device "auto", computed by the CPU, and a note says so. `room` is for tests: the bytes of the device
        that weights may take before experts are held in host memory.
        """
        given = LoadOptions.of(options or LoadOptions(), **chosen)
        check_threads(given.threads)
        if given.streams < 1:
            raise EngineError(f"streams is {given.streams}; it must be 1 or more.")
        choice = pick_device(given.device)
        picked = choice.device
        picked_dtype = pick_dtype(given.dtype, picked)
        files = model if isinstance(model, ModelFiles) else resolve(model, on_progress=on_progress)
        count = given.tensor_parallel or fewest_ranks(files, given)
        check_parallel(count, picked)
        draft_files, no_draft = find_draft(given.draft, files.name, on_progress)
        tokenizer = load_tokenizer(files)
        tokenizer.start_template()
        threads = given.threads or default_threads()
        if count > 1 and picked.type == "cpu":
            threads = max(threads // count, 1)
        asked = replace(given, threads=threads, tensor_parallel=count)
        loop = Loop()
        ranks, together = None, None
        if count > 1:
            parts = "GPUs" if picked.type == "cuda" else "processes"
            together = f"{count} {parts} compute the model together."

        def build(place: torch.device, numbers: torch.dtype, notes: tuple[str, ...]) -> Engine:
            if place.type == "cpu":
                torch.set_num_threads(threads)
            elif place.index is not None:
                torch.cuda.set_device(place)  # for this thread: streams, events and kernels are of this GPU
            before = available_memory(place)
            short = SHORT_CONTEXT if given.device == "auto" and place.type == "cuda" else LEAST_CONTEXT
            plan = plan_here(
                files,
                numbers,
                place,
                asked,
                room=room or (gpu_room(numbers, place, asked.context) if count == 1 else None),
                rank=(0, count),
                needs=lambda spec: least_beside(
                    spec,
                    numbers,
                    place,
                    asked.context,
                    asked.kv_dtype,
                    short,
                ),
            )
            network = load_here(plan, on_progress)
            group = ranks.meet(place) if ranks is not None else None
            # Mapped weights still count as free memory, so subtract them, or that memory would be used twice.
            free = max(before - taken - network.nbytes * count, 0) // count
            drafter, drafter_told = None, no_draft
            if draft_files is not None:
                drafter, drafter_told = read_draft(
                    draft_files, network, tokenizer, place, asked, free, on_progress
                )
                free -= drafter.nbytes if drafter is not None else 0
            told = (files.note, *notes, together, *tokenizer.notes, *plan.notes, *drafter_told)
            engine = cls(
                loop,
                network,
                tokenizer,
                BuildOptions.of(
                    asked,
                    free=free if place.type == "cpu" else None,
                    group=group,
                    drafter=drafter,
                    draft_name=draft_files.name if draft_files is not None else "",
                    notes=tuple(filter(None, told)),
                ),
                name=files.name,
                device=place,
                ranks=ranks,
            )
            if disk is not None:
                engine._keep_in(disk, files, asked)
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
                if given.device != "auto" or picked.type == "cpu" or ranks is not None:
                    raise
                refusal = error.with_traceback(None)  # its frames refer to the weights that were read
            torch.cuda.empty_cache()
            try:
                return build(_CPU, pick_dtype(given.dtype, _CPU), (instead_of_gpu(refusal, files, given),))
            except NoRoomError:
                raise refusal from None

        try:
            if count > 1:  # they load while this process does; rank 0 refuses what cannot be deterministic
                name = str(picked_dtype).removeprefix("torch.")
                resolved = replace(asked, device=picked.type, dtype=name, deterministic=False)
                ranks = Ranks(files, resolved, loop.fail)
            engine = loop.call(build_here)
        except BaseException as error:
            if ranks is not None:
                ranks.close()
            loop.close()
            tokenizer.close()
            if picked.type == "cuda" and isinstance(error, RuntimeError):
                raise not_loaded(error) from error
            raise
        if on_progress is not None:
            size = engine.figures().kv_bytes
            on_progress(Progress("prepare", f"KV cache for {engine.context_length:,} tokens", size, size))
        return engine

    def _keep_in(self, folder: Path, files: ModelFiles, options: LoadOptions) -> None:
        """Create the disk tier, if this model can have one. Call it on the loop's thread."""
        refused = {
            "the model is divided": self._ranks is not None,
            "every layer sees only a window": self.spec.window is not None,
        }
        if (why := next((why for why, holds in refused.items() if holds), None)) is not None:
            self._no_disk = DiskFigures.none(f"nothing is kept, because {why}")
            return
        most_bytes = None if options.disk_gb is None else gb_to_bytes(options.disk_gb)
        pieces = self.pieces
        row, threads = pieces.cache.row, torch.get_num_threads() if self.device.type == "cpu" else 0
        place = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        kernels = f"{pieces.attention_name}, {pieces.decode_name}, {pieces.runner.name}"
        groups = f", {pieces.cache.groups}" if pieces.cache.pools else ""
        facts = {
            "spec": repr(self.spec),
            "weights": repr(sorted((w.format, w.rows, w.columns) for w in pieces.network.parts(Weight))),
            "dtype": f"{self.dtype}, {row}, {self.block_size}{groups}",
            "kernels": f"{kernels}, {threads}, {place}{', deterministic' * options.deterministic}",
        }
        # The hashes require reading files, so the disk tier calls this where nobody waits.
        self.disk = self.engine_step.disk = DiskTier(
            folder, most_bytes, pieces.cache, self._blocks, self.loop.post,
            lambda: {**facts, "files": of_weights(files), "code": of_code()},
        )  # fmt: skip

    @property
    def weight_format(self) -> str:
        """The format of most of the weights, by size: BF16, Q4_0, ..."""
        sizes = Counter[str]()
        for weight in self.pieces.network.parts(Weight):
            sizes[weight.format.name] += weight.nbytes
        return next((name for name, _ in sizes.most_common(1)), "")

    def figures(self) -> Figures:
        """Return what the engine holds and does right now."""
        return replace(super().figures(), chunks=self.chunks.look())

    def kept_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of `tokens` need not be computed: they are in the cache or on disk."""
        keys = Rows.of(tokens).keys
        disk = self.engine_step.disk
        return self.loop.call(lambda: max(self._blocks.match(keys), disk.reach(keys) if disk else 0))

    def chat(
        self, system: str | None = None, think: Think = "auto", think_cache: ThinkCache = "exact"
    ) -> Chat:
        """Start a conversation. Raises EngineError if the model cannot chat."""
        return Chat(self, system, think, think_cache)
