"""Prompts through the fused kernels against the plain modules, in fp32 and in Triton's interpreter."""

import pytest
import torch
from transformers import PretrainedConfig

pytest.importorskip("triton")

from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.prefill import FusedPrefill
from models.loading.load import load_model
from models.reference.decoder import Decoder
from tests.models.checkpoints import files_of, tiny_llama, tiny_qwen3, write_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "config",
    [
        tiny_qwen3(num_hidden_layers=2, head_dim=64, hidden_size=96),
        tiny_llama(
            num_hidden_layers=2,
            hidden_size=192,
            num_attention_heads=3,
            num_key_value_heads=1,
            attention_bias=True,
            mlp_bias=True,
        ),
    ],
    ids=["qwen3", "llama"],
)
def test_a_prompt_in_two_chunks_gives_the_hidden_states_and_the_cache_of_the_plain_modules(
    tmp_path_factory: pytest.TempPathFactory, config: PretrainedConfig
) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("prefill"), config)
    model = load_model(files_of(folder), dtype=torch.float32, device=DEVICE)
    attention = model.spec.attention
    table = (3, 1, 2)
    ids = torch.randint(160, (37,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    positions = torch.arange(37, device=DEVICE) + 5  # not the row, as behind a masked think span
    hidden, caches = [], []
    for program in (Decoder(model), FusedPrefill(model)):
        cache = KVCache.uniform(2, 4, 16, attention.kv_heads, attention.head_dim, torch.float32, DEVICE)
        cache.kv.zero_()
        backend = SdpaBackend(cache)
        with torch.inference_mode():
            chunks = [
                program.forward(
                    ids[start:end],
                    positions[start:end],
                    backend.plan(StepBatch((Span(table, start, end - start),))),
                )
                for start, end in ((0, 20), (20, 37))
            ]
            hidden.append(torch.cat(chunks))
        caches.append(cache.kv)
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-4, atol=1e-4)
