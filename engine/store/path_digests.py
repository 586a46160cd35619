"""What is on disk of a path: its blocks by their digests, as far as a table can continue after them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.cache.blocks import BlockManager
from engine.cache.prefix_index import Block, Key
from engine.store.digests import Digest, after, chain, without_windows
from engine.store.folder import Folder


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The blocks of a path that are on disk and follow those in the cache."""

    present: int
    """The number of full blocks in the cache or host memory, after which these come."""
    digests: list[Digest]
    is_bare: list[bool]
    """For each block, whether it lacks the rows of the groups with a window."""
    end: int
    """The row at which they end."""


@dataclass(slots=True)
class PathDigests:
    """The digests of blocks. For the loop's thread."""

    blocks: BlockManager
    root: Digest = b""
    """The digest at the root of every chain."""
    _names: dict[int, Digest] = field(default_factory=dict)
    """The digest of a block by its name."""

    def digest(self, block: Block, parent: Digest) -> Digest:
        """Return the digest of a full block after the block `parent`."""
        found = self._names.get(block.name)
        if found is None:
            if len(self._names) > 4 * self.blocks.num_blocks:
                self._names.clear()
            found = self._names[block.name] = after(parent, block.keys)
        return found

    def missing(self, folder: Folder, keys: Sequence[Key], until: int) -> OnDisk:
        """Return what is on disk of `keys` after the rows in the cache; `until` is as in `DiskTier.bring`."""
        size, groups = self.blocks.block_size, self.blocks.groups
        path = self.blocks.chain(keys)
        match = self.blocks.match(keys)
        # Blocks that lost only the rows of a group are read again, and take the places of those in the cache.
        present = match // size if groups else max(match // size, len(path))
        found: list[Digest] = []
        is_bare: list[bool] = []
        digest = self.root
        for at, following in enumerate(self._chain(path, keys)):
            if at >= present:
                name = next(
                    (name for name in (following, without_windows(following)) if name in folder), None
                )
                if name is None:
                    break
                found.append(name)
                is_bare.append(name != following)
            digest = following
        count = self._whole(present, is_bare)
        end = (present + count) * size
        tail = keys[end:until]
        if count == len(found) and 0 < len(tail) < size and until > match:
            rest = after(digest, tail)
            if rest in folder:
                return OnDisk(present, [*found, rest], [*is_bare, False], until)
        return OnDisk(present, found[:count], is_bare[:count], end)

    def _chain(self, path: Sequence[Block], keys: Sequence[Key]) -> Iterator[Digest]:
        """Yield the digest of every full block of `keys`, which begin with the blocks `path`."""
        digest = self.root
        for block in path:
            digest = self.digest(block, digest)
            yield digest
        yield from chain(digest, keys[len(path) * self.blocks.block_size :], self.blocks.block_size)

    def _whole(self, present: int, is_bare: Sequence[bool]) -> int:
        """Return how many blocks a table can continue with after `present` blocks: it needs the last ones whole."""
        for count in range(len(is_bare), 0, -1):
            first = min(self.blocks.groups.firsts(present + count), default=present)
            if not any(is_bare[max(first - present, 0) : count]):
                return count
        return 0
