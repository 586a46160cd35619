"""Finds the models on this machine for which a smaller one, also on this machine, can guess the next tokens."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from engine.errors import EngineError
from engine.machine.memory_check import memory_need
from engine.params import LoadOptions
from models.errors import ModelError
from models.files import ModelFiles
from models.hub.catalogue import drafts_for
from models.hub.sources import local_models, resolve


@dataclass(frozen=True, slots=True)
class DraftPair:
    """The draft model that `--draft auto` picks for a model, and the bytes it needs in addition."""

    model: str
    draft: str
    weight_bytes: int
    kv_bytes: int
    """For a conversation of a useful length."""
    fits: bool
    """Whether both models fit in memory together."""


def draft_pairs(device: str) -> tuple[DraftPair, ...]:
    """Return the pairs on this machine, by name. Raises ModelError if the caches cannot be read."""
    found, options = list[DraftPair](), LoadOptions(device)
    for model in local_models():
        draft = first_here(drafts_for(model.name))
        if draft is None:
            continue
        with suppress(ModelError, EngineError):
            mine, more = (memory_need(files, options) for files in (model.files, draft))
            whole = mine.weights + mine.beside + more.weights + more.beside
            found.append(DraftPair(model.name, draft.name, more.weights, more.beside, whole <= mine.free))
    return tuple(found)


def first_here(names: Iterable[str]) -> ModelFiles | None:
    """Return the first of these models that is on this machine; None if none is. Download nothing."""
    for name in names:
        with suppress(ModelError):
            return resolve(name, offline=True)
    return None
