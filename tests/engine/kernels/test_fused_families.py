"""What families ask of the fused kernels, against the plain modules: in fp32 and in Triton's interpreter."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.runtime.interpreter import GridExecutor

from engine.attention.sdpa import SdpaBackend
from engine.attention.triton import TritonBackend
from engine.attention.unusual import unusual_layers
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows
from engine.cache.window import Window
from engine.execute.compatibility import not_fused
from engine.execute.cuda import padded_prefill
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.padded_prefill import PaddedPrefill
from engine.execute.cuda.prefill import FusedPrefill
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.tiles import context_limit
from engine.execute.cuda.verify import GuessedRows
from engine.kernels.triton import prompt_attention
from engine.kernels.triton.prompt_attention import Tile
from models.loading.load import load_model
from models.network import Network
from models.reference.decoder import Decoder
from models.spec import kv_sources
from tests.models.checkpoints import files_of, write_checkpoint
from tests.models.families import FUSED, FUSED_LATENTS

CPU = torch.device("cpu")
BLOCK, LENGTHS = 16, [170, 40, 3]
CONFIGS = FUSED | FUSED_LATENTS
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="tests/gpu runs them; fp32 is known in the interpreter only"
    ),
    pytest.mark.usefixtures("few_programs"),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A network, its plain modules' cache with three texts in it, and their tables."""

    network: Network
    cache: KVCache
    tables: list[tuple[int, ...]]
    texts: list[list[int]]
    last: Tensor
    """Logits of the last token of each text, whose rows are not in the cache."""
    rows: list[Tensor]
    """What it would write there, in each part of the cache."""


def cache_of(network: Network, blocks: int, window: Window | None = None) -> KVCache:
    """Return a cache of rows that were never written, which must not matter."""
    rows = layer_rows(network.spec, torch.float32, CPU)
    sources = kv_sources(network.spec)
    cache = KVCache(rows, blocks, BLOCK, torch.float32, CPU, window, sources)
    for part in cache.parts:
        part.fill_(float("nan"))
    return cache


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("families")
    network = load_model(
        files_of(write_checkpoint(folder, CONFIGS[request.param])), dtype=torch.float32, device=CPU
    )
    random = torch.Generator().manual_seed(1)
    blocks = iter(torch.randperm(48, generator=random).tolist())
    tables = [tuple(next(blocks) for _ in range(length // BLOCK + 1)) for length in LENGTHS]
    texts = [torch.randint(40, (length + 1,), generator=random).tolist() for length in LENGTHS]
    cache = cache_of(network, 48)
    backend = SdpaBackend(cache, unusual_layers(network))
    model, last = Decoder(network), []
    with torch.inference_mode():
        for table, text in zip(tables, texts, strict=True):
            count = len(text) - 1
            for start, stop in ((0, count), (count, count + 1)):
                step = backend.plan(StepBatch((Span(table, start, stop - start),)))
                hidden = model.forward(torch.tensor(text[start:stop]), torch.arange(start, stop), step)
            last.append(model.logits(hidden[-1:])[0])
    ends = [table[-1] * BLOCK + length % BLOCK for table, length in zip(tables, LENGTHS, strict=True)]
    rows = [part[:, :, ends].clone() for part in cache.parts]
    for part in cache.parts:
        part[:, :, ends] = float("nan")
    return Case(network, cache, tables, texts, torch.stack(last), rows)


def decoded(case: Case, slots: list[int], rows: int) -> tuple[Tensor, list[Tensor]]:
    """Logits of the last tokens of some texts, and the rows that were written in each part of the cache."""
    cache = cache_of(case.network, 48)
    for part, given in zip(cache.parts, case.cache.parts, strict=True):
        part.copy_(given)
    held = Slots(3, 32, 12, torch.tensor([text[-1] for text in case.texts]))
    for slot, (table, length) in enumerate(zip(case.tables, LENGTHS, strict=True)):
        held.put(slot, length, length)
        held.show(slot, table)
    held.activate(slots, rows)
    held.send()
    with torch.inference_mode():
        program = FusedDecoder(case.network, cache, held.given, pdl=False)
        logits = program.run(rows, context_limit(max(LENGTHS)))[: len(slots)].clone()
    ends = [case.tables[slot][-1] * BLOCK + LENGTHS[slot] % BLOCK for slot in slots]
    return logits, [part[:, :, ends] for part in cache.parts]


def agrees(case: Case, slots: list[int], logits: Tensor, written: list[Tensor]) -> None:
    """Compare a step of these slots with what the plain modules compute and write."""
    torch.testing.assert_close(logits, case.last[slots], rtol=1e-4, atol=2e-4)
    for found, wanted in zip(written, case.rows, strict=True):
        torch.testing.assert_close(found, wanted[:, :, slots], rtol=1e-4, atol=1e-4)


def test_a_step_of_families_gives_what_the_plain_modules_give(case: Case) -> None:
    assert not_fused(case.network.spec) is None
    slots = [0, 2, 1]
    agrees(case, slots, *decoded(case, slots, 4))


@pytest.mark.parametrize(
    "case",
    ["phi3 longrope", "olmo3", "granite moe", "gemma2", "gpt-oss", "hunyuan", "lfm2 biases", "glm4 moe lite"],
    indirect=True,
)
def test_a_row_of_families_gets_the_bits_that_it_gets_alone(case: Case) -> None:
    """A family for each of what kernels of attention, experts and convolutions compute beside the usual."""
    (alone, _), (two, _) = decoded(case, [2], 1), decoded(case, [0, 2], 2)
    assert torch.equal(alone[0], two[1])


FEWEST = {
    "phi3": 6,
    "granite": 6,
    "olmo3": 8,
    "gemma2": 8,
    "gemma3": 8,
    "gemma4": 11,
    "gemma4 unified": 8,
    "gemma4 moe": 11,
    "deepseek v3 biases": 9,
}


@pytest.mark.parametrize(("case", "most"), FEWEST.items(), indirect=["case"])
def test_norms_and_inputs_of_layers_take_few_launches_of_their_own(
    case: Case, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    launch = GridExecutor.__call__

    def noting(self: Any, *given: Any, **named: Any) -> None:
        launched.append(self.fn.__name__)
        launch(self, *given, **named)

    monkeypatch.setattr(GridExecutor, "__call__", noting)
    decoded(case, [1], 1)
    # Before the layers there are embeddings, and what makes the inputs of all layers; the head comes last.
    around = 2 if case.network.layer_inputs is None else 5
    assert len(launched) == around + most * len(case.network.layers), launched


@pytest.mark.parametrize(
    "case", ["lfm2", "lfm2 biases", "lfm2 moe", "gemma4", "glm4 moe lite"], indirect=True
)
def test_a_row_may_see_rows_of_its_own_step(case: Case) -> None:
    """As where guesses are checked: rows of one text follow each other, and get the bits of steps of one row."""
    cache = cache_of(case.network, 48)
    found = []
    for together in (False, True):
        for part, given in zip(cache.parts, case.cache.parts, strict=True):
            part.copy_(given)
        held = Slots(3, 8, 12, torch.tensor([text[-1] for text in case.texts]))
        held.put(0, LENGTHS[0], LENGTHS[0])
        held.show(0, case.tables[0])
        held.activate([0], 1)
        held.send()
        with torch.inference_mode():
            program = FusedDecoder(case.network, cache, held.given, pdl=False)
            rows: Any = GuessedRows(program, held, BLOCK)
            if together:
                rows.plan([(0, (7, 9, 11))])
                rows.compute(4, context_limit(LENGTHS[0] + 3))
                found.append(rows._logits[4].clone())
                continue
            one = []
            for place, token in enumerate((case.texts[0][-1], 7, 9, 11)):
                held.given.token[0], held.given.counters[0] = token, LENGTHS[0] + place
                one.append(program.run(1, context_limit(LENGTHS[0]))[0].clone())
            found.append(torch.stack(one))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0][0], case.last[0], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    "case", ["gemma3", "olmo3", "lfm2 biases", "gemma4", "glm4 moe lite", "deepseek v2 lite"], indirect=True
)
def test_a_large_step_of_families_gives_what_the_plain_modules_give(case: Case) -> None:
    slots = [1, 0, 2]
    agrees(case, slots, *decoded(case, slots, 32))


def test_a_prompt_of_families_gives_what_the_plain_modules_give(case: Case) -> None:
    network = case.network
    ids = torch.tensor(case.texts[1])
    positions = torch.arange(len(ids)) + 5  # not the row, as behind a masked think span
    hidden, caches = [], []
    for program in (Decoder(network), FusedPrefill(network)):
        cache = cache_of(network, 4)
        for part in cache.parts:
            part.zero_()
        backend = SdpaBackend(cache, unusual_layers(network))
        with torch.inference_mode():
            parts = [
                program.forward(
                    ids[start:stop],
                    positions[start:stop],
                    backend.plan(StepBatch((Span((3, 1, 2), start, stop - start),))),
                )
                for start, stop in ((0, 25), (25, len(ids)))
            ]
            hidden.append(torch.cat(parts))
        caches.append(cache.parts)
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=2e-4)
    for found, wanted in zip(caches[1], caches[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case", ["phi3", "gemma2", "olmo3", "gpt-oss", "lfm2 biases", "gemma4"], indirect=True
)
def test_deterministic_prompts_of_families_have_the_same_bits_however_they_are_cut(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_prefill, "SLAB", 16)  # the interpreter is slow
    monkeypatch.setattr(prompt_attention, "choose_tile", lambda *_: Tile(16, 16, 4))
    monkeypatch.setattr(padded_prefill, "ALONE", (16,))
    text = case.texts[1]
    found = []
    for cuts in ((len(text),), (7, 30, len(text))):
        cache = cache_of(case.network, 5)
        padded = PaddedPrefill(case.network, cache, None, len(text), graphs=None)
        for start, stop in zip((0, *cuts), cuts, strict=False):
            span = Span((4, 1, 3), start, stop - start, text[start:stop], range(start, stop), True)
            (last,) = padded.run((span,))
        found.append(last.clone())
    if case.network.spec.architecture == "GptOssForCausalLM":
        # Experts are multiplied for as many rows as chose them, here by the processor, whose sums may follow that.
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], case.last[1], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    "case", ["phi3", "gemma2", "gemma3", "olmo3", "lfm2", "lfm2 biases", "gemma4"], indirect=True
)
def test_graphs_of_prompts_of_families_give_what_the_plain_modules_give(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk alone, then several in a step; blocks that a window of all layers has let go of are not read."""
    monkeypatch.setattr(padded_prefill, "ALONE", (16, 32))
    monkeypatch.setattr(padded_prefill, "TOGETHER", (64,))
    monkeypatch.setattr(padded_prefill, "SPANS", (4,))
    monkeypatch.setattr(padded_prefill, "LONGEST", (32,))
    spec = case.network.spec
    window = Window(spec.window, 32) if spec.window is not None else None
    cache = cache_of(case.network, 48, window)
    for part, given in zip(cache.parts, case.cache.parts, strict=True):
        part[:, :, : 48 * BLOCK] = given
    backend = TritonBackend(cache, unusual_layers(case.network))
    padded = PaddedPrefill(case.network, cache, backend, max(LENGTHS) + 1, graphs=None)

    def chunk(text: int, start: int) -> Span:
        ids, gone = case.texts[text], cache.first_seen(start) // BLOCK
        table = (48,) * gone + case.tables[text][gone:]
        return Span(table, start, len(ids) - start, ids[start:], range(start, len(ids)), True)

    (alone,) = padded.run((chunk(0, 150),))
    torch.testing.assert_close(alone, case.last[0], rtol=1e-4, atol=2e-4)
    together = padded.run((chunk(0, 158), chunk(2, 0), chunk(1, 30)))
    torch.testing.assert_close(torch.stack(together), case.last[[0, 2, 1]], rtol=1e-4, atol=2e-4)
