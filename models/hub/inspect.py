"""What a model is, from the headers of its files alone: nothing is loaded and torch is not imported."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.errors import ModelError
from models.families.registry import spec_of_gguf, spec_of_hf
from models.files import ModelFiles, read_json
from models.spec import ModelSpec
from models.weights.safetensors_files import safetensors_files, tensor_shapes


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `chatterm show` tells about a model."""

    name: str
    architecture: str
    """As in config.json; "unknown" where nothing names it."""
    supported: bool
    """Whether chatterm can run it."""
    reason: str | None
    """Why not, in one line; None when it is supported."""
    parameters: int
    """Weights of the network; an output layer that is tied to the embeddings counts once."""
    context_length: int
    """Tokens the model was made for; 0 when unknown."""
    dtypes: tuple[tuple[str, int], ...]
    """How weights are stored and how many so, most first: (("Q4_1", 134479872), ("F32", 35136))."""
    has_chat_template: bool
    files: tuple[tuple[str, int], ...]
    """Every file with its bytes, by name."""
    spec: ModelSpec | None = None
    """What it computes; None where it is not supported."""

    @property
    def dtype(self) -> str:
        """How weights are stored, most first: "Q4_1, F32"."""
        return ", ".join(name for name, _ in self.dtypes)


def describe(files: ModelFiles) -> ModelFacts:
    """The facts of a model on this machine. Raises ModelError when a file is missing, damaged or incomplete."""
    if files.gguf is not None:
        return _describe_gguf(files, files.gguf)
    if files.folder is None:
        raise ModelError(f"{files.name} has neither a folder nor a GGUF file; name one of them.")
    try:
        return _describe_folder(files, files.folder)
    except OSError as error:
        raise ModelError(f"Cannot read {files.folder}: {error.strerror or error}.") from error


def _describe_folder(files: ModelFiles, folder: Path) -> ModelFacts:
    raw = read_json(folder / "config.json")
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else raw.get("model_type")
    shapes: dict[str, tuple[str, int]] = {}
    for path in safetensors_files(folder):
        for name, (dtype, shape) in tensor_shapes(path).items():
            shapes[name] = (dtype, math.prod(shape))
    if raw.get("tie_word_embeddings") and "model.embed_tokens.weight" in shapes:
        shapes.pop("lm_head.weight", None)
    return _facts(
        files,
        str(architecture or "unknown"),
        lambda: spec_of_hf(raw)[1],
        list(shapes.values()),
        raw.get("max_position_embeddings"),
        _folder_has_template(folder),
        sorted(path for path in folder.rglob("*") if path.is_file()),
    )


def _folder_has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_json(settings).get("chat_template"))


def _describe_gguf(files: ModelFiles, path: Path) -> ModelFacts:
    from models.weights.gguf import read_gguf

    file = read_gguf(path)
    named = str(file.metadata.get("general.architecture", "unknown"))
    return _facts(
        files,
        named,
        lambda: spec_of_gguf(file)[1],
        [(tensor.kind.name, math.prod(tensor.shape)) for tensor in file.tensors.values()],
        file.metadata.get(f"{named}.context_length"),
        bool(file.metadata.get("tokenizer.chat_template")),
        sorted({tensor.path for tensor in file.tensors.values()} | {file.path}),
    )


def _facts(
    files: ModelFiles,
    named: str,
    read_spec: Callable[[], ModelSpec],
    tensors: list[tuple[str, int]],
    context: object,
    has_chat_template: bool,
    paths: list[Path],
) -> ModelFacts:
    spec, reason = None, None
    try:
        spec = read_spec()
    except ModelError as error:
        reason = str(error)
    if spec is not None:
        context = spec.max_positions
    counts: Counter[str] = Counter()
    for dtype, count in tensors:
        counts[dtype] += count
    base = files.folder or paths[0].parent
    return ModelFacts(
        name=files.name,
        architecture=spec.architecture if spec is not None else named[:80],
        supported=reason is None,
        reason=reason,
        parameters=counts.total(),
        context_length=context if isinstance(context, int) and context > 0 else 0,
        dtypes=tuple(counts.most_common()),
        has_chat_template=has_chat_template,
        files=tuple((path.relative_to(base).as_posix(), path.stat().st_size) for path in paths),
        spec=spec,
    )
