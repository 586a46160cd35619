"""Greedy tokens of every family through the engine: small chunks, blocks that are reused, windows that are crossed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import SamplingParams
from tests.engine.tiny import tiny_engine
from tests.models.checkpoints import (
    reference_model,
    tiny_ernie,
    tiny_ernie_moe,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gpt2,
    tiny_qwen3_moe,
)

COUNT = 40
PROMPT = torch.randint(200, (70,), generator=torch.Generator().manual_seed(3)).tolist()
FAMILIES = {
    "qwen3 moe": tiny_qwen3_moe,
    "gemma2": tiny_gemma2,
    "gemma3": tiny_gemma3,
    "gpt2": tiny_gpt2,
    "ernie": tiny_ernie,
    "ernie moe": tiny_ernie_moe,
}


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())
def test_greedy_tokens_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    prompts = (PROMPT, PROMPT[:50], [*PROMPT[:61], 7, 8])
    with tiny_engine(tmp_path, make(vocab_size=272), max_chunk=8) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=COUNT)
        found = [[event.token_id for event in engine.stream(prompt, greedy)] for prompt in prompts]
    model = reference_model(tmp_path)
    for prompt, ids in zip(prompts, found, strict=True):
        assert len(ids) > COUNT // 2  # some end their turn
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        assert ids == logits.argmax(-1).tolist()
