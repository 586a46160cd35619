"""From local files to a model that runs: build it empty, check every tensor, then fill it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.errors import ModelError
from models.families.config import ModelConfig, load_config
from models.families.llama import LlamaModel
from models.families.qwen3 import Qwen3Model
from models.progress import OnProgress, Progress
from models.reference.decoder import DecoderModel
from models.reference.layers import Linear, Product, choose_product
from models.reference.rope import rotary_table
from models.units import bytes_text
from models.weights.block_formats import Kind
from models.weights.checkpoint import StoredTensor, read_safetensors
from models.weights.quantize import choose_kinds, conversion_note, packed_rows
from models.weights.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    hold_quantized,
    quantized_weights,
    release,
)
from models.weights.staging import Staging

if TYPE_CHECKING:
    from models.hub.sources import ModelFiles

__all__ = ["available_bytes", "build_model", "fill_model", "load_config", "load_model", "needed_bytes"]

INT4_BYTES = 0.75
"""Of a weight with `--quantize int4`, what stays in 8 bits included."""

_MODELS: dict[str, type[DecoderModel]] = {
    "Qwen3ForCausalLM": Qwen3Model,
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
}


def load_model(
    files: "ModelFiles",
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress | None = None,
    context_length: int | None = None,
    quantize: str = "auto",
    on_note: Callable[[str], None] | None = None,
) -> DecoderModel:
    """The model of local files in `dtype` on `device`, ready for forward() under torch.inference_mode().

    `context_length` is the number of positions to prepare for; None takes the model's own. `quantize` is one of
    models.weights.quantize.QUANTIZE: "auto" leaves the blocks of a GGUF file as they are on a CPU, mapped from the
    file; `dtype` is then that of the activations and norms. On a CPU it needs the memory of the model and of one tensor
    at its peak; to a GPU the weights stream through buffers of 100 MB. `on_note` gets what a person should know of how
    the weights are held, a line each. Raises ModelError for whatever is wrong
    with the files and when memory is short.
    """
    if files.gguf is not None:
        from models.weights.gguf import config_of, read_gguf
        from models.weights.gguf_tensors import stored_tensors

        file = read_gguf(files.gguf)
        config = config_of(file)
        tensors = stored_tensors(file, config)
    else:
        config = load_config(files)
        tensors = read_safetensors(files.folder or Path())
    model = build_model(config, choose_product(dtype, device))
    _match(model, tensors)
    kinds = choose_kinds(tensors, quantize, device)
    if kinds:
        hold_quantized(model, kinds, dtype)
        if on_note is not None and (note := conversion_note(tensors, kinds)):
            on_note(note)
    positions = context_length or config.max_position_embeddings
    # A memory-mapped file is as near to a CPU as a buffer: nothing is gained by staging there.
    staging = Staging() if device.type == "cuda" else None
    fill_model(model, tensors, dtype, device, on_progress, positions, staging)
    return model


def build_model(config: ModelConfig, product: Product) -> DecoderModel:
    """The modules of a config, their parameters on the meta device."""
    return _MODELS[config.architecture](config, product)


def fill_model(
    model: DecoderModel,
    tensors: Iterable[StoredTensor],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress | None,
    positions: int,
    staging: Staging | None = None,
) -> None:
    """Give every parameter its memory and its values, and make the rotary table.

    Names, shapes and memory are checked before anything is allocated. With `staging` the weights are streamed,
    without it they are copied one tensor at a time. Raises ModelError; what `on_progress` raises ends the load.
    The parameters of a load that failed are empty again.
    """
    fillings = _match(model, tensors)
    needed = needed_bytes(model, dtype, positions)
    available = available_bytes(device)
    if available is not None and needed > available:
        raise ModelError(_too_large(needed, available, dtype, device, bool(quantized_weights(model))))
    total = sum(filling.tensor.nbytes for filling in fillings)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_progress is not None:
            on_progress(Progress("load", "weights", done, total))

    try:
        advance(0)
        _allocate(model, dtype, device)
        model.rotary_table = rotary_table(model.config, positions, dtype, device)
        _fill(fillings, device, staging, advance)
    except BaseException as error:
        # The frames of the error hold views of the parameters, which would keep their memory.
        clear_frames(error.__traceback__)
        model.to_empty(device="meta")
        release(model)
        if _is_out_of_memory(error):
            raise ModelError(
                f"Memory ran out while loading: the model needs {bytes_text(needed)} on {device}; "
                "choose a smaller model or free some memory."
            ) from None
        raise
    finally:
        if device.type == "cuda":  # what was only needed on the way is free for others, too
            torch.cuda.empty_cache()


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU allocator has no error of its own, and neither has a CUDA context that does not fit.
    text = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text


def _fill(
    fillings: list["_Filling"],
    device: torch.device,
    staging: Staging | None,
    advance: Callable[[int], None],
) -> None:
    """Write every tensor to its place, and tell `advance` the bytes that are done."""
    streamed = []
    for filling in fillings:
        extent = filling.tensor.extent
        if (
            isinstance(filling.module, QuantizedLinear | QuantizedEmbedding)
            and filling.parameter == "weights"
        ):
            held = filling.module.weights[filling.start]
            data = packed_rows(filling.tensor, Kind(held.qtype))
            _touch(data)
            filling.module.weights[filling.start] = replace(held, data=data)
            advance(filling.tensor.nbytes)
        elif staging is None or extent is None:
            filling.tensor.copy_into(filling.target())
            advance(filling.tensor.nbytes)
        else:
            streamed.append((extent, filling.target()))
    if staging is not None:
        staging.stream(streamed, device, advance)


def _touch(data: Tensor) -> None:
    """Read a byte of every page, so that a mapped file is in memory when the first token is computed."""
    data.flatten()[::4096].sum()


@dataclass(frozen=True, slots=True)
class _Filling:
    """A stored tensor and the rows of the parameter that it fills."""

    tensor: StoredTensor
    module: nn.Module
    parameter: str
    start: int
    rows: int

    def target(self) -> Tensor:
        parameter: Tensor = getattr(self.module, self.parameter)
        return parameter.detach().narrow(0, self.start, self.rows)


def _match(model: DecoderModel, tensors: Iterable[StoredTensor]) -> list[_Filling]:
    """Where each tensor goes, in file order. Raises ModelError unless the tensors are exactly the model's."""
    wanted = {name: (module, slot) for name, module, slot in model.slots()}
    fillings = []
    for tensor in tensors:
        if _is_redundant(tensor.name, model.config):
            continue
        found = wanted.pop(tensor.name, None)
        if found is None:
            raise ModelError(
                f"The checkpoint has the tensor {tensor.name[:80]}, which {model.config.architecture} with this "
                "config does not use, or has it twice; the weights and the config do not match."
            )
        module, slot = found
        if tensor.shape != slot.shape:
            raise ModelError(
                f"{tensor.name} has the shape {list(tensor.shape)}, but the config requires "
                f"{list(slot.shape)}; the weights and the config do not match."
            )
        fillings.append(_Filling(tensor, module, slot.parameter, slot.start, slot.rows))
    if wanted:
        more = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
        raise ModelError(
            f"The checkpoint lacks {next(iter(wanted))}{more}; it is incomplete: download it again."
        )
    return fillings


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that old checkpoints carry and that follow from the others."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _allocate(model: DecoderModel, dtype: torch.dtype, device: torch.device) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                memory = torch.empty(parameter.shape, dtype=dtype, device=device)
                module.register_parameter(name, nn.Parameter(memory, requires_grad=False))
    if model.config.tie_word_embeddings and isinstance(model.lm_head, Linear):
        model.lm_head.weight = model.embed_tokens.weight


def needed_bytes(model: DecoderModel, dtype: torch.dtype, positions: int) -> int:
    """Bytes of the parameters, of quantised weights (mapped from a file or not) and of the rotary table."""
    # parameters() yields a tied weight once.
    numbers = sum(parameter.numel() for parameter in model.parameters()) + positions * model.config.head_dim
    return numbers * dtype.itemsize + sum(weight.nbytes for weight in quantized_weights(model))


def _too_large(needed: int, available: int, dtype: torch.dtype, device: torch.device, quantized: bool) -> str:
    """One line: what the model needs, what is free, and what would fit."""
    if quantized:
        ways = [f"choose a model of at most {bytes_text(available)}"]
    else:
        ways = [f"choose a smaller model (about {_count(available // dtype.itemsize)} parameters fit)"]
        if dtype.itemsize > 2:
            ways.append("use --dtype bfloat16, which needs half")
        if device.type == "cpu" and needed * INT4_BYTES / dtype.itemsize < available:
            ways.append("use --quantize int4")
    on_cpu = None if device.type == "cpu" else available_bytes(torch.device("cpu"))
    if on_cpu is not None and needed < on_cpu:
        ways.append(f"use --device cpu, where {bytes_text(on_cpu)} are free")
    return (
        f"The model needs {bytes_text(needed)} of memory on {device}, but {bytes_text(available)} are free; "
        f"{', '.join(ways)}, or free some memory."
    )


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device now; None where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limits = [*free, *_cgroup_bytes(Path("/sys/fs/cgroup"))]
    return min(limits) if limits else None


def _cgroup_bytes(folder: Path) -> list[int]:
    """What a container may still allocate: its limit less what it cannot drop, files are; empty if unlimited."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        counts = dict(
            line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        )
        files = sum(int(counts.get(kind, 0)) for kind in ("inactive_file", "active_file"))
        return [] if limit == "max" else [int(limit) - used + files]
    except (OSError, ValueError):
        return []
