"""Check the files of a model on this machine against the Hub's hashes or a manifest."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.errors import ModelError
from models.files import gguf_parts
from models.hub import catalogue
from models.hub.cache import RepoCache
from models.hub.digests import content_id
from models.hub.download import HubModel, HubSettings, select
from models.hub.download_common import Meter
from models.hub.manifest import manifest_path, read_manifest
from models.hub.sources import parse, unreadable
from models.hub.transfer import Listing
from models.progress import OnProgress, Progress

_READ = (".json", ".jinja", ".model", ".safetensors")
"""The suffixes of files that loading a folder may read."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one file."""

    name: str
    state: Literal["good", "damaged", "missing", "unknown"]
    """The result; "unknown" if there is no hash to compare with."""
    bytes: int
    expected: str | None
    found: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results for all files of a model."""

    files: tuple[Checked, ...]
    against: str
    """What the files were checked against, for display."""

    @property
    def is_good(self) -> bool:
        """Whether every file has the expected hash."""
        return all(file.state == "good" for file in self.files)


def verify(model: str, *, online: bool = False, on_progress: OnProgress | None = None) -> Verdict:
    """Hash every file of `model`, named as in `resolve`, and compare.

    With `online` the Hub is asked for its hashes; otherwise those in the cache are used. Raises ModelError if the model
    is not here, there is nothing to check it against, or a file cannot be read.
    """
    source = parse(model)
    try:
        return _verified(source, online, on_progress)
    except PermissionError as error:
        raise unreadable(error) from error


def _verified(
    source: catalogue.WheelModel | HubModel | Path, online: bool, on_progress: OnProgress | None
) -> Verdict:
    if isinstance(source, catalogue.WheelModel):
        path = catalogue.place(source)
        if not path.is_file():
            raise ModelError(
                f"{source.name} is not on this machine; to download it: chatterm pull {source.name}"
            )
        return _check(path.parent, {path.name: source.gguf_sha256}, "the catalogue", source.name, on_progress)
    if isinstance(source, HubModel):
        return _on_hub(source, online, on_progress)
    return _own(source, on_progress)


def _own(path: Path, on_progress: OnProgress | None) -> Verdict:
    manifest = read_manifest(path)
    if manifest is None:
        raise ModelError(
            f"{path} has no manifest beside it, so there is nothing to check it against; chatterm quantize writes one, "
            "and models from the Hub are checked by their name there (owner/name)."
        )
    folder = path if path.is_dir() else path.parent
    known: dict[str, str | None] = dict(manifest.files)
    if path.is_dir():
        known |= dict.fromkeys(_unlisted(path, known))
    return _check(folder, known, f"its manifest (from {manifest.source})", path.name, on_progress)


def _unlisted(folder: Path, known: Collection[str]) -> list[str]:
    """Return the files of a folder that loading may read although its manifest does not name them."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read ({error.strerror}); check its rights.") from None
    return [
        name
        for name in names
        if name.endswith(_READ) and name not in known and name != manifest_path(folder).name
    ]


def _on_hub(model: HubModel, online: bool, on_progress: OnProgress | None) -> Verdict:
    settings = HubSettings.read()
    cache = RepoCache(settings.cache, model.repo)
    commit = cache.find_commit(model.revision)
    if commit is None or not cache.snapshot(commit).is_dir():
        raise ModelError(f"{model.name} is not on this machine; to download it: chatterm pull {model.name}")
    folder = cache.snapshot(commit)
    if online:
        if settings.offline:
            raise ModelError("The network is off (HF_HUB_OFFLINE); leave out --online.")
        meter = Meter(model.name, None, None)
        with settings.connect() as connection:
            listing = connection.listing(model.repo, commit, meter)
            names = select(listing.files, model)
            files = [connection.measured(model.repo, commit, listing.files[name], meter) for name in names]
        return _check(
            folder, {f.path: f.id for f in files}, f"the Hub, commit {commit[:12]}", model.name, on_progress
        )
    listing = cache.listing(commit) or cache.local_listing(commit)
    names = _needed(listing, model)
    known = {name: listing.files[name].id or _blob_id(folder / name) for name in names}
    against = f"the Hub's hashes as of the download, commit {commit[:12]}"
    return _check(folder, known, against, model.name, on_progress)


def _needed(listing: Listing, model: HubModel) -> list[str]:
    """Return the files that the model needs; if too few are here to make up a model, return all that are."""
    try:
        return select(listing.files, model)
    except ModelError:
        return sorted(listing.files) if model.file is None else gguf_parts(model.file)


def _blob_id(path: Path) -> str | None:
    """Return the expected hash of a file that is a link in the cache: the name of its target."""
    if not path.is_symlink():
        return None
    name = path.readlink().name
    return name if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) else None


def _check(
    folder: Path, known: Mapping[str, str | None], against: str, what: str, on_progress: OnProgress | None
) -> Verdict:
    try:
        sizes = {name: (folder / name).stat().st_size for name in known if (folder / name).is_file()}
    except OSError as error:
        raise ModelError(
            f"The files of {what} in {folder} cannot be read ({error.strerror}); check their names and rights."
        ) from None
    done, total, files = 0, sum(sizes.values()), []

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(Progress("check", what, min(done, total), total))

    for name, expected in known.items():
        if name not in sizes:
            files.append(Checked(name, "missing", 0, expected, None))
            continue
        try:
            found = content_id(folder / name, expected or "", advance)
        except OSError as error:
            raise ModelError(f"{folder / name} cannot be read ({error.strerror}); check the disk.") from None
        state = "unknown" if found is None else "good" if found == expected else "damaged"
        files.append(Checked(name, state, sizes[name], expected, found))  # type: ignore[arg-type]
    return Verdict(tuple(files), against)
