"""A KV cache in int8 and fp8 in the native kernels: the bytes of its rows, bits of rows, and the plain modules."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.attention.sdpa import SdpaBackend
from engine.attention.unusual import unusual_layers
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import layer_rows
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native import library
from engine.kernels.native.library import Pool
from models.loading.load import load_model
from models.network import Network
from models.reference.decoder import Decoder
from models.spec import kv_sources
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint
from tests.models.families import FAMILIES, FUSED

pytestmark = pytest.mark.skipif(library.problem() is not None, reason="needs the native kernels")
CPU, BLOCK, ROWS = torch.device("cpu"), 16, 150
KINDS = ["int8", "fp8"]
CONFIGS = {
    "plain": tiny_qwen3(head_dim=64),
    **{name: FUSED[name] for name in ("ministral", "gpt-oss", "gemma2")},
    "gemma4": FAMILIES["gemma4"],
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder = write_checkpoint(tmp_path_factory.mktemp("kv"), CONFIGS[request.param])
    return load_model(files_of(folder), dtype=torch.float32, device=CPU)


def a_cache(network: Network, kind: str) -> KVCache:
    spec = network.spec
    rows = layer_rows(spec, torch.float32, CPU, kind)
    cache = KVCache(rows, 24, BLOCK, torch.float32, CPU, sources=kv_sources(spec))
    for part in cache.parts:
        part.fill_(255)  # a scale of no number: rows that were never written must not matter
    return cache


def written(cache: KVCache) -> list[Tensor]:
    """The rows of the text, K and V of each layer."""
    at = slice(2 * BLOCK, 2 * BLOCK + ROWS)
    return [rows[at] for layer in zip(cache.k, cache.v, strict=True) for rows in layer]


def a_text() -> list[int]:
    return torch.randint(40, (ROWS,), generator=torch.Generator().manual_seed(1)).tolist()


def spans(text: list[int], ends: list[int], first: int = 2) -> list[Span]:
    """A text cut at `ends`, in blocks from `first` on."""
    blocks = tuple(range(first, first + -(-len(text) // BLOCK)))
    return [
        Span(blocks, start, end - start, tuple(text[start:end]), tuple(range(start, end)), wanted=True)
        for start, end in zip([0, *ends], [*ends, len(text)], strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_gets_the_same_bits_however_it_is_cut(network: Network, pool: Pool, kind: str) -> None:
    """Also beside another one; rows and logits."""
    text, found = a_text(), []
    for ends in ([], [1], [149], [40, 41, 90, 148], list(range(1, ROWS, 7))):
        cache, logits = a_cache(network, kind), Tensor()
        decoder = NativeDecoder(network, cache, pool)
        for span in spans(text, ends):
            beside = replace(span, blocks=tuple(block + 11 for block in span.blocks))
            logits = decoder.run([span, beside] if ends else [span])
        found.append((logits[0].clone(), torch.cat([rows.flatten() for rows in written(cache)])))
    for logits, rows in found[1:]:
        assert torch.equal(rows, found[0][1])
        assert torch.equal(logits, found[0][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", [0, None])
def test_the_plain_modules_write_and_read_the_same_rows(
    network: Network, pool: Pool, kind: str, variant: int | None
) -> None:
    text, native, plain = a_text(), a_cache(network, kind), a_cache(network, kind)
    backend = SdpaBackend(plain, unusual_layers(network))
    model, expected = Decoder(network), Tensor()
    with torch.inference_mode():
        decoder = NativeDecoder(network, native, pool, variant)
        for span in spans(text, [100]):
            logits = decoder.run([span])[0]
            step = backend.plan(StepBatch((span,)))
            ids, positions = torch.tensor(span.tokens), torch.tensor(span.positions)
            expected = model.logits(model.forward(ids, positions, step)[-1:])[0]
    rows = [row for row in plain.rows for _ in range(2)]
    differ = []
    for row, ours, theirs in zip(rows, written(native), written(plain), strict=True):
        codes = row.heads * row.dim
        differ.append((ours[:, :codes] != theirs[:, :codes]).flatten())
        torch.testing.assert_close(row.scales(ours), row.scales(theirs), rtol=0.02, atol=1e-4)
    assert torch.cat(differ).float().mean() < 0.02  # where a number lies between two codes
    torch.testing.assert_close(logits, expected, rtol=3e-2, atol=3e-2)
