"""Latent attention by the native kernels: against the reference executor, and to the bit the same in any company."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine.execute.compatibility import not_native
from engine.execute.cpu.executor import NativeDecoder, unsupported
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.families.common import uniform
from models.loading.load import load_model
from models.network import LatentWeights
from models.reference.decoder import Decoder
from models.spec import FeedForward, LatentAttention, Layer, ModelSpec, Rope, each_layer
from tests.covering import each_value_once
from tests.engine.native.comparing import check
from tests.engine.native.test_native_batches import alone, random_texts
from tests.engine.native.test_native_chunks import relative
from tests.engine.native.test_native_decode import CPU, cache_for, plain_model
from tests.engine.native.test_native_families import logits_of
from tests.fresh import examples
from tests.models.checkpoints import (
    PlainAttention,
    files_of,
    reference_model,
    run_reference,
    write_checkpoint,
)
from tests.models.families import FAMILIES, tiny_deepseek, tiny_deepseek_v2, tiny_glm_lite
from tests.models.test_reference import VOCAB, checkpoint, network_of

LENGTHS = (1, 7, 30, 140)
LONG = {"max_position_embeddings": 512}
IN_BLOCKS = LONG | {"hidden_size": 192, "v_head_dim": 32, "moe_intermediate_size": 64, "q_lora_rank": 32}
"""Sizes whose matrices can be in blocks."""
CONFIGS: dict[str, Any] = {
    "v2": tiny_deepseek_v2(**IN_BLOCKS),
    "v2 lite": tiny_deepseek_v2(**IN_BLOCKS | {"q_lora_rank": None}),
    "v3": tiny_deepseek(**IN_BLOCKS, attention_bias=True),
    # Several threads share the queries of a row, and the halves of a head's outputs.
    "glm": tiny_glm_lite(
        **IN_BLOCKS | {"hidden_size": 256}, num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=160
    ),
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if "deepseek" in name or "moe lite" in name])
def test_a_family_gives_the_logits_of_the_plain_modules(
    name: str, library: NativeLibrary, pool: Pool, tmp_path: Path
) -> None:
    check(plain_model(tmp_path, FAMILIES[name]), library, pool, (1, 7, 30), torch.float32)


@each_value_once
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.float16, "int8")],
    ids=["float32", "bfloat16", "float16-int8"],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_any_company(
    name: str, dtype: torch.dtype, quantize: str, library: NativeLibrary, pool: Pool, tmp_path: Path
) -> None:
    """Contexts of one part and of two, which single rows and chunks see."""
    folder = write_checkpoint(tmp_path, CONFIGS[name])
    model = load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize=quantize)
    assert model.is_quantized == (quantize == "int8")
    check(model, library, pool, LENGTHS, dtype)


def latents() -> st.SearchStrategy[LatentAttention]:
    sizes = st.sampled_from((8, 24, 32))
    return st.builds(
        LatentAttention,
        heads=st.sampled_from((1, 3, 8, 11, 20, 22)),
        q_rank=st.none() | st.sampled_from((20, 64)),
        kv_rank=st.sampled_from((8, 32, 136)),
        nope_dim=st.sampled_from((4, 12, 32)),
        rope_dim=sizes,
        v_dim=st.sampled_from((8, 20, 136)),
        rope=st.none() | st.builds(Rope, interleaved=st.booleans()),
        scale=st.none() | st.just(0.3),
        bias=st.booleans(),
    )


@examples(6, *HealthCheck)
@given(
    latent=latents(),
    lengths=st.lists(st.sampled_from((1, 7, 30, 140, 260)), min_size=1, max_size=4),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_any_latent_attention_computes_what_its_description_says(
    library: NativeLibrary, latent: LatentAttention, lengths: list[int], threads: int, seed: int
) -> None:
    layer = Layer(latent, FeedForward(96))
    spec = uniform(
        "DeepseekV3ForCausalLM",
        layers=2,
        vocab_size=VOCAB,
        hidden_size=64,
        max_positions=512,
        layer=layer,
        tied=False,
    )
    check(
        network_of(spec, *checkpoint(spec, seed), "none"),
        library,
        Pool(threads, library),
        lengths,
        torch.float32,
    )


@pytest.mark.parametrize("name", ["v2 lite", "v3", "glm"])
def test_in_bf16_it_is_as_exact_as_transformers(
    name: str, library: NativeLibrary, pool: Pool, tmp_path: Path
) -> None:
    """Without experts: their choice would magnify every difference."""
    config = deepcopy(CONFIGS[name])
    config.first_k_dense_replace = config.num_hidden_layers
    config.mlp_layer_types = ["dense"] * config.num_hidden_layers
    folder = write_checkpoint(tmp_path, config)
    models = {
        dtype: load_model(files_of(folder), dtype=dtype, device=CPU, quantize="none")
        for dtype in (torch.float32, torch.bfloat16)
    }
    (text,) = random_texts(models[torch.bfloat16], (100,), Random(0))
    text.positions = list(range(100))
    truth = logits_of(Decoder(models[torch.float32]), text, PlainAttention(models[torch.float32]))
    theirs = relative(run_reference(reference_model(folder, torch.bfloat16), text.ids).float(), truth)
    for variant in library.variants.values():
        model = models[torch.bfloat16]
        decoder = NativeDecoder(model, cache_for(model, torch.bfloat16, len(text.blocks)), pool, variant)
        assert relative(torch.cat(alone(decoder, [text])), truth) < theirs


def with_latents(spec: ModelSpec, **changes: Any) -> ModelSpec:
    def changed(mixer: Any) -> Any:
        return replace(mixer, **changes)

    return each_layer(spec, lambda _, layer: replace(layer, mixer=changed(layer.mixer)))


def test_what_does_not_fit_is_refused(pool: Pool, tmp_path: Path) -> None:
    model = plain_model(tmp_path, CONFIGS["v3"])
    odd = with_latents(model.spec, kv_rank=20)
    assert not_native(odd) == "there are no native kernels for latents of 20 + 8 numbers"
    assert unsupported(model.spec) is None
    said = "there are no native kernels for latents in int8; use --kv-dtype auto"
    assert unsupported(model.spec, "int8") == said
    cache = cache_for(model, torch.float32)
    first = model.layers[0]
    assert isinstance(first.mixer, LatentWeights)
    for wrong in (replace(first.mixer, out=first.mixer.kv_a), replace(first.mixer, q_b=first.mixer.q)):
        layers = (replace(first, mixer=wrong), *model.layers[1:])
        with pytest.raises(NativeError, match="a layer do not fit together"):
            NativeDecoder(replace(model, layers=layers), cache, pool)
