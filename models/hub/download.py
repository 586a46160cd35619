"""Models on the Hugging Face Hub: find out which files a model needs, and fetch them into the Hub's cache folder.

Blobs are fetched and checked first, then linked under their names, then the ref is written: a model is either
complete or not there. The listing kept beside a complete model identifies it later without asking the Hub.
"""

import json
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.parse import unquote

from models.errors import ModelError
from models.files import MOST_JSON, gguf_parts
from models.hub.cache import RepoCache, repositories
from models.hub.download_common import Meter, file_size, locked, need_space, storage_error
from models.hub.transfer import HubConnection, Listing, RemoteFile, Unreachable, partial
from models.progress import OnProgress
from models.units import bytes_text

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLE_REASON = "a pickle may run code when it is opened; use a safetensors or GGUF version of the model."

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_ID = re.compile(rf"({_PART}/{_PART})(?:@([\w][\w./-]*))?", re.ASCII)
_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/(.*)", re.ASCII | re.IGNORECASE)

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_SETTINGS = re.compile(
    r"config\.json|generation_config\.json|tokenizer(_config)?\.json|tokenizer\.model|tekken\.json|vocab\.(json|txt)|merges\.txt"
    r"|special_tokens_map\.json|added_tokens\.json|chat_template\.(json|jinja)"
)
"""Matches the small files that belong to a model."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hub: a repository in Hugging Face layout, or one GGUF file in a repository."""

    repo: str
    """`owner/name`."""
    revision: str = "main"
    """A branch, a tag or a commit."""
    file: str | None = None
    """The path of the GGUF file in the repository; None for Hugging Face layout."""

    @property
    def name(self) -> str:
        """The name that identifies this model in `resolve`."""
        if self.file is None:
            return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"
        return f"hf.co/{self.repo}{'' if self.revision == 'main' else '/blob/' + self.revision}/{self.file}"


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Locations of the Hub and its cache, from huggingface_hub's own environment variables."""

    endpoint: str
    cache: Path
    offline: bool
    timeout_s: float

    @classmethod
    def read(cls) -> "HubSettings":
        """Read HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_HUB_DOWNLOAD_TIMEOUT. Raises ModelError."""
        try:
            from huggingface_hub import constants

            if float(constants.HF_HUB_DOWNLOAD_TIMEOUT) < 0:
                raise ValueError("HF_HUB_DOWNLOAD_TIMEOUT is below 0")
        except ValueError as error:  # raised while its module is imported
            raise ModelError(
                f"A variable that begins with HF_ has a wrong value ({error}); correct it."
            ) from None
        return cls(
            endpoint=constants.ENDPOINT,
            cache=Path(constants.HF_HUB_CACHE),
            offline=bool(constants.HF_HUB_OFFLINE),
            timeout_s=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
        )

    def connect(self) -> HubConnection:
        """Open a connection with the user's token (HF_TOKEN, or `hf auth login`)."""
        from huggingface_hub import constants, get_token

        try:
            token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        except (OSError, ValueError) as error:  # the token's path is no file, or not text
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ModelError(
                f"The token in {constants.HF_TOKEN_PATH} cannot be read ({reason}); check HF_HOME, or set HF_TOKEN."
            ) from None
        return HubConnection(self.endpoint, token, self.timeout_s)


def parse_id(text: str) -> HubModel | None:
    """Parse `owner/name` or `owner/name@revision`; return None if `text` is neither."""
    match = _ID.fullmatch(text)
    if match is None or ".." in text or "--" in match[1] or (match[2] or "").endswith("/"):
        return None
    return HubModel(match[1], match[2] or "main")


def parse_url(text: str) -> HubModel | None:
    """Parse `hf.co/...` or `https://huggingface.co/...`; None if `text` is no such address. Raises ModelError."""
    match = _URL.fullmatch(text)
    if match is None:
        return None
    rest = unquote(match[1].partition("?")[0].partition("#")[0]).strip("/")
    if rest.endswith(".gguf"):
        repo, path, revision = "/".join(rest.split("/")[:2]), rest.split("/")[2:], "main"
        if path[:1] in (["blob"], ["resolve"]) and len(path) > 2:
            revision, path = path[1], path[2:]
        model = parse_id(f"{repo}@{revision}")
        if model is not None and path and rest.isprintable() and ".." not in path and "\\" not in rest:
            return HubModel(model.repo, revision, "/".join(path))
    else:
        repo, _, revision = rest.partition("/tree/")
        model = parse_id(f"{repo}@{revision}" if revision else repo)
        if model is not None:
            return model
    raise ModelError(
        f"{text} is not the address of a model; use hf.co/owner/name or hf.co/owner/name/file.gguf."
    )


def select(paths: Collection[str], model: HubModel) -> list[str]:
    """Return the files of a repository that `model` needs: its GGUF file (all parts), or small files and then weights.

    Raises ModelError if they do not make up a model that can be run.
    """
    repo = model.repo
    if model.file is not None:
        if model.file not in paths:
            raise ModelError(f"{repo} has no file {model.file}.{_choices(paths, repo)}")
        return _parts(model.file, paths, repo)
    weights = [path for path in paths if "/" not in path and path.endswith(".safetensors")]
    # consolidated.*: the same weights again, in another layout.
    weights = sorted(path for path in weights if not path.startswith(("consolidated", "adapter_")))
    if not weights:
        files = _gguf_files(paths)
        if len(files) == 1:
            return _parts(files[0], paths, repo)
        if files:
            raise ModelError(f"{repo} has several GGUF files; choose one.{_choices(paths, repo)}")
        if any(path.endswith(PICKLE_SUFFIXES) for path in paths):
            raise ModelError(f"{repo} has only pickled weights, which are not downloaded: {PICKLE_REASON}")
        raise ModelError(f"{repo} has no model weights (*.safetensors or *.gguf); name another model.")
    if "config.json" not in paths:
        raise ModelError(f"{repo} has no config.json, so it is not a whole model; is it an adapter?")
    if _INDEX in paths:
        weights = [_INDEX, *([path for path in weights if _SHARD.fullmatch(path)] or weights)]
    elif "model.safetensors" in weights:
        weights = ["model.safetensors"]
    return [*sorted(path for path in paths if _SETTINGS.fullmatch(path)), *weights]


def fetch(model: HubModel, *, on_progress: OnProgress | None, offline: bool, refresh: bool) -> Path:
    """Return the model's snapshot folder or GGUF file, after downloading missing files.

    No network call is made for a complete model unless `refresh` asks for a newer one. Raises ModelError.
    """
    settings = HubSettings.read()
    cache = RepoCache(settings.cache, model.repo)
    commit = cache.find_commit(model.revision)
    if commit is not None and (not refresh or offline or settings.offline):
        if here := _complete(cache, commit, model, cache.listing(commit)):
            return here
        if (offline or settings.offline) and (here := _fetched_elsewhere(cache, commit, model)):
            return here
    if offline or settings.offline:
        raise ModelError(_absent(cache, model))
    meter = Meter(model.name, None, on_progress)
    meter.at(0)
    try:
        with settings.connect() as connection:
            try:
                listing = connection.listing(model.repo, model.revision, meter)
            except Unreachable:
                if not refresh and commit is not None and (here := _fetched_elsewhere(cache, commit, model)):
                    return here
                raise
            return _download(connection, cache, listing, model, meter)
    except OSError as error:
        raise storage_error(error, settings.cache, "HF_HOME") from error


def commit_here(model: HubModel) -> str | None:
    """Return the commit that a model's revision stands for on this machine; None while it is not known."""
    return RepoCache(HubSettings.read().cache, model.repo).find_commit(model.revision)


def in_reach(repo: str, timeout_s: float) -> bool:
    """Return whether the Hub answers for this repository within `timeout_s`, including name servers and proxies.

    A thread asks; it is left behind if it takes longer. HF_ENDPOINT and HF_HUB_OFFLINE apply.
    """
    answers: SimpleQueue[bool] = SimpleQueue()

    def ask() -> None:
        found = False
        with suppress(Exception):  # whatever goes wrong, the Hub is not in reach
            settings = HubSettings.read()
            if not settings.offline:
                with replace(settings, timeout_s=timeout_s).connect() as connection:
                    found = connection.has(repo)
        answers.put(found)

    Thread(target=ask, name="hub in reach", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except Empty:
        return False


def cached_models() -> list[tuple[HubModel, Path, int]]:
    """Return every complete model in the Hub's cache folder, with its path and the bytes of its files."""
    found = []
    for cache in repositories(HubSettings.read().cache):
        revisions = {commit: name for name, commit in cache.revisions().items()}
        revisions |= {commit: name for name, commit in cache.revisions().items() if name == "main"}
        for commit in cache.snapshots():
            kept = cache.listing(commit)  # read once: a repository may have thousands of GGUF files
            listing = kept or cache.local_listing(commit)
            for file in (None, *_gguf_files(listing.files)):
                model = HubModel(cache.repo, revisions.get(commit, commit), file)
                path = (_complete if kept else _whole)(cache, commit, model, listing)
                # A repository with a single GGUF file is listed under the name of that file.
                if path is not None and path.is_dir() == (file is None):
                    size = sum(listing.files[name].size or 0 for name in select(listing.files, model))
                    found.append((model, path, size))
    return found


def remove(model: HubModel) -> int:
    """Delete a model from the cache, including unfinished downloads; return the bytes freed (0: none there)."""
    cache = RepoCache(HubSettings.read().cache, model.repo)
    before = cache.bytes()
    if model.file is None and model.revision == "main":
        cache.remove_all()
    else:
        for commit in _commits(cache, model):
            if model.file is None:
                cache.remove_commit(commit)
            else:
                for part in gguf_parts(model.file):
                    cache.remove_file(commit, part)
    return before - cache.bytes()


def held_bytes(model: HubModel) -> int:
    """Return the bytes of a model in the cache, including an unfinished download: those that `remove` would delete."""
    cache = RepoCache(HubSettings.read().cache, model.repo)
    if model.file is None and model.revision == "main":
        return cache.bytes()
    files = [None] if model.file is None else gguf_parts(model.file)
    return sum(cache.commit_bytes(commit, file) for commit in _commits(cache, model) for file in files)


def _commits(cache: RepoCache, model: HubModel) -> list[str]:
    """Return the commits that the revision may stand for: the ref is only written when a download is complete."""
    commit = cache.find_commit(model.revision)
    return cache.listed() if commit is None else [commit]


def _download(
    connection: HubConnection, cache: RepoCache, listing: Listing, model: HubModel, meter: Meter
) -> Path:
    """Fetch the missing files of `model` at the listing's commit, then link them. Raises ModelError, OSError."""
    commit = listing.commit
    names = select(listing.files, model)
    files = [connection.measured(model.repo, commit, listing.files[name], meter) for name in names]
    check_sizes(files, model.repo)
    listing.files.update({file.path: file for file in files})
    cache.keep_listing(listing)
    missing = [file for file in files if not cache.stored(commit, file)]
    have = sum(file.size or 0 for file in files if file not in missing)
    begun = sum(file_size(partial(cache.blob(file))) for file in missing)
    meter.total = sum(file.size or 0 for file in files)
    meter.at(have + begun)
    need_space(cache.root, meter.total - have - begun, "HF_HOME")
    for file in missing:
        if file.path.endswith(".safetensors"):
            _check_config(cache, commit, listing)
        _fetch_file(connection, cache, commit, file, meter, have)
        have += file.size or 0
        if file.path == _INDEX:
            _check_index(cache.blob(file), names, model.repo)
    ids = [file.id for file in files]
    for index, file in enumerate(files):
        cache.link(commit, file, goes_on=file.id in ids[index + 1 :])
    cache.keep_ref(model.revision, commit)
    meter.finish()
    return _path(cache, commit, names)


def check_sizes(files: Iterable[RemoteFile], repo: str) -> None:
    """Raise ModelError if a file that is read into memory is too large for that, before it is fetched."""
    for file in files:
        if not file.path.endswith((".safetensors", ".gguf")) and (file.size or 0) > MOST_JSON:
            raise ModelError(
                f"{file.path} of {repo} has {bytes_text(file.size or 0)}, which cannot be right; name another model."
            )


def _fetch_file(
    connection: HubConnection, cache: RepoCache, commit: str, file: RemoteFile, meter: Meter, have: int
) -> None:
    blob = cache.blob(file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with locked(cache.lock(file), lambda: meter.at(have)):
        # Another process may have fetched it while this one waited for the lock.
        if not cache.stored(commit, file):
            connection.download(cache.repo, commit, file, blob, meter, have)


def _check_config(cache: RepoCache, commit: str, listing: Listing) -> None:
    """Raise ModelError if the model cannot be run, before gigabytes of weights are fetched."""
    from models.families.registry import spec_of_hf
    from models.files import read_json

    name = cache.snapshot(commit) / "config.json"
    spec_of_hf(read_json(name if name.is_file() else cache.blob(listing.files["config.json"])))


def _complete(cache: RepoCache, commit: str, model: HubModel, listing: Listing | None) -> Path | None:
    """Return the path of `model` if every file that the listing requires is there in full; else None."""
    if listing is None:
        return None
    try:
        names = select(listing.files, model)
        if not all(cache.linked(commit, listing.files[name]) for name in names):
            return None
        if _INDEX in names:
            _check_index(cache.snapshot(commit) / _INDEX, names, model.repo)
    except ModelError:
        return None
    return _path(cache, commit, names)


def _fetched_elsewhere(cache: RepoCache, commit: str, model: HubModel) -> Path | None:
    """Return the path of `model` if another tool fetched it, as far as its files alone can tell; else None."""
    return None if cache.listing(commit) else _whole(cache, commit, model, cache.local_listing(commit))


def _whole(cache: RepoCache, commit: str, model: HubModel, listing: Listing) -> Path | None:
    """Return the path of `model` if the files here, which `listing` lists, seem complete; else None."""
    path = _complete(cache, commit, model, listing)
    if path is None or path.is_file():
        return path
    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json")
    sharded = any(_SHARD.fullmatch(name) for name in listing.files)
    whole = any(name in listing.files for name in tokenizers) and (
        not sharded or _INDEX in listing.files or "model.safetensors" in listing.files
    )
    return path if whole else None


def _check_index(index: Path, names: Collection[str], repo: str) -> None:
    """Raise ModelError if the index of sharded weights names a file that is not among `names`."""
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        lost = sorted(shards.difference(names))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{_INDEX} of {repo} is damaged; the model has to be fixed on the Hub.") from error
    if lost:
        raise ModelError(
            f"{repo} lacks {lost[0]}, which its {_INDEX} lists; the model has to be fixed on the Hub."
        )


def _path(cache: RepoCache, commit: str, names: list[str]) -> Path:
    folder = cache.snapshot(commit)
    return folder / names[0] if names[0].endswith(".gguf") else folder


def _absent(cache: RepoCache, model: HubModel) -> str:
    """Return the line for an incomplete model while the network must not be used."""
    arrived = cache.arrived()
    state = (
        f"is incomplete ({bytes_text(arrived)} downloaded so far)" if arrived else "is not on this machine"
    )
    return f"{model.name} {state} and the network is off; connect once and run: chatterm pull {model.name}"


def _gguf_files(paths: Collection[str]) -> list[str]:
    """Return the GGUF files that are models; for a model in several parts, its first part."""
    return sorted({gguf_parts(path)[0] for path in paths if path.endswith(".gguf")})


def _parts(file: str, paths: Collection[str], repo: str) -> list[str]:
    """Return all parts of a GGUF model. Raises ModelError if one is missing."""
    parts = gguf_parts(file)
    if lost := [part for part in parts if part not in paths]:
        raise ModelError(
            f"{repo} lacks {lost[0]}, a part of {parts[0]}; the model has to be fixed on the Hub."
        )
    return parts


def _choices(paths: Collection[str], repo: str) -> str:
    """List some GGUF files of a repository as a user would name them."""
    files = _gguf_files(paths)
    more = f" and {len(files) - 4} more" if len(files) > 4 else ""
    return f" It has {', '.join(f'hf.co/{repo}/{file}' for file in files[:4])}{more}." if files else ""
