"""How the kernels of a decode step are cut: as was measured on this machine, else as the tables say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import torch

from engine.execute.cuda.tiles import (
    FEW,
    PACKED_TILES,
    SPLITS,
    TILES,
    PackedTile,
    Split,
    Tile,
    choose_packed_tile,
    choose_tile,
)
from models.spec import Attention
from models.weights.block_formats import Kind

if TYPE_CHECKING:
    from engine.kernels.triton.prompt_attention import Tile as PromptTile

Cut: TypeAlias = "Tile | PackedTile | Split | PromptTile"
Chosen = Mapping[str, tuple[int, ...]]
"""The numbers of a cut, by what it is for."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a kind of GPU begins with, before anything was measured on it."""

    room: int
    """Bytes of shared memory that a program may hold weights in."""
    why: str


STARTS: Mapping[tuple[int, int], Start] = MappingProxyType(
    {
        (8, 0): Start(
            80 << 10, "A100: 164 KB, 108 multiprocessors: two of 80 KB; 2 TB/s need 13 KB on the way"
        ),
        (8, 6): Start(
            48 << 10, "RTX 30: 100 KB, 82 multiprocessors: two of 48 KB; 0.9 TB/s need 8 KB on the way"
        ),
        (8, 9): Start(
            48 << 10, "RTX 40: 100 KB, 128 multiprocessors: two of 48 KB; 72 MB of L2 hold no step"
        ),
        (9, 0): Start(
            227 << 10, "H100, H200: 228 KB, 132 multiprocessors: measured there; two of the largest, 96 KB"
        ),
        (10, 0): Start(
            227 << 10, "B200: 228 KB, 148 multiprocessors: as an H100; 8 TB/s need 43 KB on the way"
        ),
        (12, 0): Start(
            48 << 10, "RTX 50: 100 KB, 170 multiprocessors: two of 48 KB, of which one may wait (PDL)"
        ),
    }
)
"""By compute capability; all have 65,536 registers a multiprocessor. Only (9, 0) was measured. Others begin with what
was fastest there, in as little shared memory as lets two programs run beside each other."""


def room_of(capability: tuple[int, int], shared_bytes: int) -> int:
    """Bytes that a program may hold weights in; a GPU that is not in the table begins as its shared memory says."""
    known = STARTS.get(capability)
    return known.room if known is not None else shared_bytes // 2 - 2048


def table_cuts(device: torch.device) -> "Cuts":
    """How kernels are cut on a GPU that nothing was measured on."""
    if device.type != "cuda":
        return Cuts()
    found = torch.cuda.get_device_properties(device)
    shared = found.shared_memory_per_multiprocessor
    return Cuts(room_of((found.major, found.minor), shared), most=shared - 1024)


def fitted(tile: Tile, inputs: int, room: int) -> Tile:
    """`tile` where it fits, else with less on the way, then with fewer outputs, then with fewer warps."""
    while tile.shared(inputs) > room:
        if tile.ahead > 2:
            tile = replace(tile, ahead=tile.ahead - 1)
        elif tile.tiles > 1:
            tile = replace(tile, tiles=tile.tiles // 2)
        elif tile.warps > 1:
            tile = replace(tile, warps=tile.warps // 2)
        else:
            break
    return tile


def fitted_packed(tile: PackedTile, inputs: int, kind: Kind, room: int) -> PackedTile:
    """The same of quantised weights."""
    while tile.shared(inputs, kind) > room:
        if tile.ahead > 2:
            tile = replace(tile, ahead=tile.ahead - 1)
        elif tile.tiles > 1:
            tile = replace(tile, tiles=tile.tiles // 2)
        elif tile.warps > 1:
            tile = replace(tile, warps=tile.warps // 2)
        else:
            break
    return tile


class Cuts:
    """How each kernel is cut. What was chosen counts only where it is one of the candidates."""

    __slots__ = ("_chosen", "_most", "_taken", "candidates", "room")

    def __init__(
        self, room: int = 227 << 10, chosen: Chosen = MappingProxyType({}), most: int = 227 << 10
    ) -> None:
        """`room` is that of `room_of`; `most`: bytes of shared memory that a program may have at all."""
        self.room = room
        self._most = most
        self._chosen = chosen
        self._taken: dict[str, Cut] = {}
        self.candidates: dict[str, tuple[Cut, ...]] = {}
        """Of what was asked for so far, by what it is for; the first is the one that is taken otherwise."""

    def with_(self, chosen: Chosen) -> "Cuts":
        """The same GPU with other choices."""
        return Cuts(self.room, chosen, self._most)

    def product(
        self, rows: int, outputs: int, inputs: int, gated: bool, kind: Kind | None
    ) -> Tile | PackedTile:
        """Of a matrix, quantised where it has a `kind`, with so many rows. Up to FEW rows have one in common."""
        name = f"{_of(rows)}{outputs} x {inputs}{' gated' if gated else ''}{f' {kind.name}' if kind else ''}"
        if kind is None:
            few = rows <= FEW
            found = self._take(name, lambda: _tiles(outputs, inputs, gated, few, self.room, self._most))
        else:
            found = self._take(
                name, lambda: _packed_tiles(outputs, inputs, gated, kind, self.room, self._most)
            )
        assert isinstance(found, Tile | PackedTile)
        return found

    def split(self, rows: int, spec: Attention, dim: int, tensor_cores: bool, possible: bool) -> Split | None:
        """Of the attention of up to FEW sequences; None: as the tables say.

        `dim` is that of a head, made a power of two; `tensor_cores`: they attend there by the tables; `possible`:
        they can.
        """
        if rows > FEW:
            return None
        window = f" window {spec.window}" if spec.window is not None else ""
        plain = "" if possible or window else " sinks"
        name = f"{_of(rows)}attention {spec.heads} / {spec.kv_heads} x {spec.head_dim}{window}{plain}"
        found = self._take(name, lambda: _splits(spec.kv_heads, dim, tensor_cores, possible))
        assert isinstance(found, Split)
        return found if found != self.candidates[name][0] else None

    def prompt(self, spec: Attention, itemsize: int, shared: int) -> "PromptTile":
        """Of the attention of prompts by `ragged_attention`, with so much shared memory for a program."""
        from engine.kernels.triton.prompt_attention import MEASURED, Tile, choose_tile

        head_bytes = max(16, 1 << (spec.head_dim - 1).bit_length()) * itemsize
        known = [
            choose_tile(head_bytes, shared),
            *(tile for tile in MEASURED if tile.shared(head_bytes) <= shared),
        ]
        found = self._take(f"prompts: {spec.heads} / {spec.kv_heads} x {spec.head_dim}", lambda: known)
        assert isinstance(found, Tile)
        return found

    def _take(self, name: str, find: Callable[[], Iterable[Cut]]) -> Cut:
        cut = self._taken.get(name)
        if cut is None:
            known = self.candidates[name] = tuple(dict.fromkeys(find()))
            wanted = self._chosen.get(name)
            cut = next((one for one in known if numbers(one) == wanted), known[0])
            self._taken[name] = cut
        return cut


def numbers(cut: Cut) -> tuple[int, ...]:
    """What is written down of a cut."""
    return tuple(int(number) for number in astuple(cut))


def told(name: str, cut: Sequence[int]) -> str:
    """Of what is written down of a cut, for people: "8 warps, 2 tiles, 4 ahead"."""
    if name.startswith("prompts"):
        return f"{cut[0]} tokens, {cut[1]} rows at once, {cut[2]} warps"
    kind = Split if "attention" in name else Tile if len(cut) == len(fields(Tile)) else PackedTile
    if kind is Split:
        return f"{cut[1] * cut[2]} rows a part, {'tensor cores' if cut[0] else 'no tensor cores'}"
    units = [
        part.name if number != 1 else part.name.removesuffix("s")
        for part, number in zip(fields(kind), cut, strict=False)
    ]
    return ", ".join(f"{number} {unit}" for number, unit in zip(cut, units, strict=False))


def _of(rows: int) -> str:
    return f"1 to {FEW} rows: " if rows <= FEW else f"{2 * FEW} rows: "


def _tiles(outputs: int, inputs: int, gated: bool, few: bool, room: int, most: int) -> Iterable[Tile]:
    first = fitted(choose_tile(outputs, inputs, gated, few), inputs, room)
    yield first
    seen = {_works_as(first, inputs)}
    for tile in TILES:
        same = _works_as(tile, inputs)
        wide = 128 * tile.warps * tile.folds
        if same not in seen and tile.shared(inputs) <= most and wide < 2 * max(inputs, 128):
            seen.add(same)
            yield tile


def _works_as(tile: Tile, inputs: int) -> Tile:
    """The same for tiles that make the same kernel: no more is on the way than there is."""
    return replace(tile, ahead=min(tile.ahead, -(-inputs // (128 * tile.warps * tile.folds))))


def _packed_tiles(
    outputs: int, inputs: int, gated: bool, kind: Kind, room: int, most: int
) -> Iterable[PackedTile]:
    first = fitted_packed(choose_packed_tile(outputs, inputs, gated, kind), inputs, kind, room)
    yield first
    seen = {_works_as_packed(first, inputs)}
    for tile in PACKED_TILES:
        same = _works_as_packed(tile, inputs)
        wide = 256 * tile.warps
        if same not in seen and tile.shared(inputs, kind) <= most and wide < 2 * max(inputs, 256):
            seen.add(same)
            yield tile


def _works_as_packed(tile: PackedTile, inputs: int) -> PackedTile:
    return replace(tile, ahead=min(tile.ahead, -(-inputs // (256 * tile.warps))))


def _splits(heads: int, dim: int, tensor_cores: bool, possible: bool) -> Iterable[Split]:
    """The first one stands for the tables: up to 2,560 rows they cut as it says."""
    yield Split(tensor_cores, 64, 2) if tensor_cores or heads > 4 else Split(False, 32, min(heads, 2))
    at_once = 1024 // dim * max(dim // 128, 1)
    for split in SPLITS:
        if (possible if split.tensor_cores else split.tile >= at_once) and split.tile % at_once == 0:
            yield split
