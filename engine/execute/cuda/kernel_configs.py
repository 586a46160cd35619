"""How the kernels of a decode step are cut: as measured on this machine, or else by the tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import torch

from engine.execute.cuda.tiles import (
    FEW,
    FUSED,
    LATE_WIDTH,
    PACKED_TILES,
    SPLITS,
    TILES,
    AttentionSplit,
    PackedTile,
    Tile,
    choose_packed_tile,
    choose_tile,
)
from models.network import Linear
from models.spec import Attention
from models.weights.block_formats import Kind
from models.weights.packing import PACKINGS

if TYPE_CHECKING:
    from engine.kernels.triton.prompt_attention import Tile as PromptTile

Cut: TypeAlias = "Tile | PackedTile | AttentionSplit | PromptTile"
Chosen = Mapping[str, tuple[int, ...]]
"""The numbers of a cut, by the name of the operation."""


@dataclass(frozen=True, slots=True)
class KernelDefaults:
    """The defaults for a kind of GPU, before anything has been measured on it."""

    room: int
    """Bytes of shared memory in which a program may hold weights."""
    why: str


STARTS: Mapping[tuple[int, int], KernelDefaults] = MappingProxyType(
    {
        (8, 0): KernelDefaults(
            80 << 10, "A100: 164 KB, 108 multiprocessors: two of 80 KB; 2 TB/s need 13 KB on the way"
        ),
        (8, 6): KernelDefaults(
            48 << 10, "RTX 30: 100 KB, 82 multiprocessors: two of 48 KB; 0.9 TB/s need 8 KB on the way"
        ),
        (8, 9): KernelDefaults(
            48 << 10, "RTX 40: 100 KB, 128 multiprocessors: two of 48 KB; 72 MB of L2 hold no step"
        ),
        (9, 0): KernelDefaults(
            227 << 10, "H100, H200: 228 KB, 132 multiprocessors: measured there; two of the largest, 96 KB"
        ),
        (10, 0): KernelDefaults(
            227 << 10, "B200: 228 KB, 148 multiprocessors: as an H100; 8 TB/s need 43 KB on the way"
        ),
        (12, 0): KernelDefaults(
            48 << 10, "RTX 50: 100 KB, 170 multiprocessors: two of 48 KB, of which one may wait (PDL)"
        ),
    }
)
"""By compute capability. All have 65,536 registers per multiprocessor. Only (9, 0) was measured; the others start with
what was fastest there, within the shared memory that lets two programs run side by side."""


def weight_room(capability: tuple[int, int], shared_bytes: int) -> int:
    """Return the bytes in which a program may hold weights; for an unlisted GPU, derive them from its shared memory."""
    known = STARTS.get(capability)
    return known.room if known is not None else shared_bytes // 2 - 2048


def table_cuts(device: torch.device) -> "KernelConfigs":
    """Return the cuts of the tables, for a GPU on which nothing was measured."""
    if device.type != "cuda":
        return KernelConfigs()
    found = torch.cuda.get_device_properties(device)
    shared = found.shared_memory_per_multiprocessor
    return KernelConfigs(weight_room((found.major, found.minor), shared), most=shared - 1024)


def fitted(tile: Tile, inputs: int, room: int) -> Tile:
    """Return `tile` if it fits in `room`; otherwise reduce first the copies ahead, then the outputs, then the warps."""
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
    """Fit a tile for quantised weights as `fitted` does."""
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


class KernelConfigs:
    """How each kernel is cut. A chosen cut is used only if it is among the candidates."""

    __slots__ = ("_chosen", "_most", "_taken", "candidates", "room")

    def __init__(
        self, room: int = 227 << 10, chosen: Chosen = MappingProxyType({}), most: int = 227 << 10
    ) -> None:
        """`room` is as in `weight_room`; `most` is the most shared memory in bytes that a program may have at all."""
        self.room = room
        self._most = most
        self._chosen = chosen
        self._taken: dict[str, Cut] = {}
        self.candidates: dict[str, tuple[Cut, ...]] = {}
        """The candidates of everything asked for so far, by name; the first one is the default."""

    def with_(self, chosen: Chosen) -> "KernelConfigs":
        """Return the cuts of the same GPU with other choices."""
        return KernelConfigs(self.room, chosen, self._most)

    def product(
        self, rows: int, outputs: int, inputs: int, gated: bool, kind: Kind | None
    ) -> Tile | PackedTile:
        """Return the cut of a product for `rows` rows, of `kind` if quantised.

        Counts up to FEW have the same cut, or by the tables one that gives a row the same bits.
        """
        name = f"{_rows_key(rows)}{outputs} x {inputs}{' gated' if gated else ''}{f' {kind.name}' if kind else ''}"
        few = rows <= FEW
        if kind is None:
            found = self._take(name, lambda: _tiles(outputs, inputs, gated, few, self.room, self._most))
        else:
            found = self._take(
                name, lambda: _packed_tiles(outputs, inputs, gated, kind, few, self.room, self._most)
            )
            if found == self.candidates[name][0]:
                found = _packed_tile(outputs, inputs, gated, kind, rows, self.room)
        assert isinstance(found, Tile | PackedTile)
        return found

    def combines(self, layer: Linear) -> bool:
        """Return whether a product of one row combines the parts of its input: if small and, if quantised, in lanes.

        On an H200, a token of Qwen3-0.6B takes 487 instead of 499 us, and one of 1.7B 1,089 instead of 1,109. Half of
        8B, with twice the outputs, takes 2,231 instead of 2,153.
        """
        for weight in layer.parts:
            kind = weight.format if weight.planes is not None else None
            tile = self.product(1, weight.rows, weight.columns, False, kind)
            ordered = weight.planes is not None and weight.planes.order is not None
            if isinstance(tile, PackedTile) and (tile.lanes == 1 or ordered):
                return False
            if max(weight.rows, weight.columns) > LATE_WIDTH:
                return False
        return True

    def split(
        self, rows: int, spec: Attention, dim: int, tensor_cores: bool, possible: bool
    ) -> AttentionSplit | None:
        """Return the cut of the attention of up to FEW sequences; None means by the tables.

        `dim` is the head size rounded up to a power of two; `tensor_cores` says whether the tables use tensor cores
        here, `possible` whether they can be used.
        """
        if rows > FEW:
            return None
        window = f" window {spec.window}" if spec.window is not None else ""
        plain = "" if possible or window else " sinks"
        name = f"{_rows_key(rows)}attention {spec.heads} / {spec.kv_heads} x {spec.head_dim}{window}{plain}"
        found = self._take(name, lambda: _splits(spec.kv_heads, dim, tensor_cores, possible))
        assert isinstance(found, AttentionSplit)
        return found if found != self.candidates[name][0] else None

    def prompt(self, spec: Attention, itemsize: int, shared: int) -> "PromptTile":
        """Return the tile of `ragged_attention` for prompts; `shared` is the bytes of shared memory for a program."""
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
    """Return the numbers that the tuning file stores for a cut."""
    return tuple(int(number) for number in astuple(cut))


def describe(name: str, cut: Sequence[int]) -> str:
    """Describe stored numbers for people: "8 warps, 2 tiles, 4 ahead"."""
    if name.startswith("prompts"):
        return f"{cut[0]} tokens, {cut[1]} rows at once, {cut[2]} warps"
    kind = (
        AttentionSplit
        if "attention" in name
        else PackedTile
        if name.split()[-1] in Kind.__members__
        else Tile
    )
    if kind is AttentionSplit:
        return f"{cut[1] * cut[2]} rows a part, {'tensor cores' if cut[0] else 'no tensor cores'}"
    units = [
        part.name if number != 1 else part.name.removesuffix("s")
        for part, number in zip(fields(kind), cut, strict=False)
        if (part.name, number) != ("lanes", 1)
    ]
    return ", ".join(f"{number} {unit}" for number, unit in zip(cut, units, strict=False))


def _rows_key(rows: int) -> str:
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
    """Return the same tile for all that compile to the same kernel: no more can be copied ahead than there is."""
    return replace(tile, ahead=min(tile.ahead, -(-inputs // (128 * tile.warps * tile.folds))))


def _packed_tile(outputs: int, inputs: int, gated: bool, kind: Kind, rows: int, room: int) -> PackedTile:
    return fitted_packed(choose_packed_tile(outputs, inputs, gated, kind, rows), inputs, kind, room)


def _packed_tiles(
    outputs: int, inputs: int, gated: bool, kind: Kind, few: bool, room: int, most: int
) -> Iterable[PackedTile]:
    first = _packed_tile(outputs, inputs, gated, kind, 1 if few else FUSED, room)
    yield first
    seen = {_works_as_packed(first, inputs)}
    for tile in PACKED_TILES:
        if tile.lanes > 1 and not (few and PACKINGS[kind].shared == 1):
            continue
        same = _works_as_packed(tile, inputs)
        wide = 256 * tile.warps
        if same not in seen and tile.shared(inputs, kind) <= most and wide < 2 * max(inputs, 256):
            seen.add(same)
            yield tile


def _works_as_packed(tile: PackedTile, inputs: int) -> PackedTile:
    return replace(tile, ahead=min(tile.ahead, -(-inputs // (256 * tile.warps))))


def _splits(heads: int, dim: int, tensor_cores: bool, possible: bool) -> Iterable[AttentionSplit]:
    """Yield the candidates. The first stands for the tables, which cut alike up to 2,560 rows."""
    yield (
        AttentionSplit(tensor_cores, 64, 2)
        if tensor_cores or heads > 4
        else AttentionSplit(False, 32, min(heads, 2))
    )
    at_once = 1024 // dim * max(dim // 128, 1)
    for split in SPLITS:
        if (possible if split.tensor_cores else split.tile >= at_once) and split.tile % at_once == 0:
            yield split
