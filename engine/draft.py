"""Finding a draft model for a model, checking that it fits, and loading it."""

import torch

from engine.cache.computing import GRAPH_BYTES, computing_bytes, prefill_rows
from engine.cache.kv_needs import kv_needs
from engine.cache.sizing import USEFUL_CONTEXT, kv_share
from engine.execute.compatibility import DRAFTS_NEED, not_divided, not_fused
from engine.execute.cpu.executor import unsupported
from engine.execute.loading import load_here, plan_here
from engine.kernels import on_gpu
from engine.machine.drafts import first_here
from engine.params import LoadOptions
from models.files import ModelFiles
from models.hub.catalogue import drafts_for
from models.hub.sources import resolve
from models.loading.plan import LoadPlan
from models.network import Network
from models.progress import OnProgress
from models.text.tokenizer import Tokenizer, load_tokenizer
from models.units import bytes_text

AUTO = "auto"
"""Use the draft model that the catalogue names for a model, if it is on this machine."""


def find_draft(
    asked: str | None, model: str, on_progress: OnProgress | None
) -> tuple[ModelFiles | None, tuple[str, ...]]:
    """Return the files of the draft model for `model`, and notes for the user. A model named in `asked` is downloaded
    if it is missing; for `AUTO` nothing is downloaded. None asks for no draft model. Raises ModelError."""
    if asked is None:
        return None, ()
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
    options: LoadOptions,
    free: int,
    on_progress: OnProgress | None,
) -> tuple[Network | None, tuple[str, ...]]:
    """Load a draft model for `model`, whose tokenizer is `tokenizer` and which leaves `free` bytes of memory. Return it
    and notes for the user; None instead if it cannot guess for `model`. Raises ModelError."""
    why = plan = None
    if _lacks_kernels(model, device):
        why = f"{DRAFTS_NEED}."
    elif (differs := tokenizer.difference(load_tokenizer(files))) is not None:
        why = f"the tokenizer of {files.name} is different ({differs}); choose a draft model of the same family."
    else:
        plan = plan_here(files, model.dtype, device, options)
        if (needed := _needed(plan, model, options.context, free)) > free:
            need = f"{files.name} and the KV caches need {bytes_text(needed)} of memory"
            why = f"{need}, and {bytes_text(free)} are free."
    if plan is None or why is not None:
        return None, (f"No draft model is used: {why}",)
    return load_here(plan, on_progress), plan.notes


def _needed(plan: LoadPlan, model: Network, context: int | None, free: int) -> int:
    """Return the bytes that a draft model and the KV caches of a useful length need."""
    device = plan.target.device
    tokens = min(context or USEFUL_CONTEXT, model.positions)
    kv = sum(kv_needs(spec, model.dtype).conversation_bytes(tokens) for spec in (plan.spec, model.spec))
    needed = plan.nbytes + int(kv / kv_share(device))
    if device.type == "cuda":
        rows = prefill_rows(model.spec, model.dtype, device, free + model.nbytes)
        needed += computing_bytes(model.spec, rows, model.dtype, device) + GRAPH_BYTES
    return needed


def _lacks_kernels(model: Network, device: torch.device) -> bool:
    """Return whether no kernels here can check guesses for `model`: its decode steps compute one row per sequence."""
    if device.type == "cpu":
        return model.share is not None or unsupported(model.spec) is not None
    if on_gpu.problem(device) is not None or (model.share and not_divided(model.whole, model.share.ranks)):
        return True
    return model.dtype != torch.bfloat16 or not_fused(model.spec) is not None
