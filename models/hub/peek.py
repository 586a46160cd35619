"""Look at a model on the Hub before it is downloaded: its files, and its config.json or GGUF header."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from models.errors import ModelError
from models.hub.download import HubModel, HubSettings, check_sizes, select
from models.hub.download_common import Meter
from models.hub.transfer import HubConnection, RemoteFile
from models.units import bytes_text

HEADS = (2**22, 2**24, 2**26)
"""Bytes to fetch of a GGUF file, one after the other, until its header is whole; its size depends on the vocabulary."""


@dataclass(frozen=True, slots=True)
class Peek:
    """What was fetched of a model; `folder` is temporary."""

    folder: Path
    files: tuple[tuple[str, int], ...]
    """Every file of the model with its bytes, by name."""


@contextmanager
def peek(model: HubModel) -> Iterator[Peek]:
    """Provide the list of files of `model`, and a folder with its config.json or GGUF headers. Raises ModelError."""
    settings = HubSettings.read()
    if settings.offline:
        raise ModelError(
            f"{model.name} is not on this machine and the network is off; connect and try again."
        )
    with settings.connect() as connection, tempfile.TemporaryDirectory() as folder:
        meter = Meter(model.name, None, None)
        listing = connection.listing(model.repo, model.revision, meter)
        names = select(listing.files, model)
        commit = listing.commit
        files = [connection.measured(model.repo, commit, listing.files[name], meter) for name in names]
        if names[0].endswith(".gguf"):
            for file in files:
                _fetch_header(connection, model, commit, file, Path(folder))
        else:
            config = next(file for file in files if file.path == "config.json")
            check_sizes([config], model.repo)
            connection.download(model.repo, commit, config, Path(folder, "config.json"), meter, 0)
        yield Peek(Path(folder), tuple((file.path, file.size or 0) for file in files))


def _fetch_header(
    connection: HubConnection, model: HubModel, commit: str, file: RemoteFile, folder: Path
) -> None:
    """Fetch the header of a GGUF file into a file of the full size, with a hole in place of the tensors."""
    path, size = folder / Path(file.path).name, file.size or 0
    for count in HEADS:
        data = connection.head(model.repo, commit, file, count)
        path.write_bytes(data)
        try:
            os.truncate(path, size)
        except OSError as error:
            raise ModelError(
                f"{file.path} of {model.repo} has {bytes_text(size)} by its listing, which no file here can have "
                f"({error.strerror}); name another model."
            ) from None
        if len(data) >= size or _is_whole(path, len(data)):
            return
    raise ModelError(
        f"{model.name} has an unusually long header; download it first: chatterm pull {model.name}"
    )


def _is_whole(path: Path, count: int) -> bool:
    """Return whether the first `count` bytes hold the whole header, and the tensors that belong to the description."""
    from models.weights.gguf import read_part

    try:
        tensors = read_part(path).tensors.values()
    except ModelError:
        return False
    ends = [tensor.offset + tensor.data.nbytes for tensor in tensors if tensor.name.startswith("rope_")]
    return max([*ends, min((tensor.offset for tensor in tensors), default=count)]) <= count
