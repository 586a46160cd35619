"""Mamba-2 by the native kernels: against the reference executor, and to the bit the same however a text is cut."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine.execute.compatibility import not_native
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.loading.load import load_model
from models.network import Mamba2Weights
from models.recurrences import DeltaNet, Mamba2
from models.spec import Attention, FeedForward, Layer, ModelSpec, Norm, Rope
from tests.covering import each_value_once
from tests.engine.hybrid import hybrid_network
from tests.engine.native.recurrences import LENGTHS, cache_of, check, check_in_bf16
from tests.engine.native.test_native_decode import CPU, plain_model
from tests.fresh import examples
from tests.models.checkpoints import files_of, write_checkpoint
from tests.models.families import tiny_bamba, tiny_falcon_h1, tiny_granite_hybrid, tiny_nemotron_h
from tests.models.test_reference import VOCAB

LONG: dict[str, Any] = {"max_position_embeddings": 512, "hidden_size": 64, "mamba_n_heads": 8}
"""Sizes whose matrices can be in blocks; states of the first config are no whole vectors."""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FALCON: dict[str, Any] = {
    **LONG,
    **HEADS,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "num_hidden_layers": 2,
}
CONFIGS: dict[str, Any] = {
    "bamba": tiny_bamba(**LONG, mamba_n_groups=2, mamba_d_state=24, mamba_proj_bias=True, head_dim=32),
    "granite experts": tiny_granite_hybrid(
        **HEADS, **LONG, mamba_n_groups=1, mamba_d_state=32, intermediate_size=64, time_step_limit=(0.0, inf)
    ),
    "granite dense": tiny_granite_hybrid(
        **HEADS, **LONG, mamba_n_groups=4, mamba_d_state=8, num_local_experts=0, mamba_conv_bias=False
    ),
    "falcon": tiny_falcon_h1(**FALCON),
    "falcon norm first": tiny_falcon_h1(**FALCON, mamba_norm_before_gate=True, projectors_bias=True),
    "nemotron": tiny_nemotron_h(
        **HEADS,
        hidden_size=64,
        max_position_embeddings=512,
        ssm_state_size=16,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=32,
        mlp_bias=True,
        use_bias=True,
    ),
}


@each_value_once
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.float16, "int8"), (torch.float32, "int8")],
    ids=["float32", "bfloat16", "float16-int8", "float32-int8"],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_any_company(
    name: str, dtype: torch.dtype, quantize: str, library: NativeLibrary, pool: Pool, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[name])
    model = load_model(files_of(folder), dtype=torch.float32, device=CPU, quantize=quantize)
    assert model.is_quantized == (quantize == "int8")
    check(model, library, pool, LENGTHS, dtype)


def mixers() -> st.SearchStrategy[Mamba2]:
    return st.builds(
        lambda heads, dim, size, width, biases, limits, norm, factors: Mamba2(
            heads[0], dim, size, heads[1], width, *biases, limits, *norm[:1], factors, *norm[1:]
        ),
        st.sampled_from(((1, 1), (4, 2), (3, 3), (6, 1))),
        st.sampled_from((8, 16, 40)),
        st.sampled_from((8, 16, 40, 128)),
        st.sampled_from((1, 2, 4, 7)),
        st.tuples(st.booleans(), st.booleans(), st.booleans()),
        st.sampled_from(((0.0, inf), (0.001, inf), (0.3, 0.9))),
        st.sampled_from(((None, False), (1e-5, False), (1e-5, True))),
        st.sampled_from((None, (0.5, 1.5, 2.0, 0.75, 1.25))),
    )


def layers_with(mixer: Mamba2) -> st.SearchStrategy[tuple[Layer, ...]]:
    """Delta nets, attention and Mamba-2 may be in the same network, each with or without a feed-forward, or side by
    side."""
    attention, net, feed = Attention(4, 2, 16, rope=Rope()), DeltaNet(1, 2, 8, 8), FeedForward(40, "relu2")
    whole = [Layer(each, feed, feed_forward_post_norm=Norm()) for each in (mixer, attention, net)]
    alone = [
        Layer(each, None, feed_forward_norm=None, attention_post_norm=Norm()) for each in (mixer, attention)
    ]
    beside = [
        replace(layer, beside=True, attention_norm=None, residual_scale=0.5) for layer in (*alone, *whole)
    ]
    parts: list[tuple[Layer, ...]] = [
        *((layer,) for layer in (*whole, *alone)),
        (Layer(None, feed, attention_norm=None),),
        *((alone[0], layer) for layer in beside[1:]),
        (alone[1], beside[0]),
    ]
    some = st.lists(st.sampled_from(parts), max_size=3)
    return some.map(lambda more: (*whole[:2], *(layer for part in more for layer in part)))


@examples(8, *HealthCheck)
@given(
    layers=mixers().flatmap(layers_with),
    lengths=st.lists(st.sampled_from((1, 7, 30, 140)), min_size=1, max_size=3),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_any_mixer_computes_what_its_description_says(
    library: NativeLibrary, layers: tuple[Layer, ...], lengths: list[int], threads: int, seed: int
) -> None:
    model = hybrid_network(ModelSpec("Hybrid", VOCAB, 48, 512, layers, Norm()), seed)
    check(model, library, Pool(threads, library), lengths, torch.float32)


def test_in_bf16_it_is_as_exact_as_transformers(library: NativeLibrary, pool: Pool, tmp_path: Path) -> None:
    """The log keeps its numbers in 16 bits, as those of transformers are."""
    check_in_bf16(CONFIGS["bamba"], library, pool, tmp_path)


def test_what_does_not_fit_is_refused(pool: Pool, tmp_path: Path) -> None:
    odd = plain_model(tmp_path / "odd", tiny_bamba())
    assert not_native(odd.spec) == "there are no native kernels for states of 32 x 10 numbers"
    model = plain_model(tmp_path, CONFIGS["bamba"])
    first = model.layers[0]
    assert isinstance(first.mixer, Mamba2Weights)
    cache = cache_of(model, torch.float32, 40, slots=2)
    for wrong in (
        replace(first.mixer, out=first.mixer.inputs),
        replace(first.mixer, inputs=first.mixer.out),
    ):
        layers = (replace(first, mixer=wrong), *model.layers[1:])
        with pytest.raises(NativeError, match="a layer do not fit together"):
            NativeDecoder(replace(model, layers=layers), cache, pool)
