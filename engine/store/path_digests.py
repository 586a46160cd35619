"""What is on disk of a path: its blocks by their digests, as far as a table can continue after them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.cache.block import Block, Key
from engine.cache.blocks import BlockManager
from engine.store.digests import Digest, after, chain, state_pieces, without_windows
from engine.store.folder import Folder


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The blocks of a path that are on disk and follow those in the cache, or have what those lack."""

    held: int
    """The number of full blocks in the cache or host memory with which a prompt can continue."""
    present: int
    """The number of full blocks after which these come: more than `held` if those between lack only rows of groups."""
    digests: list[Digest]
    is_bare: list[bool]
    """For each block, whether it lacks the rows of the groups with a window."""
    end: int
    """The row at which they end."""
    match: int
    """The row up to which a prompt can continue without them."""
    pieces: list[Digest]
    """The pieces of the state after row `end`; none without recurrent layers, or if there is no such state."""


@dataclass(slots=True)
class PathDigests:
    """The digests of blocks. For the loop's thread."""

    blocks: BlockManager
    count_pieces: Callable[[int], int]
    """Returns how many pieces the state after so many rows has."""
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
        size, groups, has_states = self.blocks.block_size, self.blocks.groups, self.blocks.marks is not None
        path = self.blocks.index.chain(keys)
        match = self.blocks.match(keys)
        held = match // size if groups else max(match // size, len(path))
        held = 0 if has_states else held  # a path may be in the cache, and lack a state anywhere
        digests = [self.root]
        names: list[Digest | None] = []
        is_bare: list[bool] = []
        for at, following in enumerate(self._chain(path, keys)):
            name = self._stored(folder, following) if at >= held else None
            if name is None and at >= max(held, len(path)):
                break
            names.append(name)
            is_bare.append(name != following)
            digests.append(following)
        for end in range(len(names), held - 1, -1):
            if has_states and (end + 1) * size <= match:
                break
            if has_states and not folder.has_states(digests[end]):
                continue
            # A prompt continues here if the last blocks are whole in all groups, and those before are there at all.
            first = min(groups.firsts(end), default=held)
            begin = max(min(first, len(path)), held) if self.blocks.window is None else held
            if any(is_bare[max(first, held) : end]) or None in names[begin:end]:
                continue
            found = [name for name in names[begin:end] if name is not None]
            bare, pieces = is_bare[begin:end], list[Digest]()
            tail = keys[end * size : until] if end == len(names) and until > match else []
            if has_states:
                tail, pieces = self._state(
                    folder, digests[end], keys[end * size :][: size - 1], end * size, match
                )
                if not pieces:
                    continue
            rest = after(digests[end], tail)
            if 0 < len(tail) < size and rest in folder:
                return OnDisk(
                    held, begin, [*found, rest], [*bare, False], end * size + len(tail), match, pieces
                )
            return OnDisk(held, begin, found, bare, end * size, match, pieces)
        return OnDisk(held, held, [], [], match, match, [])  # a path is in the cache, but for its states

    def state(self, block: Digest, keys: Sequence[Key], row: int) -> list[Digest]:
        """Return the pieces of the state after `row` rows, of which `keys` follow the last full block."""
        return state_pieces(block, keys, self.count_pieces(row))

    def _state(
        self, folder: Folder, block: Digest, keys: Sequence[Key], start: int, match: int
    ) -> tuple[Sequence[Key], list[Digest]]:
        """Return the most of the rows `keys`, which begin at row `start` after `block`, after which a state is on disk,
        and the pieces of that state; no pieces if there is none after row `match`."""
        for count in range(len(keys), -1, -1):
            if start + count <= match:
                break
            pieces = self.state(block, keys[:count], start + count)
            is_whole = pieces[-1] in folder and all(piece in folder for piece in pieces)
            if is_whole and (not count or after(block, keys[:count]) in folder):
                return keys[:count], pieces
        return [], []

    def _stored(self, folder: Folder, digest: Digest) -> Digest | None:
        """Return the name under which a block is on disk, whole or without the rows of groups; None: it is not."""
        if digest in folder:
            return digest
        bare = without_windows(digest) if self.blocks.groups else digest
        return bare if bare in folder else None

    def _chain(self, path: Sequence[Block], keys: Sequence[Key]) -> Iterator[Digest]:
        """Yield the digest of every full block of `keys`, which begin with the blocks `path`."""
        digest = self.root
        for block in path:
            digest = self.digest(block, digest)
            yield digest
        yield from chain(digest, keys[len(path) * self.blocks.block_size :], self.blocks.block_size)
