"""Facts about a model from the headers of its files alone: nothing is loaded and torch is not imported."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.errors import ModelError
from models.families.registry import spec_of_gguf, spec_of_hf
from models.files import ModelFiles, read_json
from models.hub.download import HubModel
from models.hub.peek import peek
from models.spec import ModelSpec
from models.weights.formats.format import Scheme
from models.weights.formats.registry import read_scheme, stored_types
from models.weights.safetensors_files import safetensors_files, tensor_shapes
from models.weights.slots import parameters


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that `chatterm show` displays."""

    name: str
    architecture: str
    """The name in config.json; "unknown" if nothing names it."""
    supported: bool
    """Whether chatterm can run it."""
    reason: str | None
    """Why it cannot run, in one line; None if it is supported."""
    parameters: int
    """Number of weights; an output layer that is tied to the embeddings counts once."""
    context_length: int
    """The number of tokens the model was made for; 0 if unknown."""
    dtypes: tuple[tuple[str, int], ...]
    """The stored types with their counts of numbers, most frequent first: (("Q4_1", 134479872), ("F32", 35136))."""
    has_chat_template: bool | None
    """None: unknown until the model is downloaded."""
    files: tuple[tuple[str, int], ...]
    """Every file with its bytes, by name."""
    spec: ModelSpec | None = None
    """What it computes; None if it is not supported."""
    scheme: Scheme | None = None
    """How the matrices of a safetensors checkpoint are quantised; None if they are not."""

    @property
    def dtype(self) -> str:
        """The stored types, most frequent first: "Q4_1, F32"."""
        return ", ".join(name for name, _ in self.dtypes)

    @property
    def is_quantized(self) -> bool:
        """Whether most weights are in GGUF blocks, or stored in a form that a CPU holds in such blocks."""
        if self.scheme is not None:
            return self.scheme.held is not None
        return bool(self.dtypes) and self.dtypes[0][0].startswith(("Q", "IQ", "TQ", "MXFP"))


def describe(files: ModelFiles) -> ModelFacts:
    """Return the facts about a local model. Raises ModelError if a file is missing, damaged or incomplete."""
    if files.gguf is not None:
        return _describe_gguf(files, files.gguf)
    if files.folder is None:
        raise ModelError(f"{files.name} has neither a folder nor a GGUF file; name one of them.")
    try:
        return _describe_folder(files, files.folder)
    except OSError as error:
        raise ModelError(f"Cannot read {files.folder}: {error.strerror or error}.") from error


def describe_on_hub(model: HubModel, name: str) -> ModelFacts:
    """Return the facts about a model on the Hub that is not on this machine, called `name`; little of it is fetched.

    Raises ModelError if there is no such model or the Hub is out of reach.
    """
    with peek(model) as found:
        path = next(found.folder.iterdir())
        if path.suffix == ".gguf":
            facts = _describe_gguf(ModelFiles(name, gguf=path), path)
            return replace(facts, files=found.files)
        raw = read_json(path)
        scheme = _scheme(raw)
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "unknown")
        dtype = dtype if scheme is None else scheme.name
        template = any(file.startswith("chat_template.") for file, _ in found.files)
        return _facts(
            name,
            _named(raw),
            lambda: spec_of_hf(raw)[1],
            dtype,
            raw.get("max_position_embeddings"),
            template or None,
            found.files,
            scheme,
        )


def _describe_folder(files: ModelFiles, folder: Path) -> ModelFacts:
    raw = read_json(folder / "config.json")
    found = {
        name: tensor for path in safetensors_files(folder) for name, tensor in tensor_shapes(path).items()
    }
    scheme = _scheme(raw)
    shapes = {name: (dtype, math.prod(shape)) for name, (dtype, shape) in found.items()}
    if scheme is not None:
        shapes = stored_types(found, scheme)
    shapes = _used(raw, shapes)
    if raw.get("tie_word_embeddings") and "model.embed_tokens.weight" in shapes:
        shapes.pop("lm_head.weight", None)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return _facts(
        files.name,
        _named(raw),
        lambda: spec_of_hf(raw)[1],
        list(shapes.values()),
        raw.get("max_position_embeddings"),
        _folder_has_template(folder),
        tuple((path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths),
        scheme=scheme,
    )


def _used(raw: dict[str, Any], shapes: dict[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Return the tensors that the text model uses, by the names in it; all as stored if nothing reads the config."""
    try:
        family, _ = spec_of_hf(raw)
    except ModelError:
        return shapes
    return {used: shape for name, shape in shapes.items() if (used := family.rename(name)) is not None}


def _scheme(raw: dict[str, Any]) -> Scheme | None:
    """Return how the matrices are quantised; None also for an unsupported scheme, which reading the spec reports."""
    try:
        return read_scheme(raw)
    except ModelError:
        return None


def _named(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    return str((names[0] if isinstance(names, list) and names else raw.get("model_type")) or "unknown")


def _folder_has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_json(settings).get("chat_template"))


def _describe_gguf(files: ModelFiles, path: Path) -> ModelFacts:
    from models.weights.gguf import read_gguf

    file = read_gguf(path)
    named = str(file.metadata.get("general.architecture", "unknown"))
    paths = {tensor.path for tensor in file.tensors.values()} | {file.path}
    return _facts(
        files.name,
        named,
        lambda: spec_of_gguf(file)[1],
        [(tensor.kind.name, math.prod(tensor.shape)) for tensor in file.tensors.values()],
        file.metadata.get(f"{named}.context_length"),
        bool(file.metadata.get("tokenizer.chat_template")),
        tuple((path.name, path.stat().st_size) for path in sorted(paths)),
    )


def _facts(
    name: str,
    named: str,
    read_spec: Callable[[], ModelSpec],
    tensors: list[tuple[str, int]] | str,
    context: object,
    has_chat_template: bool | None,
    files: tuple[tuple[str, int], ...],
    scheme: Scheme | None = None,
) -> ModelFacts:
    """Put the facts together. `tensors` has type and count of numbers of each, or only the type of all."""
    spec, reason = None, None
    try:
        spec = read_spec()
    except ModelError as error:
        reason = str(error)
    if spec is not None:
        context = spec.max_positions
    if isinstance(tensors, str):
        tensors = [(tensors, parameters(spec))] if spec is not None else []
    counts: Counter[str] = Counter()
    for kind, count in tensors:
        counts[kind] += count
    return ModelFacts(
        name=name,
        architecture=spec.architecture if spec is not None else named[:80],
        supported=reason is None,
        reason=reason,
        parameters=counts.total(),
        context_length=context if isinstance(context, int) and context > 0 else 0,
        dtypes=tuple(counts.most_common()),
        has_chat_template=has_chat_template,
        files=files,
        spec=spec,
        scheme=scheme,
    )
