"""Hashes of file contents."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

_STEP = 4 << 20


def sha256(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 as hex digits; `advance` receives the bytes of every piece. Raises OSError."""
    return _digest(path, hashlib.sha256(), advance)


def content_id(path: Path, like: str, advance: Callable[[int], None] | None = None) -> str | None:
    """Return the Hub's id of this content: SHA-256 if `like` has 64 hex digits, git's blob id if it has 40.

    Return None if `like` is neither. Raises OSError.
    """
    if re.fullmatch(r"[0-9a-f]{64}", like):
        return sha256(path, advance)
    if re.fullmatch(r"[0-9a-f]{40}", like):
        head = b"blob %d\x00" % path.stat().st_size
        return _digest(path, hashlib.sha1(head, usedforsecurity=False), advance)
    return None


def _digest(path: Path, digest: "hashlib._Hash", advance: Callable[[int], None] | None) -> str:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_STEP):
            digest.update(piece)
            if advance is not None:
                advance(len(piece))
    return digest.hexdigest()
