"""A network divided among several ranks gives the same logits as alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.families.common import pre_norm_layer, uniform
from models.loading.load import load_model
from models.network import DeltaNetWeights, Network, Weight
from models.recurrences import DeltaNet, Mamba2
from models.reference.decoder import Decoder
from models.spec import Attention, FeedForward, Layer, ModelSpec, Norm
from models.weights.block_formats import Kind as Held
from models.weights.share import Share
from tests.covering import each_value_once
from tests.engine.divided import MORE_RANKS
from tests.fresh import examples
from tests.models.checkpoints import (
    PlainAttention,
    files_of,
    random_model,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)
from tests.models.families import FAMILIES, RECURRENT, tiny_nemotron_h
from tests.models.hybrids import HYBRIDS, tiny_qwen3_5, tiny_qwen3_next
from tests.models.quantized_models import CASES, write

CPU = torch.device("cpu")
TOKENS = [3, 141, 59, 26, 5, 35, 89, 79, 3, 23, 84, 62, 64, 33, 83, 27, 95, 0, 28, 159]
WHOLE = ("lfm", "gemma3n", "deepseek", "glm4 moe lite")
"""The first words of families that are not divided."""
CONFIGS = {
    "qwen3": tiny_qwen3(),
    "llama": tiny_llama(),
    **{name: config for name, config in FAMILIES.items() if not name.startswith(WHOLE)},
    **HYBRIDS,
    **RECURRENT,
}


@dataclass(slots=True)
class Threads:
    """The ranks as threads of one process."""

    rank: int
    barrier: Barrier
    given: list[Tensor]

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0).to(x.dtype)

    def join_columns(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), -1)

    def _all(self, x: Tensor) -> list[Tensor]:
        self.given[self.rank] = x
        self.barrier.wait(60)
        found = list(self.given)
        self.barrier.wait(60)
        return found


def logits_of(network: Network, peers: Threads | None = None) -> Tensor:
    """Return [tokens, vocab], with the second half computed after the first, as an engine does."""
    with torch.inference_mode():
        model, attention = Decoder(network, peers=peers), PlainAttention(network)
        found = []
        for first, end in ((0, 11), (11, len(TOKENS))):
            hidden = model.forward(torch.tensor(TOKENS[first:end]), torch.arange(first, end), attention)
            found.append(model.logits(hidden))
        return torch.cat(found)


def together(load: Callable[[tuple[int, int]], Network], ranks: int) -> list[Tensor]:
    """Return the logits on each of `ranks` ranks."""
    barrier, given_by = Barrier(ranks), [torch.empty(0)] * ranks

    def run(rank: int) -> Tensor:
        try:
            return logits_of(load((rank, ranks)), Threads(rank, barrier, given_by))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def loading(path: Path, **options: Any) -> Callable[[tuple[int, int]], Network]:
    return lambda rank: load_model(files_of(path), dtype=torch.float32, device=CPU, rank=rank, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_compute_together_what_one_computes(name: str, tmp_path: Path) -> None:
    load = loading(write_checkpoint(tmp_path, CONFIGS[name]))
    alone = logits_of(load((0, 1)))
    for ranks in (3, 4, *MORE_RANKS):  # two are processes in tests of the engine
        for found in together(load, ranks):
            torch.testing.assert_close(found, alone, atol=2e-4, rtol=1e-4)


@each_value_once
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K])
@pytest.mark.parametrize("quantize", ["auto", "none"])
def test_blocks_of_a_file_are_divided_as_they_are(kind: Kind, quantize: str, tmp_path: Path) -> None:
    config = tiny_llama(
        hidden_size=512, intermediate_size=768, num_attention_heads=4, num_key_value_heads=2, head_dim=128
    )
    load = loading(write_gguf(tmp_path / "m.gguf", random_model(config), kind), quantize=quantize)
    alone = logits_of(load((0, 1)))
    for ranks in (2, 3):
        for found in together(load, ranks):
            torch.testing.assert_close(found, alone, atol=5e-4, rtol=1e-3)
    held = {weight.format for weight in load((1, 2)).parts(Weight)}
    assert held == ({Held[kind.name]} if quantize == "auto" else {Held.F32})


@pytest.mark.parametrize("config", [tiny_qwen3_5, tiny_qwen3_next])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_delta_nets_of_a_file_are_divided_by_key_heads(
    config: Callable[..., Any], kind: Kind, tmp_path: Path
) -> None:
    """The value heads of one key head are neighbours in Qwen3-Next; in Qwen3.5 they are as far apart as can be."""
    sizes: dict[str, Any] = {"hidden_size": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    sizes |= {"layer_types": None, "mlp_only_layers": [], "norm_topk_prob": True, "moe_intermediate_size": 64}
    sizes["shared_expert_intermediate_size"] = 64  # so that all matrices fit blocks, divided or not
    stems = dict.fromkeys(("attn_qkv", "attn_gate", "ssm_out"), kind)
    load = loading(write_gguf(tmp_path / "m.gguf", random_model(config(**sizes)), stems))
    alone = logits_of(load((0, 1)))
    for ranks in (2, 3):
        for found in together(load, ranks):
            torch.testing.assert_close(found, alone, atol=5e-4, rtol=1e-3)
    if kind == Kind.Q8_0:
        mixer = load((1, 2)).layers[0].mixer
        assert isinstance(mixer, DeltaNetWeights)
        assert {part.format for part in (*mixer.inputs.parts, *mixer.out.parts)} == {Held.Q8_0}


def test_norms_by_group_of_a_file_are_divided_by_groups(tmp_path: Path) -> None:
    model = random_model(tiny_nemotron_h(time_step_min=0.001, moe_latent_size=20))
    load = loading(write_gguf(tmp_path / "m.gguf", model))
    alone = logits_of(load((0, 1)))
    for ranks in (2, 3):
        for found in together(load, ranks):
            torch.testing.assert_close(found, alone, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["fp8, blocks", "awq", "gptq, act-order"])
def test_quantized_checkpoints_are_divided_as_a_gpu_holds_them(name: str, tmp_path: Path) -> None:
    """In planes, here on a CPU; a matrix whose columns lie in another order is expanded where columns are divided."""
    write(tmp_path, CASES[name])
    load = loading(tmp_path, packs=lambda spec: True)
    alone = logits_of(load((0, 1)))
    for found in together(load, 2):
        torch.testing.assert_close(found, alone, atol=5e-4, rtol=1e-3)
    layer = load((1, 2)).layers[0]
    feed: Any = layer.feed_forward
    linears = [layer.attention.qkv, layer.attention.out, feed.gate_up, feed.down]
    expanded = [all(part.planes is None for part in linear.parts) for linear in linears]
    assert expanded == [False, name.endswith("order"), False, name.endswith("order")]


def test_weights_that_are_quantized_as_they_are_loaded_are_divided_before(tmp_path: Path) -> None:
    load = loading(write_checkpoint(tmp_path, tiny_llama(hidden_size=192)), quantize="int8")
    alone = logits_of(load((0, 1)))
    for found in together(load, 2):
        assert (found - alone).abs().max() < 0.1 * alone.abs().max(), "blocks may begin elsewhere"


@examples(200)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 400), st.integers(1, 500), st.integers(1, 12))
def test_every_head_every_column_and_every_word_has_one_rank(
    kv_heads: int, groups: int, size: int, vocab: int, ranks: int
) -> None:
    attention = Attention(kv_heads * groups, kv_heads, 8)
    layer = pre_norm_layer(attention, FeedForward(size), Norm())
    whole = uniform(
        "Any", layers=1, vocab_size=vocab, hidden_size=16, max_positions=8, layer=layer, tied=True
    )
    shares = [Share(rank, ranks, whole) for rank in range(ranks)]
    assert len({share.spec for share in shares}) == 1, "all ranks run the same program"
    spec = shares[0].spec.attention
    for count, parts in (
        (attention.heads, [share.q_heads(attention) for share in shares]),
        (size, [share.width(size) for share in shares]),
        (vocab, [share.vocab for share in shares]),
    ):
        covered = [number for part in parts for number in range(part.start, part.stop)]
        assert covered == list(range(count))
        assert all(0 <= part.count <= part.size for part in parts)
    for share in shares:
        heads, kv = share.q_heads(attention), share.kv_heads(attention)
        assert (heads.size, kv.size) == (spec.heads, spec.kv_heads)
        for place, head in enumerate(range(heads.start, heads.stop)):
            assert kv.start + place // spec.groups == head // groups, (
                "it reads the KV head that it read before"
            )


@examples(100)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_every_head_of_a_recurrence_has_one_rank(
    groups: int, each: int, ranks: int, alternating: bool
) -> None:
    net = DeltaNet(groups, groups * each, 8, 8, alternating=alternating)
    mamba = Mamba2(groups * each, 8, 8, groups)
    layers = tuple(Layer(mixer, FeedForward(32)) for mixer in (net, mamba))
    whole = ModelSpec("Any", 64, 16, 8, layers)
    shares = [Share(rank, ranks, whole) for rank in range(ranks)]
    assert len({share.spec for share in shares}) == 1, "all ranks run the same program"
    values = [share.value_heads(net) for share in shares]
    heads = [share.mamba_heads(mamba) for share in shares]
    for parts in ([part for each in values for part in each], heads):
        covered = [number for part in parts for number in range(part.start, part.stop)]
        assert sorted(covered) == list(range(groups * each))
    for share, own in zip(shares, values, strict=True):
        net_part, mamba_part = (layer.mixer for layer in share.spec.layers)
        assert isinstance(net_part, DeltaNet)
        assert isinstance(mamba_part, Mamba2)
        places = [part.start + place for part in own for place in range(part.size) if place < part.count]
        keys = range(share.key_heads(net).start, share.key_heads(net).stop)
        for key_head in keys:
            read = {head for head in places if key_head == (head % groups if alternating else head // each)}
            assert len(read) == each, "a key head is where all its value heads are"
        group = share.mamba_groups(mamba)
        for place, head in enumerate(range(share.mamba_heads(mamba).start, share.mamba_heads(mamba).stop)):
            local = place // (mamba_part.heads // mamba_part.groups)
            assert group.start + local == head // each, "it reads the group that it read before"
