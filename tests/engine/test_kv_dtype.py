"""A KV cache in fp8 and int8: what it takes, where it cannot be had, and that no row ever changes on its way."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from engine.cache.kv_rows import KVRow, kv_row, token_bytes
from engine.cache.rows import Rows
from engine.errors import EngineError
from engine.execute.build_options import BuildOptions
from engine.kernels.native import library
from engine.schedule.loop import Loop
from models.loading.load import load_model
from models.network import Network
from tests.engine.tiny import TinyEngine, tiny_engine, tiny_tokenizer
from tests.fresh import seeds
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KINDS = ["fp8", "int8"]
native = pytest.mark.skipif(library.problem() is not None, reason="needs the native kernels")


@pytest.mark.parametrize(
    ("kind", "heads", "dim", "nbytes"),
    [("auto", 8, 128, 2048), ("bf16", 8, 128, 2048), ("fp8", 8, 128, 1056), ("int8", 1, 64, 80)],
)
def test_what_a_row_takes(kind: str, heads: int, dim: int, nbytes: int) -> None:
    assert kv_row(kind, heads, dim, torch.bfloat16, CPU).nbytes == nbytes


def test_what_cannot_be_had_is_refused_in_a_line() -> None:
    with pytest.raises(
        EngineError, match="Unknown KV dtype 'int3'; it must be auto, bf16, fp16, fp8 or int8"
    ):
        kv_row("int3", 1, 64, torch.bfloat16, CPU)
    with pytest.raises(
        EngineError, match=r"--kv-dtype fp16 cannot be used: .* the dtype of the model, bfloat16"
    ):
        kv_row("fp16", 1, 64, torch.bfloat16, CUDA)
    assert kv_row("fp16", 1, 64, torch.bfloat16, CPU).stored == torch.float16
    assert kv_row("bf16", 1, 64, torch.bfloat16, CUDA) == KVRow(1, 64, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_fit_and_people_are_told(tmp_path: Path, kind: str) -> None:
    with tiny_engine(tmp_path, kv_dtype=kind, num_blocks=40, context=100) as engine:
        figures = engine.figures()
        assert (figures.kv_dtype, figures.kv_token_bytes) == (
            kind,
            token_bytes(engine.spec, torch.float32, kind),
        )
        assert figures.kv_bytes == 40 * 4 * figures.kv_token_bytes
        assert figures.kv_token_bytes < token_bytes(engine.spec, torch.float32) / 2
        seen: list[tuple[str, int]] = []
        engine.look_at_blocks([], lambda found: seen.append((found.kv_dtype, found.token_bytes)))
        engine.check()
        assert seen == [(kind, figures.kv_token_bytes)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    config = tiny_qwen3(vocab_size=272, max_position_embeddings=1024, hidden_size=64, intermediate_size=128)
    folder = write_checkpoint(tmp_path_factory.mktemp("kv"), config)
    # Products with quantised weights have one order of sums, so that rows have the same bits however they came about.
    return load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize="int8")


@contextmanager
def an_engine(network: Network, kind: str) -> Iterator[TinyEngine]:
    tokenizer = tiny_tokenizer()
    tokenizer.stop_ids = frozenset()
    engine = TinyEngine(
        Loop(),
        network,
        tokenizer,
        BuildOptions(
            block_size=4,
            max_chunk=16,
            num_blocks=60,
            context=200,
            offload=1 << 20,
            threads=1,
            kv_dtype=kind,
        ),
        name="tiny",
        device=CPU,
    )
    try:
        yield engine
    finally:
        engine.close()


def stored(engine: TinyEngine, ids: list[int]) -> Tensor:
    """The rows of a text that are in the cache."""

    def job() -> Tensor:
        table = engine.pieces.blocks.open(Rows.of(ids).keys)
        try:
            slots = (
                engine.pieces.cache.every_slot(table.blocks, 0, table.length)
                if table.length
                else torch.empty(0).long()
            )
            row = engine.pieces.cache.row
            # What fills a row up to a multiple of 16 bytes is nobody's.
            return engine.pieces.cache.kv.index_select(2, slots)[..., : row.heads * (row.dim + 4)]
        finally:
            engine.pieces.blocks.close(table)

    return engine.loop.call(job)


@native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(2))
def test_rows_and_answers_are_the_same_to_the_bit_whatever_was_cached(
    network: Network, kind: str, seed: int
) -> None:
    """Prompts that begin alike, cut anywhere, go to host memory and come back: against an empty cache each."""
    random = Random(seed)
    text = [random.randrange(256) for _ in range(90)]
    texts = [text, text[:37] + text[40:80], [*text[:38], 1, 2, 3], text[:8] + text[60:]]
    with an_engine(network, kind) as engine, an_engine(network, kind) as empty:
        assert "native" in engine.figures().decode
        how = engine.default_params(temperature=0.0, max_tokens=4)
        restored = 0
        for _ in range(25):
            ids = random.choice(texts)
            ids = ids[: random.randrange(1, len(ids) + 1)]
            what = random.choice(["warm", "answer", "answer", "offload", "offload", "evict"])
            if what == "warm":
                engine.warm(ids)
            elif what == "offload":
                engine.offload_all()
            elif what == "evict" and random.random() < 0.3:
                engine.evict_all()
            empty.evict_all()
            answer = [event.token_id for event in empty.stream(ids, how)]
            assert [event.token_id for event in engine.stream(ids, how)] == answer
            engine.check()
            whole = ids + answer[:-1]
            expected, found = stored(empty, whole), stored(engine, whole)
            assert found.shape[2] == expected.shape[2] == len(whole)
            assert torch.equal(found, expected)
            offload = engine.figures().offload
            assert offload is not None
            restored = offload.restored_tokens
        assert restored > 0
