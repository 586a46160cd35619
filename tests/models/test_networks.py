"""The networks against transformers, on checkpoints that transformers wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.load import load_model
from tests.models.checkpoints import (
    VOCAB_SIZE,
    files_of,
    random_model,
    run,
    run_reference,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
)

CPU = torch.device("cpu")
TOKENS = torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist()

CONFIGS = {
    "qwen3 tied": tiny_qwen3(),
    "qwen3 untied": tiny_qwen3(tie_word_embeddings=False),
    "qwen3 bias": tiny_qwen3(attention_bias=True),
    "llama untied": tiny_llama(),
    "llama tied": tiny_llama(tie_word_embeddings=True),
    "llama biases": tiny_llama(attention_bias=True, mlp_bias=True),
    "llama multi-head": tiny_llama(num_key_value_heads=6),
    "llama head_dim": tiny_llama(head_dim=32),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_fp32_logits_are_those_of_transformers(config: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config)
    model = load_model(files_of(folder), dtype=torch.float32, device=CPU)
    expected = run_reference(random_model(config), TOKENS)
    torch.testing.assert_close(
        run(model, TOKENS), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
    )
