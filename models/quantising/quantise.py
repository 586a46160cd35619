"""`chatterm quantize`: write a model's calibrated files, whole or not at all."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from models.errors import ModelError
from models.families.registry import spec_of_gguf
from models.files import ModelFiles
from models.hub.digests import sha256
from models.hub.fetching import need_space, size_of
from models.hub.manifest import Manifest, manifest_path, write_manifest
from models.load import fill_network, read_tensors
from models.network import Network
from models.progress import OnProgress
from models.quantising.activations import divergence, measure
from models.quantising.calibrate import TEXT, WINDOW, Held, calibrate, windows
from models.quantising.files import check_one_to_one, write_folder, write_gguf
from models.quantising.fit import BLOCK
from models.spec import ModelSpec
from models.text.tokenizer import load_tokenizer
from models.weights.checkpoint import Blocks, StoredTensor, read_safetensors
from models.weights.matching import match
from models.weights.memory import available_bytes
from models.weights.slots import Names, slots

FORMAT = "int4, calibrated"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Written:
    """The result of `quantise`."""

    manifest: Manifest
    bytes: int
    """Bytes of all files."""
    kept: int
    """How many of the `matrices` are in 8 bits."""
    matrices: int


def quantise(
    files: ModelFiles, out: Path, revision: str | None = None, on_progress: OnProgress | None = None
) -> Written:
    """Write `files` in 4 and 8 bits to `out`: a GGUF file becomes a GGUF file, a folder becomes a folder.

    `revision` is the commit of the source, for the manifest. An exception from `on_progress` stops it. If it is stopped
    or fails, nothing is left at `out`. Raises ModelError.
    """
    _check_places(files, out)
    spec, tensors, names, _ = read_tensors(files)
    places = match(spec, tensors, names)
    tensors = [tensor for tensor in tensors if tensor.name in places]
    kinds = (t.quantised or (t.blocks.kind.name if t.blocks else None) for t in tensors)
    if stored := next((kind for kind in kinds if kind is not None), None):
        raise ModelError(
            f"The weights of {files.name} are quantised already ({stored}); name the model in 16 or 32 bits."
        )
    matrices = {tensor.name for tensor in tensors if places[tensor.name].is_matrix}
    if odd := next((t for t in tensors if t.name in matrices and t.shape[1] % BLOCK), None):
        raise ModelError(
            f"{odd.name} has rows of {odd.shape[1]} numbers, which are not whole blocks of {BLOCK}, so {files.name} "
            "cannot be quantised."
        )
    if files.folder is not None:  # folders keep embedding and head unquantised
        matrices = {name for name in matrices if places[name].part not in ("embedding", "head")}
    check_one_to_one(_stored_names(files), dict.fromkeys(matrices))
    known, unknown = windows(_text_of(files, spec), _positions(spec))
    network = fill_network(spec, tensors, _dtype(tensors), _CPU, positions=_positions(spec), names=names)
    activations = measure(network, known, on_progress)
    held = calibrate(tensors, places, activations, files.folder is not None, on_progress)
    kl = divergence(network, _in_blocks(spec, tensors, names, held), unknown)
    written = {name: one for name, one in held.items() if name in matrices}
    manifest = Manifest(files.name, revision, FORMAT, kl, {})
    with _whole(out) as scratch:
        need = sum(one.data.nbytes for one in held.values())
        need_space(out.parent, need, "the path")
        if files.gguf is not None:
            write_gguf(files.gguf, scratch, written, _interleaved(files.gguf))
            manifest = replace(manifest, files={out.name: sha256(scratch)})
        else:
            assert files.folder is not None
            scratch.mkdir()
            write_folder(files.folder, scratch, written)
            manifest = replace(
                manifest, files={path.name: sha256(path) for path in sorted(scratch.iterdir())}
            )
            write_manifest(manifest_path(scratch), manifest)
        total = sum(map(size_of, scratch.iterdir())) if scratch.is_dir() else size_of(scratch)
        if files.gguf is not None:
            write_manifest(manifest_path(out), manifest)
    kept = sum(one.kind.name == "Q8_0" for one in written.values())
    return Written(manifest, total, kept, len(written))


def _check_places(files: ModelFiles, out: Path) -> None:
    if out.exists():
        raise ModelError(f"{out} already exists; name another file or folder, or delete it first.")
    if not out.parent.is_dir():
        raise ModelError(f"There is no folder {out.parent}; create it first.")
    if (out.suffix == ".gguf") != (files.gguf is not None):
        ways = (
            "a GGUF file: name OUT.gguf" if files.gguf is not None else "a folder: name one, not a .gguf file"
        )
        raise ModelError(f"{files.name} becomes {ways}.")


def _stored_names(files: ModelFiles) -> set[str]:
    if files.folder is not None:
        return {tensor.name for tensor in read_safetensors(files.folder)}
    from models.weights.gguf import read_gguf

    assert files.gguf is not None
    return set(read_gguf(files.gguf).tensors)


def _positions(spec: ModelSpec) -> int:
    return min(WINDOW, spec.max_positions)


def _text_of(files: ModelFiles, spec: ModelSpec) -> list[int]:
    """Return the tokens of the built-in text. Raises ModelError if the network cannot read them."""
    ids = load_tokenizer(files).encode(TEXT.read_text(encoding="utf-8"))
    if (most := max(ids, default=0)) >= spec.vocab_size:
        raise ModelError(
            f"The tokenizer of {files.name} has token {most}, but the network only has tokens 0 to "
            f"{spec.vocab_size - 1}; the files do not belong together: download the model again."
        )
    if min(len(ids), spec.max_positions) < 2:
        raise ModelError(f"{files.name} cannot read the two tokens that calibrating takes at least.")
    return ids


def _dtype(tensors: list[StoredTensor]) -> torch.dtype:
    """Return fp32 if it takes at most a third of the memory, because measuring needs memory, too; otherwise bf16."""
    numbers = sum(torch.Size(tensor.shape).numel() for tensor in tensors)
    free = available_bytes(_CPU)
    return torch.float32 if free is None or 12 * numbers <= free else torch.bfloat16


def _in_blocks(
    spec: ModelSpec, tensors: list[StoredTensor], names: Names, held: Mapping[str, Held]
) -> Network:
    stored = [
        replace(tensor, blocks=Blocks(held[tensor.name].kind, lambda name=tensor.name: held[name].data))  # type: ignore[misc]
        if tensor.name in held
        else tensor
        for tensor in tensors
    ]
    kinds = {name: one.kind for name, one in held.items()}
    return fill_network(
        spec, stored, torch.float32, _CPU, positions=_positions(spec), kinds=kinds, names=names
    )


def _interleaved(path: Path) -> dict[str, int]:
    from models.weights.gguf import read_gguf

    family, spec = spec_of_gguf(read_gguf(path))
    dim = spec.attention.head_dim
    return {slot.name(family.gguf_names): dim for slot in slots(spec) if slot.part in family.gguf_interleaved}


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Provide a path beside `out` that replaces it at the end; if the work ends early, nothing of either stays."""
    scratch = out.with_name(
        f".{out.name}.partial"
    )  # a fixed name, so that what a killed process left behind is cleared here

    def clear() -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.unlink(missing_ok=True)

    clear()
    try:
        yield scratch
        scratch.rename(out)
    except OSError as error:
        raise ModelError(
            f"{out} cannot be written ({error.strerror or error}); nothing was left there."
        ) from None
    finally:
        clear()
        if not out.exists():
            manifest_path(out).unlink(missing_ok=True)
