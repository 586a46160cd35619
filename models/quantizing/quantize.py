"""`chatterm quantize`: write a model's calibrated files, whole or not at all."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from models.errors import ModelError
from models.families.registry import spec_of_gguf
from models.features import Feature, features
from models.files import ModelFiles
from models.hub.digests import sha256
from models.hub.download_common import file_size, need_space
from models.hub.manifest import Manifest, manifest_path, write_manifest
from models.loading.load import fill_network
from models.loading.plan import LoadPlan, Target, plan_tensors, read_tensors
from models.network import Network, Weight
from models.progress import OnProgress
from models.quantizing.activations import divergence, measure
from models.quantizing.calibrate import TEXT, WINDOW, calibrate, windows
from models.quantizing.files import check_one_to_one, write_folder, write_gguf
from models.quantizing.fit import BLOCK
from models.spec import ModelSpec
from models.system import BINARY, NOFOLLOW, try_lock
from models.text.tokenizer import load_tokenizer
from models.weights.checkpoint import Blocks, StoredTensor, read_safetensors
from models.weights.gguf import read_gguf
from models.weights.matching import match
from models.weights.memory import available_bytes
from models.weights.quantize import quantized_as
from models.weights.slots import OF_VOCABULARY, slots

FORMAT = "int4, calibrated"
_CPU = torch.device("cpu")
_LONGEST = 200
"""The most bytes of a name: the manifest's is longer, and file systems allow 255."""


@dataclass(frozen=True, slots=True)
class Written:
    """The result of `quantize_model`."""

    manifest: Manifest
    bytes: int
    """Bytes of all files."""
    kept: int
    """How many of the `matrices` are in 8 bits."""
    matrices: int


def quantize_model(
    files: ModelFiles, out: Path, revision: str | None = None, on_progress: OnProgress | None = None
) -> Written:
    """Write `files` in 4 and 8 bits to `out`: a GGUF file becomes a GGUF file, a folder becomes a folder.

    `revision` is the commit of the source, for the manifest. An exception from `on_progress` stops it. If it is stopped
    or fails, nothing is left at `out`. Raises ModelError.
    """
    _check_places(files, out)
    with _place(out) as scratch:
        return _write(files, out, scratch, revision, on_progress)


def _write(
    files: ModelFiles, out: Path, scratch: Path, revision: str | None, on_progress: OnProgress | None
) -> Written:
    """Compute the blocks, write them to the folder `scratch`, and move them to `out`."""
    spec, tensors, names, _ = read_tensors(files)
    places = match(spec, tensors, names)
    tensors = [tensor for tensor in tensors if tensor.name in places]
    if stored := quantized_as(tensors):
        raise ModelError(
            f"The weights of {files.name} are quantised already ({stored}); name the model in 16 or 32 bits."
        )
    if Feature.RECURRENCE in features(spec):
        raise ModelError(
            f"{files.name} has {Feature.RECURRENCE.value}, which cannot be calibrated; use --quantize int4 instead."
        )
    matrices = {tensor.name for tensor in tensors if places[tensor.name].is_matrix}
    if odd := next((t for t in tensors if t.name in matrices and t.shape[1] % BLOCK), None):
        raise ModelError(
            f"{odd.name} has rows of {odd.shape[1]} numbers, which are not whole blocks of {BLOCK}, so {files.name} "
            "cannot be quantised."
        )
    if files.folder is not None:  # folders keep embeddings and head unquantised
        matrices = {name for name in matrices if places[name].part not in OF_VOCABULARY}
    check_one_to_one(_stored_names(files), dict.fromkeys(matrices))
    known, unknown = windows(_calibration_tokens(files, spec), _positions(spec))
    target = Target(_dtype(tensors), _CPU, context_length=_positions(spec))
    plan = plan_tensors(spec, tensors, target, names)
    network = fill_network(plan)
    activations = measure(network, known, on_progress)
    held = calibrate(tensors, places, activations, files.folder is not None, on_progress)
    kl = divergence(network, _in_blocks(plan, held), unknown)
    written = {name: one for name, one in held.items() if name in matrices}
    rest = sum(tensor.nbytes for tensor in tensors if tensor.name not in written)
    need_space(out.parent, sum(one.data.nbytes for one in written.values()) + rest, "the path")
    try:
        if files.gguf is not None:
            write_gguf(files.gguf, scratch / out.name, written, _interleaved(files.gguf))
        else:
            assert files.folder is not None
            write_folder(files.folder, scratch, written)
        made = sorted(scratch.iterdir())
        manifest = Manifest(files.name, revision, FORMAT, kl, {path.name: sha256(path) for path in made})
        total = sum(map(file_size, made))
        _move(scratch, out, manifest, files.gguf is not None)
    except (OSError, SafetensorError) as error:
        raise _unwritable(out, error) from None
    kept = sum(one.format.name == "Q8_0" for one in written.values())
    return Written(manifest, total, kept, len(written))


def _check_places(files: ModelFiles, out: Path) -> None:
    if not str(out).isprintable():
        raise ModelError(f"The name {str(out)!a} contains control characters; choose another.")
    if len(os.fsencode(out.name)) > _LONGEST:
        raise ModelError(f"The name {out.name[:20]}... is too long; choose one of up to {_LONGEST} bytes.")
    try:
        _check_free(out)
        is_folder = out.parent.is_dir()
    except OSError as error:
        raise _unwritable(out, error) from None
    if not is_folder:
        raise ModelError(f"There is no folder {out.parent}; create it first.")
    if (out.suffix == ".gguf") != (files.gguf is not None):
        ways = (
            "a GGUF file: name OUT.gguf" if files.gguf is not None else "a folder: name one, not a .gguf file"
        )
        raise ModelError(f"{files.name} becomes {ways}.")


def _check_free(out: Path) -> None:
    if os.path.lexists(out):  # a dangling link counts as existing, too
        raise ModelError(f"{out} already exists; name another file or folder, or delete it first.")


def _stored_names(files: ModelFiles) -> set[str]:
    if files.folder is not None:
        return {tensor.name for tensor in read_safetensors(files.folder)}
    assert files.gguf is not None
    return set(read_gguf(files.gguf).tensors)


def _positions(spec: ModelSpec) -> int:
    return min(WINDOW, spec.max_positions)


def _calibration_tokens(files: ModelFiles, spec: ModelSpec) -> list[int]:
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


def _in_blocks(plan: LoadPlan, held: Mapping[str, Weight]) -> Network:
    stored = [
        replace(tensor, blocks=Blocks(held[tensor.name].format, lambda _, name=tensor.name: held[name].data))  # type: ignore[misc]
        if tensor.name in held
        else tensor
        for tensor in plan.tensors
    ]
    kinds = {name: one.format for name, one in held.items()}
    target = replace(plan.target, dtype=torch.float32)
    return fill_network(replace(plan, target=target, tensors=stored, kinds=kinds))


def _interleaved(path: Path) -> dict[str, int]:
    family, spec = spec_of_gguf(read_gguf(path))
    parts, found = family.gguf_interleaved, slots(spec)
    return {slot.name(family.gguf_names): spec.attention.head_dim for slot in found if slot.part in parts}


@contextmanager
def _place(out: Path) -> Iterator[Path]:
    """Provide an empty folder beside `out` for this process alone; at the end it is gone. Raises ModelError."""
    # A fixed name, so that a killed process's leftovers are cleared here.
    place = out.with_name(f".{out.name}.partial")
    guard, scratch = place / "lock", place / "files"
    try:
        if place.is_symlink() or place.is_file():
            place.unlink()
        place.mkdir(exist_ok=True)
        lock = os.open(guard, os.O_RDWR | os.O_CREAT | BINARY | NOFOLLOW, 0o600)
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        _lock(lock, guard, out)
        try:
            for path in place.iterdir():
                if path != guard:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            scratch.mkdir()
            yield scratch
        finally:
            shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(lock)
    if (
        os.name == "nt"
    ):  # which removes no file that is open: neither ours before, nor one that is another's by now
        with suppress(OSError):
            guard.unlink()
            place.rmdir()


def _lock(lock: int, guard: Path, out: Path) -> None:
    """Lock the open file `guard`. Raises ModelError if another process has."""
    busy = ModelError(f"Another chatterm quantize is writing {out}; wait for it, or choose another name.")
    try:
        if not try_lock(lock) or not os.path.samestat(os.fstat(lock), guard.stat()):
            raise busy
    except FileNotFoundError:  # another process has just removed the folder
        raise busy from None
    except OSError:  # a file system without locks
        return


def _move(scratch: Path, out: Path, manifest: Manifest, is_gguf: bool) -> None:
    """Move what was written to `out`, with its manifest. If this fails or is stopped, neither is there."""
    if not is_gguf:
        write_manifest(manifest_path(scratch), manifest)
        _check_free(out)
        scratch.rename(out)
        return
    _check_free(out)
    try:
        write_manifest(manifest_path(out), manifest)
        (scratch / out.name).rename(out)
    finally:
        if not out.exists():
            manifest_path(out).unlink(missing_ok=True)


def _unwritable(out: Path, error: Exception) -> ModelError:
    """Return the error for a failure of the file system at `out`."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := re.search(r"os error (\d+)", str(error))):
        number = int(found[1])  # safetensors names it only in its text
    reason = os.strerror(number) if number is not None else " ".join(str(error).split())[:160]
    return ModelError(f"{out} cannot be written ({reason}); nothing was left there.")
