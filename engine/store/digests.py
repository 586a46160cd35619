"""The digests that identify blocks and states on disk: a SHA-256 chain over everything on which their bits depend."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from hashlib import sha256

Digest = bytes

NAME = 24
"""The first bytes of the digest of a piece of a state: those of all its pieces."""
_STATE = b"STAT"
_NUMBER = 4
VOID = bytes(NAME) + _STATE + bytes(_NUMBER)
"""The digest of a record without contents, over which a piece of a state may be written."""


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


def state_place(block: Digest) -> bytes:
    """Return the first bytes of the digests of all states in the rows after a block, before the next block ends."""
    return sha256(block + b"states").digest()[: NAME // 2]


def state_pieces(block: Digest, keys: Sequence[Hashable], count: int) -> list[Digest]:
    """Return the digests of the `count` pieces of the state after the rows `keys`, fewer than a block has, which follow
    `block`. They are alike but for their ends."""
    name = state_place(block) + sha256(after(block, keys) + b"state").digest()[: NAME // 2]
    return [name + _STATE + number.to_bytes(_NUMBER, "little") for number in range(count)]


def is_state(digest: Digest) -> bool:
    """Return whether a digest is that of a piece of a state, or VOID."""
    return digest[NAME:-_NUMBER] == _STATE
