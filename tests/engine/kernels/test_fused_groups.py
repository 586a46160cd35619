"""Layers with a window keep only its rows, in slots of their own: the fused kernels find them there."""

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.attention import flash
from engine.attention.choose import make_backend
from engine.attention.triton import TritonBackend
from engine.attention.unusual import unusual_layers
from engine.batch import Span, StepBatch
from engine.cache.block_table import BlockTable
from engine.cache.group_pool import GroupPool
from engine.cache.groups import Groups
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows
from engine.cache.layer_groups import layer_groups
from engine.cache.window import Window
from engine.execute.cuda import padded_prefill
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.padded_prefill import PaddedPrefill
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.tiles import context_limit
from engine.execute.cuda.verify import GuessedRows
from engine.execute.runner import Runner
from engine.kernels.triton import prompt_attention
from engine.kernels.triton.prompt_attention import Tile
from models.reference.decoder import Decoder
from models.spec import kv_sources
from tests.covering import each_value_once
from tests.engine import fake_flash
from tests.engine.kernels.test_fused_families import BLOCK, CPU, LENGTHS, Case, case

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="tests/gpu runs them; fp32 is known in the interpreter only"
    ),
    pytest.mark.usefixtures("few_programs"),
]
FAMILIES = ["gemma3", "gemma4", "gpt-oss", "exaone4", "lfm2 biases"]
STEP = 32
each = pytest.mark.parametrize("case", FAMILIES, indirect=True)

__all__ = ["case"]


class Grouped:
    """A cache with the rows of a case, in which layers with a window have those alone that the texts still see."""

    def __init__(self, case: Case, ends: list[int], kind: str = "auto", in_groups: bool = True) -> None:
        """Each text has so many rows; the next ones are to be computed. `kind` is as in `kv_row`."""
        spec, sources = case.network.spec, kv_sources(case.network.spec)
        groups = layer_groups(spec, torch.float32) if in_groups else []
        assert bool(groups) is in_groups
        pools = [(group.layers, GroupPool(20, Window(group.window, STEP))) for group in groups]
        rows = layer_rows(spec, torch.float32, CPU, kind)
        self.cache = KVCache(rows, 48, BLOCK, torch.float32, CPU, sources=sources, pools=pools)
        for part in self.cache.parts if kind == "auto" else ():
            part[:, :, : -BLOCK if part.shape[2] < 48 * BLOCK else None] = float("nan")
        self.tables = [BlockTable(list(table), end) for table, end in zip(case.tables, ends, strict=True)]
        held = Groups(self.cache.pools, BLOCK)
        for table in self.tables:
            table.firsts = held.firsts(table.length // BLOCK)
        for group, pool in enumerate(self.cache.pools):
            seen = [block for table in self.tables for block in table.blocks[table.firsts[group] :]]
            random.Random(group).shuffle(seen)
            for block in seen:
                pool.take(block)
        for table in filter(lambda table: table.length, self.tables):
            for layer in range(len(spec.layers)):
                self._copy(case.cache, layer, table)

    def _copy(self, given: KVCache, layer: int, table: BlockTable) -> None:
        group = self.cache.groups[layer]
        first = table.firsts[group - 1] * BLOCK if group else 0
        source = given.every_slot(table.blocks, first, table.length)
        target = self.cache.every_slot(table.blocks, first, table.length, group)
        k, v = given.k[layer][source], given.v[layer][source]
        if self.cache.rows[layer].has_v:
            self.cache.write(layer, target, k, v)
        else:
            self.cache.k[layer][target] = k

    def slots(self, case: Case) -> Slots:
        held = Slots(3, 32, 12, torch.tensor([text[-1] for text in case.texts]), self.cache.pools)
        for slot, table in enumerate(self.tables):
            held.put(slot, table.length, table.length)
            held.show(slot, table.blocks, table.first, table.firsts)
        return held

    def blanks_are_zeros(self) -> bool:
        return all(not part[:, :, -BLOCK:].any() for part in self.cache.parts if part.shape[2] < 48 * BLOCK)


@each_value_once
@each
@pytest.mark.parametrize("rows", [4, 32])
def test_a_step_finds_the_rows_of_windows(case: Case, rows: int) -> None:
    given = Grouped(case, LENGTHS)
    slots = given.slots(case)
    slots.activate([2, 0, 1], rows)
    slots.send()
    with torch.inference_mode():
        program = FusedDecoder(case.network, given.cache, slots.given, pdl=False)
        logits = program.run(rows, context_limit(max(LENGTHS)))[:3]
    torch.testing.assert_close(logits, case.last[[2, 0, 1]], rtol=1e-4, atol=2e-4)
    assert given.blanks_are_zeros()


@pytest.mark.parametrize(
    ("case", "kind"), [("gemma4", "int8"), ("gpt-oss", "fp8"), ("lfm2 biases", "int8")], indirect=["case"]
)
def test_a_step_has_the_bits_that_it_has_with_all_rows(case: Case, kind: str) -> None:
    found = []
    for in_groups in (True, False):
        given = Grouped(case, LENGTHS, kind, in_groups)
        slots = given.slots(case)
        slots.activate([2, 0, 1], 4)
        slots.send()
        with torch.inference_mode():
            program = FusedDecoder(case.network, given.cache, slots.given, pdl=False)
            found.append(program.run(4, context_limit(max(LENGTHS)))[:3].clone())
    assert torch.equal(*found)
    assert found[0].isfinite().all()


@pytest.mark.parametrize("case", ["gemma3", "lfm2 biases"], indirect=True)
def test_a_step_that_checks_guesses_finds_the_rows_of_windows(case: Case) -> None:
    found = []
    for together in (False, True):
        given = Grouped(case, LENGTHS)
        slots = given.slots(case)
        slots.activate([0], 1)
        slots.send()
        with torch.inference_mode():
            program = FusedDecoder(case.network, given.cache, slots.given, pdl=False)
            checks: Any = GuessedRows(program, slots, BLOCK)
            if together:
                checks.plan([(0, (7, 9, 11))])
                checks.compute(4, context_limit(LENGTHS[0] + 3))
                found.append(checks._logits[4].clone())
                continue
            one = []
            for place, token in enumerate((case.texts[0][-1], 7, 9, 11)):
                slots.given.token[0], slots.given.counters[0] = token, LENGTHS[0] + place
                one.append(program.run(1, context_limit(LENGTHS[0]))[0].clone())
            found.append(torch.stack(one))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0][0], case.last[0], rtol=1e-4, atol=2e-4)


def spans(case: Case, starts: dict[int, int]) -> tuple[Span, ...]:
    found = []
    for text, start in starts.items():
        ids = case.texts[text]
        found.append(
            Span(case.tables[text], start, len(ids) - start, ids[start:], range(start, len(ids)), True)
        )
    return tuple(found)


@each_value_once
@each
@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_find_the_rows_of_windows(
    case: Case, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    monkeypatch.setattr(padded_prefill, "SLAB", 16)  # the interpreter is slow
    monkeypatch.setattr(padded_prefill, "ALONE", (16, 32))
    monkeypatch.setattr(padded_prefill, "TOGETHER", (64,))
    monkeypatch.setattr(padded_prefill, "SPANS", (4,))
    monkeypatch.setattr(padded_prefill, "LONGEST", (32,))
    if deterministic:
        monkeypatch.setattr(prompt_attention, "choose_tile", lambda *_: Tile(16, 16, 4))
    starts = {0: 158, 2: 0, 1: 30}

    def answers(given: Grouped, asked: tuple[Span, ...]) -> list[Tensor]:
        backend = TritonBackend(given.cache, unusual_layers(case.network))
        padded = PaddedPrefill(
            case.network, given.cache, None if deterministic else backend, max(LENGTHS) + 1, graphs=None
        )
        return padded.run(asked)

    found = answers(Grouped(case, [starts[text] for text in range(3)]), spans(case, starts))
    torch.testing.assert_close(torch.stack(found), case.last[[0, 2, 1]], rtol=1e-4, atol=2e-4)
    given = Grouped(case, [150, LENGTHS[1], LENGTHS[2]])
    (alone,) = answers(given, spans(case, {0: 150}))
    torch.testing.assert_close(alone, case.last[0], rtol=1e-4, atol=2e-4)
    assert given.blanks_are_zeros()


@pytest.mark.parametrize("case", ["gemma4"], indirect=True)
def test_compiling_leaves_the_blank_block_and_the_slots_as_they_were(case: Case) -> None:
    given = Grouped(case, [0, 0, 0])
    for table in given.tables:
        for block in table.blocks:
            given.cache.pools[0].release(block, 0)
            given.cache.pools[0].drop(block)
    runner = Runner(case.network, TritonBackend(given.cache, unusual_layers(case.network)), CPU)
    assert runner.fuse(case.network, given.cache, 64, None, deterministic=False) is None
    with pytest.raises(NotImplementedError), given.cache.on_trial():
        raise NotImplementedError
    assert given.blanks_are_zeros()
    given.cache.pools[0].check([])
    assert given.cache.pools[0].room() == 20


@pytest.mark.parametrize(
    ("case", "name"),
    [("gemma4", "triton"), ("lfm2 biases", "triton"), ("exaone4", "triton"), ("exaone4", "flash")],
    indirect=["case"],
)
def test_backends_find_the_rows_of_windows(case: Case, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As in networks that are not fused: one span alone, several of any lengths, and the last token of each."""
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    for module in (flash, fake_flash):
        monkeypatch.setattr(module, "PAGE", BLOCK)
    for starts in ({0: 130}, {0: 158, 2: 0, 1: 30}, dict(enumerate(LENGTHS))):
        given = Grouped(case, [starts.get(text, LENGTHS[text]) for text in range(3)])
        backend = make_backend(name, given.cache, unusual_layers(case.network))
        asked = spans(case, starts)
        ids = torch.tensor([token for span in asked for token in span.tokens])
        positions = torch.tensor([position for span in asked for position in span.positions])
        model = Decoder(case.network)
        with torch.inference_mode():
            hidden = model.forward(ids, positions, backend.plan(StepBatch(asked)))
            ends = torch.tensor([span.count for span in asked]).cumsum(0) - 1
            logits = model.logits(hidden[ends])
        torch.testing.assert_close(logits, case.last[list(starts)], rtol=1e-4, atol=2e-4)
        assert given.blanks_are_zeros()
