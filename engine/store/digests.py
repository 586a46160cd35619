"""The digest that identifies a block on disk: a SHA-256 chain over everything on which its bits depend."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from hashlib import sha256

Digest = bytes


def root(fingerprint: Mapping[str, str]) -> Digest:
    """Return the digest at the root of every chain: of the weights, the kernels and all else that decides the bits."""
    return sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).digest()


def after(parent: Digest, keys: Sequence[Hashable]) -> Digest:
    """Return the digest of the block with the rows `keys` (see `engine/cache/rows.py`) after the block `parent`."""
    return sha256(parent + repr(tuple(keys)).encode()).digest()


def without_windows(digest: Digest) -> Digest:
    """Return the digest of the same block without the rows of groups with a window, which were released."""
    return sha256(digest + b"without windows").digest()


def chain(parent: Digest, keys: Sequence[Hashable], size: int) -> Iterator[Digest]:
    """Yield the digests of the full blocks of `size` rows that hold `keys`, after the block `parent`."""
    for start in range(0, len(keys) - size + 1, size):
        parent = after(parent, keys[start : start + size])
        yield parent
