"""How the kernels of a decode step are cut: as measured on this machine, or else by the tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from itertools import starmap
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import torch

from engine.execute.cuda.tiles import (
    FEW,
    FUSED,
    LATE_WIDTH,
    AttentionSplit,
    Tile,
    WarpgroupTile,
    WideTile,
    query_splits,
    rounded,
)
from engine.execute.tuning.store import Rule, Table, load_table
from models.network import Linear
from models.spec import Attention
from models.weights.block_formats import Kind
from models.weights.formats.blocks import BLOCKS, INTEGERS

if TYPE_CHECKING:
    from engine.kernels.triton.prompt_attention import Tile as PromptTile

HELD = 80 * 1024
"""The most bytes of an expert's weights that a program copies ahead; the smallest GPUs with tensor cores have 100 KB
for it."""
MULTIPROCESSORS, LINES = 132, 64
"""Those of an H200 and an H100; the outputs of a program of `warpgroup_linear_kernel`."""
Cut: TypeAlias = "Tile | AttentionSplit | PromptTile"
Chosen = Mapping[str, tuple[int, ...]]
"""The numbers of a cut, by the name of the operation."""


def weight_room(capability: tuple[int, int], shared_bytes: int) -> int:
    """Return the bytes in which a program may hold weights; for an unlisted GPU, derive them from its shared memory."""
    return _table(capability).room or shared_bytes // 2 - 2048


def _table(capability: tuple[int, int]) -> Table:
    return load_table("sm_{}{}".format(*capability))


def table_cuts(device: torch.device) -> "KernelConfigs":
    """Return the cuts of the tables, for a GPU on which nothing was measured."""
    if device.type != "cuda":
        return KernelConfigs()
    found = torch.cuda.get_device_properties(device)
    shared, capability = found.shared_memory_per_multiprocessor, (found.major, found.minor)
    return KernelConfigs(weight_room(capability, shared), most=shared - 1024, table=_table(capability))


def fitted(tile: Tile, inputs: int, kind: Kind | None, room: int) -> Tile:
    """Return `tile` if it fits in `room`; otherwise reduce first the copies ahead, then the outputs, then the warps."""
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

    __slots__ = ("_chosen", "_most", "_products", "_rules", "_table", "_taken", "candidates", "room")

    def __init__(
        self,
        room: int = 227 << 10,
        chosen: Chosen = MappingProxyType({}),
        most: int = 227 << 10,
        table: Table | None = None,
    ) -> None:
        """`room` is as in `weight_room`; `most` is the most shared memory in bytes that a program may have at all."""
        self.room = room
        self._most = most
        self._chosen = chosen
        self._table = table or load_table()
        self._taken: dict[str, Cut] = {}
        self._rules: dict[tuple[str | int, ...], Rule] = {}
        self._products: dict[tuple[int, int, int, bool, Kind | None], Tile] = {}
        self.candidates: dict[str, tuple[Cut, ...]] = {}
        """The candidates of everything asked for so far, by name; the first one is the default."""

    def with_(self, chosen: Chosen) -> "KernelConfigs":
        """Return the cuts of the same GPU with other choices."""
        return KernelConfigs(self.room, chosen, self._most, self._table)

    def product(self, rows: int, outputs: int, inputs: int, gated: bool, kind: Kind | None) -> Tile:
        """Return the cut of a product of `outputs` (pairs of lines if gated) for `rows` rows, of `kind` if quantised.

        Counts up to FEW have the same cut, or by the tables one that gives a row the same bits: it may differ in tiles
        and copies ahead, but not in warps or lanes.
        """
        asked = rows, outputs, inputs, gated, kind
        if asked not in self._products:
            shape = f"{outputs} x {inputs}{' gated' if gated else ''}{f' {kind.name}' if kind else ''}"
            name = f"{_rows_key(rows)}{shape}"
            found = self._take(name, lambda: self._tiles(shape, 1 if rows <= FEW else FUSED, *asked[1:]))
            if found == self.candidates[name][0]:
                found = self._tile(shape, *asked)
            assert isinstance(found, Tile)
            self._products[asked] = found
        return self._products[asked]

    def _tile(self, shape: str, rows: int, outputs: int, inputs: int, gated: bool, kind: Kind | None) -> Tile:
        """Return the tile of the tables, made to fit."""
        own = "3 to 4 rows: " if 2 < rows <= FEW // 2 else f"5 to {FEW} rows: "
        keys = [own, _rows_key(rows)] if 2 < rows <= FEW else [_rows_key(rows)]
        chosen = next(
            (self._table.chosen[key + shape] for key in keys if key + shape in self._table.chosen), None
        )
        if chosen is not None:
            return fitted(Tile(*chosen), inputs, kind, self.room)
        properties = {"rows": rows, "outputs": outputs, "inputs": inputs, "gated": gated}
        if kind is None:
            rule = self._rule("plain", **properties)
        else:
            wide, nested = kind.block_bytes >= kind.block, kind.block > 32
            programs = outputs // (8 if gated else 16)
            rule = self._rule("quantised", **properties, programs=programs, wide=wide, nested=nested)
        assert rule.numbers is not None
        tile = Tile(*rule.numbers)
        while rule.narrows and tile.warps > 1 and tile.columns(kind) > inputs:
            tile = replace(tile, warps=tile.warps // 2)
        return fitted(tile, inputs, kind, self.room)

    def _tiles(
        self, shape: str, rows: int, outputs: int, inputs: int, gated: bool, kind: Kind | None
    ) -> Iterable[Tile]:
        """Yield the candidates, of which no two compile to the same kernel: no more can be copied than there is."""

        def works_as(tile: Tile) -> Tile:
            return replace(tile, ahead=min(tile.ahead, -(-inputs // tile.columns(kind))))

        first = self._tile(shape, rows, outputs, inputs, gated, kind)
        yield first
        seen, least = {works_as(first)}, Tile(1, 1, 1, 1).columns(kind)
        lanes = rows <= FEW and kind is not None and BLOCKS[kind].shared == 1
        for tile in starmap(Tile, self._table.candidates["plain" if kind is None else "quantised"]):
            fits = tile.shared(inputs, kind) <= self._most and tile.columns(kind) < 2 * max(inputs, least)
            if (tile.lanes == 1 or lanes) and works_as(tile) not in seen and fits:
                seen.add(works_as(tile))
                yield tile

    def wide(self, rows: int, outputs: int, inputs: int, gated: bool, apart: bool) -> WideTile | None:
        """Return the tile of a product of many `rows`, `rounded`; `outputs` are pairs of lines if gated.

        With `apart`, sums may stay unreduced. None means the library's product is as fast. A program reads all rows, so
        the more rows there are, the fewer weights a product may have; sums that stay unreduced have to be few beside
        them.
        """
        lines = outputs * (2 if gated else 1)
        properties = {"rows": rows, "lines": lines, "weights": lines * inputs, "gated": gated, "apart": apart}
        more = {"inputs // lines": inputs // lines, "lines % 2048": lines % 2048}
        numbers = self._rule("wide", **properties, **more).numbers
        return None if numbers is None else WideTile(*numbers)

    def warpgroups(
        self, count: int, outputs: int, inputs: int, gated: bool, apart: bool
    ) -> WarpgroupTile | None:
        """Return the tile for `count` rows where warps multiply in groups of four; None means that `wide` is as fast.

        Other arguments are as for `wide`. The gain in whole steps is in benchmarks/results/decode-speed.md.
        """
        rows, lines = rounded(count), outputs * (2 if gated else 1)
        programs, spans = -(-outputs // LINES), -(-inputs // 128)
        split = max(1, min(MULTIPROCESSORS // programs, spans // 6)) if apart and not gated else 1
        sizes = {"count": count, "rows": rows, "lines": lines, "outputs": outputs, "inputs": inputs}
        ratios = {"inputs % 8": inputs % 8, "inputs // outputs": inputs // outputs}
        ratios |= {"spans // split": spans // split, "(spans - 1) // split": (spans - 1) // split}
        work = {"weights": lines * inputs, "programs": programs, "programs * split": programs * split}
        rule = self._rule("warpgroups", **sizes, **ratios, **work, gated=gated, apart=apart)
        if rule.numbers is None:
            return None
        columns, shared = rule.numbers
        return WarpgroupTile(columns, shared // (2 * columns * (rows + LINES * lines // outputs)), split)

    def experts(self, outputs: int, inputs: int, chosen: int, gated: bool, kind: Kind) -> Tile:
        """Return the cut of a row's expert products: gate and up of each, or down of the `chosen` ones side by side."""
        spans, packing = -(-inputs // 128) * (1 if gated else chosen), BLOCKS[kind]
        rule = self._rule("experts", gated=gated, spans=spans)
        assert rule.numbers is not None
        tile = Tile(*rule.numbers)
        while tile.warps > 1 and tile.warps > spans:
            tile = replace(tile, warps=tile.warps // 2)
        fits = max(1, HELD // (2 * packing.tile_bytes * tile.warps * tile.tiles))
        # A program computes one row, so lanes take no registers for others. Codes that are the numbers gain nothing.
        in_lanes = packing.shared == 1 and packing.planes != (8,) and packing.floats == INTEGERS
        ahead = min(tile.ahead, -(-spans // tile.warps), fits)
        return replace(tile, ahead=ahead, lanes=tile.lanes if in_lanes else 1)

    def combines(self, layer: Linear) -> bool:
        """Return whether a product of one row combines the parts of its input: if small and, if quantised, in lanes.

        On an H200, a token of Qwen3-0.6B takes 487 instead of 499 us, and one of 1.7B 1,089 instead of 1,109. Half of
        8B, with twice the outputs, takes 2,231 instead of 2,153.
        """
        for weight in layer.parts:
            kind = weight.format if weight.planes is not None else None
            tile = self.product(1, weight.rows, weight.columns, False, kind)
            ordered = weight.planes is not None and weight.planes.order is not None
            if kind is not None and (tile.lanes == 1 or ordered):
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
        sinks = " sinks" if spec.sinks and not window else ""
        name = f"{_rows_key(rows)}attention {spec.heads} / {spec.kv_heads} x {spec.head_dim}{window}{sinks}"
        splits = starmap(AttentionSplit, self._table.candidates["attention"])
        programs = spec.kv_heads * query_splits(spec.groups, dim)
        found = self._take(name, lambda: _splits(splits, programs, dim, tensor_cores, possible))
        assert isinstance(found, AttentionSplit)
        return found if found != self.candidates[name][0] else None

    def prompt(self, spec: Attention, itemsize: int) -> "PromptTile":
        """Return the tile of `ragged_attention` for prompts, in numbers of `itemsize` bytes."""
        from engine.kernels.triton.prompt_attention import Tile, choose_tile

        head_bytes = max(16, 1 << (spec.head_dim - 1).bit_length()) * itemsize
        tiles = starmap(Tile, self._table.candidates["prompts"])
        fitting = [tile for tile in tiles if tile.shared(head_bytes) <= self._most]
        known = [choose_tile(head_bytes, self._most), *fitting]
        found = self._take(f"prompts: {spec.heads} / {spec.kv_heads} x {spec.head_dim}", lambda: known)
        assert isinstance(found, Tile)
        return found

    def _rule(self, kernel: str, **properties: int) -> Rule:
        """Return `Table.rule`, looked up once."""
        asked: tuple[str | int, ...] = kernel, *properties.values()
        if asked not in self._rules:
            self._rules[asked] = self._table.rule(kernel, **properties)
        return self._rules[asked]

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
    if "attention" in name:
        return f"{cut[1] * cut[2]} rows a part, {'tensor cores' if cut[0] else 'no tensor cores'}"
    hidden = {("lanes", 1), ("folds", 1)} if name.split()[-1] in Kind.__members__ else {("lanes", 1)}
    named = [(part.name, number) for part, number in zip(fields(Tile), cut, strict=False)]
    return ", ".join(
        f"{number} {unit if number != 1 else unit.removesuffix('s')}"
        for unit, number in named
        if (unit, number) not in hidden
    )


def _rows_key(rows: int) -> str:
    return f"1 to {FEW} rows: " if rows <= FEW else f"{2 * FEW} rows: "


def _splits(
    splits: Iterable[AttentionSplit], programs: int, dim: int, tensor_cores: bool, possible: bool
) -> Iterable[AttentionSplit]:
    """Yield the candidates. The first stands for the tables, which cut alike up to 2,560 rows."""
    yield (
        AttentionSplit(tensor_cores, 64, 2)
        if tensor_cores or programs > 4
        else AttentionSplit(False, 32, min(programs, 2))
    )
    at_once = max(1024 // dim, 4) * max(dim // 128, 1)
    for split in splits:
        if (possible if split.tensor_cores else split.tile >= at_once) and split.tile % at_once == 0:
            yield split
