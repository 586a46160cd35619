"""The models that can be chosen: those on this machine, then the catalogue, each with its size and whether it fits."""

from typing import TYPE_CHECKING

from chatterm.backend import EngineError, ModelChoice, ModelError

if TYPE_CHECKING:
    from models.config import ModelConfig


def choices(device: str, dtype: str, given_back: int) -> list[ModelChoice]:
    """What a person can choose. `device` and `dtype` are those to compute with, as in ChatOptions.

    `given_back`: bytes that the present model holds and that the next one may take. Raises ModelError when a cache
    cannot be read. Imports torch, and reads the headers of models.
    """
    from engine.expected import MODELS, MORE_MODELS
    from models.catalogue import HUB_NAMES, WHEELS, names
    from models.load import load_config
    from models.sources import local_models

    memory = _Memory(device, dtype, given_back)
    found = []
    local = local_models()
    for model in local:
        try:
            config = load_config(model.files)
        except ModelError:
            config = None
        found.append(ModelChoice(model.name, model.bytes, True, memory.fits(config)))
    here = {model.name.lower() for model in local}
    shapes = {**MODELS, **MORE_MODELS}
    for name in names():
        if name.lower() in here or HUB_NAMES.get(name, "").lower() in here:
            continue
        shape = shapes.get(name)
        size = WHEELS[name].wheel_bytes if name in WHEELS else memory.checkpoint_bytes(shape)
        found.append(ModelChoice(name, size, False, memory.fits(shape)))
    return found


class _Memory:
    """What a model needs on this machine, and what there is."""

    def __init__(self, device: str, dtype: str, given_back: int) -> None:
        from engine.device import available_memory, pick_device, pick_dtype

        self._device = None
        try:
            self._device = pick_device(device).device
            self._dtype = pick_dtype(dtype, self._device)
            self._free = available_memory(self._device) + given_back
        except (EngineError, RuntimeError, OSError):
            self._device = None  # loading will say why

    def fits(self, config: "ModelConfig | None") -> bool | None:
        """Whether the weights and a conversation fit; None: nobody knows."""
        if config is None or self._device is None:
            return None
        from engine.expected import PROGRAMS, expected_speed

        program = PROGRAMS["plain modules"]
        return expected_speed("", config, self._device, self._dtype, program, None, self._free).context > 0

    def checkpoint_bytes(self, config: "ModelConfig | None") -> int | None:
        """About what the checkpoint takes on disk: bf16 weights."""
        if config is None:
            return None
        from engine.expected import parameters

        return 2 * parameters(config)
