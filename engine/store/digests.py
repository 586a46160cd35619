"""What names a block on disk: a hash over everything that its bits depend on."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from hashlib import sha256

Digest = bytes


def root(fingerprint: Mapping[str, str]) -> Digest:
    """What every chain begins with: the weights, the kernels, and whatever else decides what is computed."""
    return sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).digest()


def after(parent: Digest, keys: Sequence[Hashable]) -> Digest:
    """The digest of a block with the rows `keys` (see `engine/cache/rows.py`) behind the block `parent`."""
    return sha256(parent + repr(tuple(keys)).encode()).digest()


def chain(parent: Digest, keys: Sequence[Hashable], size: int) -> Iterator[Digest]:
    """Those of the full blocks of `size` rows that hold `keys`, behind the block `parent`."""
    for start in range(0, len(keys) - size + 1, size):
        parent = after(parent, keys[start : start + size])
        yield parent
