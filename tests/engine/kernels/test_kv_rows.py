"""Quantised rows of the KV cache in the kernels against their plain twins; in Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.attention.triton import TritonBackend
from engine.attention.unusual import unusual_layers
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import KVRow, layer_rows
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.slots import Slots
from engine.execute.cuda.tiles import context_limit
from engine.kernels.triton.kv_rows import read_rows, write_rows
from models.loading.load import load_model
from models.network import Network
from models.reference.decoder import Decoder
from models.spec import kv_sources
from tests.covering import each_value_once
from tests.models.checkpoints import files_of, write_checkpoint
from tests.models.families import FUSED

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, LENGTHS = 16, [170, 40, 3]
KINDS = ["fp8", "int8"]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 is known in the interpreter only")


def numbers(count: int, heads: int, dim: int) -> Tensor:
    """Heads of very different sizes, one of zeros, one of numbers that are nearly none, and one with an outlier."""
    x = torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(count))
    x *= torch.logspace(-20, 20, count).view(-1, 1, 1)
    x[0] = 0
    x[1] *= 1e-25
    x[2, :, 0] = 1e6
    return x


def reading(cache: KVCache, rows: Tensor) -> Tensor:
    out = torch.empty(len(rows), cache.row.heads, cache.row.dim, dtype=cache.dtype, device=DEVICE)
    return read_rows(rows, cache.row.scales(rows), out, cache.row.is_fp8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 96), (1, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_write_and_read_rows_as_torch_does(
    kind: str, heads: int, dim: int, dtype: torch.dtype
) -> None:
    k, v = numbers(40, heads, dim).to(dtype), numbers(40, heads, dim).flip(0).to(dtype)
    cache = KVCache.uniform(1, 4, BLOCK, heads, dim, dtype, DEVICE, kind=kind)
    cache.kv.fill_(255)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:40].int()
    slots[7] = -1  # padding
    given = slots.to(DEVICE), k.to(DEVICE), v.to(DEVICE)
    write_rows((cache.k[0], cache.v[0]), cache.told(0), *given)
    kept = [i for i in range(40) if i != 7]
    at = slots[kept].long()
    width = heads * (dim + 4)
    for rows, given in ((cache.k[0], k), (cache.v[0], v)):
        assert torch.equal(rows.cpu()[at][:, :width], cache.row.encode(given)[kept][:, :width])
        found, expected = reading(cache, rows[at.to(DEVICE)]).cpu(), cache.row.decode(rows.cpu()[at])
        # The interpreter does not round to the nearest bf16; those of fp8 need no rounding.
        rounds = kind == "int8" and dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2**-7 if rounds else 0, atol=0)
    untouched = [slot for slot in range(64) if slot not in at.tolist()]
    assert (cache.kv[:, :, untouched] == 255).all()


@pytest.mark.parametrize(("kind", "error"), [("fp8", 2**-4), ("int8", 0.5 / 126)])
def test_a_number_is_off_by_half_a_step_at_most(kind: str, error: float) -> None:
    row, x = KVRow(3, 64, torch.float32, kind), numbers(30, 3, 64)  # type: ignore[arg-type]
    found = row.decode(row.encode(x))
    most = x.abs().amax(-1, keepdim=True)
    # Where a number of fp8 has fewer digits, as close to 0, steps are as large as they become.
    bound = error * x.abs() + most * 2.0**-17 if kind == "fp8" else error * most
    assert ((found - x).abs() <= bound + 1e-30).all()


@pytest.fixture(scope="module", params=["qwen2 windows", "olmo2", "gemma2", "gpt-oss", "gemma4"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder = write_checkpoint(tmp_path_factory.mktemp("kv"), FUSED[request.param])
    return load_model(files_of(folder), dtype=torch.float32, device=CPU)


def caches(network: Network, kind: str) -> tuple[KVCache, KVCache]:
    spec = network.spec
    rows, sources = layer_rows(spec, torch.float32, CPU, kind), kv_sources(spec)
    made = [KVCache(rows, 48, BLOCK, torch.float32, CPU, sources=sources, is_free=False) for _ in range(2)]
    for cache in made:
        for part in cache.parts:
            part.fill_(255)  # a scale of no number, which rows that were never written must not bring in
    return made[0], made[1]


@each_value_once
@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_what_the_plain_modules_wrote(network: Network, kind: str) -> None:
    plain, fused = caches(network, kind)
    random = torch.Generator().manual_seed(1)
    blocks = iter(torch.randperm(48, generator=random).tolist())
    tables = [tuple(next(blocks) for _ in range(length // BLOCK + 1)) for length in LENGTHS]
    texts = [torch.randint(40, (length + 1,), generator=random).tolist() for length in LENGTHS]
    backend, model = SdpaBackend(plain, unusual_layers(network)), Decoder(network)

    def compute(table: tuple[int, ...], text: list[int], start: int, stop: int) -> Tensor:
        step = backend.plan(StepBatch((Span(table, start, stop - start),)))
        return model.logits(
            model.forward(torch.tensor(text[start:stop]), torch.arange(start, stop), step)[-1:]
        )[0]

    with torch.inference_mode():
        for table, text in zip(tables, texts, strict=True):
            compute(table, text, 0, len(text) - 1)
        for part, given in zip(fused.parts, plain.parts, strict=True):
            part.copy_(given)
        expected = [
            compute(*pair, len(pair[1]) - 1, len(pair[1])) for pair in zip(tables, texts, strict=True)
        ]
        held = Slots(3, 32, 12, torch.tensor([text[-1] for text in texts]))
        for slot, (table, length) in enumerate(zip(tables, LENGTHS, strict=True)):
            held.put(slot, length, length)
            held.show(slot, table)
        held.activate([0, 1, 2], 3)
        held.send()
        logits = FusedDecoder(network, fused, held.given, pdl=False).run(3, context_limit(max(LENGTHS)))
    ends = [table[-1] * BLOCK + length % BLOCK for table, length in zip(tables, LENGTHS, strict=True)]
    for layer, row in enumerate(fused.rows):
        codes = slice(row.heads * row.dim)
        for one, other in ((fused.k, plain.k), (fused.v, plain.v)):
            stored, wanted = one[layer][ends], other[layer][ends]
            torch.testing.assert_close(row.decode(stored), row.decode(wanted), rtol=0.13, atol=0.02)
            # A number that lies between two codes may become either.
            assert (stored[:, codes] != wanted[:, codes]).float().mean() < 0.02
    torch.testing.assert_close(logits, torch.stack(expected), rtol=2e-2, atol=2e-2)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_read_what_is_stored(network: Network, kind: str) -> None:
    """By kernels that read bytes, one after the other and in one step, and by torch."""
    plain, fused = caches(network, kind)
    unusual = unusual_layers(network)
    random = torch.Generator().manual_seed(2)
    tables = ((3, 9, 4, 40, 20), (7, 1, 30))
    spans = [Span(tables[0], 0, 61), Span(tables[1], 0, 20), Span(tables[0], 61, 5), Span(tables[1], 20, 1)]
    model, found = Decoder(network), []
    ids = [torch.randint(40, (span.count,), generator=random) for span in spans]
    for cache, backend in (
        (plain, SdpaBackend(plain, unusual)),
        (fused, TritonBackend(fused, unusual)),
    ):
        outs = []
        with torch.inference_mode():
            for pair in ((0, 1), (2, 3)) if cache is fused else ((0,), (1,), (2,), (3,)):
                step = backend.plan(StepBatch(tuple(spans[i] for i in pair)))
                positions = torch.cat([torch.arange(spans[i].start, spans[i].stop) for i in pair])
                outs.append(model.forward(torch.cat([ids[i] for i in pair]), positions, step))
        found.append(torch.cat(outs))
    torch.testing.assert_close(found[1], found[0], rtol=3e-2, atol=3e-2)
