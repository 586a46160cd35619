"""Finding a draft model for a model, checking that it fits, and loading it."""

import torch

from engine.cache.computing import GRAPH_BYTES, computing_bytes, prefill_rows
from engine.cache.kv_rows import token_bytes
from engine.cache.sizing import USEFUL_CONTEXT, kv_share
from engine.execute.compatibility import DRAFTS_NEED, not_divided, not_fused
from engine.execute.cpu.executor import unsupported
from engine.execute.cpu.weight_loading import packs, read_model
from engine.kernels import on_gpu
from engine.machine.drafts import first_here
from models.files import ModelFiles
from models.hub.catalogue import drafts_for
from models.hub.sources import resolve
from models.load import bytes_to_load
from models.network import Network
from models.progress import OnProgress
from models.text.tokenizer import Tokenizer, load_tokenizer
from models.units import bytes_text

AUTO = "auto"
"""Use the draft model that the catalogue names for a model, if it is on this machine."""


def find_draft(
    asked: str | ModelFiles, model: str, on_progress: OnProgress | None
) -> tuple[ModelFiles | None, tuple[str, ...]]:
    """Return the files of the draft model for `model`, and notes for the user. A model named in `asked` is downloaded
    if it is missing; for `AUTO` nothing is downloaded. Raises ModelError."""
    if isinstance(asked, ModelFiles):
        return asked, ()
    if asked != AUTO:
        return resolve(asked, on_progress=on_progress), ()
    names = drafts_for(model)
    if (found := first_here(names)) is not None:
        return found, ()
    if not names:
        return None, (f"No draft model is used: the catalogue has none for {model}; name one with --draft.",)
    return None, (
        f"No draft model is used: none for {model} is on this machine; run: chatterm pull {names[0]}",
    )


def read_draft(
    files: ModelFiles,
    model: Network,
    tokenizer: Tokenizer,
    device: torch.device,
    quantize: str,
    context: int | None,
    free: int,
    on_progress: OnProgress | None,
) -> tuple[Network | None, tuple[str, ...]]:
    """Load a draft model for `model`, whose tokenizer is `tokenizer` and which leaves `free` bytes of memory. Return it
    and notes for the user; None instead if it cannot guess for `model`. Raises ModelError."""
    if (why := _refused(files, model, tokenizer, device, quantize, context, free)) is not None:
        return None, (f"No draft model is used: {why}",)
    return read_model(files, model.dtype, device, quantize, on_progress, context)


def _refused(
    files: ModelFiles,
    model: Network,
    tokenizer: Tokenizer,
    device: torch.device,
    quantize: str,
    context: int | None,
    free: int,
) -> str | None:
    if _lacks_kernels(model, device):
        return f"{DRAFTS_NEED}."
    if (why := tokenizer.difference(load_tokenizer(files))) is not None:
        return f"the tokenizer of {files.name} is different ({why}); choose a draft model of the same family."
    spec, weights = bytes_to_load(
        files,
        dtype=model.dtype,
        device=device,
        quantize=quantize,
        longest=context,
        packs=packs(model.dtype, device),
    )
    each = token_bytes(spec, model.dtype) + token_bytes(model.spec, model.dtype)
    tokens = min(context or USEFUL_CONTEXT, model.positions)
    needed = weights + int(tokens * each / kv_share(device))
    if device.type == "cuda":
        rows = prefill_rows(model.spec, model.dtype, device, free + model.nbytes)
        needed += computing_bytes(model.spec, rows, model.dtype, device) + GRAPH_BYTES
    if needed > free:
        return f"{files.name} and the KV caches need {bytes_text(needed)} of memory, and {bytes_text(free)} are free."
    return None


def _lacks_kernels(model: Network, device: torch.device) -> bool:
    """Return whether no kernels here can check guesses for `model`: its decode steps compute one row per sequence."""
    if device.type == "cpu":
        return model.share is not None or unsupported(model.spec) is not None
    if on_gpu.problem(device) is not None or (model.share and not_divided(model.whole)):
        return True
    return model.dtype != torch.bfloat16 or not_fused(model.spec) is not None
