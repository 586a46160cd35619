"""Layers that differ from each other, by the native kernels: short convolutions, and heads of other sizes.

The bits of a row depend neither on its chunk nor on what is beside it.
"""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine.execute.compatibility import not_native
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.loading.load import load_model
from models.network import ConvolutionWeights
from models.reference.decoder import Decoder
from models.spec import Attention, FeedForward, Layer, ModelSpec, ShortConvolution, each_layer
from tests.covering import each_value_once
from tests.engine.native.test_native_batches import random_texts, same_in_company
from tests.engine.native.test_native_chunks import relative
from tests.engine.native.test_native_decode import CPU, cache_for, plain_model, rounded
from tests.engine.native.test_native_families import WINDOWS, logits_of
from tests.fresh import examples
from tests.models.checkpoints import PlainAttention, files_of, write_checkpoint
from tests.models.families import tiny_gemma4, tiny_gemma4_unified, tiny_lfm2, tiny_lfm2_moe
from tests.models.test_reference import checkpoint, feeds_of, network_of, specs

LENGTHS = (1, 2, 7, 30, 140)
CONFIGS = {
    "dense": tiny_lfm2(hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
    "wide": tiny_lfm2(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, conv_bias=True, conv_L_cache=20
    ),
    "experts": tiny_lfm2_moe(hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
    "shared": tiny_gemma4(hidden_size=64, hidden_size_per_layer_input=32),
    "values": tiny_gemma4_unified(hidden_size=64),
}


@each_value_once
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(torch.float32, "int8"), (torch.bfloat16, "none"), (torch.float16, "int8")],
    ids=["float32-int8", "bfloat16", "float16-int8"],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_any_company(
    name: str, dtype: torch.dtype, quantize: str, library: NativeLibrary, pool: Pool, tmp_path: Path
) -> None:
    """The wide convolution sees rows of more than one block."""
    folder = write_checkpoint(tmp_path, CONFIGS[name])
    model = load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize=quantize)
    assert (model.is_quantized, not_native(model.spec)) == (quantize == "int8", None)
    random = Random(0)
    texts = random_texts(model, LENGTHS, random)
    for variant in library.variants.values():
        same_in_company(model, texts, pool, variant, dtype, random)


def computed(spec: ModelSpec) -> ModelSpec:
    """The same network with sizes that the native kernels have."""

    def layer(_: int, given: Layer) -> Layer:
        mixer = given.mixer
        mixer = mixer if isinstance(mixer, Attention) else ShortConvolution(32, getattr(mixer, "width", 3))
        return replace(given, mixer=mixer, laurel=None)

    inputs = spec.layer_inputs
    spec = replace(spec, altup=None, embedding_norm=None, layer_inputs=inputs and replace(inputs, size=32))
    return each_layer(spec, layer)


@examples(4, *HealthCheck)
@given(
    spec=specs((64,), (16, 32), feeds_of(32, 96), WINDOWS, 256, mixed=True)
    .map(computed)
    .filter(lambda spec: not_native(spec) is None),
    quantize=st.sampled_from(["none", "int8"]),
    lengths=st.lists(st.sampled_from((1, 7, 30, 140, 200)), min_size=1, max_size=4),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_any_network_of_mixed_layers_computes_what_its_description_says(
    library: NativeLibrary, spec: ModelSpec, quantize: str, lengths: list[int], threads: int, seed: int
) -> None:
    feeds = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, FeedForward)]
    sizes = [each.heads * each.head_dim for each in spec.attentions.values()] + [feed.size for feed in feeds]
    if any(size % 32 for size in sizes):
        quantize = "none"
    network, random, pool = (
        network_of(spec, *checkpoint(spec, seed), quantize),
        Random(seed),
        Pool(threads, library),
    )
    assert (network.is_quantized, not_native(spec)) == (quantize == "int8", None)
    texts = random_texts(network, lengths, random)
    expected, near = (
        torch.cat([logits_of(decoder, text, PlainAttention(network)) for text in texts])
        for decoder in (Decoder(network), rounded(network) if network.is_quantized else Decoder(network))
    )
    limit = 1e-4 + 2 * relative(near, expected)
    for variant in library.variants.values():
        found = same_in_company(network, texts, pool, variant, torch.float32, random)
        assert relative(found, expected) < limit


def test_convolutions_that_do_not_fit_are_refused(pool: Pool, tmp_path: Path) -> None:
    model = plain_model(tmp_path, CONFIGS["dense"])
    cache = cache_for(model, torch.float32)
    odd = ShortConvolution(60, 3)
    spec = each_layer(
        model.spec,
        lambda i, layer: replace(layer, mixer=odd) if isinstance(layer.mixer, ShortConvolution) else layer,
    )
    assert not_native(spec) == "there are no native kernels for convolutions of 60 channels"
    with pytest.raises(NativeError, match="a layer do not fit together"):
        NativeDecoder(replace(model, spec=spec), cache, pool)
    mixer = model.layers[0].mixer
    assert isinstance(mixer, ConvolutionWeights)
    first = replace(model.layers[0], mixer=replace(mixer, inputs=mixer.out))
    with pytest.raises(NativeError, match="a layer do not fit together"):
        NativeDecoder(replace(model, layers=(first, *model.layers[1:])), cache, pool)
