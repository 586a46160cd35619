"""Windows, caps and scales through the paged KV cache: what the engine computes is what transformers computes."""

from collections.abc import Sequence as Items
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PretrainedConfig

from engine.attention.choose import make_backend
from engine.attention.unusual import unusual_layers
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention
from tests.models.checkpoints import random_model, run_reference
from tests.models.test_reference_random import (
    EXAMPLES,
    POSITIONS,
    Piece,
    Reference,
    assert_close,
    gemmas,
    side_by_side,
    texts_and_steps,
)

BLOCK = 4
TEXTS = 4
BACKENDS = ["sdpa", "triton"] if find_spec("triton") and not torch.cuda.is_available() else ["sdpa"]
"""Triton's in its interpreter."""


class Paged(Reference):
    """The same network over blocks that lie scattered; rows that nobody wrote are NaN."""

    def __init__(self, folder: Path, blocks: list[int], backend: str) -> None:
        super().__init__(folder)
        spec = self.model.spec.attention
        layers, count = len(self.model.spec.layers), len(blocks)
        cache = KVCache.uniform(
            layers, count, BLOCK, spec.kv_heads, spec.head_dim, torch.float32, torch.device("cpu")
        )
        cache.kv.fill_(float("nan"))
        self._blocks, self._each = blocks, count // TEXTS
        self._backend = make_backend(backend, cache, unusual_layers(self.model.network))

    def attention(self, pieces: Items[Piece]) -> Attention:
        spans = []
        for piece in pieces:
            table = self._blocks[piece.text * self._each : (piece.text + 1) * self._each]
            needed = -(-(piece.start + len(piece.tokens)) // BLOCK)
            spans.append(Span(tuple(table[:needed]), piece.start, len(piece.tokens)))
        return self._backend.plan(StepBatch(tuple(spans)))


@EXAMPLES
@given(
    gemmas(),
    texts_and_steps(),
    st.permutations(range(TEXTS * POSITIONS // BLOCK)),
    st.integers(0, 2**16),
    st.sampled_from(BACKENDS),
)
def test_chunks_and_batches_across_windows_give_the_logits_of_transformers(
    config: PretrainedConfig,
    given_texts: tuple[list[list[int]], list[list[int]]],
    blocks: list[int],
    seed: int,
    backend: str,
) -> None:
    texts, cuts = given_texts
    model = random_model(config, seed=seed)
    with TemporaryDirectory() as name:
        model.save_pretrained(Path(name))
        found = side_by_side(Paged(Path(name), blocks, backend), texts, cuts)
    for logits, text in zip(found, texts, strict=True):
        assert_close(logits, run_reference(model, text))
