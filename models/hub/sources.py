"""Resolve what a user calls a model to files on this machine."""

import difflib
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from models.errors import ModelError
from models.files import ModelFiles
from models.hub import catalogue
from models.hub import download as hub
from models.hub.download import HubModel
from models.hub.download_common import file_size
from models.progress import OnProgress


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that chatterm keeps on this machine, complete and ready to run."""

    name: str
    """The name that runs it again."""
    files: ModelFiles
    bytes: int
    """Bytes of its files on disk."""
    source: Literal["hub", "catalogue"]


def resolve(
    model: str, *, on_progress: OnProgress | None = None, offline: bool = False, refresh: bool = False
) -> ModelFiles:
    """Return the local files of `model`, after downloading missing ones.

    `model` is a catalogue name, a path to a folder or a GGUF file, a Hub id (`owner/name`, optionally
    `@revision`) or `hf.co/owner/name/file.gguf`. A complete model is returned without any network call,
    unless `refresh` asks whether there is a newer one; `offline` forbids the network. An exception from
    `on_progress` stops a download; the data that has arrived is kept, and the next call continues.
    Raises ModelError with one line for the user.
    """
    try:
        return _resolved(model, on_progress, offline, refresh)
    except PermissionError as error:
        raise unreadable(error) from error


def _resolved(model: str, on_progress: OnProgress | None, offline: bool, refresh: bool) -> ModelFiles:
    source = parse(model)
    match source:
        case catalogue.WheelModel():
            if offline and catalogue.cached(source) is None:
                raise ModelError(
                    f"{source.name} is not on this machine yet; connect once and run: chatterm pull {source.name}"
                )
            path = catalogue.fetch(source, on_progress=on_progress)
            return ModelFiles(source.name, gguf=path, note=hidden_folder(model))
        case HubModel():
            path = hub.fetch(source, on_progress=on_progress, offline=offline, refresh=refresh)
            return replace(_hub_files(source, path), note=hidden_folder(model))
        case Path():
            return local_files(source)


def parse(model: str) -> catalogue.WheelModel | HubModel | Path:
    """Return the kind of source that `model` names; a Path exists. Does not use the network. Raises ModelError."""
    text = model.strip()
    if not text:
        raise ModelError("The model's name is empty; try smollm2, or a Hub id such as Qwen/Qwen3-0.6B.")
    if len(text) > 300:
        raise ModelError(f"The model's name has {len(text)} characters ({text[:20]}...); is it a prompt?")
    if not text.isprintable():
        raise ModelError(f"The model's name contains control characters: {text!a}; remove them.")
    name = text.lower()
    if name in catalogue.WHEELS:
        return catalogue.WHEELS[name]
    if name in catalogue.HUB_NAMES:
        return HubModel(catalogue.HUB_NAMES[name])
    if name in catalogue.HUB_FILES:
        file = catalogue.HUB_FILES[name]
        return HubModel(file.repo, file=file.file)
    if (on_hub := hub.parse_url(text)) is not None:
        return on_hub
    path = _existing(text)
    if path is not None:
        return path
    if text.startswith((".", "/", "~")) or text.endswith(("/", ".gguf", ".safetensors")) or "\\" in text:
        hint = ""
        if text.count("/") == 2 and text.endswith(".gguf") and text[0] not in "./~":
            hint = f" For a file on the Hub, use hf.co/{text}."
        raise ModelError(f"There is no file or folder {text}.{hint}")
    if (on_hub := hub.parse_id(text)) is not None:
        return on_hub
    raise ModelError(_unknown(text))


def local_commit(model: str) -> str | None:
    """Return the commit of a model from the Hub that is on this machine; None for other models. Raises ModelError."""
    source = parse(model)
    return hub.commit_here(source) if isinstance(source, HubModel) else None


def hidden_folder(model: str) -> str | None:
    """Return a line for the user if the catalogue name `model` also names a model folder in the working directory."""
    name = model.strip()
    path = _existing(name)
    if path is not None and path.is_dir() and name.lower() in catalogue.names():
        with suppress(ModelError):
            local_files(path)
            return f"{name} is the model of the catalogue. For the one in the folder {name} here, write ./{name}."
    return None


def local_files(path: Path) -> ModelFiles:
    """Return the files of a model in a folder in Hugging Face layout, or of a GGUF file. Raises ModelError."""
    try:
        return _folder(path) if path.is_dir() else _gguf(path)
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror or error}.") from error


def local_models() -> list[LocalModel]:
    """Return the complete models in chatterm's cache and in the Hub's cache folder, by name. Raises ModelError."""
    found = []
    try:
        for wheel in catalogue.WHEELS.values():
            if path := catalogue.cached(wheel):
                size = sum(file_size(file) for file in path.parent.iterdir() if file.is_file())
                found.append(LocalModel(wheel.name, ModelFiles(wheel.name, gguf=path), size, "catalogue"))
        for on_hub, path, size in hub.cached_models():
            found.append(LocalModel(_hub_name(on_hub), _hub_files(on_hub, path), size, "hub"))
    except OSError as error:
        raise unreadable(error) from error
    return sorted(found, key=lambda entry: entry.name.lower())


def remove(model: str) -> int:
    """Delete `model` from the caches, including an unfinished download; return the bytes freed.

    Never deletes the user's own folders or files. Raises ModelError if there is nothing to remove.
    """
    source, _ = _downloaded(model)
    try:
        return catalogue.remove(source) if isinstance(source, catalogue.WheelModel) else hub.remove(source)
    except OSError as error:
        raise ModelError(
            f"Cannot delete {source.name}: {error.strerror or error} ({error.filename})."
        ) from error


def unreadable(error: OSError) -> ModelError:
    """Return the error for a cache that cannot be read."""
    return ModelError(f"Cannot read the cache: {error.strerror or error} ({error.filename}).")


def held_bytes(model: str) -> int:
    """Return the bytes that `remove` would delete. Raises ModelError as `remove` does, so no one confirms in vain."""
    return _downloaded(model)[1]


def _downloaded(model: str) -> tuple[catalogue.WheelModel | HubModel, int]:
    """Return a model that chatterm downloaded, and its bytes. Raises ModelError if nothing of it is here."""
    source = parse(model)
    if isinstance(source, Path):
        raise ModelError(
            f"{source} is your own; chatterm removes only what it downloaded. Delete it yourself."
        )
    try:
        held = (
            catalogue.held_bytes(source)
            if isinstance(source, catalogue.WheelModel)
            else hub.held_bytes(source)
        )
    except OSError as error:
        raise unreadable(error) from error
    if held == 0:
        raise ModelError(f"{source.name} is not on this machine; see: chatterm list")
    return source, held


def _existing(text: str) -> Path | None:
    """Return the file or folder that `text` names, or None."""
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # the name is too long, or there is no such user
        return None


def _unknown(text: str) -> str:
    """Return one line for an unknown name, with names close to it."""
    ways = "a Hub id such as Qwen/Qwen3-0.6B, a folder, or a .gguf file"
    if "://" in text:
        return f"{text} is an address, not a model on this machine or the Hub. Use a catalogue name, {ways}."
    known = {name.lower(): name for name in [*catalogue.names(), *catalogue.HUB_NAMES.values()]}
    known |= {entry.name.lower(): entry.name for entry in local_models()}
    close = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.6)
    if not close:
        close = [name for name in known if re.sub(r"\W", "", text.lower()) in re.sub(r"\W", "", name)][:3]
    if close:
        return f"Unknown model {text}. Did you mean {' or '.join(known[name] for name in close)}?"
    families = dict[str, str]()
    for name in catalogue.names():
        families.setdefault(name.partition(":")[0], name)
    return f"Unknown model {text}. Use a catalogue name ({', '.join(families.values())}, ...), {ways}."


def _gguf(path: Path) -> ModelFiles:
    if not path.is_file():  # reading a pipe would wait for ever
        raise ModelError(f"{path} is not a regular file; name a .gguf file or a model folder.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        if path.suffix in hub.PICKLE_SUFFIXES:
            raise ModelError(f"{path} has pickled weights: {hub.PICKLE_REASON}")
        if path.suffix == ".safetensors":
            raise ModelError(
                f"{path} has only the weights; name the folder that also has config.json: {path.parent}"
            )
        raise ModelError(
            f"{path} is not a GGUF file (it does not start with GGUF); is it a complete download?"
        )
    return ModelFiles(path.name, gguf=path)


def _folder(path: Path) -> ModelFiles:
    names = sorted(entry.name for entry in path.iterdir())
    if "config.json" not in names:
        gguf = [name for name in names if name.endswith(".gguf")]
        if gguf:
            raise ModelError(f"{path} contains GGUF files; name one of them: {path / gguf[0]}")
        raise ModelError(
            f"{path} has no config.json, so it is not a model folder; name one with config.json, tokenizer.json "
            "and *.safetensors."
        )
    if not any(name.endswith(".safetensors") for name in names):
        if any(name.endswith(hub.PICKLE_SUFFIXES) for name in names):
            raise ModelError(f"{path} has only pickled weights: {hub.PICKLE_REASON}")
        raise ModelError(f"{path} has no *.safetensors weights; download the model again.")
    # For "." and "..", use the folder's real name.
    return ModelFiles(path.resolve().name or str(path), folder=path)


def _hub_files(model: HubModel, path: Path) -> ModelFiles:
    if path.is_dir():
        return ModelFiles(_hub_name(model), folder=path)
    return ModelFiles(_hub_name(model), gguf=path)


def _hub_name(model: HubModel) -> str:
    """Return the name that gets this model again: the catalogue name if it has one for this file."""
    known = {(file.repo, file.file): name for name, file in catalogue.HUB_FILES.items()}
    short = known.get((model.repo, model.file or "")) if model.revision == "main" else None
    return short or model.name
