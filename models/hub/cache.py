"""One repository in the Hub's standard cache folder, which is shared with every other tool that uses the Hub.

models--owner--name/
    blobs/<id>                 the files, named by the hash of their content; <id>.incomplete while they arrive
    snapshots/<commit>/<path>  links to the blobs (or the files themselves if the file system has no links)
    refs/<revision>            the commit that a branch or tag stood for
    chatterm/<commit>.json     our own: every file of that commit with its size and id
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from models.files import write_whole
from models.hub.transfer import Listing, RemoteFile, is_identity, is_safe, is_size, partial

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RepoCache:
    """The folder of one repository. A file counts as present only if it has the size that the Hub gives."""

    root: Path
    """The Hub's cache folder."""
    repo: str
    """`owner/name`."""

    @property
    def folder(self) -> Path:
        """The folder that contains everything of this repository."""
        return self.root / f"models--{self.repo.replace('/', '--')}"

    def find_commit(self, revision: str) -> str | None:
        """Return the commit that `revision` stands for on this machine; None while it is not known."""
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            commit = (self.folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def revisions(self) -> dict[str, str]:
        """Return the commit of every revision that has a ref here, by name."""
        refs = self.folder / "refs"
        names = [path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file()]
        return {name: commit for name in sorted(names) if (commit := self.find_commit(name))}

    def snapshots(self) -> list[str]:
        """Return the commits that have files here."""
        return sorted(
            path.name for path in (self.folder / "snapshots").glob("*") if _COMMIT.fullmatch(path.name)
        )

    def listed(self) -> list[str]:
        """Return the commits that have a listing here: those whose download was started or completed."""
        names = (path.stem for path in (self.folder / "chatterm").glob("*.json"))
        return sorted(name for name in names if _COMMIT.fullmatch(name))

    def snapshot(self, commit: str) -> Path:
        """Return the folder that has the files of a commit under their names."""
        return self.folder / "snapshots" / commit

    def blob(self, file: RemoteFile) -> Path:
        """Return the path of a file's content. The file's id must be known."""
        assert file.id is not None
        return self.folder / "blobs" / file.id

    def lock(self, file: RemoteFile) -> Path:
        """Return the lock that is held while this file is fetched, by huggingface_hub as well."""
        return self.root / ".locks" / self.folder.name / f"{file.id}.lock"

    def listing(self, commit: str) -> Listing | None:
        """Return the listing that `keep_listing` stored for a commit; None if there is no readable one."""
        try:
            stored = json.loads(self._listing_path(commit).read_text(encoding="utf-8"))
            files = [RemoteFile(path, *entry) for path, entry in stored["files"].items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        for file in files:
            known = (file.size is None or is_size(file.size)) and (file.id is None or is_identity(file.id))
            if not known or not is_safe(file.path):
                return None
        return Listing(commit, {file.path: file for file in files})

    def local_listing(self, commit: str) -> Listing:
        """Make a listing from the files on disk, for a snapshot that another tool fetched."""
        snapshot = self.snapshot(commit)
        paths = [path for path in snapshot.rglob("*") if path.is_file()]
        files = [
            RemoteFile(path.relative_to(snapshot).as_posix(), path.stat().st_size, None) for path in paths
        ]
        return Listing(commit, {file.path: file for file in files})

    def keep_listing(self, listing: Listing) -> None:
        """Store a listing, so that an offline start can tell a complete model from an incomplete one."""
        files = {file.path: [file.size, file.id] for file in listing.files.values()}
        write_whole(
            self._listing_path(listing.commit), json.dumps({"repo": self.repo, "files": files}, indent=0)
        )

    def linked(self, commit: str, file: RemoteFile) -> bool:
        """Return whether the file is in the snapshot of `commit`, whole."""
        return file.size is not None and _size(self.snapshot(commit) / file.path) == file.size

    def stored(self, commit: str, file: RemoteFile) -> bool:
        """Return whether the file's content is here, whole."""
        return self.linked(commit, file) or _size(self.blob(file)) == file.size

    def link(self, commit: str, file: RemoteFile, goes_on: bool = False) -> None:
        """Link a stored file under its name in the snapshot of `commit`. `goes_on`: more names will be linked to it."""
        if self.linked(commit, file):
            return
        blob, name = self.blob(file), self.snapshot(commit) / file.path
        name.parent.mkdir(parents=True, exist_ok=True)
        name.unlink(missing_ok=True)
        try:
            name.symlink_to(os.path.relpath(blob, name.parent))
        except FileExistsError:  # another process was faster
            return
        except (
            OSError
        ):  # no links on this file system: move the file itself, or copy it if it has several names
            if goes_on:
                shutil.copyfile(blob, name)
            else:
                blob.replace(name)

    def keep_ref(self, revision: str, commit: str) -> None:
        """Record which commit a branch or tag stands for."""
        if revision != commit:
            write_whole(self.folder / "refs" / revision, commit)

    def arrived(self) -> int:
        """Return the bytes of content here, including unfinished files."""
        return sum(path.stat().st_size for path in (self.folder / "blobs").glob("*") if path.is_file())

    def remove_all(self) -> None:
        """Delete everything of this repository. Raises OSError."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        shutil.rmtree(self.root / ".locks" / self.folder.name, ignore_errors=True)

    def remove_file(self, commit: str, path: str) -> None:
        """Delete one file of a commit and everything that only it needed."""
        listing = self.listing(commit)
        (self.snapshot(commit) / path).unlink(missing_ok=True)
        if listing is not None and (file := listing.files.get(path)) is not None and file.id:
            partial(self.blob(file)).unlink(missing_ok=True)
        if not any(self.snapshot(commit).rglob("*.*")):
            self.remove_commit(commit)
        self._drop_unused_blobs()

    def remove_commit(self, commit: str) -> None:
        """Delete the files of one commit that no other commit shares."""
        listing = self.listing(commit)
        shutil.rmtree(self.snapshot(commit), ignore_errors=True)
        self._listing_path(commit).unlink(missing_ok=True)
        for revision, of in self.revisions().items():
            if of == commit:
                (self.folder / "refs" / revision).unlink(missing_ok=True)
        for file in listing.files.values() if listing else ():
            if file.id:
                partial(self.blob(file)).unlink(missing_ok=True)
        self._drop_unused_blobs()
        if not self.snapshots() and not self.arrived():
            self.remove_all()

    def _drop_unused_blobs(self) -> None:
        """Delete the blobs that no snapshot links to, except unfinished ones: another download may be writing them."""
        names = (self.folder / "snapshots").rglob("*")
        # Not resolve(): a blob may itself be a link into a store that several repositories share.
        used = {path.readlink().name for path in names if path.is_symlink()}
        for blob in (self.folder / "blobs").glob("*"):
            if blob.name not in used and blob.suffix != ".incomplete":
                blob.unlink(missing_ok=True)

    def _listing_path(self, commit: str) -> Path:
        return self.folder / "chatterm" / f"{commit}.json"

    def commit_bytes(self, commit: str, path: str | None) -> int:
        """Return the bytes of one file of a commit, or of all; of an unfinished one, those that have arrived."""
        listing = self.listing(commit)
        known = [file for file in (listing.files.values() if listing else ()) if path in (None, file.path)]
        parts = sum(max(_size(partial(self.blob(file))), 0) for file in known if file.id)
        names = [self.snapshot(commit) / path] if path else self.snapshot(commit).rglob("*")
        return parts + sum(name.stat().st_size for name in names if name.is_file())

    def bytes(self) -> int:
        """Return the bytes of all regular files of this repository."""
        return sum(
            path.lstat().st_size
            for path in self.folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        )


def repositories(root: Path) -> Iterator[RepoCache]:
    """Yield every model repository in the Hub's cache folder."""
    for folder in sorted(root.glob("models--*--*")):
        owner_name = folder.name.split("--")[1:]
        if len(owner_name) == 2 and folder.is_dir():
            yield RepoCache(root, "/".join(owner_name))


def _size(path: Path) -> int:
    """Return the bytes of a file, -1 if there is none."""
    with suppress(OSError):
        return path.stat().st_size
    return -1
