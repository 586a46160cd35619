"""Gated delta nets against the module of transformers, against float64, and cut anywhere."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from models.network import DeltaNetWeights, Linear, NormWeights, Weight
from models.recurrences import DeltaNet
from models.reference.delta_net import gated_norm, walk
from models.spec import Attention, FeedForward, Layer, ModelSpec, Norm, Rope
from tests.models.plain_network import PlainNetwork
from tests.models.recurrences import check_cuts, check_network, check_order
from tests.models.test_reference import checkpoint, network_of

HIDDEN, ROWS = 48, 150
SPEC = DeltaNet(2, 6, 16, 24)
CONFIG = {
    "hidden_size": HIDDEN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
}


def random_module() -> tuple[Qwen3_5GatedDeltaNet, DeltaNetWeights]:
    """Return a module of transformers with random weights, and these as held here."""
    torch.manual_seed(0)
    module = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**CONFIG), layer_idx=0).eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        if name != "A_log":
            parameter.copy_(torch.randn_like(parameter) * (HIDDEN**-0.5 if parameter.ndim == 2 else 1.0))

    def linear(*modules: torch.nn.Module) -> Linear:
        return Linear((Weight.plain(torch.cat([each.weight for each in modules])),))

    return module, DeltaNetWeights(
        linear(module.in_proj_qkv, module.in_proj_z),
        linear(module.in_proj_b, module.in_proj_a),
        module.conv1d.weight.squeeze(1),
        module.dt_bias,
        -module.A_log.exp(),
        NormWeights(module.norm.weight),
        linear(module.out_proj),
    )


def projected(weights: DeltaNetWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return z and the log rows of a text, after as many zeros as the convolution sees before it."""
    qkv, z = (x @ weights.inputs.weight.T).split([SPEC.conv_size, SPEC.output_size], -1)
    rows = torch.cat((qkv, x @ weights.gates.weight.T), -1)
    return z, torch.cat((torch.zeros(SPEC.conv_width - 1, SPEC.log_size), rows))


def test_a_delta_net_computes_what_transformers_does() -> None:
    module, weights = random_module()
    x = torch.randn(ROWS, HIDDEN)
    with torch.inference_mode():
        expected = module(x.unsqueeze(0))[0]
        z, rows = projected(weights, x)
        y, _ = walk(SPEC, weights, rows, torch.zeros(SPEC.state_shape))
        ours = gated_norm(SPEC, weights, y, z) @ weights.out.weight.T
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, alternating=True)])
def test_a_text_has_the_same_bits_however_it_is_cut(spec: DeltaNet, dtype: torch.dtype) -> None:
    _, weights = random_module()
    _, rows = projected(weights, torch.randn(ROWS, HIDDEN))
    ways = ([1] * ROWS, [5, 0, 64, 11, 70], [149, 1], [1, 149], [3, 7] * 15)
    start, before = torch.randn(spec.state_shape), spec.conv_width - 1
    whole = check_cuts(partial(walk, spec, weights), rows.to(dtype), start, before, ways)
    assert whole.dtype == dtype


def test_what_comes_later_changes_nothing_and_what_came_before_does() -> None:
    _, weights = random_module()
    _, rows = projected(weights, torch.randn(20, HIDDEN))
    check_order(partial(walk, SPEC, weights), rows, torch.zeros(SPEC.state_shape), SPEC.conv_width - 1)


@pytest.mark.parametrize("alternating", [False, True])
def test_a_network_with_delta_nets_computes_what_its_description_says(alternating: bool) -> None:
    net = Layer(replace(SPEC, conv_width=3, norm_eps=1e-2, alternating=alternating), FeedForward(64))
    plain = Layer(Attention(2, 1, 32, rope=Rope()), FeedForward(64))
    spec = ModelSpec("Hybrid", 31, 64, 32, (net, plain, net), Norm())
    tensors, names = checkpoint(spec, 0)
    for name in tensors:
        if name.endswith("decay"):
            tensors[name] = -tensors[name].abs()
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    expected = PlainNetwork(spec, tensors).logits(tokens)
    check_network(network_of(spec, tensors, names), tokens, expected, (3, 6, 9, 11))
