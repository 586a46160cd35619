"""Mixtures of experts by the native kernels: against the reference executor, and to the bit the same in any company.

Random descriptions and weights.
"""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine.execute.compatibility import has_experts, not_native
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.families.common import pre_norm_layer, uniform
from models.loading.load import load_model
from models.network import ExpertWeights, Linear, Network
from models.reference.decoder import Decoder
from models.spec import Attention, Experts, FeedForward, ModelSpec, Norm, Rope, each_layer
from tests.covering import each_value_once
from tests.engine.native.spans import a_span
from tests.engine.native.test_native_batches import random_texts, same_in_company
from tests.engine.native.test_native_chunks import COUNT, Prompt, run
from tests.engine.native.test_native_decode import (
    BLOCK,
    CPU,
    cache_for,
    errors,
    in_blocks,
    plain_model,
    rounded,
    step,
)
from tests.engine.test_compatibility import a_network
from tests.fresh import examples
from tests.models.checkpoints import files_of, random_model, write_checkpoint, write_gguf
from tests.models.families import FAMILIES, GGUF, tiny_ernie_moe, tiny_gpt_oss, tiny_qwen3_moe
from tests.models.test_gpt_oss import write_quantized
from tests.models.test_reference import checkpoint, feeds_of, maybe_norms, maybe_weighted, network_of, specs

DENSE = FeedForward(96)
POSITIONS = 256
WINDOWS = st.none() | st.sampled_from((1, 5, 64, 100))


def a_spec(*mixtures: Experts | FeedForward | None, hidden: int = 64) -> ModelSpec:
    """A layer for each of them, DENSE where there is none."""
    spec = uniform(
        "Qwen3MoeForCausalLM",
        layers=len(mixtures),
        vocab_size=160,
        hidden_size=hidden,
        max_positions=512,
        layer=pre_norm_layer(Attention(4, 2, 32, rope=Rope()), DENSE, Norm()),
        tied=False,
    )
    return each_layer(spec, lambda i, layer: replace(layer, feed_forward=mixtures[i] or DENSE))


@st.composite
def mixtures(draw: st.DrawFn, size: int) -> Experts:
    """Everything that there may be in a mixture whose sizes are multiples of `size`."""
    groups = draw(st.sampled_from((1, 1, 2, 4)))
    count = groups * draw(st.sampled_from((1, 2, 5, 16, 33)))
    chosen_groups = draw(st.integers(1, groups))
    shared = draw(st.booleans())
    shared_gate = shared and draw(st.booleans())
    flag = st.booleans()
    feeds = feeds_of(size, 2 * size, 3 * size)
    return Experts(
        count=count,
        chosen=draw(st.integers(1, min(count // groups * chosen_groups, 9))),
        expert=draw(feeds),
        renormalise=draw(flag),
        scoring=draw(st.sampled_from(("softmax", "sigmoid"))),
        router_bias=draw(flag),
        exact_router=draw(flag),
        selection_bias=draw(flag),
        shared=draw(feeds) if shared else None,
        shared_gate=shared_gate,
        groups=groups,
        chosen_groups=chosen_groups,
        group_best=draw(st.integers(1, min(count // groups, 2))),
        scale=draw(st.sampled_from((1.0, 2.5))),
        expert_scales=draw(flag),
        router_scale=draw(st.sampled_from((1.0, 0.5))),
        router_norm=None if shared_gate else draw(maybe_weighted),
        expert_norm=draw(maybe_norms),
        expert_post_norm=draw(maybe_norms),
        shared_norm=draw(maybe_norms) if shared and not shared_gate else None,
        shared_post_norm=draw(maybe_norms) if shared else None,
    )


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Up to three layers with whatever there may be, of which one at least has experts; plain, or in blocks."""
    quantized = draw(st.booleans())
    size, hidden, dims = (32, (64, 256), (32, 64)) if quantized else (20, (40, 64), (8, 32))
    spec = draw(
        specs(hidden, dims, feeds_of(size, 3 * size) | mixtures(size), WINDOWS, POSITIONS).filter(has_experts)
    )
    tensors, names = checkpoint(spec, draw(st.integers(0, 2**16)))
    for name, tensor in tensors.items():
        if name.endswith("router.weight"):
            tensor.div_(spec.hidden_size)  # else sigmoids are all 1, and no expert is before another
    plain = network_of(spec, tensors, names)
    return in_blocks(plain) if quantized else plain


EXAMPLE = examples(3, *HealthCheck)


@EXAMPLE
@given(model=networks())
def test_a_mixture_gives_what_the_reference_gives(library: NativeLibrary, pool: Pool, model: Network) -> None:
    assert not_native(model.spec) is None
    truth = rounded(model) if model.is_quantized else Decoder(model)
    for variant in library.variants.values():
        found = sorted(errors(model, pool, variant, range(12), torch.float32, truth))
        # A number next to the middle of two int8 steps may go either way, and then another expert may be chosen.
        assert found[len(found) // 4 if model.is_quantized else -1] < 1e-5
        assert found[len(found) // 2] < 0.02


@EXAMPLE
@given(
    model=networks(),
    lengths=st.lists(st.sampled_from((1, 2, 7, 16, 30, 140)), min_size=2, max_size=9),
    threads=st.integers(1, 8),
    random=st.randoms(use_true_random=False),
)
def test_a_row_has_the_same_bits_in_any_company(
    library: NativeLibrary, model: Network, lengths: list[int], threads: int, random: Random
) -> None:
    texts, pool = random_texts(model, lengths, random), Pool(threads, library)
    for variant in library.variants.values():
        same_in_company(model, texts, pool, variant, torch.bfloat16, random)


MIXTURE = Experts(8, 3, FeedForward(64), shared=FeedForward(96), shared_gate=True, router_bias=True)


@pytest.mark.parametrize("rows", range(1, 10))
def test_so_many_rows_decode_as_each_alone(library: NativeLibrary, pool: Pool, rows: int) -> None:
    model = in_blocks(a_network(a_spec(MIXTURE, None, MIXTURE)))
    spans = [a_span([3 * row], 0, [0], [row]) for row in range(rows)]
    for variant in library.variants.values():
        decoder = NativeDecoder(model, cache_for(model, torch.float32), pool, variant)
        found = decoder.run(spans)
        for span, row in zip(spans, found, strict=True):
            assert torch.equal(decoder.run([span])[0], row)


def test_a_prompt_longer_than_what_is_computed_at_once(library: NativeLibrary, pool: Pool) -> None:
    """Its experts have hundreds of rows; token by token they have one."""
    model, length = in_blocks(a_network(a_spec(MIXTURE, MIXTURE))), 512 + 40
    prompt = Prompt(model, 500)
    prompt.ids, prompt.positions = prompt.ids + prompt.ids[: length - 500], [r % 500 for r in range(length)]
    prompt.slots = torch.tensor([prompt.table[r // BLOCK] * BLOCK + r % BLOCK for r in range(length)])
    for variant in library.variants.values():
        logits, kv = run(model, prompt, pool, variant, torch.bfloat16, [length])
        again, kv_again = run(model, prompt, pool, variant, torch.bfloat16, [1, 9, 100, 530, 531, length])
        assert torch.equal(again, logits)
        assert torch.equal(kv_again, kv)


CONFIGS: dict[str, Any] = {
    name: config(hidden_size=64, intermediate_size=96, moe_intermediate_size=64, head_dim=32, **few)
    for name, config, few in (
        (
            "qwen3 moe",
            tiny_qwen3_moe,
            {"num_attention_heads": 4, "num_key_value_heads": 2, "decoder_sparse_step": 1},
        ),
        ("ernie moe", tiny_ernie_moe, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    )
} | {"gpt-oss": tiny_gpt_oss(head_dim=32)}
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@pytest.mark.parametrize("name", ["qwen3 moe", "ernie moe", "gpt-oss", "lfm2 moe", "gemma4 moe"])
def test_a_family_with_experts_gives_what_the_plain_modules_give(
    name: str, tmp_path: Path, library: NativeLibrary, pool: Pool
) -> None:
    model = plain_model(tmp_path, FAMILIES[name])
    assert not_native(model.spec) is None
    for variant in library.variants.values():
        assert max(errors(model, pool, variant, (0, 1, 11, 12, 69), torch.float32)) < 2e-5


@each_value_once
@pytest.mark.parametrize("source", ["gguf", "safetensors"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_with_experts_in_blocks(
    name: str, source: str, tmp_path: Path, library: NativeLibrary, pool: Pool
) -> None:
    config, quantize = CONFIGS[name], "auto"
    if source == "gguf":
        kinds = Kind.Q8_0 if name != "gpt-oss" else dict.fromkeys(EXPERTS, Kind.MXFP4)
        path = write_gguf(tmp_path / "model.gguf", random_model(config), kinds, metadata=GGUF.get(name, {}))
    elif name == "gpt-oss":
        path = write_quantized(tmp_path, head_dim=32)
    else:
        path, quantize = write_checkpoint(tmp_path, config), "int8"
    model = load_model(files_of(path), dtype=torch.float32, device=CPU, quantize=quantize)
    mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertWeights)]
    assert mixtures
    assert all(not expert.down.is_plain for mixture in mixtures for expert in mixture.experts)
    assert not_native(model.spec) is None
    for variant in library.variants.values():
        found = sorted(errors(model, pool, variant, range(12), torch.float32, rounded(model)))
        assert found[len(found) // 4] < 1e-5
        assert found[len(found) // 2] < 0.02
        prompt = Prompt(model)
        logits, kv = run(model, prompt, pool, variant, torch.float32, [COUNT])
        again, kv_again = run(model, prompt, pool, variant, torch.float32, [1, 9, 40, COUNT])
        assert torch.equal(again, logits)
        assert torch.equal(kv_again, kv)


def test_equal_scores_choose_the_first_experts(library: NativeLibrary, pool: Pool) -> None:
    """As the reference does, where nothing tells experts from each other."""
    model = a_network(a_spec(Experts(8, 3, FeedForward(64))))
    feed = model.layers[0].feed_forward
    assert isinstance(feed, ExpertWeights)
    feed.router.weight.zero_()
    for expert in feed.experts[3:]:
        expert.down.weight.fill_(float("nan"))
    for variant in library.variants.values():
        logits = step(NativeDecoder(model, cache_for(model, torch.float32), pool, variant), 1, 0, 0, [0])
        assert not logits.isnan().any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("part", ["router", "gate", "up", "down"])
def test_weights_that_are_no_numbers_show_in_the_logits(
    library: NativeLibrary, pool: Pool, part: str, scoring: Any
) -> None:
    model = a_network(a_spec(Experts(8, 3, FeedForward(64, limit=0.1), scoring=scoring)))
    feed = model.layers[0].feed_forward
    assert isinstance(feed, ExpertWeights)
    if part == "router":
        feed.router.weight[7] = float("nan")
    else:
        for expert in feed.experts:
            weight = expert.down.weight if part == "down" else expert.gate_up.weight
            weight[{"gate": 3, "up": 64 + 3, "down": 3}[part], 5] = float("nan")
    for rows in (1, 20):
        spans = [a_span([row], 0, [0], [row]) for row in range(rows)]
        for variant in library.variants.values():
            decoder = NativeDecoder(model, cache_for(model, torch.float32), pool, variant)
            assert decoder.run(spans).isnan().all()


def test_experts_that_do_not_fit_are_refused(pool: Pool) -> None:
    model = in_blocks(a_network(a_spec(MIXTURE)))
    cache = cache_for(model, torch.float32)
    (layer,) = model.layers
    feed = layer.feed_forward
    assert isinstance(feed, ExpertWeights)

    def refuse(feed: ExpertWeights, spec: ModelSpec, words: str) -> None:
        with pytest.raises(NativeError, match=words):
            NativeDecoder(replace(model, spec=spec, layers=(replace(layer, feed_forward=feed),)), cache, pool)

    refuse(feed, a_spec(replace(MIXTURE, chosen=9)), "so many experts")
    refuse(feed, a_spec(replace(MIXTURE, chosen=0)), "so many experts")
    refuse(replace(feed, router=feed.experts[0].gate_up), model.spec, "router")
    refuse(replace(feed, router=Linear(feed.experts[0].gate_up.parts[:1])), model.spec, "router")
    other = replace(feed.experts[0], down=feed.experts[0].gate_up)
    refuse(replace(feed, experts=(*feed.experts[:7], other)), model.spec, "experts of a layer")
