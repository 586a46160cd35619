"""Mamba-2 against the mixers of transformers, and cut anywhere."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BambaConfig, FalconH1Config, GraniteMoeHybridConfig, NemotronHConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from models.network import Linear, Mamba2Weights, NormWeights, Weight
from models.recurrences import Mamba2
from models.reference.mamba2 import gated_norm, walk
from models.spec import Attention, FeedForward, Layer, ModelSpec, Rope
from tests.models.checkpoints import run
from tests.models.plain_network import PlainNetwork
from tests.models.recurrences import check_cuts, check_network, check_order
from tests.models.test_reference import assert_close, checkpoint, network_of

HIDDEN, ROWS = 48, 23
SIZES: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 10,
    "mamba_n_groups": 3,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
    "mamba_proj_bias": True,
    "time_step_limit": (0.3, 0.9),
    "hidden_size": HIDDEN,
}
NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 10,
    "n_groups": 3,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_bias": True,
    "time_step_min": 0.3,
    "hidden_size": HIDDEN,
    "layer_norm_epsilon": 1e-5,
}
SPEC = Mamba2(6, 16, 10, 3, in_bias=True, out_bias=True, step_limits=(0.3, 0.9))
FALCON = {**SIZES, "mamba_d_ssm": 96, "projectors_bias": True}
BARE = {"mamba_conv_bias": False, "mamba_proj_bias": False, "mamba_n_groups": 1, "mamba_d_conv": 3}

CASES: dict[str, tuple[Any, Any, Mamba2]] = {
    "bamba": (BambaMixer, BambaConfig(**SIZES), SPEC),
    "bamba bare": (
        BambaMixer,
        BambaConfig(**SIZES | BARE | {"time_step_limit": (0.0, float("inf"))}),
        Mamba2(6, 16, 10, conv_width=3, conv_bias=False),
    ),
    "granite": (GraniteMoeHybridMambaLayer, GraniteMoeHybridConfig(**SIZES, rms_norm_eps=1e-5), SPEC),
    "nemotron": (
        NemotronHMamba2Mixer,
        NemotronHConfig(**NEMOTRON, layers_block_type=["linear_attention"]),
        Mamba2(6, 16, 10, 3, in_bias=True, out_bias=True, step_limits=(0.3, float("inf"))),
    ),
    "falcon": (
        FalconH1Mixer,
        FalconH1Config(**FALCON),
        Mamba2(6, 16, 10, 3, in_bias=True, out_bias=True, step_limits=(0.3, 0.9), norm_eps=None),
    ),
    "falcon norm before": (
        FalconH1Mixer,
        FalconH1Config(**FALCON, mamba_rms_norm=True),
        Mamba2(6, 16, 10, 3, in_bias=True, out_bias=True, step_limits=(0.3, 0.9), norms_first=True),
    ),
    "falcon norm after": (
        FalconH1Mixer,
        FalconH1Config(**FALCON, mamba_rms_norm=True, mamba_norm_before_gate=False),
        SPEC,
    ),
}
"""For each case a mixer of transformers, its config, and what describes it here."""


def random_mixer(name: str) -> tuple[Any, Mamba2, Mamba2Weights]:
    """Return a mixer of transformers with random weights, and the same described and held as here."""
    kind, config, spec = CASES[name]
    torch.manual_seed(0)
    mixer = kind(config, layer_idx=0).eval()
    if kind is FalconH1Mixer:
        mixer.register_buffer("mup_vector", torch.ones(1, 1, mixer.in_proj.out_features))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 2 else 0.5))
    return mixer, spec, weights_from(mixer)


def weights_from(mixer: Any) -> Mamba2Weights:
    """Return the weights of a mixer of transformers."""

    def linear(module: Any) -> Linear:
        return Linear(
            (Weight.plain(module.weight.detach()),), None if module.bias is None else module.bias.detach()
        )

    bias, norm = mixer.conv1d.bias, getattr(mixer.norm, "weight", None)
    return Mamba2Weights(
        linear(mixer.in_proj),
        mixer.conv1d.weight.detach().squeeze(1),
        mixer.dt_bias.detach(),
        -torch.exp(mixer.A_log.detach()),
        mixer.D.detach(),
        linear(mixer.out_proj),
        None if bias is None else bias.detach(),
        None if norm is None else NormWeights(norm.detach()),
    )


def projected(spec: Mamba2, weights: Mamba2Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return z and the log rows of a text, after as many zeros as the convolution sees before it."""
    inner = torch.nn.functional.linear(x, weights.inputs.weight, weights.inputs.bias)
    z, rows = inner.split([spec.output_size, spec.log_size], -1)
    return z, torch.cat((torch.zeros(spec.conv_width - 1, spec.log_size), rows))


@pytest.mark.parametrize("name", CASES)
def test_a_mixer_computes_what_transformers_does(name: str) -> None:
    mixer, spec, weights = random_mixer(name)
    x = torch.randn(ROWS, HIDDEN)
    with torch.inference_mode():
        expected = mixer(x.unsqueeze(0))[0]
        z, rows = projected(spec, weights, x)
        y, _ = walk(spec, weights, rows, torch.zeros(spec.state_shape))
        ours = torch.nn.functional.linear(
            gated_norm(spec, weights, y, z), weights.out.weight, weights.out.bias
        )
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_has_the_same_bits_however_it_is_cut(dtype: torch.dtype) -> None:
    _, spec, weights = random_mixer("bamba")
    _, rows = projected(spec, weights, torch.randn(ROWS, HIDDEN))
    ways = ([1] * ROWS, [5, 0, 11, 7], [22, 1])
    start, before = torch.randn(spec.state_shape), spec.conv_width - 1
    check_cuts(partial(walk, spec, weights), rows.to(dtype), start, before, ways)


def test_what_comes_later_changes_nothing_and_what_came_before_does() -> None:
    _, spec, weights = random_mixer("nemotron")
    _, rows = projected(spec, weights, torch.randn(ROWS, HIDDEN))
    check_order(partial(walk, spec, weights), rows, torch.zeros(spec.state_shape), spec.conv_width - 1)


def test_its_projections_may_be_quantised() -> None:
    layers = (
        Layer(Mamba2(4, 16, 16), FeedForward(64)),
        Layer(Attention(2, 1, 32, rope=Rope()), FeedForward(64)),
    )
    spec = ModelSpec("Mamba", 32, 64, 64, layers)
    tensors, names = checkpoint(spec, 0)
    tensors["layers.0.decay"] = -tensors["layers.0.decay"].exp()
    network, tokens = network_of(spec, tensors, names, "int8"), list(range(20))
    mixer = network.layers[0].mixer
    assert isinstance(mixer, Mamba2Weights)
    assert not mixer.inputs.is_plain
    assert not mixer.out.is_plain
    assert_close(run(network, tokens), PlainNetwork(spec, tensors).logits(tokens), 0.15)


@pytest.mark.parametrize("norms_first", [True, False, None])
def test_a_network_computes_the_formula_of_the_paper(norms_first: bool | None) -> None:
    eps = None if norms_first is None else 1e-2
    multipliers = (0.5, 2.0, 0.75, 1.5, 1.25)
    mixer = Mamba2(
        6, 4, 5, 2, 3, multipliers=multipliers, norm_eps=eps, norms_first=bool(norms_first), out_bias=True
    )
    layers = tuple(Layer(each, FeedForward(24)) for each in (mixer, Attention(2, 1, 8, rope=Rope()), mixer))
    spec = ModelSpec("Mamba", 32, 16, 64, layers)
    tensors, names = checkpoint(spec, 0)
    for name in tensors:
        if name.endswith("decay"):
            tensors[name] = -tensors[name].exp()
    tokens = torch.randint(32, (40,)).tolist()
    expected = PlainNetwork(spec, tensors).logits(tokens)
    check_network(network_of(spec, tensors, names), tokens, expected, (9, 10, 40))
