"""Whatever a dense network may ask for, by the native kernels: every family, and random descriptions."""

import re
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.unusual import Unusual
from engine.execute.compatibility import not_native
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeLibrary, Pool
from models.loading.load import load_model
from models.network import Network
from models.reference.attention import Attention
from models.reference.decoder import Decoder
from models.spec import ModelSpec
from tests.engine.native.test_native_batches import Sequence, random_texts, same_in_company
from tests.engine.native.test_native_chunks import Prompt, relative, run
from tests.engine.native.test_native_decode import (
    CPU,
    RoundedAttention,
    cache_for,
    errors,
    plain_model,
    rounded,
)
from tests.fresh import examples
from tests.models.checkpoints import files_of, write_checkpoint
from tests.models.families import FAMILIES, tiny_gemma4, tiny_gpt2
from tests.models.test_reference import checkpoint, feeds_of, network_of, specs

COUNT = 150
"""Tokens of a prompt: more than the library computes at once."""
DENSE = {
    **{
        name: config
        for name, config in FAMILIES.items()
        if not re.search("moe|gemma3n|lfm3|llama4|muse|deepseek|^gpt-oss$", name)
    },
    "gemma4": tiny_gemma4(hidden_size_per_layer_input=32),
    "gpt2": tiny_gpt2(n_embd=64),
    "gpt2 scales": tiny_gpt2(
        n_embd=64, n_inner=96, scale_attn_by_inverse_layer_idx=True, activation_function="gelu"
    ),
}
POSITIONS = 256
WINDOWS = st.none() | st.integers(1, 8) | st.sampled_from([63, 64, 65, 100, 128, 129, 140])


@pytest.fixture(params=DENSE)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_family_gives_the_logits_and_the_cache_of_the_plain_modules(
    name: str, pool: Pool, library: NativeLibrary, tmp_path: Path
) -> None:
    """`errors` leaves no row in the cache that lies before a window."""
    model = plain_model(tmp_path, DENSE[name])
    assert not_native(model.spec) is None
    for variant in library.variants.values():
        assert max(errors(model, pool, variant, (0, 1, 11, 12, 69), torch.float32)) < 2e-5


def test_a_quantized_family_is_within_what_rounding_the_activations_does(
    name: str, pool: Pool, library: NativeLibrary, tmp_path: Path
) -> None:
    config = deepcopy(DENSE[name])
    config.max_position_embeddings = 256
    if config.hidden_size % 32:
        config.hidden_size = 64
    if not name.startswith("gemma4") and config.num_attention_heads * getattr(config, "head_dim", 32) % 32:
        config.head_dim = 32
    folder = write_checkpoint(tmp_path, config)
    model = load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize="int8")
    assert model.is_quantized
    prompt = Prompt(model, COUNT)
    ids, positions = torch.tensor(prompt.ids), torch.tensor(prompt.positions)
    with torch.inference_mode():
        expected, found = (
            each.logits(each.forward(ids, positions, RoundedAttention(torch.float32, model)))[-1]
            for each in (Decoder(model), rounded(model))
        )
    for variant in library.variants.values():
        whole, kv = run(model, prompt, pool, variant, torch.float32, [COUNT])
        assert relative(whole, expected) < 2 * relative(found, expected)
        split, again = run(model, prompt, pool, variant, torch.float32, [1, 30, COUNT - 1, COUNT])
        assert torch.equal(whole, split)
        assert torch.equal(kv, again)


@pytest.mark.parametrize("start", [20, 80, 100, 140, COUNT - 1])
def test_rows_before_the_window_are_not_read(
    start: int, pool: Pool, library: NativeLibrary, tmp_path: Path
) -> None:
    """By a chunk of a prompt and by a single row: what lies there is no number."""
    model = plain_model(tmp_path, FAMILIES["mistral window"])
    window = model.spec.attention.window
    assert window == 12
    prompt = Prompt(model, COUNT)
    for variant in library.variants.values():
        expected, _ = run(model, prompt, pool, variant, torch.float32, [COUNT])
        cache = cache_for(model, torch.float32)
        decoder = NativeDecoder(model, cache, pool, variant)
        prompt.run(decoder, [start])
        cache.kv[:, :, prompt.slots[: start + 1 - window]] = torch.nan
        assert torch.equal(decoder.run([prompt.span(start, COUNT)])[0], expected)


class Attending:
    """The attention of one text in a pass, as the network asks for it."""

    def __init__(self, network: Network) -> None:
        layers = zip(network.spec.layers, network.layers, strict=True)
        self._layers = [Unusual(spec.attention, weights.attention.sinks) for spec, weights in layers]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._layers[layer_index].attend(q, k, v)


def logits_of(decoder: Decoder, text: Sequence, attention: Attention | None = None) -> Tensor:
    """[tokens, vocab]"""
    attention = attention or Attending(decoder.network)
    ids, positions = torch.tensor(text.ids), torch.tensor(text.positions)
    with torch.inference_mode():
        return decoder.logits(decoder.forward(ids, positions, attention))


@examples(5)
@given(
    spec=specs((32, 64), (8, 16, 32), feeds_of(32, 96), WINDOWS, POSITIONS),
    quantize=st.sampled_from(["none", "int8"]),
    lengths=st.lists(st.sampled_from((1, 7, 30, 140, 200)), min_size=1, max_size=4),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_any_dense_network_computes_what_its_description_says(
    library: NativeLibrary, spec: ModelSpec, quantize: str, lengths: list[int], threads: int, seed: int
) -> None:
    if spec.attention.heads * spec.attention.head_dim % 32:
        quantize = "none"
    network, random, pool = (
        network_of(spec, *checkpoint(spec, seed), quantize),
        Random(seed),
        Pool(threads, library),
    )
    assert (network.is_quantized, not_native(spec)) == (quantize == "int8", None)
    texts = random_texts(network, lengths, random)
    expected, near = (
        torch.cat([logits_of(decoder, text) for text in texts])
        for decoder in (Decoder(network), rounded(network) if network.is_quantized else Decoder(network))
    )
    limit = 1e-4 + 2 * relative(near, expected)
    for variant in library.variants.values():
        found = same_in_company(network, texts, pool, variant, torch.float32, random)
        assert relative(found, expected) < limit
