"""`chatterm doctor --profile`: which kernel of which layer is which, and the picture of it."""

import pytest

from chatterm.cli.main import call
from chatterm.cli.profile import picture
from engine.execute.cuda.step_profile import ProfiledKernel, Ran, median_kernels

LAYER = [
    "linear_kernel",
    "attention_kernel",
    "combine_kernel",
    "linear_kernel",
    "linear_kernel",
    "linear_kernel",
]
MIXED = [
    "packed_linear_kernel",
    "packed_linear_kernel",
    "parts_kernel",
    "combine_parts_kernel",
    "linear_kernel",
]
MIXED += ["router_kernel", "gate_up_kernel", "down_kernel"]


def steps(kernels: list[str], count: int = 4) -> list[Ran]:
    """Kernels of 3 us, each of which begins 1 us before the one before it ends; the first step is slow."""
    ran, now = [], 0.0
    for step in range(count):
        for name in kernels:
            took = 300.0 if step == 0 else 3.0
            ran.append(Ran(name, now, now + took))
            now += took - 1
        now += 50
    return ran


def test_kernels_are_told_by_their_place_in_a_layer_and_add_up_to_the_step() -> None:
    parts = median_kernels(reversed(steps(["embedding_kernel", *3 * LAYER, "linear_kernel"])))
    names = ["q, k, v", "attention", "combine", "o", "gate and up", "down"]
    assert [part.name for part in parts] == ["embedding", *3 * names, "head"]
    assert [part.layer for part in parts] == [None, *6 * [0], *6 * [1], *6 * [2], None]
    assert parts[0].seconds == pytest.approx(3e-6)
    assert all(part.seconds == pytest.approx(2e-6) for part in parts[1:])


def test_layers_with_experts_and_several_products_before_the_attention() -> None:
    parts = median_kernels(steps(["packed_embedding_kernel", *2 * MIXED, "packed_linear_kernel"]))
    names = ["q, k, v", "q, k, v", "attention", "combine_parts", "o", "router", "gate_up", "down"]
    assert [part.name for part in parts] == ["packed_embedding", *2 * names, "head"]
    assert [part.layer for part in parts] == [None, *8 * [0], *8 * [1], None]


def test_recurrences_stand_in_the_place_of_attention() -> None:
    net = ["linear_kernel", "linear_kernel", "recur_kernel", *3 * ["linear_kernel"]]
    kernels = ["embedding_kernel", *2 * [*net, "linear_kernel", *LAYER], "linear_kernel"]
    parts = median_kernels(steps(kernels))
    names = ["q, k, v", "q, k, v", "recurrence", "o", "gate and up", "down"]
    names += ["q, k, v", "q, k, v", "attention", "combine", "o", "gate and up", "down"]
    assert [part.name for part in parts] == ["embedding", *2 * names, "head"]
    assert [part.layer for part in parts] == [None, *6 * [0], *7 * [1], *6 * [2], *7 * [3], None]


def test_a_mixer_beside_another_begins_with_its_attention() -> None:
    both = ["linear_kernel", "linear_kernel", "recur_kernel", "linear_kernel", "parts_kernel"]
    kernels = ["embedding_kernel", *2 * [*both, *3 * ["linear_kernel"]], "linear_kernel"]
    parts = median_kernels(steps(kernels))
    names = ["q, k, v", "q, k, v", "recurrence", "o", "attention", "o", "gate and up", "down"]
    assert [part.name for part in parts] == ["embedding", *2 * names, "head"]
    assert [part.layer for part in parts] == [None, *4 * [0], *4 * [1], *4 * [2], *4 * [3], None]


def test_latent_attention_is_among_products_of_its_own() -> None:
    layer = [*4 * ["linear_kernel"], "latent_kernel", *4 * ["linear_kernel"]]
    parts = median_kernels(steps(["embedding_kernel", *2 * layer, "linear_kernel"]))
    names = [*4 * ["q, k, v"], "latent attention", "v_b", "o", "gate and up", "down"]
    assert [part.name for part in parts] == ["embedding", *2 * names, "head"]


def test_the_inputs_of_all_layers_belong_to_none() -> None:
    first = ["embedding_kernel", "embedding_kernel", "linear_kernel", "norm_kernel"]
    layer = [*LAYER, "linear_kernel", "linear_kernel"]
    parts = median_kernels(steps([*first, *2 * layer, "linear_kernel"]))
    assert [part.layer for part in parts] == [*4 * [None], *8 * [0], *8 * [1], None]
    assert [part.name for part in parts[4:6]] == ["q, k, v", "attention"]


@pytest.mark.parametrize("kernels", [[], ["linear_kernel"], ["copy", "attention_kernel"]])
def test_what_is_no_step_has_no_parts(kernels: list[str]) -> None:
    assert median_kernels(steps(kernels)) == []


def test_a_step_without_attention_or_with_one_layer_is_shown_all_the_same() -> None:
    assert [part.layer for part in median_kernels(steps(["embedding_kernel", "linear_kernel"]))] == [
        None,
        None,
    ]
    one = median_kernels(steps(["embedding_kernel", *LAYER, "linear_kernel"]))
    assert picture("tiny", one)


def test_the_picture_fits_a_terminal_and_has_the_figures() -> None:
    parts = [ProfiledKernel(None, "embedding", 2e-6)]
    for layer in range(28):
        parts += [
            ProfiledKernel(layer, "q, k, v", 4e-6),
            ProfiledKernel(layer, "attention", 4e-6 + layer * 1e-7),
        ]
    parts.append(ProfiledKernel(None, "head", 60e-6))
    lines = picture("Qwen3-0.6B", parts, blocks=False)
    text = "\n".join(lines)
    assert text.isascii()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Qwen3-0.6B: token 512 takes 0.324 ms in 28 layers, without sampling."
    assert "q, k, v              4.0 us a layer   0.112 ms  34.6%  ####" in text
    assert "head, once          60.0 us           0.060 ms  18.5%" in text
    assert "8.0 to 10.7 us, 9.3 on average" in text
    assert "█" in "\n".join(picture("Qwen3-0.6B", parts))


def test_options_that_do_not_go_together_are_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["doctor", "--profile", "tiny", "--tune", "tiny"]) == 2
    assert "cannot be combined" in capsys.readouterr().err
