"""The models that can be chosen: those on this machine, then the catalogue, each with its memory needs and speed
here.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from chatterm.backends.backend import ModelChoice, ModelError

if TYPE_CHECKING:
    from engine.machine.expected import Here, Speed
    from models.hub.sources import LocalModel


def choices(device: str, dtype: str, given_back: int, bandwidth: float | None = None) -> list[ModelChoice]:
    """Return the models that can be chosen. `device` and `dtype` are as in ChatOptions.

    `given_back` is the memory in bytes that the present model would free for the next; `bandwidth` is in bytes/s, None
    if unknown. Raises ModelError if a model cache cannot be read. Imports torch and reads the headers of models.
    """
    from engine.machine.expected import catalogue_speed
    from engine.machine.report import look_here
    from models.hub.sources import local_models

    here = look_here(device, dtype, given_back, bandwidth)
    local = local_models()
    found = [_choice(model.name, model.bytes, True, _local_speed(model, here)) for model in local]
    for name in _elsewhere(local):
        speed = catalogue_speed(name, here) if here is not None else None
        found.append(_choice(name, speed.download_bytes if speed is not None else None, False, speed))
    return found


def plain_choices() -> list[ModelChoice]:
    """Return the same models with name and size only, without heavy imports or measurements. Raises ModelError."""
    from models.hub.sources import local_models

    local = local_models()
    here = [ModelChoice(model.name, model.bytes, True, None) for model in local]
    return [*here, *(ModelChoice(name, None, False, None) for name in _elsewhere(local))]


def _elsewhere(local: "list[LocalModel]") -> list[str]:
    """Return the names of the catalogue's models that are not on this machine."""
    from models.hub.catalogue import HUB_NAMES, names

    known = {model.name.lower() for model in local}
    return [name for name in names() if known.isdisjoint((name.lower(), HUB_NAMES.get(name, "").lower()))]


def _local_speed(model: "LocalModel", here: "Here | None") -> "Speed | None":
    from engine.machine.expected import local_speed
    from engine.params import LoadOptions

    with suppress(ModelError):
        return local_speed(model.files, here, LoadOptions()) if here is not None else None
    return None


def _choice(name: str, size: int | None, on_disk: bool, speed: "Speed | None") -> ModelChoice:
    if speed is None:
        return ModelChoice(name, size, on_disk, None)
    return ModelChoice(
        name,
        size,
        on_disk,
        speed.fits,
        memory_bytes=speed.memory_bytes,
        tokens_per_s=speed.tokens_per_s,
        int4_tokens_per_s=speed.int4_tokens_per_s,
        crawls=speed.crawls,
    )
