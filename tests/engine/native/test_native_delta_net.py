"""Gated delta nets by the native kernels: against the reference executor, and to the bit the same however a text is
cut, from whichever mark it goes on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine.batch import NONE, StateMoves
from engine.execute.compatibility import not_native
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.loading.load import load_model
from models.network import DeltaNetWeights
from models.recurrences import DeltaNet
from models.spec import Attention, FeedForward, Layer, ModelSpec, Norm, Rope, each_layer
from tests.covering import each_value_once
from tests.engine.hybrid import hybrid_network
from tests.engine.native.recurrences import LENGTHS, cache_of, check, check_in_bf16
from tests.engine.native.spans import a_span
from tests.engine.native.test_native_decode import CPU, cache_for, plain_model
from tests.fresh import examples
from tests.models.checkpoints import (
    files_of,
    tiny_qwen3,
    write_checkpoint,
)
from tests.models.hybrids import tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next
from tests.models.test_reference import VOCAB

LONG = {
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "linear_value_head_dim": 40,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
}
"""Sizes whose matrices can be in blocks, and columns of states that are no whole vectors."""
CONFIGS: dict[str, Any] = {
    "qwen3.5": tiny_qwen3_5(**LONG),
    "qwen3.5 moe": tiny_qwen3_5_moe(**LONG),
    "qwen3 next": tiny_qwen3_next(**LONG),
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


def delta_nets() -> st.SearchStrategy[DeltaNet]:
    heads = st.sampled_from(((1, 1), (2, 4), (3, 3), (2, 6)))
    sizes = st.sampled_from((8, 24, 64))
    return st.builds(
        lambda heads, key, value, width, alternating: DeltaNet(
            *heads, key, value, width, alternating=alternating
        ),
        heads,
        sizes,
        st.sampled_from((8, 40, 72)),
        st.sampled_from((1, 2, 4, 7)),
        st.booleans(),
    )


@examples(5, *HealthCheck)
@given(
    net=delta_nets(),
    gate=st.sampled_from((None, "heads", "numbers")),
    lengths=st.lists(st.sampled_from((1, 7, 30, 140)), min_size=1, max_size=3),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_any_delta_net_computes_what_its_description_says(
    library: NativeLibrary, net: DeltaNet, gate: Any, lengths: list[int], threads: int, seed: int
) -> None:
    attention = Attention(4, 2, 16, rope=Rope(dims=8), gate=gate)
    layers = (Layer(net, FeedForward(40)), Layer(attention, FeedForward(40)), Layer(net, FeedForward(40)))
    model = hybrid_network(ModelSpec("Hybrid", VOCAB, 48, 512, layers, Norm()), seed)
    check(model, library, Pool(threads, library), lengths, torch.float32)


def test_in_bf16_it_is_as_exact_as_transformers(library: NativeLibrary, pool: Pool, tmp_path: Path) -> None:
    """The log keeps its numbers in 16 bits, as those of transformers are."""
    check_in_bf16(CONFIGS["qwen3.5"], library, pool, tmp_path)


def test_what_does_not_fit_is_refused(pool: Pool, tmp_path: Path) -> None:
    model = plain_model(tmp_path, CONFIGS["qwen3.5"])
    odd = with_nets(model.spec, key_dim=20)
    assert not_native(odd) == "there are no native kernels for states of 20 x 40 numbers"
    with pytest.raises(NativeError, match="there are no states for recurrences"):
        NativeDecoder(model, cache_for(model, torch.float32), pool)
    cache = cache_of(model, torch.float32, 40, slots=2)
    first = model.layers[0]
    assert isinstance(first.mixer, DeltaNetWeights)
    for wrong in (replace(first.mixer, out=first.mixer.inputs), replace(first.mixer, gates=first.mixer.out)):
        layers = (replace(first, mixer=wrong), *model.layers[1:])
        with pytest.raises(NativeError, match="a layer do not fit together"):
            NativeDecoder(replace(model, layers=layers), cache, pool)
    decoder, span = NativeDecoder(model, cache, pool), a_span([1, 2], 3, [3, 4], [0])
    for moves, said in (
        (None, "no state of the span is saved"),
        (StateMoves(2, 0, ((5, 0),)), "there is no such state"),
        (StateMoves(NONE, 4, ((5, 0),)), "there is no such state"),
        (StateMoves(NONE, 0, ((5, 2),)), "there is no such state"),
        (StateMoves(NONE, 0, ((6, 0),)), "no state of the span is saved"),
        (StateMoves(NONE, 0, ((5, 0), (4, 1))), "states are saved in another order"),
    ):
        with pytest.raises(NativeError, match=said):
            decoder.run([replace(span, states=moves)])
    plain = plain_model(tmp_path / "plain", tiny_qwen3())
    with pytest.raises(NativeError, match="there are no states"):
        NativeDecoder(plain, cache_for(plain, torch.float32), pool).run(
            [replace(span, states=StateMoves(NONE, 0, ((5, 0),)))]
        )


def with_nets(spec: ModelSpec, **changes: Any) -> ModelSpec:
    def changed(_: int, layer: Layer) -> Layer:
        return (
            replace(layer, mixer=replace(layer.mixer, **changes))
            if isinstance(layer.mixer, DeltaNet)
            else layer
        )

    return each_layer(spec, changed)
