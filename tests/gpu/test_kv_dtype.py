"""A KV cache in fp8 and int8 on a GPU: errors compared with torch's reading of it, bits of rows, cached prefixes."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.stepping import blocks_for, forced_logits
from engine import SamplingParams
from engine.batch import Span, StepBatch
from engine.engine import Engine
from tests.gpu.engines import GpuEngine, alone, an_engine, forget, random_tokens
from tests.models.checkpoints import reference_model, tiny_llama, tiny_qwen3, write_checkpoint
from tests.models.families import FUSED

pytest.importorskip("triton")

import triton.language as tl

from engine.kernels.triton.gluon import gl, jit
from engine.kernels.triton.kv_bytes import converted, shifted, signed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "max_position_embeddings": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
}
CONFIGS: dict[str, Any] = {
    "groups of two": tiny_qwen3(**SIZES, num_attention_heads=16, num_key_value_heads=8, head_dim=128),
    "groups of four": tiny_qwen3(**SIZES, num_attention_heads=32, num_key_value_heads=8, head_dim=128),
    "heads of 64": tiny_llama(**SIZES | {"hidden_size": 1152}, num_attention_heads=18, num_key_value_heads=3),
    "windows": FUSED["gemma3"],
    "sinks": FUSED["gpt-oss"],
}
KINDS = ["fp8", "int8"]
BF16 = torch.bfloat16


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param.replace(" ", "_")
    return write_checkpoint(tmp_path_factory.mktemp(name), CONFIGS[request.param], dtype=BF16)


def opened(folder: Path, kind: str, **options: Any) -> AbstractContextManager[GpuEngine]:
    """Provide an engine with such a cache, for contexts that every model here supports."""
    return an_engine(folder, BF16, kv_dtype=kind, **{"context": 250, "streams": 5} | options)


def text_of(engine: Engine, count: int, seed: int) -> list[int]:
    return [token % min(engine.vocab_size, 256) for token in random_tokens(count, seed)]


def prefilled(engine: Engine, ids: list[int], cuts: list[int]) -> Tensor:
    """Return the logits fp32 [T, vocab] of a prompt from the backend, in chunks that begin at `cuts`."""

    def job() -> Tensor:
        engine.pieces.blocks.evict_all()
        runner, found = engine.pieces.runner, []
        with blocks_for(engine, [[]], len(ids)) as (blocks,), torch.inference_mode():
            for start, end in zip(cuts, [*cuts[1:], len(ids)], strict=True):
                plan = runner._backend.plan(StepBatch((Span(tuple(blocks), start, end - start),)))
                given = torch.tensor(ids[start:end], device="cuda"), torch.arange(start, end, device="cuda")
                found.append(runner._model.logits(runner._model.forward(*given, plan)).float())
        return torch.cat(found)

    return engine.loop.call(job)


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_is_larger_than_that_of_torch_with_the_same_rows(folder: Path, kind: str) -> None:
    exact = reference_model(folder).cuda()
    plain: dict[str, Any] = {"attention": "sdpa", "fused": False, "decode_runner": False, "graphs": False}
    long = {"context": 1500} if folder.name.startswith(("groups", "heads")) else {}
    with opened(folder, kind, **plain, **long) as engine:
        # For a single text, the errors of two ways of rounding differ by a tenth.
        texts = [text_of(engine, engine.context_length // 2, seed) for seed in (5, 6, 7)]
        half, length = len(texts[0]) // 2, len(texts[0])
        with torch.inference_mode():
            references = exact(torch.tensor(texts, device="cuda"), use_cache=False).logits.float()
        theirs = torch.stack(
            [errors(prefilled(engine, ids, [0, half]), to) for ids, to in zip(texts, references, strict=True)]
        )
    for attention, block_size in (("triton", 32), ("auto", None)):
        with opened(folder, kind, attention=attention, block_size=block_size, **long) as engine:
            assert engine.figures().kv_dtype == kind
            found = forced_logits(engine, texts, length - 1)
            steps = [errors(ours.float(), to[1:]) for ours, to in zip(found, references, strict=True)]
            prompts = [
                errors(prefilled(engine, ids, [0, half, length - 5]), to)
                for ids, to in zip(texts, references, strict=True)
            ]
            told = engine.figures().decode, engine.figures().attention
        for name, each in (("steps", steps), ("prompts", prompts)):
            ours = torch.stack(each)
            print(f"{folder.name} {kind} {told} {name}: {ours.median():.3e}, torch's {theirs.median():.3e}")
            assert ours.median() <= 1.05 * theirs.median()
            # Any rounding may give a token between two experts the other one: the largest error is a matter of chance.
            assert ours.quantile(0.95) <= 1.3 * theirs.quantile(0.95)


def errors(logits: Tensor, reference: Tensor) -> Tensor:
    return (logits - reference).norm(dim=-1) / reference.norm(dim=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_bits_that_it_gets_alone(folder: Path, kind: str) -> None:
    with opened(folder, kind, attention="triton") as engine:
        texts = [text_of(engine, 40, seed) for seed in range(5)]
        together = forced_logits(engine, texts, 39)
        for text, found in zip(texts, together, strict=True):
            assert torch.equal(forced_logits(engine, [text], 39)[0], found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_from_the_cache_gives_the_same_bits(folder: Path, kind: str) -> None:
    """Deterministic, as such an engine promises: the rows of a prompt, and the text after it."""
    how = SamplingParams(temperature=0.0, max_tokens=20)
    with opened(folder, kind, attention="triton", deterministic=True) as engine:
        ids = text_of(engine, 200, 3)
        fresh, rows = alone(engine, (ids, how)), stored(engine, ids)
        for cut in (1, 100, len(ids) - 1):
            forget(engine)
            engine.warm(ids[:cut])
            assert alone(engine, (ids, how)) == fresh
            assert torch.equal(stored(engine, ids), rows)


def stored(engine: Engine, ids: list[int]) -> Tensor:
    """Return the rows of a cached prompt."""

    def job() -> Tensor:
        with blocks_for(engine, [ids], 1) as (blocks,):
            slots = engine.pieces.cache.every_slot(blocks, 0, len(ids) - 1).cuda()
            row = engine.pieces.cache.row
            return engine.pieces.cache.kv.index_select(2, slots)[..., : row.heads * (row.dim + 4)]

    return engine.loop.call(job)


@jit
def bytes_kernel(words, out, decode: tl.constexpr, HALVES: tl.constexpr):
    """Decode 128 words."""
    at = gl.arange(0, 128, layout=gl.BlockedLayout([2], [32], [2], [0]))
    first, second = decode(gl.load(words + at), HALVES)
    gl.store(out + at, first)
    gl.store(out + 128 + at, second)


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("decode", [converted, shifted, signed])
def test_every_byte_becomes_its_number(decode: Any, halves: bool) -> None:
    """By the instruction of newer GPUs, and by what others do instead."""
    if decode is converted and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no such instruction")
    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    plain = every.view(torch.int8 if decode is signed else torch.float8_e4m3fn).float().view(64, 2, 2)
    first, second = (plain[..., 0], plain[..., 1]) if halves else (plain[:, 0], plain[:, 1])
    out = torch.empty(256, dtype=torch.float16, device="cuda")
    bytes_kernel[(1,)](every.view(torch.int16), out, decode, halves, num_warps=2)
    found = out.float() * (256 if decode is shifted else 1)
    expected = torch.cat([first.flatten(), second.flatten()])
    known = expected.isfinite()  # the cache has no NaN
    assert torch.equal(found[known], expected[known])
